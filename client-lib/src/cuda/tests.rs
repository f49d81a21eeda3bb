//! Clients of a daemon with frames on the fake CUDA driver, each test in a process of its own.
#![expect(unsafe_code, reason = "hands streams over, forks")]

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use lapis_fake_cuda::harness::FakeCuda;
use lapis_proto::ids::{AllocationId, MappingId, VramFrame};
use lapis_proto::kind::Kind;
use lapis_proto::message::{Allocated, DeviceKind, Done, Frames, Mapped, Welcome};

use super::error::CudaError;
use crate::testing::cuda::{
    Raw, alone, connect, cuda_welcome, directory, eventually, is_spawned, machine, spawn, test_name,
};
use crate::testing::{Daemon, PAGE, access_at, listening, sealed_memfd, welcome};
use crate::{Access, Allocation, Client, Error, Mapping};

const PAGE_BYTES: usize = 65536;
/// Long enough for what would be wrong to happen.
const MOMENT: Duration = Duration::from_millis(100);

fn bytes_of(mapping: &Mapping, range: usize) -> Vec<u8> {
    let mut bytes = vec![0; mapping.length(range)];
    mapping.copy_to_host(range, 0, &mut bytes).expect("copied");
    bytes
}

fn page(index: u64) -> std::ops::Range<u64> {
    index * PAGE..(index + 1) * PAGE
}

/// An allocation with each page full of its number and 1.
fn numbered(client: &Client, pages: u8) -> Allocation {
    let allocation = client.allocate(u64::from(pages) * PAGE).expect("allocated");
    for index in 0..pages {
        let mut mapping =
            allocation.map(page(index.into()), Access::Overwrite).expect("there is room");
        mapping.copy_from_host(0, 0, &[index + 1; PAGE_BYTES]).expect("copied");
        mapping.unmap().expect("unmapped");
    }
    allocation
}

/// Descriptors of device memory that this process has open.
fn descriptors() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs");
    let links = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().contains("/memory-")).count()
}

fn memory_used(fake: &FakeCuda) -> u64 {
    fake.memory_used(0).expect("it can be read")
}

#[test]
fn bytes_come_back_at_the_same_device_addresses() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 10);
        let first = allocation.map(0..1, Access::Read).expect("mapped").device_ptr(0);
        let first = first.expect("on a device");
        for _ in 0..3 {
            for index in (0..9_u8).rev() {
                let start = u64::from(index) * PAGE;
                let mapping =
                    allocation.map(start + 7..start + PAGE + 3, Access::Read).expect("mapped");
                assert_eq!(mapping.device_ptr(0), Some(first + start + 7));
                assert_eq!(mapping.as_ptr(0).addr() as u64, first + start + 7);
                let bytes = bytes_of(&mapping, 0);
                assert!(bytes[..65529].iter().all(|byte| *byte == index + 1));
                assert_eq!(bytes[65529..], [index + 2; 3]);
            }
        }
        drop(allocation);
        let address = usize::try_from(first).expect("an address");
        assert_eq!(access_at(std::ptr::without_provenance(address)), None);
        let seen = daemon.finish();
        assert_eq!((seen.unmapped, seen.freed, seen.bye), (38, 1, true));
        assert_eq!((Raw::start(fake).outcome(), memory_used(fake)), (0, 0));
    });
}

#[test]
fn bytes_out_of_the_cpus_reach_are_no_bytes_and_a_typed_error() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = daemon.client.allocate(2 * PAGE).expect("allocated");
        let mut mapping = allocation.map(10..PAGE + 20, Access::Write).expect("mapped");
        assert_eq!((mapping.length(0), mapping.bytes(0).len()), (65546, 0));
        assert_eq!(mapping.bytes_mut(0).len(), 0);
        assert!(matches!(mapping.try_bytes(0), Err(Error::OnDevice)));
        assert!(matches!(mapping.try_bytes_mut(0), Err(Error::OnDevice)));
        mapping.copy_from_host(0, 65526, b"0123456789").expect("copied");
        let mut found = [0; 4];
        mapping.copy_to_host(0, 65529, &mut found).expect("copied");
        assert_eq!(found, *b"3456");
        mapping.copy_to_host(0, 65546, &mut []).expect("nothing to do");
        for (offset, length) in [(65546, 1), (0, 65547), (u64::MAX, 2)] {
            let error = mapping.copy_to_host(0, offset, &mut vec![0; length]);
            assert!(matches!(error, Err(Error::OutOfRange { size: 65546, .. })), "{error:?}");
        }
        drop(mapping);
        let mut reading = allocation.map(0..10, Access::Read).expect("mapped");
        assert!(matches!(reading.copy_from_host(0, 0, b"0"), Err(Error::ReadOnly)));
        assert!(matches!(reading.try_bytes_mut(0), Err(Error::ReadOnly)));
    });
}

#[test]
fn access_is_set_once_for_a_run_and_frames_are_imported_once() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 8);
        let allocation = daemon.client.allocate(8 * PAGE).expect("allocated");
        let limits = |set_access, map, import| {
            let limit = |call, calls| format!("{call}:{calls}:1:1000");
            let faults = [
                limit("cuMemSetAccess", set_access),
                limit("cuMemMap", map),
                limit("cuMemImportFromShareableHandle", import),
            ];
            fake.set_faults(&faults.each_ref().map(String::as_str)).expect("written");
        };
        let map = |bytes, access| allocation.map(bytes, access);
        limits(1, 4, 4);
        let held = map(2 * PAGE..6 * PAGE, Access::Read).expect("one call for four pages");
        assert!(matches!(
            map(page(0), Access::Read),
            Err(Error::Cuda(CudaError::Call { failed })) if failed.call == "cuMemImportFromShareableHandle"
        ));
        assert_eq!(descriptors(), 1, "of the frame that was refused");
        // Those left and right of the ones that have it already.
        limits(2, 4, 4);
        let all = map(0..8 * PAGE, Access::Read).expect("two runs");
        // All of it is there.
        limits(0, 0, 0);
        assert_eq!(descriptors(), 0);
        let again = map(0..8 * PAGE, Access::Read).expect("nothing to do");
        again.unmap().expect("others hold all");
        limits(1, 0, 0);
        held.unmap().expect("another holds all");
        all.unmap().expect("one run");
        limits(0, 0, 0);
        assert!(map(page(0), Access::Read).is_err(), "drop took access away");
        // Writing is allowed, and isn't taken away while others read.
        limits(2, 0, 0);
        let reading = map(0..100, Access::Read).expect("read");
        let writing = map(100..PAGE, Access::Write).expect("written");
        writing.unmap().expect("as it is");
        assert!(reading.unmap().is_err(), "taken away");
    });
}

#[test]
fn what_is_not_mapped_is_out_of_the_devices_reach() {
    alone(test_name!(), &[], |fake| {
        let raw = Raw::start(fake);
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 2);
        let mapping = allocation.map(page(0), Access::Write).expect("mapped");
        let address = mapping.device_ptr(0).expect("on a device");
        raw.fill(raw.stream(), address, 9, PAGE_BYTES);
        drop(mapping);
        assert_eq!(raw.outcome(), 0);
        raw.fill(raw.stream(), address, 9, 1);
        assert_eq!(raw.outcome(), 700);
        // The process is of no use for CUDA any more, and says so.
        let error = allocation.map(page(1), Access::Read).map(drop).expect_err("broken");
        assert!(matches!(error, Error::Cuda(CudaError::Broken { .. })), "{error}");
        assert!(error.to_string().contains("start it again"), "{error}");
        drop(allocation);
        let seen = daemon.finish();
        assert_eq!((seen.maps.len(), seen.unmapped, seen.bye), (4, 4, true));
    });
}

#[test]
fn a_mapping_for_reading_is_not_written_by_the_device() {
    alone(test_name!(), &[], |fake| {
        let raw = Raw::start(fake);
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 1);
        let mapping = allocation.map_all(Access::Read).expect("mapped");
        raw.fill(raw.stream(), mapping.device_ptr(0).expect("on a device"), 9, 1);
        assert_eq!(raw.outcome(), 700);
        let error = mapping.unmap().expect_err("broken");
        assert!(matches!(error, Error::Cuda(CudaError::Broken { .. })), "{error}");
    });
}

#[test]
fn a_dropped_mapping_waits_for_the_devices_work() {
    alone(test_name!(), &[], |fake| {
        let raw = Raw::start(fake);
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 2);
        let mapping = allocation.map_all(Access::Write).expect("mapped");
        fake.pause(0).expect("paused");
        raw.fill(raw.stream(), mapping.device_ptr(0).expect("on a device"), 9, 2 * PAGE_BYTES);
        let (done, dropped) = channel();
        let thread = std::thread::spawn(move || {
            drop(mapping);
            done.send(()).expect("the test waits");
        });
        assert_eq!(dropped.recv_timeout(MOMENT), Err(RecvTimeoutError::Timeout));
        // Others aren't held up.
        daemon.client.stats().expect("answered");
        let other = daemon.client.allocate(1).expect("allocated");
        drop(other);
        fake.resume(0).expect("resumed");
        dropped.recv().expect("it goes on");
        thread.join().expect("no panic");
        assert_eq!(raw.outcome(), 0);
        let mapping = allocation.map_all(Access::Read).expect("mapped");
        assert!(bytes_of(&mapping, 0).iter().all(|byte| *byte == 9));
    });
}

/// Ends a mapping after what `stream` holds.
fn unmap_after(mapping: Mapping, raw: &Raw, byte: u8) {
    let stream = raw.stream();
    raw.fill(stream, mapping.device_ptr(0).expect("on a device"), byte, mapping.length(0));
    // SAFETY: the stream was made above and is never destroyed.
    unsafe { mapping.unmap_after(stream.cast()) }.expect("recorded");
}

#[test]
fn a_mapping_ends_after_its_stream_while_its_caller_goes_on() {
    alone(test_name!(), &[], |fake| {
        let raw = Raw::start(fake);
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 2);
        for round in 0..3 {
            let (one, other) =
                (allocation.map(page(0), Access::Write), allocation.map(page(1), Access::Write));
            fake.pause(0).expect("paused");
            unmap_after(one.expect("mapped"), &raw, 10 + round);
            unmap_after(other.expect("mapped"), &raw, 20 + round);
            // Still mapped.
            let error = allocation.map(page(0), Access::Read).map(drop).expect_err("it is written");
            assert!(matches!(error, Error::Conflict { .. }), "{error}");
            fake.resume(0).expect("resumed");
            let mut mapped = None;
            eventually(|| {
                mapped = allocation.map_all(Access::Read).ok();
                mapped.is_some()
            });
            let bytes = bytes_of(&mapped.expect("mapped"), 0);
            assert_eq!((bytes[0], bytes[PAGE_BYTES]), (10 + round, 20 + round));
        }
        assert_eq!(raw.outcome(), 0);
        drop(allocation);
        let seen = daemon.finish();
        assert_eq!((seen.unmapped, seen.freed, seen.bye), (2 + 3 * 3, 1, true));
        assert_eq!(memory_used(fake), 0);
    });
}

#[test]
fn a_connection_ends_after_the_last_of_its_mappings() {
    alone(test_name!(), &[], |fake| {
        let raw = Raw::start(fake);
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 2);
        let mapping = allocation.map_all(Access::Write).expect("mapped");
        fake.pause(0).expect("paused");
        unmap_after(mapping, &raw, 5);
        drop(allocation);
        let (done, ended) = channel();
        std::thread::spawn(move || done.send(daemon.finish()).expect("the test waits"));
        assert_eq!(ended.recv_timeout(MOMENT).map(drop), Err(RecvTimeoutError::Timeout));
        fake.resume(0).expect("resumed");
        let seen = ended.recv().expect("it ends");
        assert_eq!((seen.unmapped, seen.freed, seen.bye), (3, 1, true));
        assert_eq!((raw.outcome(), memory_used(fake)), (0, 0));
    });
}

#[test]
fn a_mapping_whose_stream_is_stuck_is_left_as_it_is() {
    alone(test_name!(), &[], |fake| {
        let raw = Raw::start(fake);
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 2);
        let mapping = allocation.map(page(0), Access::Write).expect("mapped");
        let gpu = daemon.client.session.gpu().expect("started").clone();
        fake.pause(0).expect("paused");
        let stream = raw.stream();
        raw.fill(stream, mapping.device_ptr(0).expect("on a device"), 5, 1);
        // SAFETY: the stream was made above.
        let mark = unsafe { gpu.mark(stream.cast()) }.expect("recorded");
        let drains = crate::drains::Drains::new(Duration::ZERO);
        drains.push(mark, mapping).expect("a thread");
        eventually(|| drains.abandoned() == 1);
        fake.resume(0).expect("resumed");
        assert_eq!(raw.outcome(), 0);
        assert!(matches!(allocation.map(page(0), Access::Read), Err(Error::Conflict { .. })));
        drop(allocation.map(page(1), Access::Write).expect("another is mapped as ever"));
    });
}

#[test]
fn a_mapping_that_cannot_be_waited_for_is_left_as_it_is() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 2);
        let first = allocation.map(page(0), Access::Write).expect("mapped");
        let second = allocation.map(page(1), Access::Write).expect("mapped");
        // As in a host function. The second question is drop's.
        fake.set_faults(&["cuCtxSynchronize:0:800:2"]).expect("written");
        assert!(matches!(first.unmap(), Err(Error::Cuda(CudaError::Call { .. }))));
        second.unmap().expect("the driver answers again");
        let conflict = |index| allocation.map(page(index), Access::Read).map(drop).is_err();
        assert_eq!([conflict(0), conflict(1)], [true, false]);
        daemon.client.stats().expect("the connection is as ever");
    });
}

#[test]
fn a_stream_that_is_none_is_an_error_and_the_mapping_over() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = numbered(&daemon.client, 1);
        let mapping = allocation.map_all(Access::Write).expect("mapped");
        fake.set_faults(&["cuEventRecord:0:400"]).expect("written");
        // SAFETY: null is the default stream.
        let error = unsafe { mapping.unmap_after(std::ptr::null_mut()) }.expect_err("refused");
        assert!(matches!(error, Error::Cuda(CudaError::Call { .. })), "{error}");
        let mapping = allocation.map_all(Access::Write).expect("it is over");
        // SAFETY: as above.
        unsafe { mapping.unmap_after(std::ptr::null_mut()) }.expect("recorded");
        drop(allocation);
        let seen = daemon.finish();
        assert_eq!((seen.unmapped, seen.bye), (3, true));
    });
}

#[test]
fn a_revoked_frame_is_given_back_after_the_devices_work() {
    alone(test_name!(), &[], |fake| {
        let raw = Raw::start(fake);
        let daemon = Daemon::on_cuda(fake, 3);
        let allocation = numbered(&daemon.client, 3);
        let held = allocation.map(page(1), Access::Write).expect("mapped");
        allocation.prefetch(0..1).expect("asks for all frames back");
        let frames = |count| {
            let back = daemon.revoked.recv().expect("given back");
            assert_eq!(back.len(), count);
        };
        frames(2);
        fake.pause(0).expect("paused");
        unmap_after(held, &raw, 7);
        assert!(daemon.revoked.recv_timeout(MOMENT).is_err(), "given back under queued work");
        fake.resume(0).expect("resumed");
        frames(1);
        assert_eq!(raw.outcome(), 0);
        // They come again, as if never seen.
        let all = allocation.map_all(Access::Read).expect("mapped");
        let bytes = bytes_of(&all, 0);
        assert_eq!([bytes[0], bytes[PAGE_BYTES], bytes[2 * PAGE_BYTES]], [1, 7, 3]);
    });
}

#[test]
fn a_map_that_fails_half_way_holds_nothing() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 4);
        let allocation = daemon.client.allocate(4 * PAGE).expect("allocated");
        for call in ["cuMemMap:2:2", "cuMemSetAccess:0:2", "cuMemImportFromShareableHandle:1:2"] {
            fake.set_faults(&[call]).expect("written");
            let error = allocation.map_all(Access::Overwrite).map(drop).expect_err("no memory");
            assert!(error.is_retryable(), "{error}");
            fake.set_faults(&[]).expect("written");
            let mut mapping = allocation.map_all(Access::Overwrite).expect("mapped");
            mapping.copy_from_host(0, 0, &[3; 4 * PAGE_BYTES]).expect("copied");
            drop(mapping);
            // All frames go, so that the next round imports them.
            allocation.prefetch(0..1).expect("asked back");
            assert_eq!(daemon.revoked.recv().expect("given back").len(), 4);
        }
        fake.set_faults(&["cuMemAddressReserve:0:2"]).expect("written");
        assert!(daemon.client.allocate(PAGE).map(drop).expect_err("no room").is_retryable());
        drop(allocation);
        let seen = daemon.finish();
        assert_eq!((seen.maps.len(), seen.unmapped, seen.freed, seen.bye), (6, 6, 2, true));
        assert_eq!(memory_used(fake), 0);
    });
}

/// A client of a daemon that says that its frames are on this device.
fn client_of_device(fake: &FakeCuda, device_uuid: [u8; 16]) -> Client {
    let path = directory().join("other");
    let welcome = Welcome { device_uuid, ..cuda_welcome(fake, 1) };
    // Its thread ends with the process.
    drop(listening(&path, welcome, |mut peer, _events| {
        while let Some(request) = peer.receive() {
            peer.reply(request.request, &Done {});
        }
    }));
    connect(fake, &path).expect("connected")
}

#[test]
fn a_device_that_this_process_does_not_see_is_named() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let uuid = [0xAB, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let client = client_of_device(fake, uuid);
        for _ in 0..2 {
            let error = client.allocate(1).map(drop).expect_err("another machine's");
            assert_eq!(
                error.to_string(),
                "this process sees 2 CUDA devices, and none is the daemon's (UUID \
                 ab010203-0405-0607-0809-0a0b0c0d0e0f): add it to CUDA_VISIBLE_DEVICES, or to the devices of this \
                 container"
            );
        }
    });
}

#[test]
fn a_device_may_have_another_number_here() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2"), ("CUDA_VISIBLE_DEVICES", "1,0")], |fake| {
        // The daemon's device 0 of this process is the machine's 1.
        let daemon = Daemon::on_cuda(fake, 2);
        drop(numbered(&daemon.client, 1));
        assert_eq!(fake.memory_used(1).expect("read"), 2 * PAGE);
        std::fs::write(directory().join("uuid"), Raw::start(fake).uuid()).expect("written");
        let settings = [("CUDA_VISIBLE_DEVICES", "0,1")];
        let mut other = spawn("cuda::tests::another_number", &settings);
        assert!(other.wait().expect("it ends").success());
    });
}

#[test]
#[ignore = "another test starts it"]
fn another_number() {
    if !is_spawned(test_name!()) {
        return;
    }
    let uuid = std::fs::read(directory().join("uuid")).expect("read");
    let client = client_of_device(&machine(), uuid.try_into().expect("16 bytes"));
    let gpu = client.session.start_gpu().expect("seen").expect("a GPU");
    assert_eq!(gpu.device(), 1);
}

#[test]
fn without_devices_the_reason_is_said() {
    alone(test_name!(), &[("CUDA_VISIBLE_DEVICES", "9")], |fake| {
        let path = directory().join("s");
        let cuda = Welcome { device: DeviceKind::Cuda, ..welcome(1) };
        drop(listening(&path, cuda, |mut peer, _events| peer.receive().map(drop)));
        let client = connect(fake, &path).expect("connected");
        let error = client.allocate(1).map(drop).expect_err("none");
        assert!(error.to_string().contains("nvidia-smi"), "{error}");
    });
}

#[test]
fn a_descriptor_of_no_memory_fails_that_map_alone() {
    alone(test_name!(), &[], |fake| {
        let path = directory().join("s");
        let daemon = listening(&path, cuda_welcome(fake, 4), |mut peer, _events| {
            let mut ended = 0;
            while let Some(request) = peer.receive() {
                match request.kind {
                    Kind::Allocate => {
                        let allocation = AllocationId(1);
                        peer.reply(request.request, &Allocated { allocation, pages: 1 });
                    }
                    Kind::Map => {
                        let fd = sealed_memfd(65536);
                        let frames = vec![VramFrame(0)];
                        let fds = [std::os::fd::AsFd::as_fd(&fd)];
                        peer.reply_with(request.request, &Frames { frames: frames.clone() }, &fds);
                        let mapped = Mapped {
                            mapping: MappingId(1),
                            frames,
                            hits_vram: 0,
                            hits_ram: 0,
                            waited_us: 0,
                        };
                        peer.reply(request.request, &mapped);
                    }
                    _ => {
                        ended += u32::from(request.kind == Kind::Unmap);
                        peer.reply(request.request, &Done {});
                    }
                }
            }
            ended
        });
        let client = connect(fake, &path).expect("connected");
        let allocation = client.allocate(1).expect("allocated");
        let error = allocation.map_all(Access::Read).map(drop).expect_err("a file");
        assert!(
            matches!(&error, Error::Cuda(CudaError::Call { failed }) if failed.code == 1),
            "{error}"
        );
        drop((allocation, client));
        assert_eq!(daemon.join().expect("no panic"), 1, "and ends it");
    });
}

#[test]
fn a_forked_child_leaves_the_device_alone() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 2);
        let allocation = numbered(&daemon.client, 1);
        let mapping = allocation.map_all(Access::Read).expect("mapped");
        // SAFETY: the child makes calls that take none of the locks other threads may have held at the fork, apart
        // from the C library's allocator, which fork leaves usable; then it exits at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut byte = [0];
            let refused = matches!(mapping.copy_to_host(0, 0, &mut byte), Err(Error::Forked))
                && matches!(allocation.map_all(Access::Read), Err(Error::Forked))
                && matches!(daemon.client.allocate(1), Err(Error::Forked))
                // SAFETY: null is the default stream.
                && matches!(unsafe { mapping.unmap_after(std::ptr::null_mut()) }, Err(Error::Forked));
            drop(allocation);
            drop(daemon.client);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(bytes_of(&mapping, 0)[0], 1);
        drop((mapping, allocation));
        let seen = daemon.finish();
        assert_eq!((seen.unmapped, seen.freed, seen.bye), (2, 1, true));
    });
}

#[test]
fn a_callers_own_context_stays_current() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let daemon = Daemon::on_cuda(fake, 2);
        let (raw, mut second) = (Raw::start(fake), std::ptr::null_mut());
        // SAFETY: device 1 exists; the pointer is to a context's handle.
        unsafe { raw.driver.primary_context_retain(&raw mut second, 1) }.expect("a context");
        // SAFETY: retained above.
        unsafe { raw.driver.context_set(second) }.expect("current");
        drop(numbered(&daemon.client, 2));
        let mut current = std::ptr::null_mut();
        // SAFETY: the pointer is to a context's handle.
        unsafe { raw.driver.context_pop(&raw mut current) }.expect("it is there");
        assert_eq!(current, second);
    });
}

#[test]
#[ignore = "another test starts it"]
fn client_process() {
    if !is_spawned(test_name!()) {
        return;
    }
    let client = connect(&machine(), &directory().join("s")).expect("connected");
    let allocation = numbered(&client, 4);
    let mapping = allocation.map_all(Access::Read).expect("mapped");
    std::fs::write(directory().join("mapped"), "").expect("written");
    if std::env::var_os("LAPIS_TEST_STAYS").is_some() {
        loop {
            std::thread::park();
        }
    }
    assert_eq!(bytes_of(&mapping, 0)[3 * PAGE_BYTES], 4);
}

/// Memory of the device that is in use once the daemon is gone and the client has ended as told.
fn left_behind(fake: &FakeCuda, settings: &[(&str, &str)]) {
    let path = directory().join("s");
    let daemon = listening(&path, cuda_welcome(fake, 4), {
        let fake = machine();
        move |peer, events| crate::testing::cuda::serve(&fake, 4, peer, &events)
    });
    let mut client = spawn("cuda::tests::client_process", settings);
    if settings.is_empty() {
        assert!(client.wait().expect("it ends").success());
    } else {
        eventually(|| directory().join("mapped").exists());
        assert_eq!(memory_used(fake), 4 * PAGE);
        client.kill().expect("it is ours");
        client.wait().expect("it was killed");
    }
    let seen = daemon.join().expect("it found nothing wrong");
    assert_eq!(seen.bye, settings.is_empty());
    assert_eq!(memory_used(fake), 0);
}

#[test]
fn memory_comes_back_after_a_client_that_ends() {
    alone(test_name!(), &[], |fake| left_behind(fake, &[]));
}

#[test]
fn memory_comes_back_after_a_client_that_is_killed() {
    alone(test_name!(), &[], |fake| left_behind(fake, &[("LAPIS_TEST_STAYS", "1")]));
}

#[test]
fn tensors_have_device_addresses() {
    alone(test_name!(), &[], |fake| {
        let daemon = Daemon::on_cuda(fake, 6);
        let path = directory().join("model.safetensors");
        let checkpoint =
            crate::model::Checkpoint { bytes: 200_000, layers: 2, ..Default::default() };
        checkpoint.write(&path).expect("written");
        let model = daemon.client.open_model(&path).expect("opened");
        for (index, layer) in model.layers().iter().enumerate() {
            let mapping = model.map_layer(index, Duration::ZERO).expect("mapped");
            for tensor in &layer.tensors {
                assert_eq!(mapping.tensor(*tensor), None);
                let address = mapping.tensor_device_ptr(*tensor).expect("on a device");
                assert_eq!(mapping.tensor_ptr(*tensor).expect("mapped").addr() as u64, address);
            }
            assert!(mapping.iter().all(|(_, bytes)| bytes.is_empty()));
            for (place, slice) in mapping.slices().iter().enumerate() {
                let name = &model.tensors()[slice.tensor].name;
                let length = usize::try_from(slice.range.end - slice.range.start).expect("small");
                let (mut found, mut expected) = (vec![0; length], vec![0; length]);
                mapping.copy_to_host(place, 0, &mut found).expect("copied");
                crate::model::Checkpoint::contents(name, slice.inside.start, &mut expected);
                assert!(found == expected, "{name}");
            }
            // SAFETY: null is the default stream.
            unsafe { mapping.unmap_after(std::ptr::null_mut()) }.expect("recorded");
        }
    });
}
