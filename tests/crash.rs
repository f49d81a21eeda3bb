//! Processes that die in the middle of something: a dead client's memory comes back, a dead daemon's clients are told,
//! and the next daemon starts.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc::channel;
use std::time::Duration;

use lapis::{Access, Client, Code, Counters, Error};
use lapis_tests::binaries::{scratch, test_client};
use lapis_tests::bytes::{edit, read};
use lapis_tests::daemon::{Daemon, arguments, failed_start};
use lapis_tests::device::{is_given_back, runs_on_a_gpu, runs_on_the_fake_gpu, scale};
use lapis_tests::good::{Sample, nothing_is_left, still_serves};
use lapis_tests::victim::Victim;
use lapis_tests::wait::{WAIT, until};

const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "1MiB", "--nvme", "2MiB"];
const LONG: Duration = Duration::from_secs(60);
/// No user's own.
const NOBODY: u32 = 65_534;

fn victim(daemon: &Daemon, role: &str, rest: &[&str]) -> Victim {
    start(None, daemon, role, rest).unwrap()
}

fn start(uid: Option<u32>, daemon: &Daemon, role: &str, rest: &[&str]) -> Option<Victim> {
    Victim::start(&test_client(), uid, role, daemon.socket(), rest)
}

/// Waits until the daemon has done so much of something since now.
fn progress(daemon: &Daemon, count: u64, counted: impl Fn(&Counters) -> u64) {
    let client = daemon.connect();
    let before = counted(&client.stats().unwrap().total);
    until("the client makes no progress", || {
        let done = counted(&client.stats().unwrap().total) - before;
        if done >= count { Ok(()) } else { Err(done) }
    });
}

/// All of a killed client is gone, its descriptors in the daemon too.
fn comes_back(daemon: &Daemon, descriptors: usize) {
    nothing_is_left(daemon);
    until("descriptors", || {
        let now = daemon.descriptors();
        if now <= descriptors { Ok(()) } else { Err(now) }
    });
}

#[test]
fn a_client_killed_in_its_handshake_leaves_nothing() {
    let daemon = Daemon::start(SMALL);
    let descriptors = daemon.descriptors();
    for bytes in ["0", "1", "23", "24", "40", "48"] {
        victim(&daemon, "greet", &[bytes]).kill();
        comes_back(&daemon, descriptors);
    }
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_client_killed_while_it_allocates_leaves_nothing() {
    let daemon = Daemon::start(SMALL);
    let descriptors = daemon.descriptors();
    for _ in 0..5 {
        victim(&daemon, "allocate", &[]).kill();
        comes_back(&daemon, descriptors);
    }
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_client_killed_while_it_waits_leaves_nothing_and_others_get_the_room() {
    let daemon = Daemon::start(SMALL);
    let descriptors = daemon.descriptors();
    let client = daemon.connect();
    let allocation = client.allocate(15 * client.page_size()).unwrap();
    for _ in 0..3 {
        let mapping = allocation.map_all(Access::Write).unwrap();
        let first = victim(&daemon, "wait", &["15"]);
        let second = victim(&daemon, "wait", &["2"]);
        first.kill();
        // The second one is not behind the first for ever.
        drop(mapping);
        until("the second wait is over", || {
            let mappings = client.stats().unwrap().mappings;
            if mappings == 1 { Ok(()) } else { Err(mappings) }
        });
        second.kill();
        until("the second mapping ends", || {
            let mappings = client.stats().unwrap().mappings;
            if mappings == 0 { Ok(()) } else { Err(mappings) }
        });
    }
    drop((allocation, client));
    comes_back(&daemon, descriptors);
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_client_killed_while_it_writes_leaves_nothing() {
    let daemon = Daemon::start(SMALL);
    let descriptors = daemon.descriptors();
    for maps in [0, 1, 17, 100] {
        // It fits in VRAM: always mapped for writing, never moved.
        let client = victim(&daemon, "write", &["12"]);
        progress(&daemon, maps, |total| total.maps);
        client.kill();
        comes_back(&daemon, descriptors);
    }
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_client_killed_while_it_prefetches_leaves_nothing() {
    let daemon = Daemon::start(SMALL);
    let descriptors = daemon.descriptors();
    let sample = sample(2, 128);
    for pages in [0, 5, 50, 300] {
        let client = victim(&daemon, "prefetch", &[sample.path().to_str().unwrap()]);
        progress(&daemon, pages, |total| total.file_to_ram.pages);
        client.kill();
        comes_back(&daemon, descriptors);
    }
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn clients_killed_while_they_spill_leave_nothing_and_the_living_keep_their_bytes() {
    // Room for one more than live at once: pages that are being copied when their client dies are free a little later.
    let daemon = Daemon::start(&[&SMALL[..6], &["--nvme", "12MiB"]].concat());
    let descriptors = daemon.descriptors();
    let living = victim(&daemon, "write", &["40"]);
    for pages in [0, 3, 40, 200] {
        let client = victim(&daemon, "write", &["60"]);
        progress(&daemon, pages, |total| total.ram_to_spill.pages);
        client.kill();
        let client = daemon.connect();
        until("what it allocated is free", || {
            let allocations = client.stats().unwrap().allocations;
            if allocations == 1 { Ok(()) } else { Err(allocations) }
        });
    }
    // It checks each byte that it wrote, and would have ended.
    progress(&daemon, 100, |total| total.maps);
    living.kill();
    comes_back(&daemon, descriptors);
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn frames_that_a_process_keeps_are_used_again_only_when_it_is_dead() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can start a client of another user");
    }
    let directory = scratch();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let flags = [SMALL, &["--socket-mode", "0666"]].concat();
    let daemon = Daemon::start_in(directory.path(), &flags);
    let descriptors = daemon.descriptors();
    let Some(hoarder) = start(Some(NOBODY), &daemon, "hoard", &["15"]) else { return };
    let client = daemon.connect();
    let size = client.page_size();
    let allocation = client.allocate(15 * size).unwrap();
    let (granted, grant) = channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mapping = client.map(&[(&allocation, 0..4 * size)], Access::Read, LONG);
            granted.send(mapping.map(|mapping| read(&mapping, 0).iter().all(|byte| *byte == 0)))
        });
        let watcher = daemon.connect();
        until("a frame is in quarantine", || {
            let stats = watcher.stats().unwrap();
            if stats.quarantined_frames > 0 { Ok(()) } else { Err(stats.vram) }
        });
        assert!(grant.try_recv().is_err(), "a frame that may be written was given away");
        hoarder.kill();
        let zeros = grant.recv_timeout(WAIT).unwrap().unwrap();
        assert!(zeros, "another user's bytes are in the frame");
    });
    let mapping = allocation.map_all(Access::Read).unwrap();
    assert!(read(&mapping, 0).iter().all(|byte| *byte == 0), "another user's bytes are in a frame");
    drop(mapping);
    drop((allocation, client));
    comes_back(&daemon, descriptors);
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn clients_of_a_killed_daemon_are_told_and_the_next_one_starts_in_its_place() {
    let directory = scratch();
    let daemon = Daemon::start_in(directory.path(), SMALL);
    let sample = sample(3, 16);
    let client = daemon.connect();
    let size = client.page_size();
    let file = client.open_path(sample.path(), 0, 16 * size).unwrap();
    let busy = victim(&daemon, "allocate", &[]);
    let mapping = file.map(0..15 * size, Access::Read).unwrap();
    let waiting = daemon.connect();
    let (told, tell) = channel();
    let thread = {
        let allocation = waiting.allocate(2 * size).unwrap();
        std::thread::spawn(move || told.send(allocation.map_all(Access::Write).map(drop)))
    };
    let killed = daemon.pid();
    daemon.kill();
    let error = tell.recv_timeout(WAIT).unwrap().unwrap_err();
    assert!(matches!(error, Error::Disconnected), "{error}");
    assert!(error.is_retryable());
    thread.join().unwrap().unwrap();
    assert!(*read(&mapping, 0) == sample.content()[..mapping.length(0)]);
    for error in [
        client.stats().unwrap_err(),
        client.allocate(1).unwrap_err(),
        client.open_path(sample.path(), 0, 1).unwrap_err(),
        file.map(0..1, Access::Read).unwrap_err(),
        file.prefetch(0..1).unwrap_err(),
        mapping.unmap().unwrap_err(),
    ] {
        assert!(matches!(error, Error::Disconnected), "{error}");
    }
    let error = Client::connect(directory.path().join("s")).unwrap_err();
    assert!(error.to_string().contains("nothing listens there any more"), "{error}");
    // The socket and the lock are still there, and hold nobody up.
    let mut left: Vec<_> =
        directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["lapis.lock", "s"]);
    let daemon = Daemon::start_in(directory.path(), SMALL);
    still_serves(&daemon);
    // Clients of the old daemon don't become the new one's.
    assert!(matches!(client.stats().unwrap_err(), Error::Disconnected));
    drop((file, client, waiting, busy));
    is_given_back(killed);
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_daemon_killed_again_and_again_while_it_spills_starts_again() {
    let directory = scratch();
    for pages in [1, 20, 60] {
        let daemon = Daemon::start_in(directory.path(), SMALL);
        still_serves(&daemon);
        let client = victim(&daemon, "write", &["40"]);
        progress(&daemon, pages, |total| total.ram_to_spill.pages);
        let killed = daemon.pid();
        daemon.kill();
        client.kill();
        is_given_back(killed);
    }
    let daemon = Daemon::start_in(directory.path(), SMALL);
    still_serves(&daemon);
    daemon.stop_well();
    let left: Vec<_> =
        directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lapis.lock"]);
}

#[test]
fn two_daemons_do_not_share_a_socket_or_a_spill() {
    let directory = scratch();
    let other = scratch();
    let daemon = Daemon::start_in(directory.path(), SMALL);
    let client = daemon.connect();
    let allocation = client.allocate(30 * client.page_size()).unwrap();
    for page in 0..30 {
        let range = page * client.page_size()..(page + 1) * client.page_size();
        edit(&mut allocation.map(range, Access::Overwrite).unwrap(), 0, |bytes| bytes.fill(7));
    }
    let lapisd = || std::process::Command::new(lapis_tests::binaries::lapisd());
    let (status, said) = failed_start(lapisd().args(arguments(directory.path(), SMALL)));
    assert_eq!(status, 1, "{said}");
    assert!(said.contains("is in use by a") && said.contains("stop"), "{said}");
    let mut own_socket = arguments(directory.path(), SMALL);
    own_socket[1] = other.path().join("s").into();
    let (status, said) = failed_start(lapisd().args(own_socket));
    assert_eq!(status, 1, "{said}");
    let refusal = format!("spill directory {} is in use", directory.path().display());
    assert!(said.contains(&refusal), "{said}");
    let mut own_spill = arguments(directory.path(), SMALL);
    own_spill[3] = other.path().into();
    let (status, said) = failed_start(lapisd().args(own_spill));
    assert_eq!(status, 1, "{said}");
    let socket = daemon.socket().display();
    assert!(said.contains(&format!("socket {socket} is in use by a running daemon")), "{said}");
    for page in 0..30 {
        let range = page * client.page_size()..(page + 1) * client.page_size();
        let mapping = allocation.map(range, Access::Read).unwrap();
        assert!(read(&mapping, 0).iter().all(|byte| *byte == 7), "page {page} of the first daemon");
    }
    drop((allocation, client));
    still_serves(&daemon);
    daemon.stop_well();
}

/// A file of so many pages.
fn sample(seed: u64, pages: u64) -> Sample {
    Sample::new(seed, usize::try_from(pages * (64 << 10) * scale()).unwrap())
}

/// Maps page after page until the daemon is gone; returns how it was told.
fn load(client: &Client, sample: &Sample) -> Error {
    let size = client.page_size();
    let run = || -> Result<(), Error> {
        let memory = client.allocate(12 * size)?;
        let length = sample.content().len() as u64;
        let file = client.open_path(sample.path(), 0, length)?;
        loop {
            for page in 0..12 {
                let range = page * size..(page + 1) * size;
                let ranges = [(&memory, range.clone())];
                edit(&mut client.map(&ranges, Access::Write, LONG)?, 0, |bytes| bytes.fill(1));
                file.prefetch(range.clone())?;
                let mapping = file.map(range.clone(), Access::Read)?;
                let expected =
                    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
                assert!(*read(&mapping, 0) == sample.content()[expected]);
            }
        }
    };
    run().unwrap_err()
}

#[test]
fn a_daemon_told_to_stop_under_load_ends_well() {
    for signal in [nix::sys::signal::Signal::SIGTERM, nix::sys::signal::Signal::SIGINT] {
        let directory = scratch();
        let daemon = Daemon::start_in(directory.path(), SMALL);
        let sample = sample(4, 16);
        let (ended, end) = channel();
        let holder = daemon.connect();
        let memory = holder.allocate(2 * holder.page_size()).unwrap();
        let mut held = memory.map_all(Access::Write).unwrap();
        edit(&mut held, 0, |bytes| bytes.fill(0x5C));
        for _ in 0..3 {
            let (client, ended) = (daemon.connect(), ended.clone());
            let sample = Sample::new(4, sample.content().len());
            std::thread::spawn(move || ended.send(load(&client, &sample)));
        }
        progress(&daemon, 100, |total| total.maps);
        let stopped = daemon.pid();
        daemon.signal(signal);
        for _ in 0..3 {
            let error = end.recv_timeout(WAIT).unwrap();
            let expected =
                matches!(error, Error::Disconnected) || error.code() == Some(Code::ShuttingDown);
            assert!(expected, "{error}");
        }
        // It waited for what was moving, and said nothing of having given up.
        let log = daemon.ends_well();
        let unwell = |line: &&String| line.contains("WARN") || line.contains("ERROR");
        assert_eq!(log.iter().find(unwell), None);
        let left = directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["lapis.lock"]);
        // What was mapped can be read, and written, to the end.
        assert!(read(&held, 0).iter().all(|byte| *byte == 0x5C));
        edit(&mut held, 0, |bytes| bytes.fill(0x5D));
        assert!(read(&held, 0).iter().all(|byte| *byte == 0x5D));
        assert!(matches!(held.unmap().unwrap_err(), Error::Disconnected));
        drop((memory, holder));
        is_given_back(stopped);
    }
}

#[test]
fn all_of_this_on_the_fake_gpu() {
    runs_on_the_fake_gpu();
}

#[test]
fn all_of_this_on_a_gpu() {
    runs_on_a_gpu();
}
