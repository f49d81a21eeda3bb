//! Streams and host functions.
#![expect(unsafe_code, reason = "host functions get pointers")]

use std::ffi::c_void;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::alone::{alone, test_name};
use crate::api::Api;
use crate::gpu::{FRAME, Gpu};

/// What a host function tells the test, and what it waits for first.
struct Note {
    number: u32,
    told: Sender<u32>,
    wait: Option<Receiver<()>>,
}

extern "C" fn tell(note: *mut c_void) {
    // SAFETY: `note` below made it from a box, for one call.
    let note = unsafe { Box::from_raw(note.cast::<Note>()) };
    if let Some(wait) = note.wait {
        wait.recv().expect("the test lets it go");
    }
    // The test may have heard enough.
    let _heard = note.told.send(note.number);
}

fn note(number: u32, told: &Sender<u32>, wait: Option<Receiver<()>>) -> *mut c_void {
    Box::into_raw(Box::new(Note { number, told: told.clone(), wait })).cast()
}

#[test]
fn a_stream_works_in_order_and_asynchronously() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (stream, (told, heard), (go, gate)) = (gpu.stream(1), channel(), channel());
        let first = note(0, &told, Some(gate));
        assert_eq!(gpu.cuLaunchHostFunc(stream, Some(tell), first), 0);
        for number in 1..100 {
            assert_eq!(gpu.cuLaunchHostFunc(stream, Some(tell), note(number, &told, None)), 0);
        }
        assert_eq!(gpu.cuStreamQuery(stream), 600);
        go.send(()).expect("it waits");
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        assert_eq!(gpu.cuStreamQuery(stream), 0);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
    });
}

#[test]
fn streams_do_not_wait_for_each_other() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (slow, fast) = (gpu.stream(0), gpu.stream(0));
        let ((told, heard), (go, gate)) = (channel(), channel());
        assert_eq!(gpu.cuLaunchHostFunc(slow, Some(tell), note(1, &told, Some(gate))), 0);
        assert_eq!(gpu.cuLaunchHostFunc(fast, Some(tell), note(2, &told, None)), 0);
        assert_eq!(gpu.cuStreamSynchronize(fast), 0);
        assert_eq!((heard.try_recv(), gpu.cuStreamQuery(slow)), (Ok(2), 600));
        go.send(()).expect("it waits");
        assert_eq!(gpu.cuCtxSynchronize(), 0);
        assert_eq!(heard.try_recv(), Ok(1));
    });
}

#[test]
fn the_null_stream_and_blocking_streams_wait_for_each_other() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (blocking, free) = (gpu.stream(0), gpu.stream(1));
        let ((told, heard), (go, gate)) = (channel(), channel());
        assert_eq!(gpu.cuLaunchHostFunc(blocking, Some(tell), note(1, &told, Some(gate))), 0);
        assert_eq!(gpu.cuStreamQuery(0), 600, "its work is the null stream's as well");
        assert_eq!(gpu.cuLaunchHostFunc(0, Some(tell), note(2, &told, None)), 0);
        let other = gpu.stream(0);
        assert_eq!(gpu.cuLaunchHostFunc(other, Some(tell), note(3, &told, None)), 0);
        assert_eq!(gpu.cuLaunchHostFunc(free, Some(tell), note(4, &told, None)), 0);
        assert_eq!(gpu.cuStreamSynchronize(free), 0);
        assert_eq!([0, other, blocking].map(|stream| gpu.cuStreamQuery(stream)), [600; 3]);
        go.send(()).expect("it waits");
        assert_eq!(gpu.cuStreamSynchronize(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(other), 0);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [4, 1, 2, 3]);
    });
}

#[test]
fn a_destroyed_stream_does_what_is_queued() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (stream, (told, heard), (go, gate)) = (gpu.stream(1), channel(), channel());
        assert_eq!(gpu.cuLaunchHostFunc(stream, Some(tell), note(1, &told, Some(gate))), 0);
        assert_eq!(gpu.cuStreamDestroy_v2(stream), 0);
        assert_eq!(gpu.cuStreamDestroy_v2(stream), 400, "again");
        assert_eq!(gpu.cuStreamQuery(stream), 400);
        go.send(()).expect("it waits");
        assert_eq!(heard.recv(), Ok(1));
    });
}

#[test]
fn wrong_streams_are_refused() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let gpu = Gpu::start(fake);
        let (stream, frame, mut second) = (gpu.stream(0), gpu.frame(), 0);
        assert_eq!(gpu.cuStreamCreate(&mut 0, 2), 1, "flags");
        assert_eq!(gpu.cuStreamDestroy_v2(0), 400, "the null stream");
        let event = gpu.event(0);
        for wrong in [0xbad0, event] {
            assert_eq!(gpu.cuStreamSynchronize(wrong), 400);
            assert_eq!(gpu.cuMemsetD8Async(frame, 0, 1, wrong), 400);
            assert_eq!(gpu.cuEventRecord(event, wrong), 400);
        }
        assert_eq!(gpu.cuLaunchHostFunc(stream, None, std::ptr::null_mut()), 1);
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
        assert_eq!(gpu.cuCtxPushCurrent_v2(second), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 400, "of another context");
        assert_eq!(gpu.cuEventRecord(event, 0), 400, "an event of another context");
    });
}

/// The driver, and what a call of it returned.
struct Called {
    api: Api,
    code: u32,
}

extern "C" fn call_the_driver(called: *mut c_void) {
    // SAFETY: the test passes one that lives until the stream is done.
    let called = unsafe { &mut *called.cast::<Called>() };
    called.code = called.api.cuCtxSynchronize();
}

#[test]
fn a_host_function_must_not_call_the_driver() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let mut called = Called { api: gpu.api, code: 0 };
        let pointer = (&raw mut called).cast();
        assert_eq!(gpu.cuLaunchHostFunc(0, Some(call_the_driver), pointer), 0);
        assert_eq!(gpu.cuCtxSynchronize(), 0);
        assert_eq!(called.code, 800);
    });
}

#[test]
fn who_waits_for_a_stream_hears_of_anothers_fault() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let Gpu { api, context } = gpu;
        let (stuck, faulty, (told, _heard)) = (gpu.stream(1), gpu.stream(1), channel());
        let ((go, gate), (returns, returned)) = (channel(), channel());
        let (handle, address) = (gpu.create(), gpu.reserve(FRAME));
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
        assert_eq!(gpu.cuLaunchHostFunc(stuck, Some(tell), note(1, &told, Some(gate))), 0);
        let waiter = std::thread::spawn(move || {
            assert_eq!(api.cuCtxSetCurrent(context), 0);
            returns.send(api.cuStreamSynchronize(stuck)).expect("the test listens");
        });
        // Time to begin waiting; if it took longer, this would prove less, never something wrong.
        assert!(returned.recv_timeout(Duration::from_millis(100)).is_err());
        assert_eq!(gpu.cuMemsetD8Async(address, 1, 1, faulty), 0);
        assert_eq!(returned.recv(), Ok(700), "while the stream is still stuck");
        waiter.join().expect("it has returned");
        go.send(()).expect("it waits");
    });
}

#[test]
fn a_host_function_does_not_run_in_a_broken_context() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (stream, frame, (told, heard)) = (gpu.stream(1), gpu.frame(), channel());
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemsetD8Async(frame, 1, 1, stream), 0);
        assert_eq!(gpu.cuLaunchHostFunc(stream, Some(tell), note(1, &told, None)), 0);
        assert_eq!(gpu.cuMemUnmap(frame, FRAME), 0);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 700);
        // Nothing is queued any more when the stream is closed; then its thread ends, and the note is never told.
        assert_eq!(gpu.cuDevicePrimaryCtxRelease_v2(0), 0);
        drop(told);
        assert!(heard.try_recv().is_err());
    });
}
