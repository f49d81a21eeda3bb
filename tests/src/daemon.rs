//! A `lapisd` process of a test's own.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use lapis::Client;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::binaries::{lapisd, scratch};
use crate::device;
use crate::wait::until_within;

/// A running daemon. When it is dropped it is killed, and its memory of the device must be free: clients go before.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    log: Receiver<String>,
    _directory: Option<TempDir>,
}

impl Daemon {
    /// Starts `lapisd` with these flags beside `--socket` and `--spill-dir`, and waits until it serves.
    ///
    /// # Panics
    /// With its log, when it ends instead.
    #[must_use]
    pub fn start(flags: &[&str]) -> Self {
        let directory = scratch();
        let mut daemon = Self::start_in(directory.path(), flags);
        daemon._directory = Some(directory);
        daemon
    }

    /// Like [`Self::start`], with socket and spill in a directory that outlives it.
    ///
    /// # Panics
    /// With its log, when it ends instead.
    #[must_use]
    pub fn start_in(directory: &Path, flags: &[&str]) -> Self {
        let mut command = Command::new(lapisd());
        Self::launch(command.args(arguments(directory, flags)), directory)
    }

    /// Starts a daemon with a command that has [`arguments`] of this directory, and waits until it serves.
    ///
    /// # Panics
    /// With its log, when it ends instead.
    #[must_use]
    pub fn launch(command: &mut Command, directory: &Path) -> Self {
        let (child, log) = spawn(command);
        let daemon = Self { child, socket: directory.join("s"), log, _directory: None };
        daemon.wait_for_log("ready on");
        daemon
    }

    /// Like [`Self::start_in`], with what the log said until it served.
    ///
    /// # Panics
    /// With its log, when it ends instead.
    #[must_use]
    pub fn start_logged(directory: &Path, flags: &[&str]) -> (Self, Vec<String>) {
        let (child, log) = spawn(Command::new(lapisd()).args(arguments(directory, flags)));
        let daemon = Self { child, socket: directory.join("s"), log, _directory: None };
        let mut said = Vec::new();
        for line in &daemon.log {
            if line.contains("ready on") {
                return (daemon, said);
            }
            said.push(line);
        }
        panic!("lapisd ended; it said:\n{}", said.join("\n"));
    }

    /// Waits for a line of the log that contains `text`, and returns it.
    ///
    /// # Panics
    /// When the daemon ends without it.
    pub fn wait_for_log(&self, text: &str) -> String {
        let mut seen = Vec::new();
        loop {
            let Ok(line) = self.log.recv() else {
                panic!("lapisd ended before it said {text:?}; it said:\n{}", seen.join("\n"));
            };
            if line.contains(text) {
                return line;
            }
            seen.push(line);
        }
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A new session.
    ///
    /// # Panics
    /// When there is none to be had.
    #[must_use]
    pub fn connect(&self) -> Client {
        Client::connect(&self.socket).expect("the daemon serves")
    }

    /// Open descriptors of the daemon.
    ///
    /// # Panics
    /// When it is gone.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("it runs").count()
    }

    /// A line of `/proc/PID/status` in KiB, e.g. `VmRSS`.
    ///
    /// # Panics
    /// When it is gone.
    #[must_use]
    pub fn status_kib(&self, key: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("it runs");
        let line = status.lines().find(|line| line.starts_with(key)).expect("a known key");
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
    }

    /// Sends a signal.
    ///
    /// # Panics
    /// When it is gone.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.pid()).expect("a pid is positive");
        kill(Pid::from_raw(pid), signal).expect("it runs");
    }

    /// Threads of the daemon, without those that the kernel adds for io_uring and ends when it likes.
    ///
    /// # Panics
    /// When it is gone.
    #[must_use]
    pub fn threads(&self) -> usize {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs");
        let names = tasks
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| !name.starts_with("iou-")).count()
    }

    /// Stops it as a service manager would and returns how it ended.
    ///
    /// # Panics
    /// When it can't be waited for.
    #[must_use]
    pub fn stop(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.child.wait().expect("it is our child")
    }

    /// Stops it, and sees that it ended well: with status 0, its socket removed, and no panic in its log. On the fake
    /// GPU all of its memory is free then, so clients must have gone before. Returns what the log said that nobody
    /// waited for.
    ///
    /// # Panics
    /// When it ended otherwise.
    pub fn stop_well(self) -> Vec<String> {
        let pid = self.pid();
        self.signal(Signal::SIGTERM);
        let log = self.ends_well();
        device::is_given_back(pid);
        log
    }

    /// Waits until a daemon that was told to stop has, and sees that it ended well, as [`Self::stop_well`] does.
    ///
    /// # Panics
    /// When it ended otherwise.
    pub fn ends_well(self) -> Vec<String> {
        let (status, log) = self.ends(Duration::from_secs(60));
        assert!(status.success(), "{status}; it said:\n{}", log.join("\n"));
        log
    }

    /// Waits until a daemon that was told to stop has, well or not, and returns its status and what its log said that
    /// nobody waited for. In any case its socket is removed, and it has not panicked.
    ///
    /// # Panics
    /// When it goes on for longer than `wait`.
    pub fn ends(mut self, wait: Duration) -> (ExitStatus, Vec<String>) {
        let status = until_within(wait, "the daemon ends", || {
            self.child.try_wait().expect("it is our child").ok_or("running")
        });
        let log: Vec<String> = self.log.iter().collect();
        let panicked = log.iter().any(|line| line.contains("panicked"));
        assert!(!panicked, "{status}; it said:\n{}", log.join("\n"));
        assert!(!self.socket.exists(), "the socket is still there");
        (status, log)
    }

    /// Kills it without warning.
    ///
    /// # Panics
    /// When it can't be waited for.
    pub fn kill(mut self) {
        self.child.kill().expect("it is our child");
        self.child.wait().expect("it is our child");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have been stopped and waited for already.
        let pid = self.child.id();
        let was_running = matches!(self.child.try_wait(), Ok(None));
        let _gone = self.child.kill();
        let _waited = self.child.wait();
        if was_running && !std::thread::panicking() {
            device::is_given_back(pid);
        }
    }
}

/// Flags for a daemon that has its socket `s` and its spill in this directory. Tiers of pages of 64 KiB are as large as
/// [`device::scale`] says.
#[must_use]
pub fn arguments(directory: &Path, flags: &[&str]) -> Vec<OsString> {
    let socket = directory.join("s").into_os_string();
    let own = ["--socket".into(), socket, "--spill-dir".into(), directory.into()];
    let small = flags.contains(&"64KiB");
    let scale = if small { device::scale() } else { 1 };
    own.into_iter().chain(flags.iter().map(|flag| scaled(flag, scale).into())).collect()
}

/// A size so many times as large; anything else is what it was.
fn scaled(flag: &str, scale: u64) -> String {
    let number = flag.find("KiB").or(flag.find("MiB"));
    let number = number.and_then(|end| flag[..end].parse::<u64>().ok().zip(Some(&flag[end..])));
    number.map_or_else(|| flag.to_owned(), |(number, unit)| format!("{}{unit}", number * scale))
}

/// Runs a daemon that can't start, and returns its exit status and what it said.
///
/// # Panics
/// When it starts.
#[must_use]
pub fn failed_start(command: &mut Command) -> (i32, String) {
    let (mut child, log) = spawn(command);
    let mut said = Vec::new();
    for line in log {
        if line.contains("ready on") {
            child.kill().expect("it is our child");
            child.wait().expect("it is our child");
            panic!("lapisd started; it said:\n{}", said.join("\n"));
        }
        said.push(line);
    }
    let status = child.wait().expect("it is our child");
    (status.code().unwrap_or(-1), said.join("\n"))
}

/// Starts a command and collects its log.
fn spawn(command: &mut Command) -> (Child, Receiver<String>) {
    // Whatever else the machine has.
    command.env("LAPISD_DEVICE", device::name());
    // What a test says about the log goes.
    if !command.get_envs().any(|(name, _)| name == "LAPIS_LOG") {
        command.env("LAPIS_LOG", "info");
    }
    let command = command.env("NO_COLOR", "1").stderr(Stdio::piped());
    let mut child = command.spawn().expect("lapisd starts");
    let stderr = BufReader::new(child.stderr.take().expect("piped"));
    let (sender, log) = channel();
    std::thread::spawn(move || {
        for line in stderr.lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    (child, log)
}
