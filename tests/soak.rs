//! Many client processes on tiers that are far too small for them, some of them killed or stopped at any moment: every
//! byte that any of them maps is right, and when all are gone the daemon holds what it held before they came.
//!
//! The short forms run with all other tests. The long one is
//! `cargo test -p lapis-tests --test soak -- --ignored --nocapture`; see `docs/testing.md`.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use lapis::{Access, Allocation, Client, Code, HopStats, Stats};
use lapis_tests::binaries::{lapisctl, scratch, test_client};
use lapis_tests::daemon::Daemon;
use lapis_tests::device::{is_sim, runs_on_the_fake_gpu};
use lapis_tests::fleet::{Fleet, Plan, known_file};
use lapis_tests::good::{Sample, nothing_is_left, still_serves};
use lapis_tests::held::Held;
use lapis_tests::wait::{until, until_within};
use lapis_tests::worker;
use serde_json::Value;

/// A few frames of VRAM and of RAM; each client has up to 48 pages of memory, and the files have 160.
const FULL: &[&str] = &["--page-size", "64KiB", "--nvme", "192MiB", "--socket-mode", "0666"];
/// Granted maps between two kills.
const MAPS_PER_KILL: u64 = 60;
/// Clients of two users work side by side where that can be: frames must not pass between them.
const NOBODY: u32 = 65_534;
/// Of a map that is going to be refused.
const SOON: Duration = Duration::from_millis(1);
/// Heap that the allocator may keep although nothing is in it.
const HEAP_SLACK_KIB: u64 = 8 << 10;

fn number(variable: &str, default: u64) -> u64 {
    let set = std::env::var(variable).ok();
    set.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable}={text}")))
}

/// What `lapisctl status` says.
fn status(daemon: &Daemon) -> Value {
    let socket = daemon.socket();
    let output =
        Command::new(lapisctl()).args(["status", "-o", "json", "--socket"]).arg(socket).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What of it must be as before once all clients are gone.
fn resting(status: &Value) -> Vec<&Value> {
    ["tiers", "sessions", "allocations", "mappings", "quarantined_frames", "metadata_bytes"]
        .map(|key| status.get(key).unwrap())
        .to_vec()
}

/// How much is enough.
struct Work {
    /// Clients at a time.
    clients: usize,
    /// Frames of VRAM, and about as many of RAM.
    frames: usize,
    /// Clients killed, at least.
    kills: u32,
    /// For this long, at least.
    time: Duration,
}

/// Lets clients work until it is enough, killing and stopping some.
fn work(daemon: &Daemon, plan: Plan, work: &Work) -> u64 {
    let mut fleet = Fleet::start(plan, work.clients);
    let watcher = daemon.connect();
    let end = Instant::now() + work.time;
    let mut kills = 0;
    let total = || watcher.stats().unwrap().total;
    while kills < work.kills || Instant::now() < end || total().spill_to_ram.pages == 0 {
        let before = total().maps;
        until_within(worker::WAIT, "the clients make progress", || {
            fleet.is_well();
            let done = total().maps - before;
            if done >= MAPS_PER_KILL { Ok(()) } else { Err(done) }
        });
        fleet.replace_one();
        fleet.stop_another();
        kills += 1;
    }
    let started = fleet.started();
    fleet.end();
    started
}

/// The tiers were full, and nothing failed.
fn was_a_test(stats: &Stats) {
    let total = &stats.total;
    for (name, hop) in [
        ("files to RAM", total.file_to_ram),
        ("RAM to VRAM", total.ram_to_vram),
        ("VRAM to RAM", total.vram_to_ram),
        ("RAM to spill", total.ram_to_spill),
        ("spill to RAM", total.spill_to_ram),
        ("zeros", total.zeroed),
    ] {
        let HopStats { pages, errors, .. } = hop;
        assert!(pages > 0 && errors == 0, "{name}: {pages} pages, {errors} errors");
    }
    assert!(total.dropped_vram > 0 && total.dropped_ram > 0, "nothing had to go: {total:?}");
    assert_eq!((total.checksum_errors, total.read_retries), (0, 0));
}

/// Work on a fresh daemon, and what it leaves.
fn soak(flags: &[&str], enough: &Work, seed: u64) {
    let tier = format!("{}KiB", enough.frames * 64);
    let flags = [FULL, flags, &["--vram", &tier, "--ram", &tier]].concat();
    let directory = scratch();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let daemon = Daemon::start_in(directory.path(), &flags);
    let idle = Held::of(daemon.pid());
    // Once before, so that the heap has what is made at first use.
    still_serves(&daemon);
    let (status_before, heap_before) = (status(&daemon), daemon.status_kib("RssAnon:"));
    let memfds = if is_sim("frames are no memfds") { enough.frames } else { 0 };
    assert_eq!(idle.memfds(), memfds, "one memfd a frame: {idle:?}");
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: only root can start clients of two users; all are of one");
    }
    eprintln!("seed {seed}");
    let plan = Plan {
        program: test_client(),
        socket: daemon.socket().to_owned(),
        files: [(1, 7_000_003), (2, 3_333_333)]
            .map(|(seed, bytes)| known_file(directory.path(), seed, bytes))
            .to_vec(),
        other_user: root.then_some(NOBODY),
        seed,
    };
    let started = work(&daemon, plan, enough);
    nothing_is_left(&daemon);
    let stats = daemon.connect().stats().unwrap();
    eprintln!("{started} clients, {} maps: {:?}", stats.total.maps, stats.total);
    was_a_test(&stats);
    assert_eq!(stats.vram.free_run_longest, stats.vram.capacity, "a frame is not free");
    assert_eq!(stats.ram.free_run_longest, stats.ram.capacity, "a RAM frame is not free");
    assert_eq!(stats.nvme.free_run_longest, stats.nvme.capacity, "a spill slot is not free");
    still_serves(&daemon);
    until("the daemon holds what it held before", || {
        let now = Held::of(daemon.pid());
        if now == idle { Ok(()) } else { Err((now, &idle)) }
    });
    let status_after = status(&daemon);
    assert_eq!(resting(&status_after), resting(&status_before));
    let heap = daemon.status_kib("RssAnon:");
    assert!(
        heap <= heap_before + HEAP_SLACK_KIB,
        "the daemon grew from {heap_before} to {heap} KiB of memory"
    );
    let log = daemon.stop_well();
    assert!(!log.iter().any(|line| line.contains("ERROR")), "{log:#?}");
    let names = directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name());
    let mut left: Vec<_> = names.collect();
    left.sort();
    assert_eq!(left, ["1", "2", "lapis.lock"]);
}

/// Requests of all kinds, granted and refused, in one session.
fn operate(client: &Client, sample: &Sample, file: &Allocation, memory: &Allocation) {
    let page = client.page_size();
    let opened = client.open_path(sample.path(), 5, 10).unwrap();
    drop(opened.map_all(Access::Read).unwrap());
    drop(memory.map(page..2 * page, Access::Write).unwrap());
    memory.flush(0..page).unwrap();
    memory.prefetch(0..2 * page).unwrap();
    let held = memory.map(0..20 * page, Access::Read).unwrap();
    for (result, code) in [
        (client.map(&[(memory, 20 * page..32 * page)], Access::Read, SOON), Code::TimedOut),
        (client.map(&[(memory, 0..40 * page)], Access::Read, SOON), Code::OverCapacity),
        (client.map(&[(file, 0..page)], Access::Write, SOON), Code::ReadOnly),
        (client.map(&[(file, 9 * page..10 * page)], Access::Read, SOON), Code::FileTruncated),
    ] {
        assert_eq!(result.unwrap_err().code(), Some(code));
    }
    drop(held);
    let error = client.open_path("/dev/null", 0, 1).unwrap_err();
    assert_eq!(error.code(), Some(Code::NotAFile), "{error}");
    assert_eq!(client.allocate(1 << 40).unwrap_err().code(), Some(Code::TooMany));
    assert_eq!(client.take_refusal(), None);
}

#[test]
fn a_session_holds_no_more_after_many_operations_than_after_the_first() {
    let daemon = Daemon::start(&[FULL, &["--vram", "2MiB", "--ram", "2MiB"]].concat());
    let (sample, cut) = (Sample::new(1, 1000), Sample::new(2, 1 << 20));
    let client = daemon.connect();
    let memory = client.allocate(40 * client.page_size()).unwrap();
    let file = client.open_path(cut.path(), 0, 1 << 20).unwrap();
    std::fs::OpenOptions::new().write(true).open(cut.path()).unwrap().set_len(1).unwrap();
    operate(&client, &sample, &file, &memory);
    let state = || {
        let stats = client.stats().unwrap();
        let pinned = (stats.vram.pinned, stats.mappings, stats.allocations);
        (Held::of(daemon.pid()), pinned)
    };
    let first = state();
    assert_eq!(first.1, (0, 0, 2));
    // 14 requests each, of which some send or keep descriptors.
    for _ in 0..number("LAPIS_SOAK_OPERATIONS", 5000) / 14 {
        operate(&client, &sample, &file, &memory);
    }
    until("what the first operations left", || {
        let now = state();
        if now == first { Ok(()) } else { Err((now, &first)) }
    });
    drop((file, memory, client));
    still_serves(&daemon);
    daemon.stop_well();
}

const SHORT: Work = Work { clients: 6, frames: 32, kills: 12, time: Duration::ZERO };

#[test]
fn clients_that_are_killed_and_stopped_harm_no_byte_of_others_and_leave_nothing() {
    soak(&[], &SHORT, 1);
}

#[test]
fn the_same_with_threads_in_place_of_io_uring() {
    soak(&["--io", "threads"], &SHORT, 2);
}

#[test]
#[ignore = "takes a minute: run it by name, see docs/testing.md"]
fn a_minute_of_thirty_two_clients_leaves_nothing() {
    let seed = number("LAPIS_SOAK_SEED", std::process::id().into());
    let clients = usize::try_from(number("LAPIS_SOAK_CLIENTS", 32)).unwrap();
    let time = Duration::from_secs(number("LAPIS_SOAK_SECONDS", 60));
    soak(&[], &Work { clients, frames: 64, kills: 10, time }, seed);
}

#[test]
fn all_of_this_on_the_fake_gpu() {
    runs_on_the_fake_gpu();
}
