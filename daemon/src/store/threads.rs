//! The store without io_uring: threads that wait in `pread` and `pwrite`.
//!
//! For machines that refuse io_uring (containers, hardened kernels).

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::errno::Errno;
use nix::libc::off_t;
use nix::sys::uio::{pread, pwrite};

use super::file::ModelFile;
use super::progress::Step;
use super::spill::Spill;
use super::task::{Buffer, Task};
use super::{FileIdentity, Store, StoreDone, StoreFault, StoreOp, StoreSetupError};
use crate::device::Full;
use crate::engine::ids::{FileId, Tag};
use crate::sys::memory::RamPool;
use crate::sys::waker::Waker;
use crate::sys::workers::Workers;

/// A store on threads. Dropping it waits for what is in flight.
#[derive(Debug)]
pub struct ThreadStore {
    pool: Arc<RamPool>,
    spill: Option<Arc<Spill>>,
    files: BTreeMap<FileId, Arc<ModelFile>>,
    workers: Workers<Task, StoreDone>,
}

impl ThreadStore {
    /// A store with at most `depth` operations in flight, on `threads` threads. At least one of each.
    ///
    /// # Errors
    /// [`StoreSetupError::Thread`].
    pub fn new(
        pool: Arc<RamPool>,
        spill: Option<Spill>,
        depth: u32,
        threads: u32,
        waker: &Waker,
    ) -> Result<Self, StoreSetupError> {
        let depth = depth.max(1);
        let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let (threads, depth) = (count(threads.clamp(1, depth)), count(depth));
        let workers = Workers::new("lapis-store", threads, depth, waker, work)
            .map_err(|source| StoreSetupError::Thread { source })?;
        Ok(Self { pool, spill: spill.map(Arc::new), files: BTreeMap::new(), workers })
    }

    /// Registers a file that a client opened for reading, with `O_DIRECT` or not.
    ///
    /// # Errors
    /// [`StoreFault::NotRegular`], [`StoreFault::NotReadable`], or `fstat`'s.
    pub fn open_file(&mut self, file: FileId, fd: OwnedFd) -> Result<FileIdentity, StoreFault> {
        let opened = ModelFile::open(fd)?;
        let identity = opened.identity();
        self.files.insert(file, Arc::new(opened));
        Ok(identity)
    }
}

impl Store for ThreadStore {
    fn submit(&mut self, tag: Tag, op: StoreOp) -> Result<(), Full> {
        let file = match op {
            StoreOp::ReadFile { file, .. } => self.files.get(&file).cloned(),
            StoreOp::ReadSpill { .. } | StoreOp::WriteSpill { .. } => None,
        };
        self.workers.submit(|| Task::new(tag, op, &self.pool, file, self.spill.as_ref()))
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        self.workers.poll(done);
    }

    fn close_file(&mut self, file: FileId) {
        self.files.remove(&file);
    }
}

fn work(mut task: Task) -> StoreDone {
    let outcome = run(&mut task);
    task.finish(outcome)
}

fn run(task: &mut Task) -> Result<(), StoreFault> {
    let mut step = task.begin().map_or_else(|end| end, |()| Step::Again);
    loop {
        match step {
            Step::Done => return Ok(()),
            Step::Fault(fault) => return Err(fault),
            Step::Again => {
                let answer = ask(task);
                step = task.advance(answer);
            }
        }
    }
}

fn ask(task: &mut Task) -> Result<usize, Errno> {
    let offset = off_t::try_from(task.segment().file_offset).map_err(|_| Errno::EOVERFLOW)?;
    match task.request() {
        (file, Buffer::Read(bytes)) => pread(file, bytes, offset),
        (file, Buffer::Write(bytes)) => pwrite(file, bytes, offset),
    }
}
