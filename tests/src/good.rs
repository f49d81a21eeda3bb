//! A client that does everything right, to see that a daemon still serves after others did not.

use std::path::PathBuf;
use std::time::Duration;

use lapis::model::pattern;
use lapis::{Access, Client, Stats};

use crate::binaries::scratch;
use crate::bytes::{edit, read};
use crate::daemon::Daemon;
use crate::wait::until;

/// Where the good client's data begin in its file: off every alignment.
const OFFSET: u64 = 4105;
const WAIT: Duration = Duration::from_secs(30);

/// A file with known bytes.
#[derive(Debug)]
pub struct Sample {
    path: PathBuf,
    content: Vec<u8>,
    _directory: tempfile::TempDir,
}

impl Sample {
    /// A file of so many bytes that `seed` determines.
    ///
    /// # Panics
    /// When it can't be written.
    #[must_use]
    pub fn new(seed: u64, bytes: usize) -> Self {
        let directory = scratch();
        let path = directory.path().join("sample");
        let mut content = vec![0; bytes];
        pattern(seed, 0, &mut content);
        std::fs::write(&path, &content).expect("target is writable");
        Self { path, content, _directory: directory }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Its bytes.
    #[must_use]
    pub fn content(&self) -> &[u8] {
        &self.content
    }

    /// Streams it through VRAM in small mappings, from an odd offset on, and compares every byte.
    ///
    /// # Panics
    /// When a byte is wrong or a request is refused.
    pub fn stream(&self, client: &Client) {
        let content = &self.content[index(OFFSET)..];
        let length = content.len() as u64;
        let allocation = client.open_path(&self.path, OFFSET, length).expect("it is a file");
        let step = 3 * client.page_size();
        let mut start = 0;
        while start < length {
            let end = length.min(start + step);
            let mapping =
                client.map(&[(&allocation, start..end)], Access::Read, WAIT).expect("room is made");
            let expected = &content[index(start)..index(end)];
            assert!(*read(&mapping, 0) == *expected, "bytes {start}..{end} are wrong");
            start = end;
        }
    }
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it fits in memory")
}

/// Writes pages, more of them than VRAM has, and reads them back.
///
/// # Panics
/// When a byte is wrong or a request is refused.
pub fn write_and_read(client: &Client, pages: u64) {
    let size = client.page_size();
    let allocation = client.allocate(pages * size).expect("there is room");
    let range = |page: u64| [(&allocation, page * size..(page + 1) * size)];
    let mut expected = vec![0; index(size)];
    for page in 0..pages {
        let mut mapping = client.map(&range(page), Access::Overwrite, WAIT).expect("room is made");
        edit(&mut mapping, 0, |bytes| pattern(page, 0, bytes));
    }
    for page in 0..pages {
        let mapping = client.map(&range(page), Access::Read, WAIT).expect("room is made");
        pattern(page, 0, &mut expected);
        assert!(*read(&mapping, 0) == expected, "page {page} is not what was written");
    }
}

/// Sees that a daemon serves a good client the right bytes, and that nothing of anybody else is left.
///
/// # Panics
/// When it does not, or something is left.
pub fn still_serves(daemon: &Daemon) {
    {
        let client = daemon.connect();
        Sample::new(u64::from(daemon.pid()), 1_500_001).stream(&client);
        write_and_read(&client, 24);
    }
    nothing_is_left(daemon);
}

/// Waits until a daemon holds no session but the one that asks, and nothing in any tier.
///
/// # Panics
/// With the counters, when something stays.
pub fn nothing_is_left(daemon: &Daemon) {
    let client = daemon.connect();
    until("something is left of clients that are gone", || {
        let stats = client.stats().expect("the daemon serves");
        let Stats { sessions, allocations, mappings, quarantined_frames, .. } = stats;
        let used = (stats.vram.used, stats.ram.used, stats.nvme.used);
        let pinned = (stats.vram.pinned, stats.ram.pinned, stats.nvme.pinned);
        let left = (sessions, allocations, mappings, quarantined_frames, used, pinned);
        if left == (1, 0, 0, 0, (0, 0, 0), (0, 0, 0)) { Ok(()) } else { Err(left) }
    });
}
