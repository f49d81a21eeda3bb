//! Host memory for DMA.
#![expect(unsafe_code, reason = "makes memory that can't be registered")]

use crate::alone::{alone, test_name};
use crate::gpu::{FRAME, Gpu, HostMemory, READ_WRITE, peek, wait_for_a_copy_to};

const PORTABLE: u32 = 1;
const DEVICE_MAP: u32 = 2;
const IO_MEMORY: u32 = 4;
const READ_ONLY: u32 = 8;

#[test]
fn host_memory_is_registered_once() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let host = HostMemory::new(4 * 4096);
        let register = |offset, bytes| gpu.cuMemHostRegister_v2(host.at(offset), bytes, PORTABLE);
        assert_eq!(register(4096, 8192), 0);
        assert_eq!(register(4096, 8192), 712, "again");
        assert_eq!(register(0, 4097), 712, "into its start");
        assert_eq!(register(8192, 8192), 712, "from its middle");
        assert_eq!(register(8192, 1), 712, "inside");
        assert_eq!(register(0, 4 * 4096), 712, "around");
        assert_eq!(register(0, 4096), 0, "before");
        assert_eq!(register(3 * 4096, 4096), 0, "behind");
        assert_eq!(gpu.cuMemHostUnregister(host.at(8192)), 713, "not its start");
        assert_eq!(gpu.cuMemHostUnregister(host.at(4096)), 0);
        assert_eq!(gpu.cuMemHostUnregister(host.at(4096)), 713, "again");
        assert_eq!(register(4096, 8192), 0, "once more");
    });
}

#[test]
fn what_is_registered_must_be_memory() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let host = HostMemory::new(4 * 4096);
        let register = |start, bytes, flags| gpu.cuMemHostRegister_v2(start, bytes, flags);
        assert_eq!(register(std::ptr::null_mut(), 4096, 0), 1);
        assert_eq!(register(host.start, 0, 0), 1);
        assert_eq!(register(host.start, usize::MAX, 0), 1);
        assert_eq!(register(host.start, 4096, IO_MEMORY), 1);
        assert_eq!(register(host.start, 4096, 16), 1);
        let device = usize::try_from(gpu.frame()).expect("an address") as *mut u8;
        assert_eq!(register(device, 4096, 0), 1, "device memory");
        // SAFETY: the pages are of `host`, and nothing of Rust's lies there.
        let protect = |page: usize, access| unsafe {
            assert_eq!(libc::mprotect(host.at(page * 4096).cast(), 4096, access), 0);
        };
        protect(1, libc::PROT_READ);
        assert_eq!(register(host.start, 2 * 4096, 0), 1, "not writable");
        assert_eq!(register(host.start, 2 * 4096, READ_ONLY), 0);
        // SAFETY: as above; the pages are not used after this.
        assert_eq!(unsafe { libc::munmap(host.at(3 * 4096).cast(), 4096) }, 0);
        assert_eq!(register(host.at(2 * 4096), 2 * 4096, 0), 1, "a hole");
    });
}

#[test]
fn registering_makes_memory_present() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let host = HostMemory::new(4 * 4096);
        let mut present = [9; 4];
        let mut look = || {
            // SAFETY: the range is mapped, and there is a byte for each of its pages.
            let done = unsafe { libc::mincore(host.start.cast(), 4 * 4096, present.as_mut_ptr()) };
            assert_eq!(done, 0);
            present.map(|page| page & 1)
        };
        assert_eq!(look(), [0; 4]);
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, 4 * 4096, 0), 0);
        assert_eq!(look(), [1; 4]);
    });
}

#[test]
fn copies_of_registered_memory_are_asynchronous() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, stream, host) = (gpu.frame(), gpu.stream(1), HostMemory::new(8192));
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, 8192, PORTABLE), 0);
        host.fill(1);
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemcpyHtoDAsync_v2(frame, host.start, 4096, stream), 0);
        assert_eq!(gpu.cuMemcpyDtoHAsync_v2(host.at(4096), frame, 4096, stream), 0);
        assert_eq!(gpu.cuStreamQuery(stream), 600);
        host.fill(2);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        assert_eq!(gpu.read(frame, 1), [2], "read when it ran, not when it was asked for");
        assert_eq!((host.byte(4096), gpu.cuStreamQuery(stream)), (2, 0));
    });
}

#[test]
fn a_copy_lies_in_one_registration_or_in_none() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, host) = (gpu.frame(), HostMemory::new(3 * 4096));
        for page in [0, 1] {
            assert_eq!(gpu.cuMemHostRegister_v2(host.at(page * 4096), 4096, 0), 0);
        }
        let copy = |offset, bytes| gpu.cuMemcpyHtoD_v2(frame, host.at(offset), bytes);
        assert_eq!([copy(0, 4096), copy(4096, 4096), copy(8192, 4096)], [0; 3]);
        assert_eq!(copy(4095, 2), 1, "in two");
        assert_eq!(copy(8191, 2), 1, "half in one");
    });
}

#[test]
fn memory_unregistered_under_queued_work_breaks_the_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, stream, host) = (gpu.frame(), gpu.stream(1), HostMemory::new(4096));
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, 4096, 0), 0);
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemcpyHtoDAsync_v2(frame, host.start, 4096, stream), 0);
        assert_eq!(gpu.cuMemHostUnregister(host.start), 0);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 700);
    });
}

#[test]
fn unregistering_waits_for_a_copy_that_is_running() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let bytes = 64 * FRAME;
        let (handle, address) =
            (gpu.try_create(bytes).expect("there is memory"), gpu.reserve(bytes));
        assert_eq!(gpu.cuMemMap(address, bytes, 0, handle, 0), 0);
        gpu.allow(address, bytes, READ_WRITE);
        let (stream, host) = (gpu.stream(1), HostMemory::new(bytes));
        host.fill(1);
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, bytes, 0), 0);
        assert_eq!(gpu.cuMemcpyHtoDAsync_v2(address, host.start, bytes, stream), 0);
        wait_for_a_copy_to(address, bytes);
        assert_eq!(gpu.cuMemHostUnregister(host.start), 0);
        // SAFETY: the test's own memory, which nobody should be reading any more.
        assert_eq!(unsafe { libc::munmap(host.start.cast(), bytes) }, 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        assert_eq!(peek(address + bytes as u64 - 1), 1);
    });
}

#[test]
fn mapped_host_memory_has_a_device_address() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, host, other) = (gpu.frame(), HostMemory::new(4096), HostMemory::new(4096));
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, 4096, DEVICE_MAP), 0);
        assert_eq!(gpu.cuMemHostRegister_v2(other.start, 4096, PORTABLE), 0);
        let mut address = 0;
        let mut ask =
            |start, flags| gpu.cuMemHostGetDevicePointer_v2(&raw mut address, start, flags);
        assert_eq!(ask(other.start, 0), 1, "not mapped for devices");
        assert_eq!(ask(host.start, 1), 1, "flags");
        assert_eq!(ask(host.at(100), 0), 0);
        host.fill(7);
        assert_eq!(gpu.cuMemcpyDtoD_v2(frame, address, 10), 0);
        assert_eq!(gpu.read(frame, 11), [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0]);
        assert_eq!(gpu.cuMemcpyDtoD_v2(frame, other.start as u64, 10), 1);
    });
}

#[test]
fn registering_needs_a_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let host = HostMemory::new(4096);
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, 4096, 0), 0);
        assert_eq!(gpu.cuCtxSetCurrent(0), 0);
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, 4096, 0), 201);
        assert_eq!(gpu.cuMemHostUnregister(host.start), 201);
        let address = gpu.reserve(FRAME);
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, gpu.create(), 0), 0);
        gpu.allow(address, FRAME, READ_WRITE);
        assert_eq!(gpu.cuMemcpyHtoD_v2(address, host.start, 1), 201);
    });
}
