//! Tests in processes of their own, and the other processes that they talk to.
#![expect(
    unsafe_code,
    reason = "limits a process's time, takes the descriptor that it was started with"
)]

use std::ffi::OsStr;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use lapis_fake_cuda::harness::FakeCuda;

/// In the child: which test it is.
const TEST: &str = "RULES_TEST";
/// In a peer: what it is to do.
const ROLE: &str = "RULES_ROLE";
/// Where the machine is, for the harness.
const DIRECTORY: &str = "RULES_DIRECTORY";

/// Longest that a test may take. All together they take two; on a machine that is busy with much else, twenty.
const SECONDS_MAX: u32 = 120;

/// The path of the test that it is written in.
macro_rules! test_name {
    () => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here);
        path.split_once("::").and_then(|(_, path)| path.strip_suffix("::here")).expect("a path")
    }};
}
pub(crate) use test_name;

/// Runs the body in a process of its own, on a machine of its own with these settings.
pub(crate) fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce(&FakeCuda)) {
    let ended = spawn(test, settings, body);
    if let Some(status) = ended {
        assert!(status.success(), "{test}: {status}");
    }
}

/// Like `alone`, for a body that must end with a segmentation fault, after it called `reached`.
pub(crate) fn dies(test: &str, settings: &[(&str, &str)], body: impl FnOnce(&FakeCuda)) {
    let ended = spawn(test, settings, |fake| {
        body(fake);
        std::process::exit(1);
    });
    if let Some(status) = ended {
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "{test}: {status}");
    }
}

/// In the child: says that the body has come to where it was to come.
pub(crate) fn reached() {
    let directory = std::env::var_os(DIRECTORY).expect("set by the parent");
    std::fs::write(Path::new(&directory).join("reached"), "").expect("the directory is there");
}

fn spawn(
    test: &str,
    settings: &[(&str, &str)],
    body: impl FnOnce(&FakeCuda),
) -> Option<ExitStatus> {
    if std::env::var_os(TEST).as_deref() == Some(OsStr::new(test)) {
        limit();
        body(&machine());
        reached();
        return None;
    }
    let memory = Path::new("/dev/shm");
    let directory =
        if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let directory = directory.expect("a directory can be made");
    let fake = FakeCuda::new(directory.path()).expect("the directory is new");
    let mut child = this_test(test);
    child.env(TEST, test).env(DIRECTORY, directory.path());
    child.envs(fake.environment()).envs(settings.iter().copied());
    let output = child.output().expect("this test can be run again");
    // By way of the test's own output, which is shown when it fails.
    print!("{}", String::from_utf8_lossy(&output.stdout));
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    let status = output.status;
    // A wrong name would run no test at all, and succeed.
    assert!(directory.path().join("reached").exists(), "{test}: {status}, before its end");
    Some(status)
}

/// Ends this process with a signal when it takes too long: a driver that waits for ever fails the test.
fn limit() {
    // SAFETY: takes no pointers.
    unsafe { libc::alarm(SECONDS_MAX) };
}

/// The machine of this process.
pub(crate) fn machine() -> FakeCuda {
    let directory = std::env::var_os(DIRECTORY).expect("set by the parent");
    FakeCuda::open(Path::new(&directory))
}

fn this_test(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test has an executable"));
    command.args([test, "--exact", "--nocapture", "--include-ignored"]);
    command
}

/// Another process on the same machine, and the socket to it.
pub(crate) struct Peer {
    pub(crate) child: Child,
    pub(crate) socket: UnixStream,
}

impl Peer {
    pub(crate) fn start(role: &str, settings: &[(&str, &str)]) -> Self {
        let (socket, theirs) = UnixStream::pair().expect("sockets can be made");
        let mut command = this_test("processes::peer");
        command.env_remove(TEST).env(ROLE, role).stdin(Stdio::from(OwnedFd::from(theirs)));
        command.envs(settings.iter().copied());
        Self { child: command.spawn().expect("this test can be run again"), socket }
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it was killed");
    }

    /// Waits for its good end.
    pub(crate) fn finish(mut self) {
        drop(self.socket);
        let status = self.child.wait().expect("it was started");
        assert!(status.success(), "the peer: {status}");
    }
}

/// In a peer: its role, and the socket to the test.
pub(crate) fn role() -> Option<(String, UnixStream)> {
    let role = std::env::var(ROLE).ok()?;
    limit();
    // SAFETY: descriptor 0 is the socket that `Peer::start` made, and nobody else uses it.
    let socket = unsafe { UnixStream::from_raw_fd(0) };
    Some((role, socket))
}
