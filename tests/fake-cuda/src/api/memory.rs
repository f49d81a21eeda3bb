//! Memory by address, and how much there is.
#![expect(unsafe_code, reason = "exports symbols")]

use std::sync::Arc;

use crate::abi::Address;
use crate::call::{Out, exports};
use crate::code::{INVALID_VALUE, OUT_OF_MEMORY, Outcome, require};
use crate::driver::Driver;
use crate::memory::Memory;

exports! {
    fn cuMemAlloc_v2(address: Out<Address>, bytes: usize) = allocate;
    fn cuMemFree_v2(address: Address) = free;
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) = info;
}

const HOST_PAGE: usize = 4096;

fn allocate(address: Out<Address>, bytes: usize) -> Outcome {
    let (driver, device) = Driver::current()?;
    address.check()?;
    require(bytes > 0, INVALID_VALUE)?;
    let bytes = bytes.checked_next_multiple_of(HOST_PAGE).ok_or(OUT_OF_MEMORY)?;
    let place = (&device.ledger, device.ordinal);
    let memory = Memory::create(place, bytes, 0, driver.config.poison)?;
    let found = driver.tables().space.allocate(Arc::new(memory))?;
    address.put(found as Address)
}

/// Waits for all work of the device first. Freeing null does nothing.
fn free(address: Address) -> Outcome {
    let (driver, _) = Driver::current()?;
    if address == 0 {
        return Ok(());
    }
    let address = usize::try_from(address).map_err(|_| INVALID_VALUE)?;
    let device = driver.tables().space.allocation_device(address)?;
    driver.synchronize(&driver.devices[device])?;
    driver.tables().space.free_allocation(address)
}

fn info(free: Out<usize>, total: Out<usize>) -> Outcome {
    let (_, device) = Driver::current()?;
    let capacity = device.ledger.capacity();
    let left = capacity.saturating_sub(device.ledger.used()?);
    free.put(usize::try_from(left).map_err(|_| INVALID_VALUE)?)?;
    total.put(usize::try_from(capacity).map_err(|_| INVALID_VALUE)?)
}
