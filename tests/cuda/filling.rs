//! VRAM frames that are made while the daemon serves.

use lapis_proto::message::{Allocate, Allocated, Done, PageRange, Prefetch};

use crate::process::{Daemon, Machine, until};

const PAGE: u64 = 64 << 10;
const GRANULARITY: (&str, &str) = ("FAKE_CUDA_GRANULARITY", "64KiB");
/// 640 frames, of which 256 are made before it serves.
const TIERS: [&str; 8] =
    ["--device", "cuda", "--page-size", "64KiB", "--vram", "40MiB", "--ram", "48MiB"];
const FRAMES: u64 = 640;
const READY: u64 = 256;

fn frames(daemon: &Daemon) -> u64 {
    daemon.connect().stats().unwrap().vram.capacity / PAGE
}

#[test]
fn a_daemon_serves_with_the_frames_that_are_made_and_gets_the_others() {
    let machine = Machine::new(&[GRANULARITY, ("FAKE_CUDA_POISON", "1")]);
    // New frames are filled with zeros, which stands still.
    machine.fake.pause(0).unwrap();
    let daemon = machine.start(&TIERS);
    assert!(daemon.said.contains("256 of 640 VRAM frames are made"), "{}", daemon.said);
    assert_eq!(frames(&daemon), READY);
    machine.fake.resume(0).unwrap();
    until("all frames are made", || frames(&daemon) == FRAMES);
    assert_eq!(machine.memory_used(), FRAMES * PAGE);
    let said = daemon.stop();
    for tenth in ["320 of 640", "512 of 640", "640 of 640"] {
        assert_eq!(said.matches(&format!("{tenth} VRAM frames are made")).count(), 1, "{said}");
    }
    assert_eq!(machine.memory_used(), 0);
}

#[test]
fn pages_beyond_the_frames_that_are_made_wait_for_them() {
    let machine = Machine::new(&[GRANULARITY]);
    machine.fake.pause(0).unwrap();
    let daemon = machine.start(&TIERS);
    let mut peer = daemon.peer();
    let Allocated { allocation, .. } = peer.call(&Allocate { size: 400 * PAGE }).unwrap();
    let ranges = vec![PageRange { allocation, first: 0, count: 400 }];
    let _: Done = peer.call(&Prefetch { ranges, priority: 0, within_us: 0 }).unwrap();
    assert_eq!(frames(&daemon), READY);
    machine.fake.resume(0).unwrap();
    until("all pages are there", || daemon.connect().stats().unwrap().vram.used == 400 * PAGE);
    drop(peer);
    daemon.stop();
}

#[test]
fn a_frame_that_can_not_be_had_leaves_vram_smaller_until_it_is_asked_for_again() {
    let fault = ("FAKE_CUDA_FAULTS", "cuMemCreate:300:2");
    let machine = Machine::new(&[GRANULARITY, fault]);
    let daemon = machine.start(&TIERS);
    let client = daemon.connect();
    // The probe's piece, and the frames before number 299; behind it, those that were under way.
    let settled = 299..=299 + 8;
    until("the frames that can be had are made", || settled.contains(&frames(&daemon)));
    assert_eq!(machine.memory_used(), frames(&daemon) * PAGE);
    if nix::unistd::geteuid().is_root() {
        let wait = std::time::Duration::from_secs(30);
        client.set_tier(lapis::Tier::Vram, FRAMES * PAGE, wait).unwrap();
        assert_eq!(frames(&daemon), FRAMES);
    } else {
        eprintln!("SKIPPED: only root may change tiers");
    }
    drop(client);
    let said = daemon.stop();
    let text = "VRAM stays smaller until `lapisctl tier set vram` asks again: VRAM frame 299: \
                cuMemCreate failed with 2";
    assert!(said.contains(text), "{said}");
}

#[test]
fn a_daemon_that_is_told_to_stop_makes_no_more_frames() {
    let machine = Machine::new(&[GRANULARITY]);
    let sizes = ["--vram", "512MiB", "--ram", "544MiB"];
    let daemon = machine.start(&[&TIERS[..4], &sizes].concat());
    let said = daemon.stop();
    assert!(!said.contains("8192 of 8192"), "{said}");
    assert_eq!(machine.memory_used(), 0);
}
