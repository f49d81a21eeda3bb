//! Devices.
#![expect(unsafe_code, reason = "exports symbols")]

use std::ffi::c_char;

use crate::abi::Uuid;
use crate::call::{In, Out, exports};
use crate::code::{INVALID_DEVICE, INVALID_VALUE, Outcome, require};
use crate::config::{Unified, uuid};
use crate::driver::Driver;

exports! {
    fn cuDeviceGetCount(count: Out<i32>) = count;
    fn cuDeviceGet(device: Out<i32>, ordinal: i32) = get;
    fn cuDeviceGetName(name: Out<u8>, length: i32, device: i32) = name;
    fn cuDeviceGetUuid(found: Out<Uuid>, device: i32) = uuid_of;
    fn cuDeviceGetUuid_v2(found: Out<Uuid>, device: i32) = uuid_of;
    fn cuDeviceGetAttribute(value: Out<i32>, attribute: u32, device: i32) = attribute;
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) = total_memory;
    fn cuDeviceGetPCIBusId(text: Out<u8>, length: i32, device: i32) = pci_bus_id;
    fn cuDeviceGetByPCIBusId(device: Out<i32>, text: In<c_char>) = by_pci_bus_id;
    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) = can_access_peer;
}

/// The last attribute of CUDA 13.5.
const ATTRIBUTE_MAX: u32 = 161;

fn count(count: Out<i32>) -> Outcome {
    count.put(i32::try_from(Driver::get()?.devices.len()).map_err(|_| INVALID_VALUE)?)
}

fn get(device: Out<i32>, ordinal: i32) -> Outcome {
    Driver::get()?.device(ordinal)?;
    device.put(ordinal)
}

fn name(name: Out<u8>, length: i32, device: i32) -> Outcome {
    let device = Driver::get()?.device(device)?;
    name.put_text(length, &format!("Lapis fake GPU {}", device.physical))
}

fn uuid_of(found: Out<Uuid>, device: i32) -> Outcome {
    found.put(uuid(Driver::get()?.device(device)?.physical))
}

fn total_memory(bytes: Out<usize>, device: i32) -> Outcome {
    let capacity = Driver::get()?.device(device)?.ledger.capacity();
    bytes.put(usize::try_from(capacity).map_err(|_| INVALID_VALUE)?)
}

fn attribute(value: Out<i32>, attribute: u32, device: i32) -> Outcome {
    let driver = Driver::get()?;
    let physical = driver.device(device)?.physical;
    require((1..=ATTRIBUTE_MAX).contains(&attribute), INVALID_VALUE)?;
    let answer = driver.config.attributes.get(&attribute).copied();
    value.put(answer.unwrap_or_else(|| usual(attribute, driver.config.unified, physical)))
}

/// The attributes that a program on memory and streams asks for; 0 for others. As an H200's, where it matters.
fn usual(attribute: u32, unified: Unified, physical: u32) -> i32 {
    match attribute {
        // INTEGRATED.
        18 => i32::from(unified == Unified::Integrated),
        // PAGEABLE_MEMORY_ACCESS, and through the host's page tables.
        88 | 100 => i32::from(unified != Unified::No),
        // PCI_BUS_ID.
        33 => i32::try_from(physical).unwrap_or(0) + 1,
        // MAX_THREADS_PER_BLOCK, WARP_SIZE, MULTIPROCESSOR_COUNT.
        1 => 1024,
        10 => 32,
        16 => 132,
        // ASYNC_ENGINE_COUNT.
        40 => 3,
        // COMPUTE_CAPABILITY_MAJOR and _MINOR.
        75 => 9,
        76 => 0,
        // CAN_MAP_HOST_MEMORY, CONCURRENT_KERNELS, UNIFIED_ADDRESSING, STREAM_PRIORITIES, COMPUTE_PREEMPTION,
        // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, HOST_REGISTER.
        19 | 31 | 41 | 78 | 90 | 91 | 99 => 1,
        // VIRTUAL_MEMORY_MANAGEMENT, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, READ_ONLY_HOST_REGISTER, IPC_EVENT.
        102 | 103 | 113 | 125 => 1,
        _ => 0,
    }
}

fn pci_bus_id(text: Out<u8>, length: i32, device: i32) -> Outcome {
    let device = Driver::get()?.device(device)?;
    text.put_text(length, &pci_text(device.physical))
}

fn by_pci_bus_id(device: Out<i32>, text: In<c_char>) -> Outcome {
    let (driver, text) = (Driver::get()?, text.text()?);
    let found = driver.devices.iter().find(|device| pci_text(device.physical) == text);
    device.put(i32::try_from(found.ok_or(INVALID_DEVICE)?.ordinal).map_err(|_| INVALID_VALUE)?)
}

fn pci_text(physical: u32) -> String {
    format!("0000:{:02x}:00.0", physical + 1)
}

/// Devices of the fake don't reach each other.
fn can_access_peer(can: Out<i32>, device: i32, peer: i32) -> Outcome {
    let driver = Driver::get()?;
    driver.device(device)?;
    driver.device(peer)?;
    can.put(0)
}
