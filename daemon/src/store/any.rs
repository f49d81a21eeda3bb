//! The store that this machine allows.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::spill::Spill;
use super::threads::ThreadStore;
use super::uring::{Ring, UringStore};
use super::{FileIdentity, Store, StoreDone, StoreFault, StoreOp, StoreSetupError};
use crate::device::Full;
use crate::engine::ids::{FileId, Tag};
use crate::sys::memory::RamPool;
use crate::sys::waker::Waker;

/// Threads that wait in system calls, where io_uring is not to be had: beyond what a disk needs, they only cost.
const THREADS_MAX: u32 = 8;

/// A store on io_uring, or on threads where that is refused.
#[derive(Debug)]
pub enum AnyStore {
    /// On io_uring.
    Uring(Box<UringStore>),
    /// On threads.
    Threads(ThreadStore),
}

impl AnyStore {
    /// The fastest store there is, with at most `depth` operations in flight, for the calling thread. With
    /// `force_threads`, io_uring is not even tried.
    ///
    /// # Errors
    /// [`StoreSetupError`].
    pub fn open(
        pool: Arc<RamPool>,
        spill: Option<Spill>,
        depth: u32,
        waker: Waker,
        force_threads: bool,
    ) -> Result<Self, StoreSetupError> {
        if force_threads {
            tracing::info!("reading and writing with threads, as configured");
        } else {
            match Ring::new(depth) {
                Ok(ring) => {
                    tracing::info!(mode = ring.mode(), depth, "reading and writing with io_uring");
                    return UringStore::with_ring(ring, pool, spill, depth, waker)
                        .map(|store| Self::Uring(Box::new(store)));
                }
                Err(error) => tracing::warn!(
                    %error,
                    "reading and writing with threads, as io_uring is refused: see the sysctl kernel.io_uring_disabled, \
                     the service's SystemCallFilter or the container's seccomp profile"
                ),
            }
        }
        ThreadStore::new(pool, spill, depth, depth.min(THREADS_MAX), &waker).map(Self::Threads)
    }

    /// Registers a file that a client opened for reading, with `O_DIRECT` or not.
    ///
    /// # Errors
    /// [`StoreFault::NotRegular`], [`StoreFault::NotReadable`], or `fstat`'s.
    pub fn open_file(&mut self, file: FileId, fd: OwnedFd) -> Result<FileIdentity, StoreFault> {
        match self {
            Self::Uring(store) => store.open_file(file, fd),
            Self::Threads(store) => store.open_file(file, fd),
        }
    }

    /// How it reads and writes: `io_uring` or `threads`; for people.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Uring(_) => "io_uring",
            Self::Threads(_) => "threads",
        }
    }
}

impl Store for AnyStore {
    fn submit(&mut self, tag: Tag, op: StoreOp) -> Result<(), Full> {
        match self {
            Self::Uring(store) => store.submit(tag, op),
            Self::Threads(store) => store.submit(tag, op),
        }
    }

    fn flush(&mut self) {
        match self {
            Self::Uring(store) => store.flush(),
            Self::Threads(store) => store.flush(),
        }
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        match self {
            Self::Uring(store) => store.poll(done),
            Self::Threads(store) => store.poll(done),
        }
    }

    fn close_file(&mut self, file: FileId) {
        match self {
            Self::Uring(store) => store.close_file(file),
            Self::Threads(store) => store.close_file(file),
        }
    }
}
