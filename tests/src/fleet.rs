//! Client processes that work, of which some are killed or stopped, and others take their place.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::device::{Device, device};
use crate::random::Random;
use crate::wait::until_within;

/// Where the processes come from.
#[derive(Debug)]
pub struct Plan {
    /// `test-client`.
    pub program: PathBuf,
    /// Of the daemon.
    pub socket: PathBuf,
    /// What they work on, each named by the seed of its pattern.
    pub files: Vec<PathBuf>,
    /// Every other one is this user's, if there is one.
    pub other_user: Option<u32>,
    /// Determines what each does.
    pub seed: u64,
}

/// The processes. Those that are left when it is dropped are killed.
#[derive(Debug)]
pub struct Fleet {
    plan: Plan,
    members: Vec<Member>,
    random: Random,
    started: u64,
    stopped: Option<usize>,
}

/// One process.
#[derive(Debug)]
struct Member {
    child: Child,
    other_user: bool,
}

impl Fleet {
    /// Starts so many, and waits until all are at work.
    ///
    /// # Panics
    /// When one fails.
    #[must_use]
    pub fn start(plan: Plan, count: usize) -> Self {
        let random = Random::new(plan.seed);
        let mut fleet = Self { plan, members: Vec::new(), random, started: 0, stopped: None };
        for index in 0..count {
            let member = fleet.launch(index % 2 == 1);
            fleet.members.push(member);
        }
        fleet.members.iter_mut().for_each(Member::wait_until_ready);
        fleet
    }

    fn launch(&mut self, other_user: bool) -> Member {
        self.started += 1;
        let mut command = Command::new(&self.plan.program);
        command.arg("work").arg(&self.plan.socket);
        command.arg((self.random.below(1 << 32)).to_string()).args(&self.plan.files);
        let other_user = other_user && self.plan.other_user.is_some();
        if let (true, Some(uid)) = (other_user, self.plan.other_user) {
            command.uid(uid).gid(uid);
        }
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        Member { child: child.expect("test-client starts"), other_user }
    }

    /// Started so far.
    #[must_use]
    pub fn started(&self) -> u64 {
        self.started
    }

    /// Kills one without warning, whatever it is doing, and starts another in its place.
    ///
    /// # Panics
    /// When the new one fails.
    pub fn replace_one(&mut self) {
        let index = self.random.index(self.members.len());
        if self.stopped == Some(index) {
            self.stopped = None;
        }
        self.members[index].kill();
        let other_user = self.members[index].other_user;
        self.members[index] = self.launch(other_user);
        // It is not waited for: some are killed before they have said hello.
    }

    /// Stops one where it is, without ending it, and lets the one that was stopped before go on.
    ///
    /// Not on the fake GPU: one that is stopped while it holds the lock of the fake's ledger would stop everybody, which no
    /// driver does.
    pub fn stop_another(&mut self) {
        if device() == Device::Fake {
            return;
        }
        self.resume();
        let index = self.random.index(self.members.len());
        self.members[index].signal(Signal::SIGSTOP);
        self.stopped = Some(index);
    }

    fn resume(&mut self) {
        if let Some(index) = self.stopped.take() {
            self.members[index].signal(Signal::SIGCONT);
        }
    }

    /// None has ended by itself: each does when a byte is wrong.
    ///
    /// # Panics
    /// When one has.
    pub fn is_well(&mut self) {
        for member in &mut self.members {
            let ended = member.child.try_wait().expect("it is our child");
            assert!(ended.is_none(), "a client ended: {ended:?}; it has said why");
        }
    }

    /// Tells all to end, and sees that they end well.
    ///
    /// # Panics
    /// When one does not.
    pub fn end(mut self) {
        self.resume();
        for member in &mut self.members {
            drop(member.child.stdin.take());
        }
        for member in &mut self.members {
            let status = until_within(crate::worker::WAIT, "a client ends", || {
                member.child.try_wait().expect("it is our child").ok_or("running")
            });
            assert!(status.success(), "a client ended with {status}; it has said why");
        }
    }
}

impl Member {
    fn wait_until_ready(&mut self) {
        let mut said = String::new();
        let mut output = BufReader::new(self.child.stdout.as_mut().expect("piped"));
        output.read_line(&mut said).expect("a line");
        assert_eq!(said, "ready\n", "a client failed; it has said why");
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid is positive");
        kill(Pid::from_raw(pid), signal).expect("it is our child");
    }

    fn kill(&mut self) {
        // It may have ended by itself: whoever looks whether all are well says so.
        let _gone = self.child.kill();
        let _waited = self.child.wait();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A file with the pattern that its name says.
///
/// # Panics
/// When it can't be written.
#[must_use]
pub fn known_file(directory: &Path, seed: u64, bytes: usize) -> PathBuf {
    let path = directory.join(seed.to_string());
    let mut content = vec![0; bytes];
    lapis::model::pattern(seed, 0, &mut content);
    std::fs::write(&path, content).expect("target is writable");
    path
}
