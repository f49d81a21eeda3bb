//! The store: reads of model files, reads and writes of the spill, into and out of RAM frames.
//!
//! Implementations: [`uring`], [`threads`] where io_uring is not to be had, and the simulator's virtual one in
//! the tests. A store never blocks its caller. An operation in flight owns its RAM frame.
//!
//! Alignment: a page of a file starts at any byte. A RAM frame is a page and 4 KiB; byte `o` of a file lands in the
//! frame such that the page begins at [`shift`]`(offset)`, so that reads may be rounded out to 4 KiB.

use crate::device::Full;
use crate::engine::ids::{FileId, RamFrame, SpillSlot, Tag};

mod any;
mod file;
mod progress;
pub mod spill;
mod task;
pub mod threads;
pub mod uring;

pub use any::AnyStore;

/// Reads are rounded out to this; no device needs more.
pub const ALIGNMENT: u64 = 4096;

/// Where a page that begins at byte `offset` of its file begins in its RAM frame.
#[must_use]
pub fn shift(offset: u64) -> u32 {
    u32::try_from(offset % ALIGNMENT).expect("a remainder of 4096 fits")
}

/// One operation on one RAM frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreOp {
    /// Reads `length` bytes at `offset` of a file; they land at [`shift`]`(offset)`, zeros follow to the page's end.
    ReadFile {
        /// A file registered with the store.
        file: FileId,
        /// First byte.
        offset: u64,
        /// Bytes, at most a page.
        length: u32,
        /// Target.
        target: RamFrame,
    },
    /// Reads a page back from the spill, to byte 0 of the frame, and checks it.
    ReadSpill {
        /// Where it lies.
        slot: SpillSlot,
        /// XXH3-64 of the page, as [`StoreOp::WriteSpill`] returned it.
        checksum: u64,
        /// Target.
        target: RamFrame,
    },
    /// Writes the page at byte 0 of the frame to the spill.
    WriteSpill {
        /// Source.
        source: RamFrame,
        /// Where to.
        slot: SpillSlot,
    },
}

/// The outcome of one operation.
#[derive(Debug)]
pub struct StoreDone {
    /// As submitted.
    pub tag: Tag,
    /// XXH3-64 of the page for `WriteSpill`, 0 otherwise.
    pub result: Result<u64, StoreFault>,
}

/// Why an operation failed. The RAM frame's content is undefined then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StoreFault {
    /// The system call failed.
    #[error("I/O failed at byte {offset}: {errno}")]
    Io {
        /// Byte offset in the file or spill.
        offset: u64,
        /// Why.
        errno: nix::errno::Errno,
    },
    /// The file ended early.
    #[error("the file ends at byte {end}, inside the page at byte {offset}")]
    Truncated {
        /// First byte asked for.
        offset: u64,
        /// Where the file ended.
        end: u64,
    },
    /// Size, mtime or ctime differ from when the file was opened.
    #[error("the file was changed since it was opened, seen at byte {offset}")]
    Changed {
        /// First byte asked for.
        offset: u64,
    },
    /// What was passed as a model file is none: a directory, a pipe, a device.
    #[error("the descriptor is not of a regular file: pass a regular file")]
    NotRegular,
    /// The file was opened for writing only.
    #[error("the file is not open for reading: open it read-only and pass that descriptor")]
    NotReadable,
    /// A spilled page came back different.
    #[error("checksum mismatch at byte {offset} of the spill")]
    Checksum {
        /// Byte offset in the spill.
        offset: u64,
    },
}

/// The store could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum StoreSetupError {
    /// No ring.
    #[error(
        "{call} failed: {source}; where io_uring is switched off (kernel.io_uring_disabled, seccomp), use threads"
    )]
    Ring {
        /// The call that failed.
        call: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// No thread.
    #[error(
        "a store thread could not be started: {source}; raise the limit on processes (ulimit -u, pids.max)"
    )]
    Thread {
        /// Why.
        source: std::io::Error,
    },
}

/// A file's identity: what must not change while it is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileIdentity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// Modification time, ns since the epoch.
    pub mtime_ns: i128,
    /// Change time, ns since the epoch.
    pub ctime_ns: i128,
}

/// A store that reads and writes RAM frames.
pub trait Store {
    /// Starts an operation, or gives it back when the queue is full. Never blocks.
    ///
    /// # Errors
    /// [`Full`]: nothing was started.
    fn submit(&mut self, tag: Tag, op: StoreOp) -> Result<(), Full>;
    /// Makes submitted operations go; called once after a batch of submits.
    fn flush(&mut self);
    /// Appends what has completed since the last call. Never blocks.
    fn poll(&mut self, done: &mut Vec<StoreDone>);
    /// Forgets a file. No operation on it is in flight.
    fn close_file(&mut self, file: FileId);
}
