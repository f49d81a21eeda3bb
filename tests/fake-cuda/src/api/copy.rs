//! Copies and fills.
//!
//! With host memory that is registered, an asynchronous copy reads or writes it when it runs. From other host memory the bytes
//! are staged at the call; to other host memory the call waits.
#![expect(unsafe_code, reason = "exports symbols, and reads host memory")]

use crate::abi::{Address, REGISTER_DEVICE_MAP};
use crate::call::exports;
use crate::code::{INVALID_VALUE, Outcome, require};
use crate::driver::{Device, Driver};
use crate::host::Cover;
use crate::work::{Place, Work};

exports! {
    fn cuMemcpyHtoD_v2(to: Address, from: usize, bytes: usize) = to_device;
    fn cuMemcpyDtoH_v2(to: usize, from: Address, bytes: usize) = to_host;
    fn cuMemcpyDtoD_v2(to: Address, from: Address, bytes: usize) = inside;
    fn cuMemcpyHtoDAsync_v2(to: Address, from: usize, bytes: usize, stream: u64) = to_device_async;
    fn cuMemcpyDtoHAsync_v2(to: usize, from: Address, bytes: usize, stream: u64) = to_host_async;
    fn cuMemcpyDtoDAsync_v2(to: Address, from: Address, bytes: usize, stream: u64) = inside_async;
    fn cuMemsetD8_v2(to: Address, value: u8, count: usize) = fill_bytes;
    fn cuMemsetD8Async(to: Address, value: u8, count: usize, stream: u64) = fill_bytes_async;
    fn cuMemsetD32_v2(to: Address, value: u32, count: usize) = fill_words;
    fn cuMemsetD32Async(to: Address, value: u32, count: usize, stream: u64) = fill_words_async;
}

/// The null stream.
const NULL: u64 = 0;
/// Fills go in blocks of this size.
const BLOCK: usize = 4096;

fn to_device(to: Address, from: usize, bytes: usize) -> Outcome {
    let (driver, device) = Driver::current()?;
    let to = device_place(driver, to, bytes)?;
    host_place(driver, from, bytes)?;
    submit(driver, device, NULL, Work::Copy { to, from: Place::Lent(from), bytes }, true)
}

fn to_host(to: usize, from: Address, bytes: usize) -> Outcome {
    let (driver, device) = Driver::current()?;
    let from = device_place(driver, from, bytes)?;
    host_place(driver, to, bytes)?;
    submit(driver, device, NULL, Work::Copy { to: Place::Lent(to), from, bytes }, true)
}

fn inside(to: Address, from: Address, bytes: usize) -> Outcome {
    let (driver, device) = Driver::current()?;
    let (to, from) = (device_place(driver, to, bytes)?, device_place(driver, from, bytes)?);
    submit(driver, device, NULL, Work::Copy { to, from, bytes }, true)
}

fn to_device_async(to: Address, from: usize, bytes: usize, stream: u64) -> Outcome {
    let (driver, device) = Driver::current()?;
    let to = device_place(driver, to, bytes)?;
    let from = match host_place(driver, from, bytes)? {
        Place::Lent(from) => {
            // SAFETY: the caller says that it may be read, and waits in here.
            let host = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
            Place::Bytes(host.to_vec())
        }
        pinned => pinned,
    };
    submit(driver, device, stream, Work::Copy { to, from, bytes }, false)
}

fn to_host_async(to: usize, from: Address, bytes: usize, stream: u64) -> Outcome {
    let (driver, device) = Driver::current()?;
    let from = device_place(driver, from, bytes)?;
    let to = host_place(driver, to, bytes)?;
    let wait = matches!(to, Place::Lent(_));
    submit(driver, device, stream, Work::Copy { to, from, bytes }, wait)
}

fn inside_async(to: Address, from: Address, bytes: usize, stream: u64) -> Outcome {
    let (driver, device) = Driver::current()?;
    let (to, from) = (device_place(driver, to, bytes)?, device_place(driver, from, bytes)?);
    submit(driver, device, stream, Work::Copy { to, from, bytes }, false)
}

fn fill_bytes(to: Address, value: u8, count: usize) -> Outcome {
    fill(to, count, vec![value; BLOCK], NULL, true)
}

fn fill_bytes_async(to: Address, value: u8, count: usize, stream: u64) -> Outcome {
    fill(to, count, vec![value; BLOCK], stream, false)
}

fn fill_words(to: Address, value: u32, count: usize) -> Outcome {
    words(to, value, count, NULL, true)
}

fn fill_words_async(to: Address, value: u32, count: usize, stream: u64) -> Outcome {
    words(to, value, count, stream, false)
}

fn words(to: Address, value: u32, count: usize, stream: u64, wait: bool) -> Outcome {
    require(to.is_multiple_of(4), INVALID_VALUE)?;
    let bytes = count.checked_mul(4).ok_or(INVALID_VALUE)?;
    fill(to, bytes, value.to_ne_bytes().repeat(BLOCK / 4), stream, wait)
}

fn fill(to: Address, bytes: usize, pattern: Vec<u8>, stream: u64, wait: bool) -> Outcome {
    let (driver, device) = Driver::current()?;
    device_place(driver, to, bytes)?;
    let address = usize::try_from(to).map_err(|_| INVALID_VALUE)?;
    submit(driver, device, stream, Work::Fill { address, bytes, pattern }, wait)
}

/// Queues it, unless it is nothing to do.
fn submit(driver: &Driver, device: &Device, stream: u64, work: Work, wait: bool) -> Outcome {
    let stream = driver.stream(device, stream)?;
    let (Work::Copy { bytes, .. } | Work::Fill { bytes, .. }) = &work else { return Ok(()) };
    if *bytes == 0 {
        return Ok(());
    }
    let count = driver.submit(&stream, work);
    if wait {
        stream.wait(count, || device.fault())?;
    }
    Ok(())
}

/// A device range, all of it mapped, or registered host memory that devices may use. Access is looked at when the work runs.
fn device_place(driver: &Driver, address: Address, bytes: usize) -> Outcome<Place> {
    let start = usize::try_from(address).map_err(|_| INVALID_VALUE)?;
    let end = start.checked_add(bytes).ok_or(INVALID_VALUE)?;
    let tables = driver.tables();
    if !tables.space.is_ours(start) {
        let mapped = match tables.hosts.cover(start, bytes) {
            Cover::Whole(found) => found.flags & REGISTER_DEVICE_MAP != 0,
            Cover::Part => false,
            Cover::None => bytes == 0,
        };
        require(mapped, INVALID_VALUE)?;
    }
    let mut next = start;
    while tables.space.is_ours(start) && next < end {
        let (base, mapping) = tables.space.mapping(next).ok_or(INVALID_VALUE)?;
        next = base + mapping.bytes;
    }
    Ok(Place::Device(start))
}

/// A host range: in one registration, or in none.
fn host_place(driver: &Driver, start: usize, bytes: usize) -> Outcome<Place> {
    let tables = driver.tables();
    require(bytes == 0 || (start != 0 && !tables.space.is_ours(start)), INVALID_VALUE)?;
    match tables.hosts.cover(start, bytes) {
        Cover::Whole(_) => Ok(Place::Pinned(start)),
        Cover::Part => Err(INVALID_VALUE),
        Cover::None => Ok(Place::Lent(start)),
    }
}
