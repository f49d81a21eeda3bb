//! Copies and fills, and what they may touch.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::alone::{alone, test_name};
use crate::gpu::{FRAME, Gpu, HostMemory, READ, READ_WRITE, wait_for_a_copy_to};

#[test]
fn every_direction() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (first, second, stream) = (gpu.frame(), gpu.frame(), gpu.stream(1));
        let pattern: Vec<u8> = (0..251).cycle().take(FRAME).collect();
        gpu.write(first, &pattern);
        assert_eq!(gpu.cuMemcpyDtoD_v2(second, first + 1, FRAME - 1), 0);
        assert_eq!(gpu.read(second, FRAME - 1), pattern[1..]);
        let mut back = vec![0; FRAME];
        let last = FRAME as u64 - 1;
        assert_eq!(gpu.cuMemcpyHtoDAsync_v2(second + last, [9].as_ptr(), 1, stream), 0);
        assert_eq!(gpu.cuMemcpyDtoDAsync_v2(first, second, FRAME, stream), 0);
        assert_eq!(gpu.cuMemcpyDtoHAsync_v2(back.as_mut_ptr(), first, FRAME, stream), 0);
        assert_eq!((&back[..FRAME - 1], back[FRAME - 1]), (&pattern[1..], 9));
    });
}

#[test]
fn fills() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, stream) = (gpu.frame(), gpu.stream(0));
        assert_eq!(gpu.cuMemsetD8_v2(frame + 1, 7, 5000), 0);
        let found = gpu.read(frame, 5002);
        assert_eq!((found[0], &found[1..5001], found[5001]), (0, &[7; 5000][..], 0));
        assert_eq!(gpu.cuMemsetD32_v2(frame + 4, 0x0403_0201, 2), 0);
        assert_eq!(gpu.read(frame, 13), [0, 7, 7, 7, 1, 2, 3, 4, 1, 2, 3, 4, 7]);
        assert_eq!(gpu.cuMemsetD32_v2(frame + 2, 0, 1), 1, "not aligned");
        assert_eq!(gpu.cuMemsetD8Async(frame, 3, 4, stream), 0);
        assert_eq!(gpu.cuMemsetD32Async(frame + 4, 5, 1, stream), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        assert_eq!(gpu.read(frame, 8), [3, 3, 3, 3, 5, 0, 0, 0]);
    });
}

#[test]
fn a_copy_may_go_over_many_mappings_but_not_past_them() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, base) = (FRAME as u64, gpu.reserve(4 * FRAME));
        for index in 0..3 {
            assert_eq!(gpu.cuMemMap(base + index * frame, FRAME, 0, gpu.create(), 0), 0);
        }
        gpu.allow(base, 3 * FRAME, READ_WRITE);
        let pattern: Vec<u8> = (0..251).cycle().take(2 * FRAME).collect();
        gpu.write(base + 77, &pattern);
        assert_eq!(gpu.read(base + 77, 2 * FRAME), pattern);
        let byte = [0];
        let copy = |to, bytes| gpu.cuMemcpyHtoD_v2(to, byte.as_ptr(), bytes);
        assert_eq!(copy(base + 3 * frame - 1, 1), 0);
        assert_eq!(copy(base + 3 * frame, 1), 1, "reserved and not mapped");
        assert_eq!(gpu.cuMemsetD8_v2(base + 3 * frame - 1, 0, 2), 1, "past the last");
        assert_eq!(copy(base - 1, 1), 1, "not reserved");
        assert_eq!(copy(0, 1), 1, "null");
        assert_eq!(copy(base, 0), 0, "nothing");
        assert_eq!(gpu.cuMemcpyHtoD_v2(base, std::ptr::null(), 1), 1, "from null");
        let device = usize::try_from(base).expect("an address") as *const u8;
        assert_eq!(gpu.cuMemcpyHtoD_v2(base, device, 1), 1, "a device address as a host's");
        assert_eq!(gpu.cuCtxSynchronize(), 0, "refusals don't stick");
    });
}

#[test]
fn work_without_access_breaks_the_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, address) = (gpu.create(), gpu.reserve(FRAME));
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
        assert_eq!(gpu.cuMemsetD8_v2(address, 1, 1), 700);
        assert_eq!(gpu.cuCtxSynchronize(), 700);
    });
}

#[test]
fn work_that_writes_what_may_be_read_breaks_the_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let address = gpu.frame();
        gpu.allow(address, FRAME, READ);
        assert_eq!(gpu.read(address, 1), [0]);
        assert_eq!(gpu.cuMemsetD8_v2(address, 1, 1), 700);
    });
}

#[test]
fn an_unmap_under_queued_work_breaks_everything_for_good() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (address, other, stream) = (gpu.frame(), gpu.frame(), gpu.stream(1));
        let (event, handle) = (gpu.event(0), gpu.create());
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemsetD8Async(address, 1, FRAME, stream), 0);
        assert_eq!(gpu.cuEventRecord(event, stream), 0);
        assert_eq!(gpu.cuMemUnmap(address, FRAME), 0, "it does not wait");
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 700);
        let (mut context, mut number) = (0, 0);
        let after = [
            gpu.cuStreamQuery(stream),
            gpu.cuEventQuery(event),
            gpu.cuEventSynchronize(event),
            gpu.cuCtxSynchronize(),
            gpu.cuMemcpyHtoD_v2(other, [1].as_ptr(), 1),
            gpu.cuMemAlloc_v2(&raw mut context, 100),
            gpu.cuMemUnmap(other, FRAME),
            gpu.cuMemRelease(handle),
            gpu.cuMemSetAccess(other, FRAME, &crate::gpu::access(0, READ), 1),
            gpu.cuStreamCreate(&raw mut context, 0),
            gpu.cuDevicePrimaryCtxRetain(&raw mut context, 0),
        ];
        assert_eq!(after, [700; 11]);
        assert_eq!(gpu.try_create(FRAME), Err(700));
        assert_eq!(gpu.cuDeviceGetCount(&raw mut number), 0, "what isn't work is answered");
        assert_eq!(gpu.cuDevicePrimaryCtxRelease_v2(0), 0);
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut context, 0), 700, "no way back");
    });
}

#[test]
fn an_unmap_under_running_work_breaks_the_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let bytes = 64 * FRAME;
        let (handle, base) = (gpu.try_create(bytes).expect("there is memory"), gpu.reserve(bytes));
        assert_eq!(gpu.cuMemMap(base, bytes, 0, handle, 0), 0);
        gpu.allow(base, bytes, READ_WRITE);
        let (stream, host) = (gpu.stream(1), HostMemory::new(bytes));
        host.fill(1);
        assert_eq!(gpu.cuMemHostRegister_v2(host.start, bytes, 0), 0);
        assert_eq!(gpu.cuMemcpyHtoDAsync_v2(base, host.start, bytes, stream), 0);
        wait_for_a_copy_to(base, bytes);
        assert_eq!(gpu.cuMemUnmap(base, bytes), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 700);
    });
}

#[test]
fn a_free_waits_for_work() {
    alone(test_name!(), &[], |fake| {
        let Gpu { api, context } = Gpu::start(fake);
        let (mut address, (told, heard)) = (0, channel());
        assert_eq!(api.cuMemAlloc_v2(&raw mut address, FRAME), 0);
        assert_eq!(api.fakeCudaPause(0), 0);
        assert_eq!(api.cuMemsetD8Async(address, 1, FRAME, 0), 0);
        let freer = thread::spawn(move || {
            assert_eq!(api.cuCtxSetCurrent(context), 0);
            assert_eq!(api.cuMemFree_v2(address), 0);
            told.send(()).expect("the test listens");
        });
        assert!(heard.recv_timeout(Duration::from_millis(100)).is_err(), "it did not wait");
        assert_eq!(api.fakeCudaResume(0), 0);
        freer.join().expect("its assertions hold");
        assert_eq!(api.cuCtxSynchronize(), 0);
    });
}

#[test]
fn work_finds_what_is_mapped_when_it_runs() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (old, new, base) = (gpu.create(), gpu.create(), gpu.reserve(FRAME));
        let map = |handle| {
            assert_eq!(gpu.cuMemMap(base, FRAME, 0, handle, 0), 0);
            gpu.allow(base, FRAME, READ_WRITE);
        };
        let stream = gpu.stream(1);
        map(old);
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemsetD8Async(base, 1, 1, stream), 0);
        assert_eq!(gpu.cuMemUnmap(base, FRAME), 0);
        map(new);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        assert_eq!(gpu.read(base, 1), [1], "the wrong frame was written to, as on a card");
        assert_eq!(gpu.cuMemUnmap(base, FRAME), 0);
        map(old);
        assert_eq!(gpu.read(base, 1), [0]);
    });
}

#[test]
fn a_fault_of_one_device_is_not_anothers() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, address) = (gpu.create(), gpu.reserve(FRAME));
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
        assert_eq!(gpu.cuMemsetD8_v2(address, 1, 1), 700);
        let (mut second, mut memory) = (0, 0);
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
        assert_eq!(gpu.cuCtxPushCurrent_v2(second), 0);
        assert_eq!(gpu.cuMemAlloc_v2(&raw mut memory, 100), 0);
        gpu.write(memory, &[1; 100]);
    });
}

#[test]
fn pageable_memory_is_staged_or_waited_for() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (frame, stream, host) = (gpu.frame(), gpu.stream(1), HostMemory::new(4096));
        host.fill(1);
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemcpyHtoDAsync_v2(frame, host.start, 4096, stream), 0);
        host.fill(2);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuMemcpyDtoHAsync_v2(host.start, frame, 4096, stream), 0);
        assert_eq!((host.byte(0), host.byte(4095)), (1, 1), "without a wait by the caller");
    });
}
