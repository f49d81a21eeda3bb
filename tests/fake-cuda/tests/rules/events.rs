//! Events inside one process.

use crate::alone::{alone, test_name};
use crate::gpu::Gpu;

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

#[test]
fn an_event_is_what_was_recorded_last() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (stream, frame, event) = (gpu.stream(1), gpu.frame(), gpu.event(0));
        assert_eq!((gpu.cuEventQuery(event), gpu.cuEventSynchronize(event)), (0, 0));
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemsetD8Async(frame, 1, 1, stream), 0);
        assert_eq!(gpu.cuEventRecord(event, stream), 0);
        assert_eq!(gpu.cuEventQuery(event), 600);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuEventSynchronize(event), 0);
        assert_eq!(gpu.cuStreamQuery(stream), 0, "its last work was the record");
        assert_eq!((gpu.cuEventQuery(event), gpu.read(frame, 1)), (0, vec![1]));
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuEventRecord(event, stream), 0);
        assert_eq!(gpu.cuEventQuery(event), 600, "recorded anew");
        assert_eq!(gpu.cuEventDestroy_v2(event), 0, "with a record under way");
        assert_eq!(gpu.cuEventDestroy_v2(event), 400, "again");
        assert_eq!(gpu.cuEventQuery(event), 400);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
    });
}

#[test]
fn a_stream_waits_for_what_was_recorded_when_it_was_asked_to() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let gpu = Gpu::start(fake);
        let (mut second, event, frame) = (0, gpu.event(0), gpu.frame());
        let first = gpu.stream(1);
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuMemsetD8Async(frame, 1, 1, first), 0);
        assert_eq!(gpu.cuEventRecord(event, first), 0);
        // A stream of a device that isn't paused.
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
        assert_eq!(gpu.cuCtxPushCurrent_v2(second), 0);
        let (waits, doesnt) = (gpu.stream(1), gpu.stream(1));
        assert_eq!(gpu.cuStreamWaitEvent(waits, event, 0), 0);
        assert_eq!(gpu.cuStreamWaitEvent(waits, event, 7), 1, "flags");
        assert_eq!(gpu.cuStreamWaitEvent(waits, 0xbad0, 0), 400);
        assert_eq!(gpu.cuStreamSynchronize(doesnt), 0);
        assert_eq!(gpu.cuStreamQuery(waits), 600);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuStreamSynchronize(waits), 0);
        assert_eq!(gpu.cuEventQuery(event), 0);
    });
}

#[test]
fn time_between_events() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (start, end, untimed) = (gpu.event(0), gpu.event(0), gpu.event(DISABLE_TIMING));
        let mut milliseconds = -1.0;
        assert_eq!(gpu.cuEventRecord(start, 0), 0);
        assert_eq!(gpu.cuEventElapsedTime(&raw mut milliseconds, start, end), 400, "not recorded");
        assert_eq!(gpu.cuCtxSynchronize(), 0);
        assert_eq!(gpu.fakeCudaPause(0), 0);
        assert_eq!(gpu.cuEventRecord(end, 0), 0);
        assert_eq!(gpu.cuEventElapsedTime(&raw mut milliseconds, start, end), 600);
        assert_eq!(gpu.fakeCudaResume(0), 0);
        assert_eq!(gpu.cuEventSynchronize(end), 0);
        assert_eq!(gpu.cuEventElapsedTime(&raw mut milliseconds, start, end), 0);
        assert!(milliseconds > 0.0 && milliseconds < 60_000.0, "{milliseconds}");
        assert_eq!(gpu.cuEventRecord(untimed, 0), 0);
        assert_eq!(gpu.cuEventElapsedTime(&raw mut milliseconds, start, untimed), 400);
    });
}

#[test]
fn an_event_for_other_processes_has_no_time() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let mut handle = crate::api::IpcEvent { bytes: [0; 64] };
        assert_eq!(gpu.cuEventCreate(&mut 0, INTERPROCESS), 1);
        assert_eq!(gpu.cuEventCreate(&mut 0, 8), 1);
        let (own, shared) = (gpu.event(DISABLE_TIMING), gpu.event(INTERPROCESS | DISABLE_TIMING));
        assert_eq!(gpu.cuIpcGetEventHandle(&raw mut handle, own), 400);
        assert_eq!(gpu.cuIpcGetEventHandle(&raw mut handle, shared), 0);
        assert_eq!(gpu.cuIpcOpenEventHandle(&mut 0, handle), 201, "in its own process");
        handle.bytes[0] ^= 1;
        assert_eq!(gpu.cuIpcOpenEventHandle(&mut 0, handle), 400, "it is no handle");
    });
}
