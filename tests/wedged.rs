//! Clients that stop without ending, and copies that never end: each costs what it holds itself, and no session of
//! others waits for it.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use lapis::{Access, Advice, Client, Code, Quota, QuotaSubject, Tier};
use lapis_tests::binaries::{scratch, test_client};
use lapis_tests::daemon::Daemon;
use lapis_tests::good::{still_serves, write_and_read};
use lapis_tests::victim::Victim;
use lapis_tests::wait::{WAIT, until};
use nix::sys::signal::Signal;

const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "1MiB", "--nvme", "2MiB"];
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(20);
/// No user's own.
const NOBODY: u32 = 65_534;
/// A copy takes an hour: for this test, for ever.
const FOR_EVER: &[&str] = &["--link-latency-us", "3600000000"];

fn victim(uid: Option<u32>, daemon: &Daemon, role: &str, rest: &[&str]) -> Option<Victim> {
    Victim::start(&test_client(), uid, role, daemon.socket(), rest)
}

/// Everything that can be asked for without a copy is answered, in old sessions and in new ones.
fn is_served(client: &Client, socket: &Path) {
    let page = client.page_size();
    client.stats().unwrap();
    let memory = client.allocate(3 * page).unwrap();
    memory.advise(0..page, Advice::Keep).unwrap();
    memory.prefetch(0..page).unwrap();
    memory.cancel_prefetch(0..page).unwrap();
    memory.flush(0..page).unwrap();
    client.quotas().unwrap();
    if nix::unistd::geteuid().is_root() {
        client.set_quota(Quota::none(QuotaSubject::EachUid)).unwrap();
        client.set_tier(Tier::Nvme, 2 << 20, LONG).unwrap();
    }
    drop(memory);
    Client::connect(socket).unwrap().stats().unwrap();
    assert_eq!(client.take_refusal(), None);
}

#[test]
fn a_stopped_client_holds_up_no_session_of_others() {
    let daemon = Daemon::start(SMALL);
    let client = daemon.connect();
    // One that holds a mapping of half of VRAM, and one in the middle of writing.
    let holder = victim(None, &daemon, "hold", &["8"]).unwrap();
    let writer = victim(None, &daemon, "write", &["6"]).unwrap();
    holder.signal(Signal::SIGSTOP);
    writer.signal(Signal::SIGSTOP);
    for _ in 0..3 {
        is_served(&client, daemon.socket());
        write_and_read(&client, 12);
        assert!(client.stats().unwrap().vram.pinned >= 8 * client.page_size());
    }
    // They go on where they were: the writer compares what it finds.
    writer.signal(Signal::SIGCONT);
    holder.signal(Signal::SIGCONT);
    let maps = client.stats().unwrap().total.maps;
    until("the writer goes on", || {
        let now = client.stats().unwrap().total.maps;
        if now > maps + 20 { Ok(()) } else { Err(now) }
    });
    drop((holder, writer, client));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn frames_that_a_stopped_process_keeps_cost_no_more_than_those_that_it_was_asked_for() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("SKIPPED: only root can start a client of another user");
    }
    let directory = scratch();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let flags = ["--page-size", "64KiB", "--vram", "4MiB", "--ram", "4MiB", "--nvme", "8MiB"];
    let flags = [&flags[..], &["--socket-mode", "0666"]].concat();
    let daemon = Daemon::start_in(directory.path(), &flags);
    // 40 of 64 frames, of pages that are not mapped any more: the best victims there are.
    let Some(hoarder) = victim(Some(NOBODY), &daemon, "hoard", &["40"]) else { return };
    let client = daemon.connect();
    for _ in 0..3 {
        write_and_read(&client, 40);
    }
    let kept = client.stats().unwrap().quarantined_frames;
    assert!((1..=8).contains(&kept), "{kept} frames were asked for in vain");
    // What it keeps is no room: a map that needs it takes nothing while it waits.
    let page = client.page_size();
    let memory = client.allocate(30 * page).unwrap();
    let error = client.map(&[(&memory, 0..30 * page)], Access::Read, SHORT).unwrap_err();
    assert!(error.to_string().contains("waited for room"), "{error}");
    drop(memory.map(0..20 * page, Access::Read).unwrap());
    drop(memory);
    hoarder.kill();
    until("its frames are of use again", || {
        let kept = client.stats().unwrap().quarantined_frames;
        if kept == 0 { Ok(()) } else { Err(kept) }
    });
    write_and_read(&client, 60);
    drop(client);
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_copy_that_never_ends_holds_up_no_request_that_needs_none() {
    let daemon = Daemon::start(&[SMALL, FOR_EVER].concat());
    let client = daemon.connect();
    let page = client.page_size();
    let (told, tell) = channel();
    let stuck = client.allocate(page).unwrap();
    // Filling its page with zeros is the device's work.
    std::thread::spawn(move || told.send(stuck.map_all(Access::Write).map(drop)));
    until("the copy has begun", || {
        let pinned = client.stats().unwrap().vram.pinned;
        if pinned == page { Ok(()) } else { Err(pinned) }
    });
    let (served, is) = channel();
    let (other, socket) = (client.clone(), daemon.socket().to_owned());
    std::thread::spawn(move || {
        for _ in 0..3 {
            is_served(&other, &socket);
            let memory = other.allocate(page).unwrap();
            let error = other.map(&[(&memory, 0..page)], Access::Read, SHORT).unwrap_err();
            assert_eq!(error.code(), Some(Code::TimedOut), "{error}");
            assert!(error.to_string().contains("waited for the bytes"), "{error}");
        }
        served.send(()).unwrap();
    });
    is.recv_timeout(LONG).expect("requests are answered");
    assert!(tell.try_recv().is_err(), "the copy has ended");
    daemon.kill();
    let error = tell.recv_timeout(WAIT).unwrap().unwrap_err();
    assert!(matches!(error, lapis::Error::Disconnected), "{error}");
}

#[test]
fn a_daemon_with_a_copy_that_never_ends_can_be_stopped() {
    let directory = scratch();
    let daemon = Daemon::start_in(directory.path(), &[SMALL, FOR_EVER].concat());
    let client = daemon.connect();
    let memory = client.allocate(client.page_size()).unwrap();
    memory.prefetch(0..1).unwrap();
    until("the copy has begun", || {
        let used = client.stats().unwrap().vram.used;
        if used > 0 { Ok(()) } else { Err(used) }
    });
    daemon.signal(Signal::SIGTERM);
    let (status, log) = daemon.ends(LONG);
    assert_eq!(status.code(), Some(1), "{log:#?}");
    let last = log.last().unwrap();
    assert!(last.contains("a transfer does not end") && last.contains("the device"), "{log:#?}");
    assert!(matches!(client.stats().unwrap_err(), lapis::Error::Disconnected));
    // Nothing is in the way of the next one.
    drop((memory, client));
    let daemon = Daemon::start_in(directory.path(), SMALL);
    still_serves(&daemon);
    daemon.stop_well();
}
