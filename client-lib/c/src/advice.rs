//! What a client says of ranges beside mapping them.

use std::ffi::c_int;
use std::time::Duration;

use lapis::{Client, PrefetchOptions};

use crate::arguments::{Ranges, lapis_range};
use crate::client::lapis_client;
use crate::code::lapis_code;
use crate::{arguments, guard, handles};

/// Says that ranges will be mapped soon, in this order. Returns at once. Those of a higher priority are fetched first.
/// within_us: after how many microseconds it is too late to begin; 0: never.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_prefetch(
    client: *const lapis_client,
    ranges: *const lapis_range,
    count: usize,
    priority: u8,
    within_us: u64,
) -> lapis_code {
    guard(|| {
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let ranges = unsafe { Ranges::read(ranges, count) }?;
        let within = (within_us > 0).then(|| Duration::from_micros(within_us));
        Ok(client.prefetch_with(&ranges.as_vec(), PrefetchOptions { priority, within })?)
    })
}

/// Takes prefetches of ranges back, as far as they have not begun.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_cancel_prefetch(
    client: *const lapis_client,
    ranges: *const lapis_range,
    count: usize,
) -> lapis_code {
    guard(|| {
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let ranges = unsafe { Ranges::read(ranges, count) }?;
        Ok(client.cancel_prefetch(&ranges.as_vec())?)
    })
}

/// Says how ranges will be used, which changes what is evicted first and nothing else. advice: a lapis_advice.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_advise(
    client: *const lapis_client,
    ranges: *const lapis_range,
    count: usize,
    advice: c_int,
) -> lapis_code {
    guard(|| {
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let ranges = unsafe { Ranges::read(ranges, count) }?;
        Ok(client.advise(&ranges.as_vec(), arguments::advice(advice)?)?)
    })
}

/// Writes ranges of allocated memory down to the NVMe tier, and leaves them where they are as well. Waits up to wait_us
/// microseconds until all is written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_flush(
    client: *const lapis_client,
    ranges: *const lapis_range,
    count: usize,
    wait_us: u64,
) -> lapis_code {
    guard(|| {
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let ranges = unsafe { Ranges::read(ranges, count) }?;
        Ok(client.flush(&ranges.as_vec(), arguments::wait(wait_us))?)
    })
}
