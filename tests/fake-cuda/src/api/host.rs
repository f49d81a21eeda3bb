//! Host memory for DMA.
#![expect(unsafe_code, reason = "exports symbols")]

use crate::abi::{Address, REGISTER_DEVICE_MAP, REGISTER_FLAGS};
use crate::call::{Out, exports};
use crate::code::{INVALID_VALUE, Outcome, require};
use crate::driver::Driver;
use crate::host::{self, Cover};

exports! {
    fn cuMemHostRegister_v2(start: usize, bytes: usize, flags: u32) = register;
    fn cuMemHostUnregister(start: usize) = unregister;
    fn cuMemHostGetDevicePointer_v2(address: Out<Address>, start: usize, flags: u32) = device_pointer;
}

fn register(start: usize, bytes: usize, flags: u32) -> Outcome {
    let (driver, device) = Driver::current()?;
    require(flags & !REGISTER_FLAGS == 0, INVALID_VALUE)?;
    require(!driver.tables().space.is_ours(start), INVALID_VALUE)?;
    host::populate(start, bytes, flags)?;
    driver.tables().hosts.register((start, bytes), flags, device.ordinal)
}

/// Waits for a copy that is running, not for those that are queued: they will be illegal accesses.
fn unregister(start: usize) -> Outcome {
    let (driver, _) = Driver::current()?;
    let registration = driver.tables().hosts.remove(start)?;
    registration.end();
    Ok(())
}

/// The same address: all devices of the fake can use host pointers.
fn device_pointer(address: Out<Address>, start: usize, flags: u32) -> Outcome {
    let (driver, _) = Driver::current()?;
    require(flags == 0, INVALID_VALUE)?;
    match driver.tables().hosts.cover(start, 1) {
        Cover::Whole(found) if found.flags & REGISTER_DEVICE_MAP != 0 => {
            address.put(start as Address)
        }
        _ => Err(INVALID_VALUE),
    }
}
