//! The daemon as a service: what it tells the service manager, sockets that are there before it, reloads, the log, and the
//! units.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use lapis::{Access, Client, Code, QuotaSubject};
use lapis_proto::message::Hello;
use lapis_tests::binaries::{lapisd, scratch};
use lapis_tests::daemon::{Daemon, arguments, failed_start};
use lapis_tests::good::{still_serves, write_and_read};
use lapis_tests::scrape::{Scrape, address_in, get_unix, has_program};
use lapis_tests::wait::until;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "2MiB", "--nvme", "4MiB"];
const PAGE: u64 = 64 << 10;

/// A service manager that only listens.
struct Manager(UnixDatagram);

impl Manager {
    fn new(directory: &Path) -> Manager {
        let socket = UnixDatagram::bind(directory.join("notify")).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Manager(socket)
    }

    /// The next note that is not one of `but`.
    fn hears(&self, but: &[&str]) -> String {
        loop {
            let mut note = [0; 512];
            let count = self.0.recv(&mut note).expect("a note in time");
            let note = String::from_utf8(note[..count].to_vec()).unwrap();
            if !but.iter().any(|but| note.starts_with(but)) {
                return note;
            }
        }
    }
}

#[test]
fn the_service_manager_is_told_in_order_and_the_watchdog_sees_a_reactor_that_hangs() {
    let directory = scratch();
    let manager = Manager::new(directory.path());
    let mut command = Command::new(lapisd());
    command.args(arguments(directory.path(), SMALL));
    command.env("NOTIFY_SOCKET", directory.path().join("notify")).env("WATCHDOG_USEC", "400000");
    let daemon = Daemon::launch(&mut command, directory.path());
    assert!(manager.hears(&[]).starts_with("STATUS=Making the tiers: VRAM 1MiB"));
    assert_eq!(manager.hears(&[]), "READY=1");
    assert_eq!(manager.hears(&["STATUS"]), "WATCHDOG=1");
    let status = manager.hears(&["WATCHDOG"]);
    assert_eq!(status, "STATUS=Serving 0 sessions; VRAM 0B/1MiB, RAM 0B/1920KiB, NVMe 0B/4MiB");
    assert_eq!(manager.hears(&["STATUS"]), "WATCHDOG=1");
    // The reactor hangs, the other threads don't: the watchdog hears nothing.
    let main = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
    if ptrace::seize(main, ptrace::Options::empty()).is_ok() {
        ptrace::interrupt(main).unwrap();
        waitpid(main, None).unwrap();
        let mut note = [0; 64];
        manager.0.set_nonblocking(true).unwrap();
        while manager.0.recv(&mut note).is_ok() {}
        manager.0.set_nonblocking(false).unwrap();
        manager.0.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        assert!(manager.0.recv(&mut note).is_err(), "something is told");
        manager.0.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        ptrace::detach(main, None).unwrap();
        assert_eq!(manager.hears(&["STATUS"]), "WATCHDOG=1");
    } else {
        eprintln!("SKIPPED in part: processes can't be traced here");
    }
    daemon.signal(Signal::SIGHUP);
    let told = manager.hears(&["STATUS", "WATCHDOG"]);
    assert!(told.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{told}");
    assert_eq!(manager.hears(&["STATUS", "WATCHDOG"]), "READY=1");
    daemon.signal(Signal::SIGTERM);
    assert!(manager.hears(&["STATUS", "WATCHDOG"]).starts_with("STOPPING=1"));
    daemon.ends_well();
}

/// Starts `lapisd` as systemd does, with sockets from 3 on that somebody else has bound.
fn activated(directory: &Path, sockets: &[(&str, &str)], flags: &[&str]) -> Command {
    const STARTER: &str = "
import os, socket, sys
names, kept = [], []
for index, pair in enumerate(sys.argv[1].split(',')):
    name, path = pair.split('=')
    kind = socket.SOCK_DGRAM if name == 'datagram' else socket.SOCK_STREAM
    one = socket.socket(socket.AF_UNIX, kind)
    one.bind(path)
    if kind == socket.SOCK_STREAM:
        one.listen()
    kept.append(os.dup(one.fileno()) if one.fileno() < 20 else one.fileno())
    names.append(name)
    kept.append(one)
fds = [os.dup2(kept[2 * i], 40 + i) for i in range(len(names))]
for index, fd in enumerate(fds):
    os.dup2(fd, 3 + index, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(names)), LISTEN_FDNAMES=':'.join(names))
os.execv(sys.argv[2], sys.argv[2:])
";
    let sockets: Vec<_> = sockets
        .iter()
        .map(|(name, file)| format!("{name}={}", directory.join(file).display()))
        .collect();
    let mut command = Command::new("python3");
    command.args(["-c", STARTER]).arg(sockets.join(",")).arg(lapisd());
    command.args(arguments(directory, flags));
    command
}

#[test]
fn sockets_that_are_there_already_are_served_and_left_in_place() {
    let directory = scratch();
    let sockets = [("lapisd.socket", "activated"), ("metrics", "numbers")];
    let mut command = activated(directory.path(), &sockets, SMALL);
    let daemon = Daemon::launch(&mut command, directory.path());
    let socket = directory.path().join("activated");
    assert!(!daemon.socket().exists(), "the configured one is not made");
    let client = Client::connect(&socket).unwrap();
    write_and_read(&client, 20);
    let scrape = Scrape::parse(&get_unix(&directory.path().join("numbers"), "/metrics").body);
    assert_eq!(scrape.get("lapis_sessions"), 1.0);
    drop(client);
    daemon.stop_well();
    assert!(socket.exists() && directory.path().join("numbers").exists());
}

#[test]
fn sockets_that_are_of_no_use_are_refused_with_what_to_do() {
    for (sockets, expected) in [
        (
            &[("datagram", "one")][..],
            "descriptor 3 (\"datagram\") from systemd is no listening Unix",
        ),
        (&[("a", "one"), ("b", "two")], "systemd passed two sockets for clients"),
    ] {
        let directory = scratch();
        let (status, said) = failed_start(&mut activated(directory.path(), sockets, SMALL));
        assert_eq!(status, 1, "{said}");
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn a_reload_changes_what_it_can_and_says_what_it_can_not() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("SKIPPED: the quota is of root");
    }
    let directory = scratch();
    let file = directory.path().join("lapisd.toml");
    std::fs::write(
        &file,
        "page_size = \"64KiB\"\nvram = \"1MiB\"\nram = \"2MiB\"\nnvme = \"4MiB\"\n",
    )
    .unwrap();
    let mut command = Command::new(lapisd());
    command.args(arguments(directory.path(), &[])).arg("--config").arg(&file);
    command.env_remove("LAPIS_LOG").env_remove("RUST_LOG");
    let daemon = Daemon::launch(&mut command, directory.path());
    let client = daemon.connect();
    write_and_read(&client, 16);
    std::fs::write(
        &file,
        "page_size = \"64KiB\"\nvram = \"512KiB\"\nram = \"2MiB\"\nnvme = \"8MiB\"\nqueue_depth = 3\n\
         log = \"debug\"\n[[quota]]\nsubject = \"user:0\"\nvram = \"256KiB\"\n",
    )
    .unwrap();
    daemon.signal(Signal::SIGHUP);
    let nvme = daemon.wait_for_log("reload: nvme stays as it is");
    assert!(nvme.contains("change the configuration and restart"), "{nvme}");
    daemon.wait_for_log("reload: queue_depth takes effect when the daemon is restarted");
    let done = daemon.wait_for_log("reloaded: ");
    assert!(done.ends_with("reloaded: log, quota, vram"), "{done}");
    until("VRAM shrinks", || {
        let vram = client.stats().unwrap().vram.capacity;
        if vram == 8 * PAGE { Ok(()) } else { Err(vram) }
    });
    let quotas = client.quotas().unwrap();
    assert_eq!(quotas.len(), 1);
    assert_eq!(quotas[0].quota.subject, QuotaSubject::Uid(0));
    let memory = client.allocate(6 * PAGE).unwrap();
    let error = memory.map(0..5 * PAGE, Access::Read).unwrap_err();
    assert_eq!(error.code(), Some(Code::OverQuota), "{error}");
    // The log has become that for debugging: requests can be followed.
    daemon.wait_for_log("kind=Map");
    // Nothing of a file with a mistake is taken.
    std::fs::write(&file, "vram = \"lots\"\n").unwrap();
    daemon.signal(Signal::SIGHUP);
    let error = daemon.wait_for_log("reload: nothing is changed");
    assert!(error.contains("lapisd.toml:1: vram: "), "{error}");
    // And back again; what could not change is not asked for any more.
    std::fs::write(
        &file,
        "page_size = \"64KiB\"\nvram = \"1MiB\"\nram = \"2MiB\"\nnvme = \"4MiB\"\n",
    )
    .unwrap();
    daemon.signal(Signal::SIGHUP);
    let done = daemon.wait_for_log("reloaded: ");
    assert!(done.ends_with("reloaded: log, quota, vram"), "{done}");
    assert_eq!(client.quotas().unwrap().len(), 0);
    until("VRAM grows", || {
        let vram = client.stats().unwrap().vram.capacity;
        if vram == 16 * PAGE { Ok(()) } else { Err(vram) }
    });
    drop((memory, client));
    still_serves(&daemon);
    daemon.stop_well();
}

#[test]
fn a_request_can_be_followed_by_its_number_and_names_of_clients_are_one_line() {
    let directory = scratch();
    let mut command = Command::new(lapisd());
    let flags = [SMALL, &["--log-format", "json"]].concat();
    command.args(arguments(directory.path(), &flags)).env("LAPIS_LOG", "debug");
    let daemon = Daemon::launch(&mut command, directory.path());
    let hostile = "x\n\u{1b}[31mERROR all is lost";
    let stream = UnixStream::connect(daemon.socket()).unwrap();
    let hello =
        Hello { version_min: 1, version_max: 1, features: 0, client_name: hostile.to_owned() };
    let mut bytes = Vec::new();
    lapis_proto::codec::encode(lapis_proto::ids::RequestId(1), &hello, 0, &mut bytes).unwrap();
    std::io::Write::write_all(&mut &stream, &bytes).unwrap();
    let json = |line: &str| -> serde_json::Value { serde_json::from_str(line).expect(line) };
    let named = json(&daemon.wait_for_log("ERROR all is lost"));
    assert_eq!(named["name"], "x\\n\\u{1b}[31mERROR all is lost");
    let client = daemon.connect();
    drop(client.allocate(1).unwrap().map(0..1, Access::Read).unwrap());
    let request = json(&daemon.wait_for_log("\"Map\""));
    let answer = daemon.wait_for_log("Some(Map)");
    let answer = json(&answer);
    assert_eq!(request["message"], "request");
    assert_eq!(answer["message"], "answer");
    assert_eq!(
        (&request["session"], &request["request"]),
        (&answer["session"], &answer["request"])
    );
    drop((stream, client));
    daemon.stop_well();
}

#[test]
fn a_line_that_comes_again_and_again_is_cut_short() {
    let directory = scratch();
    let (daemon, _) = Daemon::start_logged(directory.path(), SMALL);
    // Each says a line, "no session".
    for _ in 0..1500 {
        drop(UnixStream::connect(daemon.socket()).unwrap());
    }
    still_serves(&daemon);
    let log = daemon.stop_well();
    let lines = log.iter().filter(|line| line.contains("no session")).count();
    assert!((100..700).contains(&lines), "{lines}");
    let closed = address_in(&log);
    assert_eq!(closed, None, "no metrics unless they are asked for");
}

/// A file of the repository.
fn repository(path: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

/// What `systemd-analyze` says of a unit, which is nothing if all is well, and whether it is well.
fn analyze(arguments: &[&str], unit: &Path) -> (bool, String) {
    let output = Command::new("systemd-analyze").args(arguments).arg(unit).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn the_units_and_their_drop_ins_are_valid_and_expose_little() {
    if !has_program("systemd-analyze") {
        return;
    }
    let directory = scratch();
    let units = ["lapisd.service", "lapisd.socket", "lapisd-metrics.socket"];
    for unit in units {
        let text = std::fs::read_to_string(repository("systemd").join(unit)).unwrap();
        let text = text.replace("/usr/bin/lapisd", lapisd().to_str().unwrap());
        std::fs::write(directory.path().join(unit), text).unwrap();
    }
    for unit in units {
        let (well, said) = analyze(&["verify", "--man=no"], &directory.path().join(unit));
        assert!(well && said.is_empty(), "{unit}: {said}");
    }
    let drop_ins = directory.path().join("lapisd.service.d");
    std::fs::create_dir(&drop_ins).unwrap();
    let mut count = 0;
    for entry in std::fs::read_dir(repository("systemd/drop-ins")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), drop_ins.join(entry.file_name())).unwrap();
        count += 1;
    }
    assert!(count > 0);
    let (well, said) = analyze(&["verify", "--man=no"], &directory.path().join("lapisd.service"));
    assert!(well && said.is_empty(), "{said}");
    let security = ["security", "--offline=true", "--threshold=20"];
    let (well, said) = analyze(&security, &repository("systemd/lapisd.service"));
    assert!(well, "{said}");
}

#[test]
fn the_configuration_of_the_service_is_valid_and_has_its_socket_where_systemd_listens() {
    let file = repository("systemd/lapisd.toml");
    let mut command = Command::new(lapisd());
    let output = command.arg("--check").arg("--config").arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let effective: toml::Table = String::from_utf8(output.stdout).unwrap().parse().unwrap();
    let socket = std::fs::read_to_string(repository("systemd/lapisd.socket")).unwrap();
    let path = effective["socket"].as_str().unwrap();
    assert!(socket.contains(&format!("\nListenStream={path}\n")), "{path}");
    assert_eq!(effective["metrics"].as_str(), Some("127.0.0.1:9471"));
}
