//! The device on the fake driver. A process has one driver, and its settings are the environment's, so each test runs
//! in a process of its own.
#![expect(
    unsafe_code,
    reason = "imports and maps exported frames as a client does; limits a process's time"
)]

mod alone;
mod bench;
mod source;

use std::time::Instant;

use super::*;
use crate::engine::ids::RamFrame;
use alone::{alone, machine};
use bench::{Bench, PAGE, page};

#[test]
fn pages_go_up_from_any_shift_and_come_down_whole() {
    alone("pages_go_up_from_any_shift_and_come_down_whole", &[("FAKE_CUDA_POISON", "1")], || {
        let mut bench = Bench::new(4);
        for shift in [0, 1, 31, 32, 511, 1216, 3224, 4095] {
            bench.fill(RamFrame(0), 5);
            bench.fill(RamFrame(1), 99);
            let (source, target) = (RamFrame(0), VramFrame(2));
            bench.run(DeviceOp::Up { source, shift, target });
            let expected = bench.ram(source)[shift as usize..][..page()].to_vec();
            bench.with_imported(2, |frame| assert!(frame == expected, "up with shift {shift}"));
            bench.run(DeviceOp::Down { source: VramFrame(2), target: RamFrame(1) });
            assert!(bench.ram(RamFrame(1))[..page()] == expected, "down with shift {shift}");
        }
        bench.with_imported(2, |frame| frame.fill(0xAB));
        bench.run(DeviceOp::Down { source: VramFrame(2), target: RamFrame(3) });
        assert!(bench.ram(RamFrame(3))[..page()].iter().all(|byte| *byte == 0xAB));
        bench.run(DeviceOp::Zero { target: VramFrame(2) });
        bench.with_imported(2, |frame| assert!(frame.iter().all(|byte| *byte == 0)));
        // Its neighbours are what they were.
        bench.with_imported(1, |frame| assert!(frame.iter().all(|byte| *byte == 0xA5)));
        bench.with_imported(3, |frame| assert!(frame.iter().all(|byte| *byte == 0xA5)));
    });
}

#[test]
fn copies_are_in_flight_together_and_never_more_than_the_queue_holds() {
    let name = "copies_are_in_flight_together_and_never_more_than_the_queue_holds";
    alone(name, &[("FAKE_CUDA_MEMORY", "256MiB")], || {
        let mut bench = Bench::new(72);
        machine().pause(0).unwrap();
        let zero =
            |tag| (Tag(tag), DeviceOp::Zero { target: VramFrame(u32::try_from(tag).unwrap()) });
        for tag in 0..64 {
            let (tag, op) = zero(tag);
            bench.device.submit(tag, op).unwrap();
        }
        let (tag, op) = zero(64);
        assert_eq!(bench.device.submit(tag, op), Err(Full));
        // The other direction has a queue of its own.
        let down = DeviceOp::Down { source: VramFrame(70), target: RamFrame(0) };
        bench.device.submit(Tag(100), down).unwrap();
        assert!(bench.pool.claim_read(RamFrame(0)).is_none(), "what is in flight owns its frame");
        machine().resume(0).unwrap();
        let mut done = bench.wait(65);
        done.sort_by_key(|done| done.tag);
        let tags: Vec<u64> = done.iter().map(|done| done.tag.0).collect();
        assert_eq!(tags, (0..64).chain([100]).collect::<Vec<_>>());
        assert!(done.iter().all(|done| done.result.is_ok()));
        assert!(bench.pool.claim_write(RamFrame(0)).is_some(), "its frame is free again");
        let (tag, op) = zero(64);
        bench.device.submit(tag, op).unwrap();
        bench.wait(1);
    });
}

#[test]
fn a_released_frame_gives_its_memory_back_and_is_zeros_when_restored() {
    let name = "a_released_frame_gives_its_memory_back_and_is_zeros_when_restored";
    alone(name, &[("FAKE_CUDA_POISON", "1")], || {
        let mut bench = Bench::new(4);
        assert_eq!(machine().memory_used(0).unwrap(), 4 * PAGE);
        bench.run(DeviceOp::Release { target: VramFrame(1) });
        assert_eq!(machine().memory_used(0).unwrap(), 3 * PAGE);
        let fault = bench.device.export(VramFrame(1)).unwrap_err();
        assert!(matches!(fault, DeviceFault::Frame { frame: 1, .. }), "{fault}");
        bench.run(DeviceOp::Restore { target: VramFrame(1) });
        assert_eq!(machine().memory_used(0).unwrap(), 4 * PAGE);
        bench.with_imported(1, |frame| assert!(frame.iter().all(|byte| *byte == 0)));
        // Nothing is left behind by either, nor at the end.
        for _ in 0..100 {
            bench.run(DeviceOp::Release { target: VramFrame(3) });
            bench.run(DeviceOp::Restore { target: VramFrame(3) });
        }
        assert_eq!(machine().memory_used(0).unwrap(), 4 * PAGE);
        drop(bench);
        assert_eq!(machine().memory_used(0).unwrap(), 0);
        // The host's memory is not pinned any more, either: it could not be pinned twice.
        drop(Bench::new(4));
    });
}

#[test]
fn a_frame_that_cannot_be_restored_stays_out_and_can_be_tried_again() {
    let name = "a_frame_that_cannot_be_restored_stays_out_and_can_be_tried_again";
    alone(name, &[], || {
        let mut bench = Bench::new(4);
        for call in ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"] {
            bench.run(DeviceOp::Release { target: VramFrame(2) });
            machine().set_faults(&[&format!("{call}:0:2")]).unwrap();
            let fault = bench.fails(DeviceOp::Restore { target: VramFrame(2) });
            assert!(
                fault.to_string().starts_with(&format!("VRAM frame 2: {call} failed with 2 ("))
            );
            assert!(fault.to_string().ends_with("nvidia-smi` shows it), or lower vram"), "{fault}");
            assert_eq!(machine().memory_used(0).unwrap(), 3 * PAGE, "{call}");
            bench.run(DeviceOp::Restore { target: VramFrame(2) });
            bench.with_imported(2, |frame| assert!(frame.iter().all(|byte| *byte == 0)));
        }
        // One that can't be released goes on as it was.
        machine().set_faults(&["cuMemUnmap:0:1"]).unwrap();
        bench.fails(DeviceOp::Release { target: VramFrame(2) });
        bench.run(DeviceOp::Restore { target: VramFrame(2) });
        bench.run(DeviceOp::Release { target: VramFrame(2) });
        assert_eq!(machine().memory_used(0).unwrap(), 3 * PAGE);
    });
}

#[test]
fn what_cannot_be_started_is_a_fault_of_its_frame_alone() {
    alone("what_cannot_be_started_is_a_fault_of_its_frame_alone", &[], || {
        let mut bench = Bench::new(4);
        let target = VramFrame(3);
        machine().set_faults(&["cuMemcpyHtoDAsync_v2:0:1234", "cuMemsetD8Async:0:1"]).unwrap();
        let up = DeviceOp::Up { source: RamFrame(0), shift: 0, target };
        let fault = bench.fails(up);
        let text = "VRAM frame 3: cuMemcpyHtoDAsync_v2 failed with 1234 (a code that this driver has no name for)";
        assert!(fault.to_string().starts_with(text), "{fault}");
        let fault = bench.fails(DeviceOp::Zero { target });
        assert!(matches!(fault, DeviceFault::Driver { frame: 3, .. }), "{fault}");
        bench.run(up);
        bench.run(DeviceOp::Zero { target });
    });
}

#[test]
fn an_error_that_sticks_loses_the_device_for_good() {
    alone("an_error_that_sticks_loses_the_device_for_good", &[], || {
        let mut bench = Bench::new(16);
        bench.run(DeviceOp::Zero { target: VramFrame(0) });
        machine().set_faults(&["work:2:700"]).unwrap();
        machine().pause(0).unwrap();
        for frame in 0..12 {
            let target = VramFrame(frame);
            bench.device.submit(Tag(100 + u64::from(frame)), DeviceOp::Zero { target }).unwrap();
        }
        machine().resume(0).unwrap();
        let lost = |fault: &DeviceFault| {
            let DeviceFault::Lost { reason } = fault else { panic!("{fault}") };
            assert!(reason.contains("700 (CUDA_ERROR_ILLEGAL_ADDRESS)"), "{reason}");
        };
        // Of a batch with a copy that failed, none is known to have arrived.
        let done = bench.wait(12);
        done.iter().filter_map(|done| done.result.as_ref().err()).for_each(lost);
        assert!(done.iter().any(|done| done.result.is_err()));
        for op in [
            DeviceOp::Up { source: RamFrame(0), shift: 0, target: VramFrame(1) },
            DeviceOp::Down { source: VramFrame(1), target: RamFrame(0) },
            DeviceOp::Zero { target: VramFrame(1) },
            DeviceOp::Release { target: VramFrame(1) },
            DeviceOp::Restore { target: VramFrame(1) },
        ] {
            lost(&bench.fails(op));
        }
        // What clients have, they keep.
        bench.device.export(VramFrame(1)).unwrap();
        let started = Instant::now();
        drop(bench);
        assert!(started.elapsed() < END_WAIT, "a lost device is not waited for");
    });
}

#[test]
fn events_that_fail_lose_the_device() {
    for (number, call) in ["cuEventRecord", "cuEventSynchronize"].into_iter().enumerate() {
        let name = "events_that_fail_lose_the_device";
        alone(&format!("{name}#{number}"), &[], || {
            let mut bench = Bench::new(4);
            machine().set_faults(&[&format!("{call}:0:1")]).unwrap();
            let fault = bench.fails(DeviceOp::Zero { target: VramFrame(0) });
            assert!(matches!(fault, DeviceFault::Lost { .. }), "{fault}");
            let fault = bench.fails(DeviceOp::Zero { target: VramFrame(0) });
            assert!(fault.to_string().contains(call), "{fault}");
        });
    }
}

#[test]
fn a_device_that_cannot_be_had_whole_is_given_back_whole() {
    let calls = [
        "cuMemAddressReserve:0:2",
        "cuMemCreate:3:2",
        "cuMemExportToShareableHandle:3:304",
        "cuMemMap:3:1",
        "cuMemSetAccess:0:1",
        "cuMemHostRegister_v2:0:2",
        "cuStreamCreate:1:2",
        "cuEventCreate:70:1234",
    ];
    alone("a_device_that_cannot_be_had_whole_is_given_back_whole", &[], || {
        for fault in calls {
            // The probe has made one piece and exported it before.
            let gpu = bench::gpu();
            machine().set_faults(&[fault]).unwrap();
            let error = bench::device(gpu, 4).map(drop).expect_err(fault).to_string();
            let (call, _) = fault.split_once(':').unwrap();
            assert!(error.contains(&format!("{call} failed with")), "{error}");
            machine().set_faults(&[]).unwrap();
            bench::until(fault, || machine().memory_used(0).is_ok_and(|used| used == 0));
        }
        drop(Bench::new(4));
    });
}

#[test]
fn what_does_not_fit_is_refused_with_numbers() {
    let name = "what_does_not_fit_is_refused_with_numbers";
    alone(name, &[("FAKE_CUDA_MEMORY", "16MiB")], || {
        let error = bench::device(bench::gpu(), 9).map(drop).unwrap_err().to_string();
        assert!(
            error.starts_with("vram is 18MiB, but GPU 0 (Lapis fake GPU 0, GPU-6c61"),
            "{error}"
        );
        assert!(error.contains(") has 16MiB free of 16MiB: lower vram, "), "{error}");
        drop(Bench::new(8));
    });
}

#[test]
fn a_driver_that_hangs_is_not_waited_for_at_the_end() {
    alone("a_driver_that_hangs_is_not_waited_for_at_the_end", &[], || {
        let mut bench = Bench::new(4);
        let pool = Arc::downgrade(&bench.pool);
        machine().wedge().unwrap();
        let zero = |frame| DeviceOp::Zero { target: VramFrame(frame) };
        bench.device.submit(Tag(1), zero(0)).unwrap();
        let down = DeviceOp::Down { source: VramFrame(1), target: RamFrame(0) };
        bench.device.submit(Tag(2), down).unwrap();
        let mut done = Vec::new();
        bench.device.poll(&mut done);
        assert!(done.is_empty());
        // Descriptors are given out without the driver.
        bench.device.export(VramFrame(2)).unwrap();
        let started = Instant::now();
        drop(bench);
        assert!(started.elapsed() < 4 * END_WAIT);
        assert!(pool.upgrade().is_some(), "a copy may still touch it");
        machine().unwedge().unwrap();
        bench::until("cleared up", || machine().memory_used(0).is_ok_and(|used| used == 0));
        bench::until("the RAM tier is let go of", || pool.upgrade().is_none());
    });
}
