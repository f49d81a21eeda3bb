//! The machine around the daemon: memory limits, full disks, few descriptors, disks that lie.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lapis::model::pattern;
use lapis::{Access, Code};
use lapis_tests::binaries::{lapisd, scratch, test_client};
use lapis_tests::daemon::{Daemon, arguments, failed_start};
use lapis_tests::good::{Sample, nothing_is_left, still_serves, write_and_read};
use lapis_tests::victim::Victim;
use lapis_tests::wait::until;
use lapisd::config::Size;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tempfile::TempDir;

const PAGE: u64 = 64 << 10;
const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "1MiB", "--nvme", "2MiB"];

/// A memory cgroup of a test's own; removed when dropped.
struct Group(PathBuf);

impl Group {
    /// With this limit. `None`, said aloud, where there can be none.
    fn new(bytes: u64) -> Option<Self> {
        let own = format!("lapis-test-{}", std::process::id());
        for (mount, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let group = Self(Path::new(mount).join(&own));
            let made = fs::create_dir(&group.0).is_ok();
            if made && fs::write(group.0.join(limit), bytes.to_string()).is_ok() {
                return Some(group);
            }
        }
        eprintln!("SKIPPED: no memory cgroup can be made here");
        None
    }

    /// The daemon's command, run inside.
    fn lapisd(&self) -> Command {
        let mut command = Command::new("sh");
        let enter = r#"echo $$ > "$0/cgroup.procs" && exec "$@""#;
        command.args(["-c", enter]).arg(&self.0).arg(lapisd());
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A group of v2 that got no limit, or one whose last process is not reaped yet.
        let _left = fs::remove_dir(&self.0);
    }
}

fn checked(output: &Output) -> toml::Table {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8_lossy(&output.stdout).parse().unwrap()
}

#[test]
fn ram_is_sized_by_the_cgroup_that_the_daemon_runs_in() {
    let Some(group) = Group::new(256 << 20) else { return };
    let directory = scratch();
    let flags = ["--check", "--page-size", "64KiB", "--vram", "1MiB", "--ram", "50%"];
    let output = group.lapisd().args(arguments(directory.path(), &flags)).output().unwrap();
    let ram = checked(&output)["ram"].as_str().unwrap().parse::<Size>().unwrap();
    assert!((64 << 20..=128 << 20).contains(&ram.bytes()), "{ram} of a group of 256MiB");
    // More than it allows is refused before it is taken, by name.
    let flags = ["--page-size", "64KiB", "--vram", "1MiB", "--ram", "400MiB"];
    let (status, said) = failed_start(group.lapisd().args(arguments(directory.path(), &flags)));
    assert_eq!(status, 1, "{said}");
    let limit = group.0.display().to_string();
    assert!(said.contains("cannot make the RAM tier") && said.contains(&limit), "{said}");
    assert!(directory.path().read_dir().unwrap().next().is_none(), "something is left");
}

#[test]
fn ram_smaller_than_vram_is_warned_of_at_start_and_by_the_check() {
    let directory = scratch();
    let flags = ["--page-size", "64KiB", "--vram", "2MiB", "--ram", "1MiB", "--nvme", "2MiB"];
    let arguments = arguments(directory.path(), &[&flags[..], &["--check"]].concat());
    let output = Command::new(lapisd()).args(arguments).output().unwrap();
    checked(&output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("warning: ram (1MiB) is smaller than vram (2MiB)"), "{said}");
    let daemon = Daemon::start_logged(directory.path(), &flags);
    let warned = |line: &String| line.contains("WARN") && line.contains("smaller than vram");
    assert!(daemon.1.iter().any(warned), "{:#?}", daemon.1);
    // It works all the same.
    still_serves(&daemon.0);
    daemon.0.stop_well();
}

/// A small file system that is unmounted when dropped.
struct Mount(TempDir);

impl Mount {
    fn tmpfs(options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "lapis-test"]).arg(directory.path());
        if command.output().is_ok_and(|output| output.status.success()) {
            return Some(Self(directory));
        }
        eprintln!("SKIPPED: mounting needs root");
        None
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: a process that is being started may have a copy of a descriptor for a moment.
        let unmounted = Command::new("umount").arg("-l").arg(self.0.path()).status();
        assert!(unmounted.unwrap().success());
    }
}

#[test]
fn a_disk_that_fills_up_beside_the_spill_loses_no_page() {
    let Some(mount) = Mount::tmpfs("size=4m") else { return };
    let daemon = Daemon::start_in(mount.0.path(), SMALL);
    let client = daemon.connect();
    let mut filler = File::create(mount.0.path().join("filler")).unwrap();
    let full = (0..100).find_map(|_| filler.write_all(&[7; 1 << 16]).err());
    assert_eq!(full.unwrap().kind(), std::io::ErrorKind::StorageFull);
    for _ in 0..3 {
        write_and_read(&client, 40);
    }
    let stats = client.stats().unwrap();
    let (out, back) = (stats.total.ram_to_spill, stats.total.spill_to_ram);
    assert!(out.pages > 0 && back.pages > 0, "the spill was not used: {stats:?}");
    assert_eq!((out.errors, back.errors, stats.nvme.degraded), (0, 0, false));
    drop((filler, client));
    still_serves(&daemon);
    daemon.stop_well();
}

/// The daemon's spill, opened behind its back.
fn spill_of(daemon: &Daemon) -> File {
    let entries = fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().flatten();
    let is_spill = |link: &PathBuf| {
        let target = fs::read_link(link).unwrap_or_default().display().to_string();
        target.contains("/tmp/") && target.ends_with("(deleted)") && !target.contains("memfd")
    };
    let link = entries.map(|entry| entry.path()).find(is_spill).expect("the spill is open");
    OpenOptions::new().read(true).write(true).open(link).unwrap()
}

/// A page of pattern.
fn page_of(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(PAGE).unwrap()];
    pattern(seed, 0, &mut bytes);
    bytes
}

/// Where a page with this content lies in a spill.
fn place_of(spill: &File, content: &[u8]) -> Option<u64> {
    let mut slot = vec![0; content.len()];
    let slots = spill.metadata().unwrap().len() / PAGE;
    (0..slots).map(|slot| slot * PAGE).find(|offset| {
        spill.read_exact_at(&mut slot, *offset).unwrap();
        slot == content
    })
}

fn overwrite(spill: &File, offset: u64, byte: u8) {
    spill.write_all_at(&[byte], offset).unwrap();
    spill.sync_all().unwrap();
}

#[test]
fn one_lost_page_refuses_the_whole_map_and_no_other_page_and_comes_back_if_it_can() {
    let daemon = Daemon::start(SMALL);
    let client = daemon.connect();
    let memory = client.allocate(36 * PAGE).unwrap();
    let at = |page: u64| page * PAGE..(page + 1) * PAGE;
    for page in 0..36 {
        let mut mapping = memory.map(at(page), Access::Overwrite).unwrap();
        mapping.bytes_mut(0).copy_from_slice(&page_of(page));
    }
    // A page that is in the spill and nowhere else: changing a byte there is noticed.
    let spill = spill_of(&daemon);
    let is_lost = |page: &u64| {
        let Some(offset) = place_of(&spill, &page_of(*page)) else { return false };
        overwrite(&spill, offset + 12_345, !page_of(*page)[12_345]);
        let found = memory.map(at(*page), Access::Read).map(drop);
        if found.is_ok() {
            overwrite(&spill, offset + 12_345, page_of(*page)[12_345]);
        }
        found.is_err()
    };
    let lost = (2..34).find(is_lost).expect("not all of 36 pages fit in VRAM and RAM");
    let around = at(lost - 2).start..at(lost + 2).end;
    let error = memory.map(around.clone(), Access::Read).unwrap_err();
    assert_eq!(error.code(), Some(Code::DataLost), "{error}");
    assert!(error.to_string().contains(&format!("page {lost}:")), "{error}");
    let stats = client.stats().unwrap();
    assert_eq!((stats.mappings, stats.vram.pinned), (0, 0), "part of it was handed out");
    for page in (0..36).filter(|page| *page != lost) {
        let mapping = memory.map(at(page), Access::Read).unwrap();
        assert!(mapping.bytes(0) == page_of(page), "page {page}");
    }
    // The daemon has not given the page up: once the disk has the right byte again, so has the client.
    let mut changed = page_of(lost);
    changed[12_345] = !changed[12_345];
    let offset = place_of(&spill, &changed).expect("its slot is kept");
    overwrite(&spill, offset + 12_345, page_of(lost)[12_345]);
    let mapping = memory.map(around, Access::Read).unwrap();
    let expected: Vec<u8> = (lost - 2..lost + 3).flat_map(page_of).collect();
    assert!(mapping.bytes(0) == expected);
    drop((mapping, memory, client));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_file_that_is_cut_refuses_maps_whole_and_leaves_what_is_mapped() {
    let daemon = Daemon::start(SMALL);
    let sample = Sample::new(8, 640_000);
    let client = daemon.connect();
    let file = client.open_path(sample.path(), 3, 639_997).unwrap();
    let held = file.map(0..100_000, Access::Read).unwrap();
    OpenOptions::new().write(true).open(sample.path()).unwrap().set_len(400_000).unwrap();
    let error = file.map(0..600_000, Access::Read).unwrap_err();
    // Whichever page is read first: the file is not the one that was opened, or ends before it.
    assert!(matches!(error.code(), Some(Code::FileTruncated | Code::FileChanged)), "{error}");
    let error = file.map(500_000..500_001, Access::Read).unwrap_err();
    assert_eq!(error.code(), Some(Code::FileTruncated), "{error}");
    assert!(error.to_string().contains("400000"), "{error}");
    let stats = client.stats().unwrap();
    assert_eq!((stats.mappings, stats.vram.pinned), (1, 2 * PAGE));
    assert!(held.bytes(0) == &sample.content()[3..100_003]);
    drop((held, file, client));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn an_allocation_that_a_client_has_no_addresses_for_is_given_back() {
    let daemon = Daemon::start(&["--vram", "32MiB", "--ram", "34MiB"]);
    let sparse = tempfile::NamedTempFile::new_in(scratch().keep()).unwrap();
    sparse.as_file().set_len(8 << 30).unwrap();
    let path = sparse.path().to_str().unwrap();
    let program = test_client();
    // It opens the file, can't reserve 8 GiB of addresses, has checked the error, and is still connected.
    let client = Victim::start(&program, None, "cramped", daemon.socket(), &[path]).unwrap();
    let watcher = daemon.connect();
    until("nothing of it is left", || {
        let stats = watcher.stats().unwrap();
        let left = (stats.sessions, stats.allocations);
        if left == (2, 0) { Ok(()) } else { Err(left) }
    });
    drop((client, watcher));
    fs::remove_dir_all(sparse.path().parent().unwrap()).unwrap();
    nothing_is_left(&daemon);
    daemon.stop_well();
}

#[test]
fn more_connections_or_files_than_descriptors_harm_no_session() {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 2048 {
        return eprintln!("SKIPPED: this process may not have 2048 descriptors");
    }
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(2048), hard).unwrap();
    let directory = scratch();
    let limited = "ulimit -n 1100 && exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", limited]).arg(lapisd()).args(arguments(directory.path(), SMALL));
    let daemon = Daemon::launch(&mut command, directory.path());
    let client = daemon.connect();
    let flood: Vec<_> =
        (0..1200).map_while(|_| UnixStream::connect(daemon.socket()).ok()).collect();
    daemon.wait_for_log("few descriptors are left");
    // The session that was there before goes on, frames that it has not seen included.
    write_and_read(&client, 24);
    drop(flood);
    // New ones have waited, and are served now.
    let other = daemon.connect();
    let sample = Sample::new(9, 5000);
    let opened: Vec<_> =
        (0..1000).map_while(|offset| other.open_path(sample.path(), offset, 1).ok()).collect();
    let error = other.open_path(sample.path(), 4000, 1).unwrap_err();
    assert_eq!(error.code(), Some(Code::TooMany), "{error} after {} files", opened.len());
    assert!(error.to_string().contains("few descriptors are left"), "{error}");
    write_and_read(&client, 24);
    write_and_read(&other, 24);
    drop((opened, other, client));
    still_serves(&daemon);
    daemon.stop_well();
}
