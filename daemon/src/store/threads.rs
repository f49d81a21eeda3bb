//! The store without io_uring: threads that wait in `pread` and `pwrite`.
//!
//! For machines that refuse io_uring (containers, hardened kernels). Operations go to the threads through a bounded
//! queue, completions come back through another; both are as long as operations may be in flight, so neither side
//! ever waits for the other.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

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

/// A store on threads. Dropping it waits for what is in flight.
#[derive(Debug)]
pub struct ThreadStore {
    pool: Arc<RamPool>,
    spill: Option<Arc<Spill>>,
    files: BTreeMap<FileId, Arc<ModelFile>>,
    depth: u32,
    in_flight: u32,
    /// `None` only while dropping.
    tasks: Option<SyncSender<Task>>,
    done: Receiver<StoreDone>,
    threads: Vec<JoinHandle<()>>,
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
        let length = usize::try_from(depth).unwrap_or(usize::MAX);
        let (tasks, queue) = sync_channel(length);
        let (finished, done) = sync_channel(length);
        let queue = Arc::new(Mutex::new(queue));
        let mut store = Self {
            pool,
            spill: spill.map(Arc::new),
            files: BTreeMap::new(),
            depth,
            in_flight: 0,
            tasks: Some(tasks),
            done,
            threads: Vec::new(),
        };
        for number in 0..threads.clamp(1, depth) {
            let (queue, finished, waker) = (Arc::clone(&queue), finished.clone(), waker.clone());
            let builder = thread::Builder::new().name(format!("lapis-store-{number}"));
            let thread = builder.spawn(move || work(&queue, &finished, &waker));
            store.threads.push(thread.map_err(|source| StoreSetupError::Thread { source })?);
        }
        Ok(store)
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
        if self.in_flight == self.depth {
            return Err(Full);
        }
        let file = match op {
            StoreOp::ReadFile { file, .. } => self.files.get(&file).cloned(),
            StoreOp::ReadSpill { .. } | StoreOp::WriteSpill { .. } => None,
        };
        let task = Task::new(tag, op, &self.pool, file, self.spill.as_ref());
        let tasks = self.tasks.as_ref().expect("only drop takes the queue");
        tasks
            .try_send(task)
            .expect("the queue holds `depth` tasks, and its threads live as long as it does");
        self.in_flight += 1;
        Ok(())
    }

    fn flush(&mut self) {}

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        while let Ok(finished) = self.done.try_recv() {
            self.in_flight -= 1;
            done.push(finished);
        }
    }

    fn close_file(&mut self, file: FileId) {
        self.files.remove(&file);
    }
}

impl Drop for ThreadStore {
    fn drop(&mut self) {
        drop(self.tasks.take());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a store thread panicked");
            }
        }
    }
}

/// A thread's life: until the store drops its end of the queue and the queue is empty.
fn work(queue: &Mutex<Receiver<Task>>, finished: &SyncSender<StoreDone>, waker: &Waker) {
    loop {
        let task = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(mut task) = task else { return };
        let outcome = run(&mut task);
        if finished.send(task.finish(outcome)).is_err() {
            return;
        }
        waker.wake();
    }
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
