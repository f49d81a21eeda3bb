//! A device that shares the host's memory: pages go between NVMe and VRAM without a copy, and there is no RAM tier.

use std::process::Command;
use std::time::Duration;

use lapis::{Access, Client, Code, Error, Tier};
use lapis_tests::binaries::{lapisctl, scratch};
use lapis_tests::daemon::Daemon;

const MIB: u64 = 1 << 20;
const WAIT: Duration = Duration::from_secs(30);

fn start(io: &str) -> Daemon {
    let flags = ["--unified", "--vram", "32MiB", "--nvme", "64MiB", "--page-size", "1MiB"];
    Daemon::start(&[&flags[..], &["--io", io]].concat())
}

/// A part of a plain copy.
fn part(content: &[u8], start: u64, end: u64) -> &[u8] {
    let index = |at: u64| usize::try_from(at).expect("it fits");
    &content[index(start)..index(end)]
}

/// Ranges of `step` bytes that cover `length`.
fn steps(length: u64, step: u64) -> impl Iterator<Item = std::ops::Range<u64>> {
    (0..length.div_ceil(step)).map(move |i| i * step..length.min((i + 1) * step))
}

/// Bytes that tell where they come from.
fn pattern(length: u64, salt: u64) -> Vec<u8> {
    (0..length).map(|at| (at / 512 * 31 + at * 7 + salt).to_le_bytes()[0]).collect()
}

fn check_nothing_is_copied(client: &Client) {
    let stats = client.stats().expect("it serves");
    assert!(client.welcome().unified);
    assert_eq!((stats.ram.capacity, stats.ram.used), (0, 0), "there is no RAM tier");
    let copied = stats.total.ram_to_vram.pages + stats.total.vram_to_ram.pages;
    assert_eq!(copied, 0, "nothing is copied up or down");
}

#[test]
fn files_at_any_offset_are_read_into_vram() {
    for io in ["auto", "threads"] {
        let directory = scratch();
        let path = directory.path().join("model");
        let content = pattern(80 * MIB + 777, 5);
        std::fs::write(&path, &content).expect("target is writable");
        let daemon = start(io);
        let client = daemon.connect();
        for offset in [0_u64, 8, 4096, 11_416] {
            let length = content.len() as u64 - offset;
            let allocation = client.open_path(&path, offset, length).expect("a file");
            assert_eq!(allocation.size(), length);
            for range in steps(length, 7 * MIB) {
                let mapping = client.map(&[(&allocation, range.clone())], Access::Read, WAIT);
                let mapping = mapping.expect("room");
                let expected = part(&content, offset + range.start, offset + range.end);
                assert!(mapping.bytes(0) == expected, "{io}, {range:?} from {offset}");
            }
        }
        let stats = client.stats().expect("it serves");
        assert!(stats.total.file_to_ram.bytes > 3 * 80 * MIB, "{:?}", stats.total);
        check_nothing_is_copied(&client);
    }
}

#[test]
fn anonymous_memory_goes_to_the_spill_and_comes_back() {
    for io in ["auto", "threads"] {
        let daemon = start(io);
        let client = daemon.connect();
        let allocation = client.allocate(60 * MIB).expect("the spill holds it");
        for pass in 0..3_u64 {
            for range in steps(60 * MIB, 5 * MIB) {
                let start = range.start;
                let mut mapping =
                    client.map(&[(&allocation, range)], Access::Write, WAIT).expect("room");
                if pass > 0 {
                    assert!(mapping.bytes(0) == pattern(5 * MIB, start + pass - 1), "{io}");
                }
                mapping.bytes_mut(0).copy_from_slice(&pattern(5 * MIB, start + pass));
            }
        }
        allocation.flush(0..4 * MIB).expect("the spill works");
        let stats = client.stats().expect("it serves");
        assert!(stats.total.ram_to_spill.pages >= 60, "{:?}", stats.total);
        assert!(stats.total.spill_to_ram.pages >= 28, "{:?}", stats.total);
        check_nothing_is_copied(&client);
        let over = client.allocate(5 * MIB).map(drop);
        assert!(
            matches!(&over, Err(Error::Refused(refused)) if refused.code == Code::OutOfMemory),
            "each page needs a place in the spill: {over:?}"
        );
    }
}

#[test]
fn vram_shrinks_and_grows_under_io() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIPPED: only root changes tiers");
    }
    let daemon = start("auto");
    let client = daemon.connect();
    let allocation = client.allocate(24 * MIB).expect("room");
    let content = pattern(24 * MIB, 3);
    allocation.map_all(Access::Overwrite).expect("room").bytes_mut(0).copy_from_slice(&content);
    for size in [4 * MIB, 32 * MIB, 8 * MIB, 32 * MIB] {
        client.set_tier(Tier::Vram, size, WAIT).expect("nothing is mapped");
        for range in steps(24 * MIB, 2 * MIB) {
            let expected = part(&content, range.start, range.end);
            let mapping = client.map(&[(&allocation, range)], Access::Read, WAIT).expect("room");
            assert!(mapping.bytes(0) == expected, "with {size} bytes of VRAM");
        }
    }
    check_nothing_is_copied(&client);
}

#[test]
fn there_is_no_ram_tier_to_set() {
    let daemon = start("auto");
    let client = daemon.connect();
    let error = client.set_tier(Tier::Ram, 16 * MIB, WAIT).expect_err("there is none");
    if !nix::unistd::geteuid().is_root() {
        assert_eq!(error.code(), Some(Code::NotPermitted));
        return;
    }
    assert_eq!(error.code(), Some(Code::BadRequest), "{error}");
    assert!(error.to_string().contains("there is no RAM tier; set vram"), "{error}");
}

#[test]
fn a_model_streams() {
    let daemon = start("auto");
    let directory = scratch();
    let stream = Command::new(lapisctl())
        .args(["stream", "--passes", "2", "-o", "json", "--socket"])
        .arg(daemon.socket())
        .env("LAPIS_CACHE", directory.path())
        .output()
        .expect("lapisctl was built");
    assert!(stream.status.success(), "{}", String::from_utf8_lossy(&stream.stderr));
    check_nothing_is_copied(&daemon.connect());
}
