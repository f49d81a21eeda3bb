//! A driver that hangs or breaks, and daemons that do.

use lapis_proto::code::Code;
use lapis_proto::message::{Access, Allocate, Allocated, Done, Map, Mapped, PageRange, Prefetch};
use lapis_tests::peer::Peer;
use lapis_tests::scrape::{Scrape, address_in, get, try_get};
use nix::sys::signal::Signal;

use crate::process::{Daemon, Machine, until};

const CUDA: [&str; 2] = ["--device", "cuda"];

/// Pages that were filled with zeros on the device, as it says when asked.
fn zeroed(daemon: &Daemon) -> u64 {
    daemon.connect().stats().unwrap().total.zeroed.pages
}

/// A client whose page is to be filled with zeros, which is the device's work.
fn begin(daemon: &Daemon) -> Peer {
    let mut peer = daemon.peer();
    let Allocated { allocation, .. } = peer.call(&Allocate { size: 1 }).unwrap();
    let ranges = vec![PageRange { allocation, first: 0, count: 1 }];
    let _: Done = peer.call(&Prefetch { ranges, priority: 0, within_us: 0 }).unwrap();
    peer
}

#[test]
fn a_queue_that_stands_still_holds_up_nothing_else_and_goes_on() {
    let machine = Machine::new(&[]);
    let daemon = machine.start(&CUDA);
    machine.fake.pause(0).unwrap();
    let held = begin(&daemon);
    for _ in 0..3 {
        assert!(daemon.status().contains("cuda device"));
        let _: Allocated = daemon.peer().call(&Allocate { size: 1 }).unwrap();
    }
    assert_eq!(zeroed(&daemon), 0);
    machine.fake.resume(0).unwrap();
    until("the page is filled", || zeroed(&daemon) == 1);
    drop(held);
    daemon.stop();
    assert_eq!(machine.memory_used(), 0);
}

#[test]
fn a_driver_whose_calls_hang_holds_up_no_session_and_no_status() {
    let machine = Machine::new(&[]);
    let daemon = machine.start(&CUDA);
    machine.fake.wedge().unwrap();
    let held = begin(&daemon);
    assert!(daemon.status().contains("cuda device"));
    machine.fake.unwedge().unwrap();
    until("the page is filled", || zeroed(&daemon) == 1);
    drop(held);
    daemon.stop();
}

#[test]
fn a_daemon_whose_device_stands_still_can_be_stopped() {
    let hang = |machine: &Machine, calls: bool| {
        if calls { machine.fake.wedge().unwrap() } else { machine.fake.pause(0).unwrap() }
    };
    for calls in [false, true] {
        let machine = Machine::new(&[]);
        let daemon = machine.start(&CUDA);
        hang(&machine, calls);
        let held = begin(&daemon);
        until("the copy has begun", || daemon.connect().stats().unwrap().vram.used > 0);
        daemon.signal(Signal::SIGTERM);
        let (status, said) = daemon.ends();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("a transfer does not end: gave up after 10s"), "{said}");
        drop(held);
        assert_eq!(machine.memory_used(), 0, "the driver hangs, the process is gone");
    }
}

#[test]
fn a_daemon_at_rest_stops_though_the_driver_hangs() {
    let machine = Machine::new(&[]);
    let daemon = machine.start(&CUDA);
    machine.fake.wedge().unwrap();
    daemon.signal(Signal::SIGTERM);
    let (status, said) = daemon.ends();
    assert!(status.success(), "{status}: {said}");
    assert!(said.contains("the CUDA driver hangs: GPU memory is given back when"), "{said}");
    assert_eq!(machine.memory_used(), 0);
}

#[test]
fn a_broken_context_ends_the_daemon() {
    for fault in ["work:0:700", "work:0:719", "cuMemsetD8Async:0:999", "cuEventSynchronize:0:1"] {
        let machine = Machine::new(&[]);
        let daemon = machine.start(&CUDA);
        machine.fake.set_faults(&[fault]).unwrap();
        let held = begin(&daemon);
        let (status, said) = daemon.ends();
        assert_eq!(status.code(), Some(1), "{said}");
        assert!(said.contains("is lost: "), "{said}");
        assert!(said.contains("error: the device is lost; the daemon ends so that"), "{said}");
        assert_eq!(machine.memory_used(), 0);
        drop(held);
        // The next one is none the worse.
        machine.fake.set_faults(&[]).unwrap();
        machine.start(&CUDA).stop();
    }
}

#[test]
fn health_is_denied_before_anybody_is_told_that_the_device_is_lost() {
    let machine = Machine::new(&[("FAKE_CUDA_FAULTS", "work:0:700")]);
    let daemon = machine.start(&["--device", "cuda", "--metrics", "127.0.0.1:0"]);
    let said: Vec<_> = daemon.said.lines().map(str::to_owned).collect();
    let address = address_in(&said).expect("the log says where");
    assert_eq!(get(&address, "/healthz").status, 200);
    let info = Scrape::of(&address);
    let info = info.series().into_iter().find(|series| series.starts_with("lapis_device_info"));
    assert!(info.is_some_and(|info| info.contains("kind=\"cuda\",uuid=\"GPU-")), "{info:?}");
    let mut peer = daemon.peer();
    let Allocated { allocation, .. } = peer.call(&Allocate { size: 1 }).unwrap();
    let ranges = vec![PageRange { allocation, first: 0, count: 1 }];
    let map = Map { ranges, access: Access::Read, wait_us: 30_000_000 };
    let refused = peer.call::<_, Mapped>(&map).unwrap_err();
    assert_eq!(refused.code, Code::DeviceLost, "{refused:?}");
    // It says no until it is gone.
    for path in ["/healthz", "/readyz"] {
        if let Ok(answer) = try_get(&address, path) {
            assert_eq!(answer.status, 503, "{}", answer.body);
            assert!(answer.body.contains("the device is lost"), "{}", answer.body);
        }
    }
    assert_eq!(daemon.ends().0.code(), Some(1));
}

#[test]
fn who_waits_for_a_device_that_is_lost_is_told_before_the_daemon_ends() {
    let machine = Machine::new(&[("FAKE_CUDA_FAULTS", "work:0:700")]);
    let daemon = machine.start(&CUDA);
    let mut peer = daemon.peer();
    let Allocated { allocation, .. } = peer.call(&Allocate { size: 1 }).unwrap();
    let ranges = vec![PageRange { allocation, first: 0, count: 1 }];
    let map = Map { ranges, access: Access::Read, wait_us: 30_000_000 };
    let refused = peer.call::<_, Mapped>(&map).unwrap_err();
    assert_eq!(refused.code, Code::DeviceLost, "{refused:?}");
    peer.is_hung_up();
    let (status, said) = daemon.ends();
    assert_eq!(status.code(), Some(1), "{said}");
}

#[test]
fn a_daemon_that_is_killed_leaves_nothing_in_vram() {
    let machine = Machine::new(&[]);
    let daemon = machine.start(&CUDA);
    let held = begin(&daemon);
    until("the page is filled", || zeroed(&daemon) == 1);
    assert_eq!(machine.memory_used(), 16 << 20);
    daemon.signal(Signal::SIGKILL);
    daemon.ends();
    drop(held);
    assert_eq!(machine.memory_used(), 0);
}

#[test]
fn vram_that_is_given_up_goes_back_to_the_device() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("SKIPPED: only root may change tiers");
    }
    let machine = Machine::new(&[("FAKE_CUDA_POISON", "1")]);
    let daemon = machine.start(&CUDA);
    let client = daemon.connect();
    let wait = std::time::Duration::from_secs(30);
    client.set_tier(lapis::Tier::Vram, 10 << 20, wait).unwrap();
    assert_eq!(machine.memory_used(), 10 << 20);
    client.set_tier(lapis::Tier::Vram, 16 << 20, wait).unwrap();
    assert_eq!(machine.memory_used(), 16 << 20);
    drop(client);
    daemon.stop();
}
