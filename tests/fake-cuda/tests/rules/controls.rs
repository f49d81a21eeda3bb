//! Faults on demand, and gates.

use std::ffi::CString;
use std::sync::mpsc::channel;
use std::thread;

use crate::alone::{alone, test_name};
use crate::api::Api;
use crate::gpu::{FRAME, Gpu};

fn fail(gpu: &Gpu, symbol: &str, after: u64, code: u32, times: u64) -> u32 {
    let symbol = CString::new(symbol).expect("no zero in it");
    gpu.fakeCudaFail(symbol.as_ptr(), after, code, times)
}

#[test]
fn the_call_asked_for_fails() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        assert_eq!(fail(&gpu, "cuMemCreate", 2, 2, 2), 0);
        let codes = [(); 5].map(|()| gpu.try_create(FRAME).err());
        assert_eq!(codes, [None, None, Some(2), Some(2), None]);
        assert_eq!(fake.memory_used(0).expect("it can be read"), 3 * FRAME as u64);
        assert_eq!(fail(&gpu, "cuMemCrate", 0, 2, 1), 1, "no such function");
        assert_eq!(fail(&gpu, "cuGraphLaunch", 0, 2, 1), 1, "one that does nothing anyway");
        assert_eq!(fail(&gpu, "cuMemCreate", 0, 2, 1), 0);
        assert_eq!(gpu.fakeCudaClearFaults(), 0);
        assert!(gpu.try_create(FRAME).is_ok());
    });
}

#[test]
fn faults_come_from_the_environment() {
    let faults = "cuMemCreate:1:2, cuMemAddressReserve:0:304:1";
    alone(test_name!(), &[("FAKE_CUDA_FAULTS", faults)], |fake| {
        let gpu = Gpu::start(fake);
        assert_eq!([(); 3].map(|()| gpu.try_create(FRAME).err()), [None, Some(2), None]);
        assert_eq!(gpu.cuMemAddressReserve(&mut 0, FRAME, 0, 0, 0), 304);
    });
}

#[test]
fn a_wrong_fault_is_no_success() {
    alone(test_name!(), &[("FAKE_CUDA_FAULTS", "cuMemCrate:1:2")], |fake| {
        assert_eq!(Api::load(&fake.library()).cuInit(0), 999);
    });
}

#[test]
fn faults_come_from_a_file() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        fake.set_faults(&["cuMemCreate:1:2:9"]).expect("it can be written");
        assert_eq!([(); 3].map(|()| gpu.try_create(FRAME).err()), [None, Some(2), Some(2)]);
        fake.set_faults(&["cuMemCreate:0:3:9"]).expect("it can be written");
        assert_eq!(gpu.try_create(FRAME), Err(3));
        fake.set_faults(&[]).expect("it can be written");
        assert!(gpu.try_create(FRAME).is_ok());
    });
}

#[test]
fn a_sticky_fault_breaks_the_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let frame = gpu.frame();
        assert_eq!(fail(&gpu, "cuStreamSynchronize", 0, 999, 1), 0);
        assert_eq!((gpu.cuStreamSynchronize(0), gpu.cuCtxSynchronize()), (999, 0));
        assert_eq!(fail(&gpu, "cuStreamSynchronize", 0, 719, 1), 0);
        assert_eq!((gpu.cuStreamSynchronize(0), gpu.cuCtxSynchronize()), (719, 719));
        assert_eq!(gpu.cuMemUnmap(frame, FRAME), 719);
    });
}

#[test]
fn work_can_fail_when_it_runs() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (stream, frame) = (gpu.stream(1), gpu.frame());
        assert_eq!(fail(&gpu, "work", 1, 214, 1), 0);
        assert_eq!(gpu.cuMemsetD8Async(frame, 1, 1, stream), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        // What the call itself returns depends on whether the work was faster.
        gpu.cuMemsetD8Async(frame, 1, 1, stream);
        assert_eq!(gpu.cuStreamSynchronize(stream), 214);
        assert_eq!(gpu.cuMemcpyHtoD_v2(frame, [0].as_ptr(), 1), 214);
    });
}

#[test]
fn a_paused_device_takes_work_and_does_none() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let gpu = Gpu::start(fake);
        let (stream, frame) = (gpu.stream(1), gpu.frame());
        fake.pause(0).expect("it can be made");
        for _ in 0..100 {
            assert_eq!(gpu.cuMemsetD8Async(frame, 1, 1, stream), 0);
        }
        let mut second = 0;
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
        assert_eq!(gpu.cuCtxPushCurrent_v2(second), 0);
        assert_eq!(gpu.cuMemAlloc_v2(&raw mut second, 10), 0);
        gpu.write(second, &[1; 10]);
        assert_eq!(gpu.cuCtxPopCurrent_v2(std::ptr::null_mut()), 0);
        assert_eq!((gpu.cuStreamQuery(stream), crate::gpu::peek(frame)), (600, 0));
        fake.resume(0).expect("it can be removed");
        fake.resume(0).expect("it may be open");
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        assert_eq!(crate::gpu::peek(frame), 1);
    });
}

#[test]
fn calls_of_a_wedged_driver_do_not_return() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (api, (told, heard)) = (gpu.api, channel());
        fake.wedge().expect("it can be made");
        let caller = thread::spawn(move || {
            told.send("calls").expect("the test listens");
            assert_eq!(api.cuDeviceGetCount(&mut 0), 0);
            told.send("returned").expect("the test listens");
        });
        assert_eq!(heard.recv(), Ok("calls"));
        // It may not have come to the gate yet; then this proves less, never something wrong.
        assert!(heard.recv_timeout(std::time::Duration::from_millis(100)).is_err());
        fake.unwedge().expect("it can be removed");
        assert_eq!(heard.recv(), Ok("returned"));
        caller.join().expect("its assertions hold");
    });
}
