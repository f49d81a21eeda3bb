//! What belongs to one client, and what it holds, is nobody else's: bytes, frames, addresses, limits.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use lapis::model::pattern;
use lapis::{Access, Allocation, Client, Code, Quota, QuotaSubject, Tier};
use lapis_tests::binaries::{scratch, test_client};
use lapis_tests::bytes::{edit, read};
use lapis_tests::daemon::Daemon;
use lapis_tests::device::{
    Device, device, memory_made_by, runs_on_a_gpu, runs_on_the_fake_gpu, scale,
};
use lapis_tests::good::{still_serves, write_and_read};
use lapis_tests::victim::Victim;
use lapis_tests::wait::until;
use tempfile::TempDir;

/// One page of [`SMALL`].
fn page() -> u64 {
    (64 << 10) * scale()
}

/// 16 frames of VRAM, of which 15 can be mapped, as many of RAM, 64 slots.
const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "1MiB", "--nvme", "4MiB"];
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);
/// No user's own.
const NOBODY: u32 = 65_534;

/// A daemon that other users can connect to; `None`, said aloud, when there can be no process of another user.
fn open_to_all() -> Option<(Daemon, TempDir)> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: only root can start a client of another user");
        return None;
    }
    let directory = scratch();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let flags = [SMALL, &["--socket-mode", "0666"]].concat();
    Some((Daemon::start_in(directory.path(), &flags), directory))
}

fn of_nobody(daemon: &Daemon, role: &str, rest: &[&str]) -> Option<Victim> {
    Victim::start(&test_client(), Some(NOBODY), role, daemon.socket(), rest)
}

fn bytes_of(seed: u64, pages: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(pages * page()).unwrap()];
    pattern(seed, 0, &mut bytes);
    bytes
}

/// Four pages each, and where they begin.
fn parts(content: &[u8]) -> impl Iterator<Item = (&[u8], u64)> {
    let four = usize::try_from(4 * page()).unwrap();
    content.chunks(four).zip((0..).step_by(four))
}

/// Fills an allocation with the pattern of a seed, in parts.
fn fill(client: &Client, memory: &Allocation, seed: u64) {
    let content = bytes_of(seed, memory.size() / page());
    for (part, start) in parts(&content) {
        let range = start..start + part.len() as u64;
        let mut mapping = client.map(&[(memory, range)], Access::Overwrite, LONG).unwrap();
        edit(&mut mapping, 0, |bytes| bytes.copy_from_slice(part));
    }
}

fn holds(client: &Client, memory: &Allocation, expected: &[u8]) {
    for (part, start) in parts(expected) {
        let range = start..start + part.len() as u64;
        let mapping = client.map(&[(memory, range)], Access::Read, LONG).unwrap();
        assert!(*read(&mapping, 0) == *part, "bytes from {start} on are not this client's");
    }
}

#[test]
fn what_is_mapped_stays_while_others_page_through_every_frame() {
    let daemon = Daemon::start(SMALL);
    let holder = daemon.connect();
    let memory = holder.allocate(7 * page()).unwrap();
    fill(&holder, &memory, 1);
    let expected = bytes_of(1, 7);
    let held = memory.map_all(Access::Read).unwrap();
    let other = daemon.connect();
    for _ in 0..5 {
        write_and_read(&other, 40);
        assert!(*read(&held, 0) == expected, "bytes changed under a mapping");
    }
    let moved = holder.stats().unwrap().total.ram_to_spill.pages;
    assert!(moved > 40, "{moved} pages went to the spill: the frames were not all used");
    drop((held, memory, holder, other));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn spilled_pages_go_back_to_their_own_client_and_a_slot_is_not_read_by_the_next() {
    let daemon = Daemon::start(SMALL);
    let clients: Vec<_> = (0..3).map(|_| daemon.connect()).collect();
    let memories: Vec<_> = clients.iter().map(|c| c.allocate(20 * page()).unwrap()).collect();
    // The same pages of each, at the same time, so that slots of one lie among those of the others.
    for ((client, memory), seed) in clients.iter().zip(&memories).zip(10..) {
        fill(client, memory, seed);
    }
    for _ in 0..2 {
        for ((client, memory), seed) in clients.iter().zip(&memories).zip(10..) {
            holds(client, memory, &bytes_of(seed, 20));
        }
    }
    let total = clients[0].stats().unwrap().total;
    assert!(total.spill_to_ram.pages > 60, "{total:?}");
    // All is given up; whoever comes next finds zeros, wherever its pages lie.
    drop((memories, clients));
    let next = daemon.connect();
    until("all is free", || {
        let allocations = next.stats().unwrap().allocations;
        if allocations == 0 { Ok(()) } else { Err(allocations) }
    });
    let memory = next.allocate(60 * page()).unwrap();
    let zeros = vec![0; usize::try_from(60 * page()).unwrap()];
    holds(&next, &memory, &zeros);
    drop((memory, next));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn free_frames_in_pieces_are_as_good_as_in_one() {
    let daemon = Daemon::start(SMALL);
    let client = daemon.connect();
    let mut singles: Vec<_> = (0..14).map(|_| client.allocate(page()).unwrap()).collect();
    for single in &singles {
        drop(single.map_all(Access::Write).unwrap());
    }
    // Every other one goes: half of VRAM is free, in pieces of one frame.
    let mut index = 0;
    singles.retain(|_| {
        index += 1;
        index % 2 == 0
    });
    let held: Vec<_> = singles.iter().map(|s| s.map_all(Access::Read).unwrap()).collect();
    let vram = client.stats().unwrap().vram;
    assert_eq!((vram.used / page(), vram.pinned / page()), (7, 7));
    assert!(vram.free_run_longest <= 3 * page(), "{vram:?} is not in pieces");
    // One range of eight pages has room, at addresses that follow one another.
    let memory = client.allocate(8 * page()).unwrap();
    fill(&client, &memory, 5);
    let mapping = client.map(&[(&memory, 0..8 * page())], Access::Read, SHORT).unwrap();
    assert!(*read(&mapping, 0) == bytes_of(5, 8));
    drop((mapping, memory, held, singles, client));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn only_an_administrator_changes_limits_whoever_may_connect() {
    let Some((daemon, _directory)) = open_to_all() else { return };
    let admin = daemon.connect();
    let limit = Quota { vram_max: Some(4 * page()), ..Quota::none(QuotaSubject::Uid(NOBODY)) };
    admin.set_quota(limit).unwrap();
    let before = admin.stats().unwrap();
    // It asks for each of them, is refused, and has checked that it was.
    let Some(stranger) = of_nobody(&daemon, "administer", &[]) else { return };
    let after = admin.stats().unwrap();
    let sizes = |stats: &lapis::Stats| {
        [stats.vram.capacity, stats.ram.capacity, stats.nvme.capacity].map(|bytes| bytes / page())
    };
    assert_eq!(sizes(&after), sizes(&before));
    let quotas: Vec<_> = admin.quotas().unwrap().into_iter().map(|used| used.quota).collect();
    assert_eq!(quotas, [limit]);
    // For root the same requests are fine.
    admin.set_tier(Tier::Nvme, 48 * page(), LONG).unwrap();
    assert_eq!(admin.stats().unwrap().nvme.capacity, 48 * page());
    admin.set_quota(Quota::none(QuotaSubject::Uid(NOBODY))).unwrap();
    assert_eq!(admin.quotas().unwrap(), []);
    drop((stranger, admin));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_socket_is_for_its_user_and_group_unless_told_otherwise() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can start a client of another user");
    }
    let directory = scratch();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let daemon = Daemon::start_in(directory.path(), SMALL);
    let mode = std::fs::metadata(daemon.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let stranger = of_nobody(&daemon, "shut-out", &[]);
    assert_eq!(daemon.connect().stats().unwrap().sessions, 1);
    drop(stranger);
    daemon.stop_well();
}

/// Bytes of the device that a daemon takes; none where that isn't told.
fn memory_of(daemon: &Daemon) -> u64 {
    match device() {
        Device::Sim => daemon.status_kib("RssShmem:") << 10,
        Device::Fake => memory_made_by(daemon.pid()),
        Device::Gpu => 0,
    }
}

#[test]
fn frames_that_a_process_keeps_are_counted_and_their_memory_is_given_back_when_it_is_dead() {
    let Some((daemon, _directory)) = open_to_all() else { return };
    let Some(hoarder) = of_nobody(&daemon, "hoard", &["10"]) else { return };
    let client = daemon.connect();
    let error = client.set_tier(Tier::Vram, 4 * page(), Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.code(), Some(Code::TimedOut), "{error}");
    assert!(error.to_string().contains("clients that do not give frames back"), "{error}");
    let stats = client.stats().unwrap();
    assert!(stats.vram.degraded, "{stats:?}");
    assert!((6..=10).contains(&stats.quarantined_frames), "{stats:?}");
    assert!(stats.vram.capacity >= 10 * page(), "a frame that is in use counts as given back");
    hoarder.kill();
    until("VRAM has the size that it was set to", || {
        let stats = client.stats().unwrap();
        let memory = memory_of(&daemon);
        let vram = (stats.vram.capacity / page(), stats.quarantined_frames, stats.vram.degraded);
        if vram == (4, 0, false) && memory <= 4 * page() { Ok(()) } else { Err((vram, memory)) }
    });
    client.set_tier(Tier::Vram, 16 * page(), LONG).unwrap();
    drop(client);
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn clients_that_hold_and_wait_for_one_another_are_told_in_time_and_keep_what_they_hold() {
    let daemon = Daemon::start(SMALL);
    let clients: Vec<_> = (0..2).map(|_| daemon.connect()).collect();
    let memories: Vec<_> = clients.iter().map(|c| c.allocate(16 * page()).unwrap()).collect();
    for ((client, memory), seed) in clients.iter().zip(&memories).zip(20..) {
        fill(client, memory, seed);
    }
    let first = |index: usize| memories[index].map(0..7 * page(), Access::Read).unwrap();
    let held = [first(0), first(1)];
    // Each holds 7 of 15 and wants 4 more: neither can have them before the other gives up.
    let wants = |index: usize, wait| {
        clients[index].map(&[(&memories[index], 8 * page()..12 * page())], Access::Read, wait)
    };
    std::thread::scope(|scope| {
        let waits: Vec<_> = (0..2).map(|i| scope.spawn(move || wants(i, SHORT))).collect();
        for wait in waits {
            let error = wait.join().unwrap().unwrap_err();
            assert_eq!(error.code(), Some(Code::TimedOut), "{error}");
            assert!(error.to_string().contains("14 of 15 mappable pages"), "{error}");
        }
    });
    for (mapping, seed) in held.iter().zip(20..) {
        assert!(*read(mapping, 0) == bytes_of(seed, 16)[..mapping.length(0)]);
    }
    let [kept, given_up] = held;
    drop(given_up);
    drop(wants(0, LONG).unwrap());
    drop((kept, memories, clients));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn all_of_this_on_the_fake_gpu() {
    runs_on_the_fake_gpu();
}

#[test]
fn all_of_this_on_a_gpu() {
    runs_on_a_gpu();
}
