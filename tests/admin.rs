//! Who administers a daemon, and what that does: quotas of the configuration, `lapisctl quota`, `lapisctl tier`.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use lapis::{Access, Code, Error};
use lapis_tests::binaries::{lapisctl, scratch};
use lapis_tests::daemon::Daemon;
use nix::unistd::{geteuid, getuid};

const MIB: u64 = 1 << 20;
/// A user and a group that nobody is.
const STRANGER: &str = "54321";
const ADMINS: &str = "54322";
const WAIT: Duration = Duration::from_secs(30);

fn is_root(what: &str) -> bool {
    if geteuid().is_root() {
        return true;
    }
    println!("SKIPPED: {what}: only root administers a daemon");
    false
}

/// A daemon with a configuration file that ends with `more`.
fn start(directory: &Path, more: &str) -> Daemon {
    let file = directory.join("lapisd.toml");
    let text = format!("vram = \"32MiB\"\nram = \"64MiB\"\nnvme = \"64MiB\"\n{more}");
    std::fs::write(&file, text).expect("target is writable");
    Daemon::start_in(directory, &["--config", file.to_str().expect("a path of ours")])
}

fn run(daemon: &Daemon, arguments: &[&str]) -> Output {
    let mut command = Command::new(lapisctl());
    command.args(arguments).arg("--socket").arg(daemon.socket());
    command.output().expect("lapisctl was built")
}

fn status_of(output: &Output) -> i32 {
    output.status.code().expect("it was not killed")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// The error's code and numbers.
fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> (Code, u64, u64, u64) {
    match result {
        Err(Error::Refused(refused)) => {
            (refused.code, refused.asked, refused.in_use, refused.limit)
        }
        other => panic!("{other:?} is no refusal"),
    }
}

#[test]
fn quotas_of_the_configuration_hold_from_the_start_and_change_live() {
    let directory = scratch();
    let uid = getuid();
    let more = format!(
        "[[quota]]\nsubject = \"user:{uid}\"\nvram = \"8MiB\"\nanonymous = \"16MiB\"\n\
         [[quota]]\nsubject = \"group:54322\"\nvram_reserved = \"25%\"\npriority = 3\n"
    );
    let daemon = start(directory.path(), &more);
    let client = daemon.connect();
    let first = client.allocate(10 * MIB).expect("within the quota");
    let over = refused(client.allocate(8 * MIB));
    assert_eq!(over, (Code::OverQuota, 8 * MIB, 10 * MIB, 16 * MIB));
    let over = refused(first.map(0..10 * MIB, Access::Write).map(drop));
    assert_eq!(over, (Code::OverQuota, 10 * MIB, 0, 8 * MIB));
    let mapping = first.map(0..6 * MIB, Access::Write).expect("within the quota");
    let shown = text(&run(&daemon, &["quota", "show", "-o", "json"]));
    let user = format!(
        "{{\"subject\":\"user:{uid}\",\"vram_used_bytes\":{0},\"vram_mapped_bytes\":{0},\"vram_max_bytes\":{1},\
         \"vram_reserved_bytes\":0,\"anonymous_used_bytes\":{2},\"anonymous_max_bytes\":{3},\"priority\":0}}",
        6 * MIB,
        8 * MIB,
        10 * MIB,
        16 * MIB
    );
    assert!(shown.contains(&user), "{shown}");
    assert!(shown.contains("\"subject\":\"group:54322\""), "{shown}");
    drop(mapping);
    if !is_root("changing quotas") {
        return;
    }
    let user = format!("user:{uid}");
    text(&run(&daemon, &["quota", "set", &user, "--anonymous", "none", "--vram", "12MiB"]));
    client.allocate(8 * MIB).expect("no limit any more");
    drop(first.map(0..10 * MIB, Access::Read).expect("within the new quota"));
    let over = run(&daemon, &["quota", "set", &user, "--vram-reserved", "1GiB"]);
    assert_eq!(status_of(&over), 6, "more than there is: {over:?}");
    let left = text(&run(&daemon, &["quota", "clear", &user]));
    assert!(!left.contains(&user), "{left}");
    assert_eq!(status_of(&run(&daemon, &["quota", "clear", &user])), 5);
    assert_eq!(
        status_of(&run(&daemon, &["quota", "set", "user:no-such-user", "--priority", "1"])),
        5
    );
}

#[test]
fn tiers_shrink_and_grow_and_no_byte_is_lost() {
    if !is_root("changing tiers") {
        return;
    }
    let directory = scratch();
    let daemon = start(directory.path(), "");
    let client = daemon.connect();
    let allocation = client.allocate(40 * MIB).expect("room");
    let halves = [0..20 * MIB, 20 * MIB..40 * MIB];
    for (half, value) in halves.iter().zip([1_u8, 2]) {
        allocation.map(half.clone(), Access::Overwrite).expect("room").bytes_mut(0).fill(value);
    }
    let mapping = allocation.map(0..20 * MIB, Access::Read).expect("room");
    let held = run(&daemon, &["tier", "set", "vram", "8MiB", "--wait", "0"]);
    assert_eq!(status_of(&held), 6, "it is mapped: {held:?}");
    assert!(mapping.bytes(0).iter().all(|byte| *byte == 1));
    drop(mapping);
    let shrunk = text(&run(&daemon, &["tier", "set", "vram", "8MiB", "-o", "json"]));
    assert!(
        shrunk.starts_with("{\"schema\":1,\"tier\":\"vram\",\"capacity_bytes\":8388608,"),
        "{shrunk}"
    );
    text(&run(&daemon, &["tier", "set", "ram", "32MiB"]));
    for (half, value) in halves.iter().zip([1_u8, 2]) {
        for start in half.clone().step_by(4 << 20) {
            let range = start..start + 4 * MIB;
            let mapping = client.map(&[(&allocation, range)], Access::Read, WAIT).expect("room");
            assert!(mapping.bytes(0).iter().all(|byte| *byte == value), "bytes from {start}");
        }
    }
    let small = run(&daemon, &["tier", "set", "nvme", "0"]);
    assert_eq!(status_of(&small), 6, "what is allocated would not fit: {small:?}");
    let large = run(&daemon, &["tier", "set", "vram", "1GiB"]);
    assert_eq!(status_of(&large), 1, "more than it was started with: {large:?}");
    assert_eq!(
        text(&run(&daemon, &["tier", "set", "vram", "32MiB"])).split(',').next(),
        Some("vram: 32.00 MiB")
    );
    drop(allocation.map(0..20 * MIB, Access::Read).expect("room again"));
}

#[test]
fn only_root_and_administrators_administer() {
    if !is_root("being several users") {
        return;
    }
    let directory = scratch();
    let more = format!("socket_mode = \"0666\"\nadmin_group = \"{ADMINS}\"\n");
    let daemon = start(directory.path(), &more);
    let status = |who: &[&str], arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(who).arg(lapisctl()).args(arguments).arg("--socket").arg(daemon.socket());
        let output = command.output().expect("setpriv is part of util-linux");
        let error = String::from_utf8_lossy(&output.stderr);
        let reached = !error.contains("failed to execute");
        if !reached {
            println!("SKIPPED: another user can't run {}: {error}", lapisctl().display());
        }
        reached.then(|| status_of(&output))
    };
    let quota = ["quota", "set", "each-user", "--priority", "1"];
    let tier = ["tier", "set", "vram", "16MiB"];
    let stranger = ["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"];
    let primary = ["--reuid", STRANGER, "--regid", ADMINS, "--clear-groups"];
    let member = ["--reuid", STRANGER, "--regid", STRANGER, "--groups", ADMINS];
    let Some(denied) = status(&stranger, &quota) else { return };
    assert_eq!(denied, 4);
    assert_eq!(status(&stranger, &tier), Some(4));
    assert_eq!(status(&stranger, &["quota", "show"]), Some(0), "anyone may look");
    for administrator in [&primary[..], &member] {
        assert_eq!(status(administrator, &quota), Some(0), "{administrator:?}");
        assert_eq!(status(administrator, &tier), Some(0), "{administrator:?}");
    }
    assert_eq!(status_of(&run(&daemon, &quota)), 0, "root always may");
}
