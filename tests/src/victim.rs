//! A client process that a test kills.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Runs until it is killed, or dropped.
#[derive(Debug)]
pub struct Victim(Child);

impl Victim {
    /// Starts `test-client`, at this path, in a role, and waits until it is in the middle of it. `None`, said aloud, if
    /// it is to be another user's and can't.
    ///
    /// # Panics
    /// When it fails.
    #[must_use]
    pub fn start(
        program: &Path,
        uid: Option<u32>,
        role: &str,
        socket: &Path,
        rest: &[&str],
    ) -> Option<Self> {
        let mut command = Command::new(program);
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let command = command.arg(role).arg(socket).args(rest);
        let mut child = match command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
            Err(error) if uid.is_some() => {
                eprintln!("SKIPPED: no process of another user: {error}");
                return None;
            }
            result => result.expect("test-client starts"),
        };
        let mut said = String::new();
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        output.read_line(&mut said).expect("a line");
        assert_eq!(said, "ready\n", "test-client {role} failed");
        Some(Self(child))
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it is gone.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.0.id()).expect("a pid is positive");
        kill(Pid::from_raw(pid), signal).expect("it is our child");
    }

    /// Kills it without warning.
    pub fn kill(self) {}
}

impl Drop for Victim {
    fn drop(&mut self) {
        // It may have died of itself: the test that waits for what it should do says so.
        let _gone = self.0.kill();
        let _waited = self.0.wait();
    }
}
