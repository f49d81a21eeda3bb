//! What several processes have in common: memory, its capacity, events, gates.
#![expect(unsafe_code, reason = "forks, and takes descriptors from the driver")]

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lapis_fake_cuda::harness::FakeCuda;
use lapis_proto::fds;

use crate::alone::{Peer, alone, machine, role, test_name};
use crate::api::IpcEvent;
use crate::gpu::{FRAME, Gpu, READ_WRITE, peek, poke};

const SHARED_EVENT: u32 = 6;
const FOUR_FRAMES: [(&str, &str); 1] = [("FAKE_CUDA_MEMORY", "8MiB")];

/// Sends an exported descriptor, and closes it here.
fn send(mut socket: &UnixStream, descriptor: i32) {
    // SAFETY: made by the driver for this test alone.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    fds::send_all(socket, b"fd", &[descriptor.as_fd()]).expect("the peer lives");
    socket.flush().expect("a socket");
}

fn receive(socket: &UnixStream) -> OwnedFd {
    let mut found = VecDeque::new();
    let bytes = fds::receive(socket, &mut [0; 2], &mut found).expect("the peer lives");
    assert_eq!(bytes, 2);
    found.pop_front().expect("there is a descriptor")
}

fn say(mut socket: &UnixStream, word: u8) {
    socket.write_all(&[word]).expect("the other end lives");
}

fn hear(mut socket: &UnixStream) -> u8 {
    let mut word = [0];
    socket.read_exact(&mut word).expect("the other end lives");
    word[0]
}

/// Imports memory and maps it.
fn map_import(gpu: &Gpu, descriptor: &OwnedFd) -> u64 {
    let handle = gpu.import(descriptor.as_raw_fd()).expect("the memory is alive");
    let address = gpu.reserve(FRAME);
    assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
    gpu.allow(address, FRAME, READ_WRITE);
    assert_eq!(gpu.cuMemRelease(handle), 0);
    address
}

/// What the other processes do.
#[test]
#[ignore = "other tests start it"]
fn peer() {
    let Some((role, socket)) = role() else { return };
    let gpu = Gpu::start(&machine());
    match role.as_str() {
        "changes" => {
            let address = map_import(&gpu, &receive(&socket));
            assert_eq!(gpu.read(address, 5), b"lapis");
            poke(address, b'L');
            gpu.write(address + 1, b"APIS");
            say(&socket, 1);
        }
        "holds" => {
            let _address = map_import(&gpu, &receive(&socket));
            say(&socket, 1);
            hear(&socket);
        }
        "creates" => {
            let (handle, address) = (gpu.create(), gpu.reserve(FRAME));
            assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
            gpu.allow(address, FRAME, READ_WRITE);
            gpu.write(address, b"lapis");
            send(&socket, gpu.export(handle));
            hear(&socket);
        }
        "fills" => {
            let _handles = [(); 3].map(|()| gpu.create());
            assert_eq!(gpu.cuMemAlloc_v2(&mut 0, FRAME), 0);
            say(&socket, 1);
            hear(&socket);
        }
        "cannot see" => assert_eq!(gpu.import(receive(&socket).as_raw_fd()), Err(101)),
        "works" => {
            let frame = gpu.frame();
            say(&socket, 1);
            assert_eq!(gpu.cuMemsetD8_v2(frame, 1, 1), 0);
            say(&socket, 2);
        }
        "records" => records(&gpu, &socket),
        other => panic!("no role: {other}"),
    }
}

/// Records an event behind work that waits at the gate.
fn records(gpu: &Gpu, mut socket: &UnixStream) {
    let (event, mut handle) = (gpu.event(SHARED_EVENT), IpcEvent { bytes: [0; 64] });
    assert_eq!(gpu.cuIpcGetEventHandle(&raw mut handle, event), 0);
    assert_eq!(gpu.cuEventRecord(event, gpu.stream(1)), 0);
    socket.write_all(&handle.bytes).expect("the test lives");
    hear(socket);
}

#[test]
fn two_processes_share_memory() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (handle, address) = (gpu.create(), gpu.reserve(FRAME));
        assert_eq!(gpu.cuMemMap(address, FRAME, 0, handle, 0), 0);
        gpu.allow(address, FRAME, READ_WRITE);
        gpu.write(address, b"lapis");
        let other = Peer::start("changes", &[]);
        send(&other.socket, gpu.export(handle));
        assert_eq!(hear(&other.socket), 1);
        assert_eq!(gpu.read(address, 5), b"LAPIS");
        other.finish();
        assert_eq!(peek(address + 4), b'S');
    });
}

#[test]
fn a_killed_importer_gives_memory_back() {
    alone(test_name!(), &FOUR_FRAMES, |fake| {
        let gpu = Gpu::start(fake);
        let handles = [(); 4].map(|()| gpu.create());
        let other = Peer::start("holds", &[]);
        send(&other.socket, gpu.export(handles[0]));
        assert_eq!(hear(&other.socket), 1);
        for handle in handles {
            assert_eq!(gpu.cuMemRelease(handle), 0);
        }
        assert_eq!(gpu.free(), 3 * FRAME, "the other process holds one");
        assert_eq!(gpu.try_create(4 * FRAME), Err(2));
        other.kill();
        assert!(gpu.try_create(4 * FRAME).is_ok(), "at once");
    });
}

#[test]
fn memory_outlives_the_process_that_made_it() {
    alone(test_name!(), &FOUR_FRAMES, |fake| {
        let gpu = Gpu::start(fake);
        let other = Peer::start("creates", &[]);
        let descriptor = receive(&other.socket);
        other.kill();
        assert_eq!(gpu.free(), 3 * FRAME, "the descriptor holds it");
        let address = map_import(&gpu, &descriptor);
        drop(descriptor);
        assert_eq!(gpu.free(), 3 * FRAME, "the mapping holds it");
        assert_eq!(gpu.read(address, 5), b"lapis");
        assert_eq!(gpu.cuMemUnmap(address, FRAME), 0);
        assert_eq!(gpu.free(), 4 * FRAME);
    });
}

#[test]
fn a_descriptor_on_its_way_holds_memory() {
    alone(test_name!(), &FOUR_FRAMES, |fake| {
        let gpu = Gpu::start(fake);
        let other = Peer::start("creates", &[]);
        let socket = other.socket.try_clone().expect("there are descriptors");
        // The message is there; it is looked at, and left.
        let mut byte = 0u8;
        // SAFETY: the buffer is one byte long.
        let peeked =
            unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK) };
        assert_eq!(peeked, 1);
        other.kill();
        assert_eq!(gpu.free(), 3 * FRAME);
        drop(socket);
        assert_eq!(gpu.free(), 4 * FRAME);
    });
}

#[test]
fn capacity_is_all_processes() {
    alone(test_name!(), &FOUR_FRAMES, |fake| {
        let gpu = Gpu::start(fake);
        let other = Peer::start("fills", &[]);
        assert_eq!(hear(&other.socket), 1);
        assert_eq!(gpu.try_create(FRAME), Err(2));
        assert_eq!((gpu.free(), fake.memory_used(0).expect("it can be read")), (0, 8 << 20));
        other.kill();
        assert!(gpu.try_create(4 * FRAME).is_ok(), "without asking how much is free");
        assert_eq!(gpu.free(), 0);
    });
}

#[test]
fn memory_of_an_invisible_device_is_not_imported() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let gpu = Gpu::start(fake);
        let other = Peer::start("cannot see", &[("CUDA_VISIBLE_DEVICES", "1")]);
        send(&other.socket, gpu.export(gpu.create()));
        other.finish();
    });
}

#[test]
fn a_device_is_paused_in_every_process() {
    alone(test_name!(), &[], |fake| {
        fake.pause(0).expect("it can be made");
        let other = Peer::start("works", &[]);
        assert_eq!(hear(&other.socket), 1);
        other.socket.set_read_timeout(Some(Duration::from_millis(100))).expect("not zero");
        assert!((&other.socket).read(&mut [0]).is_err(), "it works on a paused device");
        other.socket.set_read_timeout(None).expect("a socket");
        fake.resume(0).expect("it can be removed");
        assert_eq!(hear(&other.socket), 2);
        other.finish();
    });
}

/// A peer with an event that it has recorded on the paused device 0, and the event, opened here.
fn recorded_elsewhere(fake: &FakeCuda, gpu: &Gpu) -> (Peer, u64) {
    fake.pause(0).expect("it can be made");
    let other = Peer::start("records", &[]);
    let (mut event, mut handle) = (0, IpcEvent { bytes: [0; 64] });
    (&other.socket).read_exact(&mut handle.bytes).expect("the peer lives");
    assert_eq!(gpu.cuIpcOpenEventHandle(&raw mut event, handle), 0);
    assert_eq!(gpu.cuEventQuery(event), 600);
    (other, event)
}

#[test]
fn an_event_is_waited_for_across_processes() {
    alone(test_name!(), &[("FAKE_CUDA_DEVICES", "2")], |fake| {
        let gpu = Gpu::start(fake);
        let (other, event) = recorded_elsewhere(fake, &gpu);
        let mut second = 0;
        assert_eq!(gpu.cuDevicePrimaryCtxRetain(&raw mut second, 1), 0);
        assert_eq!(gpu.cuCtxPushCurrent_v2(second), 0);
        let stream = gpu.stream(1);
        assert_eq!(gpu.cuStreamWaitEvent(stream, event, 0), 0);
        assert_eq!(gpu.cuStreamQuery(stream), 600);
        fake.resume(0).expect("it can be removed");
        assert_eq!(gpu.cuStreamSynchronize(stream), 0);
        assert_eq!((gpu.cuEventSynchronize(event), gpu.cuEventQuery(event)), (0, 0));
        say(&other.socket, 1);
        other.finish();
    });
}

#[test]
fn an_event_of_a_dead_process_never_completes() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        let (other, event) = recorded_elsewhere(fake, &gpu);
        other.kill();
        fake.resume(0).expect("it can be removed");
        assert_eq!(gpu.cuCtxSynchronize(), 0);
        assert_eq!(gpu.cuEventQuery(event), 600);
    });
}

#[test]
fn a_forked_child_has_no_driver() {
    alone(test_name!(), &[], |fake| {
        let gpu = Gpu::start(fake);
        // SAFETY: the child calls a function that takes no locks, and ends without running anything else.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::try_from(gpu.cuDeviceGetCount(&mut 0)).unwrap_or(99);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 3);
        assert_eq!(gpu.cuDeviceGetCount(&mut 0), 0);
    });
}
