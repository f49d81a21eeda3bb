//! A machine with fake GPUs, and daemons on it.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use lapis::Client;
use lapis_fake_cuda::harness::FakeCuda;
use lapis_tests::binaries::{lapisctl, lapisd};
use lapis_tests::peer::Peer;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Longest wait for what should come at once, on a busy machine.
pub(crate) const WAIT: Duration = Duration::from_secs(60);

pub(crate) struct Machine {
    pub(crate) fake: FakeCuda,
    settings: Vec<(&'static str, String)>,
    directory: TempDir,
}

impl Machine {
    /// With these settings of the fake driver, for each process.
    pub(crate) fn new(settings: &[(&'static str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let fake = FakeCuda::new(directory.path()).unwrap();
        let settings = settings.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Self { fake, settings, directory }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
    }

    /// `lapisd` with VRAM and RAM of a few frames, unless the flags say otherwise; with the fake's library.
    pub(crate) fn command(&self, flags: &[&str]) -> Command {
        let mut command = Command::new(lapisd());
        command.arg("--socket").arg(self.socket()).arg("--spill-dir").arg(self.directory.path());
        let defaults = [("--vram", "16MiB"), ("--ram", "32MiB")];
        for (flag, value) in defaults.iter().filter(|(flag, _)| !flags.contains(flag)) {
            command.args([flag, value]);
        }
        if !flags.contains(&"--libcuda") {
            command.arg("--libcuda").arg(self.fake.library());
        }
        command.args(flags).env("NO_COLOR", "1").env("LAPIS_LOG", "info").stderr(Stdio::piped());
        let [_, state] = self.fake.environment();
        command.envs([state]).envs(self.settings.iter().cloned());
        command
    }

    /// Starts a daemon and waits until it serves.
    pub(crate) fn start(&self, flags: &[&str]) -> Daemon {
        let mut child = self.command(flags).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let (mut said, mut line) = (String::new(), String::new());
        while !line.contains("ready on") {
            said.push_str(&line);
            line.clear();
            let read = log.read_line(&mut line).unwrap();
            assert_ne!(read, 0, "lapisd ended; it said:\n{said}");
        }
        let rest = std::thread::spawn(move || std::io::read_to_string(log).unwrap_or_default());
        Daemon { child, said, rest: Some(rest), socket: self.socket() }
    }

    /// Runs a daemon that can't start, and returns what it said last.
    pub(crate) fn refused(&self, flags: &[&str], status: i32) -> String {
        let output = self.command(flags).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{said}");
        let error = said.find("error: ").unwrap_or_else(|| panic!("no error: {said}"));
        said[error..].trim().to_owned()
    }

    pub(crate) fn memory_used(&self) -> u64 {
        self.fake.memory_used(0).unwrap()
    }
}

/// A running daemon; killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    /// What it said until it served.
    pub(crate) said: String,
    rest: Option<std::thread::JoinHandle<String>>,
    socket: PathBuf,
}

impl Daemon {
    pub(crate) fn connect(&self) -> Client {
        Client::connect(&self.socket).unwrap()
    }

    /// A client that speaks the protocol and touches no memory, so that it needs no driver.
    pub(crate) fn peer(&self) -> Peer {
        Peer::greeted(&self.socket)
    }

    /// `lapisctl status`, which must answer soon.
    pub(crate) fn status(&self) -> String {
        let mut command = Command::new(lapisctl());
        command.args(["status", "--socket"]).arg(&self.socket);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        until("lapisctl status", || child.try_wait().unwrap().is_some());
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// Waits for its end, and returns what it said since it served.
    pub(crate) fn ends(mut self) -> (ExitStatus, String) {
        let mut status = None;
        until("the daemon ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        (status.unwrap(), self.rest.take().unwrap().join().unwrap())
    }

    /// Stops it, and sees that it ended well. Returns what it said since it served.
    pub(crate) fn stop(self) -> String {
        self.signal(Signal::SIGTERM);
        let (status, said) = self.ends();
        assert!(status.success(), "{status}: {said}");
        assert!(!said.contains(" ERROR ") && !said.contains("panicked"), "{said}");
        said
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended and been waited for already.
        let _gone = self.child.kill();
        let _waited = self.child.wait();
    }
}

/// Waits for what another process does.
pub(crate) fn until(what: &str, mut look: impl FnMut() -> bool) {
    let end = Instant::now() + WAIT;
    while !look() {
        assert!(Instant::now() < end, "{what}: not within {WAIT:?}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}
