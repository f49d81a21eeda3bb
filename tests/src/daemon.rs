//! A `lapisd` process of a test's own.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};

use lapis::Client;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::binaries::{lapisd, scratch};

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    log: Receiver<String>,
    _directory: tempfile::TempDir,
}

impl Daemon {
    /// Starts `lapisd` with these flags beside `--socket` and `--spill-dir`, and waits until it serves.
    ///
    /// # Panics
    /// With its log, when it ends instead.
    #[must_use]
    pub fn start(flags: &[&str]) -> Self {
        let directory = scratch();
        let socket = directory.path().join("s");
        let mut child = Command::new(lapisd())
            .arg("--socket")
            .arg(&socket)
            .arg("--spill-dir")
            .arg(directory.path())
            .args(flags)
            .env("LAPIS_LOG", "info")
            .env("NO_COLOR", "1")
            .stderr(Stdio::piped())
            .spawn()
            .expect("lapisd starts");
        let stderr = BufReader::new(child.stderr.take().expect("piped"));
        let (sender, log) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let daemon = Self { child, socket, log, _directory: directory };
        daemon.wait_for_log("ready on");
        daemon
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

    /// Stops it as a service manager would and returns how it ended.
    ///
    /// # Panics
    /// When it can't be waited for.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.child.wait().expect("it is our child")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have been stopped and waited for already.
        let _gone = self.child.kill();
        let _waited = self.child.wait();
    }
}
