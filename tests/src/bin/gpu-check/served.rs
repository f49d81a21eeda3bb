//! A `lapisd` of a probe's own, and models of windows over its memory.

use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lapis::{Access, Allocation, Client, Stats};
use tempfile::TempDir;

use crate::Outcome;
use crate::setup::Setup;

/// Longest wait for a daemon that starts: it pins its RAM.
const START: Duration = Duration::from_secs(60);
const MAP_WAIT: Duration = Duration::from_secs(30);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(5);

/// A running daemon; killed when dropped.
pub(crate) struct Served {
    child: Child,
    log: PathBuf,
    socket: PathBuf,
    // Sockets have short names, so not in the scratch directory.
    _directory: TempDir,
}

impl Served {
    /// On the GPU, with tiers of so many MiB.
    pub(crate) fn start(setup: &Setup, [vram, ram]: [u64; 2], page: u64) -> Outcome<Served> {
        let directory = tempfile::tempdir()?;
        let (log, socket) = (directory.path().join("log"), directory.path().join("s"));
        let child = Command::new(setup.programs.join("lapisd"))
            .args(["--device", "cuda", "--spill-dir"])
            .arg(&setup.scratch)
            .arg("--socket")
            .arg(&socket)
            .args(["--vram", &format!("{vram}MiB"), "--ram", &format!("{ram}MiB")])
            .args(["--page-size", &format!("{page}MiB")])
            .env("LAPIS_LOG", "info")
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()
            .map_err(|error| format!("lapisd: {error}"))?;
        let mut served = Served { child, log, socket, _directory: directory };
        let end = Instant::now() + START;
        loop {
            let said = std::fs::read_to_string(&served.log)?;
            if said.contains("ready on") {
                return Ok(served);
            }
            let ended = served.child.try_wait()?;
            if ended.is_some() || Instant::now() > end {
                let last = said.lines().last().unwrap_or("nothing").to_owned();
                return Err(format!("lapisd does not serve; it said: {last}").into());
            }
            std::thread::park_timeout(LOOK);
        }
    }

    pub(crate) fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    pub(crate) fn connect(&self) -> Outcome<Client> {
        Ok(Client::connect(&self.socket)?)
    }

    /// Stops it as a service manager would; its status must be 0.
    pub(crate) fn stop(mut self) -> Outcome {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.child.id())?);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
        let status = self.child.wait()?;
        if status.success() {
            return Ok(());
        }
        let said = std::fs::read_to_string(&self.log)?;
        Err(format!("lapisd ended with {status}: {}", said.lines().last().unwrap_or("")).into())
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) -> Outcome {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It may have ended already.
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}

/// One pass through an allocation, window by window, as an engine goes through layers: the next two are prefetched if
/// they are to be read.
pub(crate) fn pass(
    client: &Client,
    memory: &Allocation,
    window: u64,
    access: Access,
) -> Outcome<Duration> {
    let size = memory.size();
    let at = |index: u64| -> Range<u64> { index * window..((index + 1) * window).min(size) };
    let windows = size.div_ceil(window);
    let started = Instant::now();
    for index in 0..windows {
        for ahead in index + 1..(index + 3).min(windows) {
            if access == Access::Read {
                memory.prefetch(at(ahead))?;
            }
        }
        drop(client.map(&[(memory, at(index))], access, MAP_WAIT)?);
    }
    Ok(started.elapsed())
}

/// Bytes that a pass moved over one hop, and how fast.
pub(crate) fn moved(
    client: &Client,
    hop: fn(&Stats) -> u64,
    pass: impl FnOnce() -> Outcome<Duration>,
) -> Outcome<f64> {
    let before = hop(&client.stats()?);
    let took = pass()?;
    let bytes = hop(&client.stats()?) - before;
    if bytes == 0 {
        return Err("lapisd moved nothing".into());
    }
    Ok(crate::rows::rate(bytes, took))
}

/// Writes a file of so many MiB that nobody's cache holds, and that doesn't compress.
pub(crate) fn file(setup: &Setup, name: &str, mib: u64) -> Outcome<PathBuf> {
    use std::io::Write;
    let path = setup.scratch.join(name);
    let mut file = File::create(&path)?;
    let mut block = vec![0; 1 << 20];
    for index in 0..mib {
        lapis::model::pattern(index, 0, &mut block);
        file.write_all(&block)?;
    }
    file.sync_all()?;
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    // Reads go past the cache anyway.
    let _kept = nix::fcntl::posix_fadvise(&file, 0, 0, advice);
    Ok(path)
}
