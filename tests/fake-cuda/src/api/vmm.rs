//! Virtual memory management: memory by handle, addresses by reservation, sharing by file descriptor.
//!
//! None of these needs a current context; each refuses once the context of the memory's device is broken.
#![expect(unsafe_code, reason = "exports symbols, and takes descriptors from callers")]

use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, IntoRawFd, RawFd};
use std::sync::Arc;

use crate::abi::{
    ACCESS_NONE, ACCESS_READ, ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDescription, Address,
    AllocationProperties, HANDLE_FABRIC, HANDLE_POSIX_FD, LOCATION_DEVICE, Location,
};
use crate::call::{In, Out, exports};
use crate::code::{
    INVALID_DEVICE, INVALID_VALUE, NOT_PERMITTED, NOT_SUPPORTED, Outcome, UNKNOWN, require,
};
use crate::driver::{Device, Driver, Tables};
use crate::memory::{self, Memory};
use crate::space::Kind;

exports! {
    fn cuMemGetAllocationGranularity(
        bytes: Out<usize>,
        properties: In<AllocationProperties>,
        option: u32,
    ) = granularity;
    fn cuMemCreate(
        handle: Out<u64>,
        bytes: usize,
        properties: In<AllocationProperties>,
        flags: u64,
    ) = create;
    fn cuMemRelease(handle: u64) = release;
    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: usize) = retain;
    fn cuMemGetAllocationPropertiesFromHandle(
        properties: Out<AllocationProperties>,
        handle: u64,
    ) = properties_of;
    fn cuMemExportToShareableHandle(
        shareable: Out<RawFd>,
        handle: u64,
        kind: u32,
        flags: u64,
    ) = export;
    fn cuMemImportFromShareableHandle(handle: Out<u64>, shareable: usize, kind: u32) = import;
    fn cuMemAddressReserve(
        address: Out<Address>,
        bytes: usize,
        alignment: usize,
        hint: Address,
        flags: u64,
    ) = reserve;
    fn cuMemAddressFree(address: Address, bytes: usize) = free_addresses;
    fn cuMemMap(address: Address, bytes: usize, offset: usize, handle: u64, flags: u64) = map;
    fn cuMemUnmap(address: Address, bytes: usize) = unmap;
    fn cuMemSetAccess(
        address: Address,
        bytes: usize,
        descriptions: In<AccessDescription>,
        count: usize,
    ) = set_access;
    fn cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: Address) = access;
}

/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED` and `..._POSIX_FILE_DESCRIPTOR_SUPPORTED`.
const ATTRIBUTE_VMM: u32 = 102;
const ATTRIBUTE_POSIX_FD: u32 = 103;

/// The device that the properties name, if memory like that can be had there.
fn checked<'a>(driver: &'a Driver, properties: &AllocationProperties) -> Outcome<&'a Device> {
    require(properties.kind == ALLOCATION_PINNED, INVALID_VALUE)?;
    require(properties.location.kind == LOCATION_DEVICE, INVALID_VALUE)?;
    require(properties.reserved == [0; 4] && properties.usage == 0, INVALID_VALUE)?;
    require(properties.compression <= 1 && properties.rdma <= 1, INVALID_VALUE)?;
    let device = driver.device(properties.location.id)?;
    let has = |attribute| driver.config.attributes.get(&attribute) != Some(&0);
    require(has(ATTRIBUTE_VMM), NOT_SUPPORTED)?;
    match properties.handle_types {
        0 => Ok(device),
        HANDLE_POSIX_FD if has(ATTRIBUTE_POSIX_FD) => Ok(device),
        // Fabric handles need an IMEX channel.
        types if types & HANDLE_FABRIC != 0 => Err(NOT_PERMITTED),
        _ => Err(NOT_SUPPORTED),
    }
}

fn granularity(bytes: Out<usize>, properties: In<AllocationProperties>, option: u32) -> Outcome {
    let driver = Driver::get()?;
    checked(driver, &properties.get()?)?;
    // MINIMUM and RECOMMENDED.
    require(option <= 1, INVALID_VALUE)?;
    bytes.put(aligned_to(driver))
}

fn create(
    handle: Out<u64>,
    bytes: usize,
    properties: In<AllocationProperties>,
    flags: u64,
) -> Outcome {
    let driver = Driver::get()?;
    handle.check()?;
    let properties = properties.get()?;
    let device = checked(driver, &properties)?;
    device.unbroken()?;
    require(flags == 0 && is_aligned(driver, bytes), INVALID_VALUE)?;
    let place = (&device.ledger, device.ordinal);
    let memory = Memory::create(place, bytes, properties.handle_types, driver.config.poison)?;
    handle.put(driver.tables().name(Arc::new(memory)))
}

fn release(handle: u64) -> Outcome {
    let driver = Driver::get()?;
    let mut tables = driver.tables();
    unbroken(driver, &*tables.memory(handle)?)?;
    let found = tables.handles.get_mut(&handle).expect("its memory was found above");
    found.references -= 1;
    if found.references == 0 {
        tables.handles.remove(&handle);
    }
    Ok(())
}

/// The handle that the memory at an address was mapped by, with one reference more.
fn retain(handle: Out<u64>, address: usize) -> Outcome {
    let driver = Driver::get()?;
    handle.check()?;
    let mut tables = driver.tables();
    let (_, mapping) = tables.space.mapping(address).ok_or(INVALID_VALUE)?;
    let memory = Arc::clone(&mapping.memory);
    let mut named = tables.handles.iter_mut();
    if let Some((number, found)) = named.find(|(_, found)| Arc::ptr_eq(&found.memory, &memory)) {
        found.references += 1;
        return handle.put(*number);
    }
    handle.put(tables.name(memory))
}

fn properties_of(properties: Out<AllocationProperties>, handle: u64) -> Outcome {
    let memory = Driver::get()?.tables().memory(handle)?;
    let id = i32::try_from(memory.device).map_err(|_| UNKNOWN)?;
    properties.put(AllocationProperties {
        kind: ALLOCATION_PINNED,
        handle_types: memory.handle_types,
        location: Location { kind: LOCATION_DEVICE, id },
        win32: std::ptr::null_mut(),
        // What was obtained: the fake compresses nothing.
        compression: 0,
        rdma: 0,
        usage: 0,
        reserved: [0; 4],
    })
}

fn export(shareable: Out<RawFd>, handle: u64, kind: u32, flags: u64) -> Outcome {
    let driver = Driver::get()?;
    shareable.check()?;
    let memory = driver.tables().memory(handle)?;
    unbroken(driver, &memory)?;
    require(flags == 0 && kind == HANDLE_POSIX_FD, INVALID_VALUE)?;
    require(memory.handle_types & kind != 0 && !memory.imported, INVALID_VALUE)?;
    shareable.put(memory.export()?.into_raw_fd())
}

/// The descriptor is the pointer's own value, and stays the caller's.
fn import(handle: Out<u64>, shareable: usize, kind: u32) -> Outcome {
    let driver = Driver::get()?;
    handle.check()?;
    require(kind == HANDLE_POSIX_FD, INVALID_VALUE)?;
    let descriptor = RawFd::try_from(shareable).map_err(|_| INVALID_VALUE)?;
    // SAFETY: takes no pointers; a descriptor that isn't open is an error.
    let open = unsafe { libc::fcntl(descriptor, libc::F_GETFD) } >= 0;
    require(open, INVALID_VALUE)?;
    // SAFETY: it is open, stays so while the caller is in here, and is not closed by this value.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) });
    let found = memory::identify(&file, &driver.config.directory);
    let (physical, name) = found.ok_or(INVALID_VALUE)?;
    let device = &driver.devices[driver.ordinal(physical)?];
    device.unbroken()?;
    let memory = Memory::import((&device.ledger, device.ordinal), &file, &name, kind)?;
    handle.put(driver.tables().name(Arc::new(memory)))
}

fn reserve(
    address: Out<Address>,
    bytes: usize,
    alignment: usize,
    hint: Address,
    flags: u64,
) -> Outcome {
    let driver = Driver::get()?;
    address.check()?;
    require(flags == 0 && is_aligned(driver, bytes), INVALID_VALUE)?;
    require(alignment == 0 || alignment.is_power_of_two(), INVALID_VALUE)?;
    let alignment = alignment.max(aligned_to(driver));
    let hint = usize::try_from(hint).map_err(|_| INVALID_VALUE)?;
    let found = driver.tables().space.reserve((bytes, alignment), hint, Kind::Reserved)?;
    address.put(found as Address)
}

fn free_addresses(address: Address, bytes: usize) -> Outcome {
    Driver::get()?.tables().space.free(to_usize(address)?, bytes)
}

fn map(address: Address, bytes: usize, offset: usize, handle: u64, flags: u64) -> Outcome {
    let driver = Driver::get()?;
    let mut tables = driver.tables();
    let memory = tables.memory(handle)?;
    unbroken(driver, &memory)?;
    let address = to_usize(address)?;
    require(flags == 0 && offset == 0, INVALID_VALUE)?;
    require(is_aligned(driver, bytes) && is_aligned(driver, address), INVALID_VALUE)?;
    tables.space.map(address, bytes, memory)
}

/// Does not wait for work that is queued.
fn unmap(address: Address, bytes: usize) -> Outcome {
    let driver = Driver::get()?;
    let mut tables = driver.tables();
    let address = to_usize(address)?;
    unbroken_at(driver, &tables, address)?;
    tables.space.unmap(address, bytes)
}

fn set_access(
    address: Address,
    bytes: usize,
    descriptions: In<AccessDescription>,
    count: usize,
) -> Outcome {
    let driver = Driver::get()?;
    let mut tables = driver.tables();
    let address = to_usize(address)?;
    require(count > 0, INVALID_VALUE)?;
    unbroken_at(driver, &tables, address)?;
    for index in 0..count {
        let wanted = descriptions.get_nth(index)?;
        require(wanted.location.kind == LOCATION_DEVICE, INVALID_VALUE)?;
        let known = [ACCESS_NONE, ACCESS_READ, ACCESS_READ_WRITE].contains(&wanted.flags);
        require(known, INVALID_VALUE)?;
        let device = driver.device(wanted.location.id)?;
        let mappings = tables.space.whole_mappings(address, bytes)?;
        // A device of the fake reaches no other's memory.
        let own = mappings.iter().all(|mapping| mapping.memory.device == device.ordinal);
        require(own, INVALID_DEVICE)?;
        tables.space.set_access(address, bytes, wanted.flags)?;
    }
    Ok(())
}

fn access(flags: Out<u64>, location: In<Location>, address: Address) -> Outcome {
    let driver = Driver::get()?;
    let location = location.get()?;
    require(location.kind == LOCATION_DEVICE, INVALID_VALUE)?;
    let device = driver.device(location.id)?;
    let tables = driver.tables();
    let (_, mapping) = tables.space.mapping(to_usize(address)?).ok_or(INVALID_VALUE)?;
    let own = mapping.memory.device == device.ordinal;
    flags.put(if own { u64::from(mapping.access) } else { 0 })
}

fn unbroken(driver: &Driver, memory: &Memory) -> Outcome {
    driver.devices[memory.device].unbroken()
}

fn unbroken_at(driver: &Driver, tables: &Tables, address: usize) -> Outcome {
    let mapping = tables.space.mapping(address);
    mapping.map_or(Ok(()), |(_, mapping)| unbroken(driver, &mapping.memory))
}

fn aligned_to(driver: &Driver) -> usize {
    usize::try_from(driver.config.granularity).expect("addresses have 64 bits")
}

/// Whether it is a multiple of the granularity, and not nothing.
fn is_aligned(driver: &Driver, bytes: usize) -> bool {
    bytes > 0 && bytes.is_multiple_of(aligned_to(driver))
}

fn to_usize(address: Address) -> Outcome<usize> {
    usize::try_from(address).map_err(|_| INVALID_VALUE)
}
