//! The store on io_uring.
//!
//! The RAM pool's chunks are registered as fixed buffers, the files in a table, so that an operation costs the kernel
//! no page or file look-ups. The ring belongs to the thread that made it (that is what makes it cheap) and completions
//! announce themselves on the [`Waker`]. There are never more operations in flight than the submission queue has
//! entries, so pushing never fails and completions never overflow.
//!
//! The kernel writes into frames between submission and completion: a slot of the slab owns the task, the task owns
//! the frame, and dropping the store waits for every completion.
#![expect(unsafe_code, reason = "hands buffers and descriptors to the kernel")]

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};
use nix::errno::Errno;

use super::file::ModelFile;
use super::progress::{Direction, Segment, Step};
use super::spill::Spill;
use super::task::Task;
use super::{FileIdentity, Store, StoreDone, StoreFault, StoreOp, StoreSetupError};
use crate::device::Full;
use crate::engine::ids::{FileId, Tag};
use crate::sys::memory::RamPool;
use crate::sys::waker::Waker;

/// Entries of the registered file table; files beyond it are named by descriptor.
const FILES_MAX: u32 = 1024;
/// The spill's entry in the table.
const SPILL_ENTRY: u32 = 0;
/// More makes no disk faster.
const DEPTH_MAX: u32 = 4096;

/// A ring that nothing is registered with yet.
pub struct Ring {
    ring: IoUring,
    mode: &'static str,
}

impl Ring {
    /// A ring for `depth` operations, in the cheapest mode that the kernel knows. Only the calling thread may use it.
    ///
    /// # Errors
    /// [`StoreSetupError::Ring`]: `EPERM` or `ENOSYS` where io_uring is switched off.
    pub fn new(depth: u32) -> Result<Self, StoreSetupError> {
        let entries = depth.clamp(1, DEPTH_MAX);
        let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
        for mode in ["SINGLE_ISSUER|DEFER_TASKRUN", "COOP_TASKRUN", "plain"] {
            let mut builder = IoUring::builder();
            builder.dontfork();
            match mode {
                // Linux 6.1: completions are worked on when we ask for them, not in the middle of our work.
                "SINGLE_ISSUER|DEFER_TASKRUN" => {
                    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
                }
                // Linux 5.19.
                "COOP_TASKRUN" => {
                    builder.setup_coop_taskrun().setup_taskrun_flag();
                }
                _ => {}
            }
            match builder.build(entries) {
                Ok(ring) => return Ok(Self { ring, mode }),
                Err(error) => {
                    let unknown = error.raw_os_error() == Some(libc::EINVAL);
                    refused = error;
                    if !unknown {
                        break;
                    }
                }
            }
        }
        Err(StoreSetupError::Ring { call: "io_uring_setup", source: refused })
    }

    /// The mode, for people.
    #[must_use]
    pub fn mode(&self) -> &'static str {
        self.mode
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// A file and its entry in the registered table, if it has one.
#[derive(Debug)]
struct OpenFile {
    file: Arc<ModelFile>,
    entry: Option<u32>,
}

/// An operation that the kernel works on.
#[derive(Debug)]
struct InFlight {
    task: Task,
    entry: Option<u32>,
}

/// A store on io_uring. Dropping it waits for what is in flight.
#[derive(Debug)]
pub struct UringStore {
    /// First, so that it is gone before the frames that it may write to.
    ring: Ring,
    /// The slab: an operation's key is its index, which the kernel carries as `user_data`.
    slots: Vec<Option<InFlight>>,
    /// Keys that are free.
    free: Vec<usize>,
    /// Operations that ended without the kernel.
    ready: Vec<StoreDone>,
    depth: usize,
    files: BTreeMap<FileId, OpenFile>,
    /// Entries of the file table that are free.
    entries: Vec<u32>,
    spill: Option<(Arc<Spill>, Option<u32>)>,
    buffers_registered: bool,
    pool: Arc<RamPool>,
    waker: Waker,
    /// A ring with `SINGLE_ISSUER` answers `EEXIST` on any other thread.
    _not_send: PhantomData<Rc<()>>,
}

impl UringStore {
    /// A store with at most `depth` operations in flight, for the calling thread.
    ///
    /// # Errors
    /// [`StoreSetupError::Ring`].
    pub fn new(
        pool: Arc<RamPool>,
        spill: Option<Spill>,
        depth: u32,
        waker: Waker,
    ) -> Result<Self, StoreSetupError> {
        Self::with_ring(Ring::new(depth)?, pool, spill, depth, waker)
    }

    /// As [`UringStore::new`], on a ring made for the same `depth` on the same thread.
    ///
    /// # Errors
    /// [`StoreSetupError::Ring`].
    pub fn with_ring(
        ring: Ring,
        pool: Arc<RamPool>,
        spill: Option<Spill>,
        depth: u32,
        waker: Waker,
    ) -> Result<Self, StoreSetupError> {
        let depth = depth.clamp(1, DEPTH_MAX).min(ring.ring.params().sq_entries());
        let depth = usize::try_from(depth).unwrap_or(1);
        let submitter = ring.ring.submitter();
        submitter.register_eventfd(waker.as_fd().as_raw_fd()).map_err(|source| {
            StoreSetupError::Ring { call: "io_uring_register(EVENTFD)", source }
        })?;
        let buffers_registered = register_buffers(&ring.ring, &pool);
        // Entry 0 is the spill's; the lowest of the others are taken first.
        let entries = match submitter.register_files_sparse(FILES_MAX) {
            Ok(()) => (SPILL_ENTRY + 1..FILES_MAX).rev().collect(),
            Err(_) => Vec::new(),
        };
        let spill = spill.map(|spill| {
            let entry = if entries.is_empty() {
                None
            } else {
                enter(&ring.ring, SPILL_ENTRY, spill.as_fd().as_raw_fd())
            };
            (Arc::new(spill), entry)
        });
        Ok(Self {
            ring,
            slots: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            ready: Vec::with_capacity(depth),
            depth,
            files: BTreeMap::new(),
            entries,
            spill,
            buffers_registered,
            pool,
            waker,
            _not_send: PhantomData,
        })
    }

    /// Registers a file that a client opened for reading, with `O_DIRECT` or not.
    ///
    /// # Errors
    /// [`StoreFault::NotRegular`], [`StoreFault::NotReadable`], or `fstat`'s.
    pub fn open_file(&mut self, file: FileId, fd: OwnedFd) -> Result<FileIdentity, StoreFault> {
        let opened = ModelFile::open(fd)?;
        let identity = opened.identity();
        let entry = self.entries.pop();
        let entered =
            entry.and_then(|entry| enter(&self.ring.ring, entry, opened.as_fd().as_raw_fd()));
        if entered.is_none() {
            self.entries.extend(entry);
        }
        self.files.insert(file, OpenFile { file: Arc::new(opened), entry: entered });
        Ok(identity)
    }

    /// Whether the kernel works on the RAM pool's memory without looking it up each time.
    #[must_use]
    pub fn has_registered_buffers(&self) -> bool {
        self.buffers_registered
    }

    fn in_flight(&self) -> usize {
        self.depth - self.free.len() + self.ready.len()
    }

    /// Queues the current segment of the operation in slot `key`.
    fn push(&mut self, key: usize) {
        let InFlight { task, entry } =
            self.slots[key].as_ref().expect("the caller filled this slot");
        let Segment { frame_offset, length, file_offset } = task.segment();
        let (chunk, chunk_offset) = self.pool.chunk_of(task.frame());
        debug_assert!(chunk_offset + frame_offset + length <= 1 << 30);
        // SAFETY: a segment lies inside its frame, so `frame_offset` is inside the frame that `frame_ptr` begins.
        let address = unsafe { self.pool.frame_ptr(task.frame()).add(frame_offset) }.as_ptr();
        let length =
            u32::try_from(length).expect("a segment is at most a frame, which is below 1 GiB");
        let file = types::Fd(match entry {
            Some(entry) => RawFd::try_from(*entry).expect("the table has 1024 entries"),
            None => task.fd().as_raw_fd(),
        });
        let buffer = u16::try_from(chunk).ok().filter(|_| self.buffers_registered);
        let sqe = match (task.direction(), buffer) {
            (Direction::Read, Some(buffer)) => {
                opcode::ReadFixed::new(file, address, length, buffer).offset(file_offset).build()
            }
            (Direction::Read, None) => {
                opcode::Read::new(file, address, length).offset(file_offset).build()
            }
            (Direction::Write, Some(buffer)) => {
                opcode::WriteFixed::new(file, address, length, buffer).offset(file_offset).build()
            }
            (Direction::Write, None) => {
                opcode::Write::new(file, address, length).offset(file_offset).build()
            }
        };
        let flags =
            if entry.is_some() { squeue::Flags::FIXED_FILE } else { squeue::Flags::empty() };
        let sqe = sqe.flags(flags).user_data(u64::try_from(key).expect("a key is below the depth"));
        // SAFETY: the bytes are a frame's, which the task claims until its completion is taken out of the slot, and
        // the pool outlives the ring (field order) and all completions (`drop` waits); the file is open as long as
        // the task, which holds it.
        let pushed = unsafe { self.ring.ring.submission().push(&sqe) };
        pushed.expect("the queue has an entry for every slot, and a slot has one entry at most");
    }

    /// Tells the kernel of queued entries and lets it work on completions.
    fn enter_kernel(&mut self) {
        let mut queue = self.ring.ring.submission();
        if queue.is_empty() && !queue.taskrun() {
            return;
        }
        queue.sync();
        drop(queue);
        if let Err(error) = self.ring.ring.submit() {
            match error.raw_os_error() {
                // Short of memory, or interrupted: whoever polls next tries again, and someone must.
                Some(libc::EAGAIN | libc::EBUSY | libc::EINTR) => self.waker.wake(),
                _ => panic!("io_uring_enter refused what the store made sure of: {error}"),
            }
        }
    }

    /// Takes the kernel's answers; operations that are not through yet are queued again.
    fn take_answers(&mut self, done: &mut Vec<StoreDone>) {
        loop {
            let Some(answer) = self.ring.ring.completion().next() else { return };
            let key = usize::try_from(answer.user_data()).expect("we chose it");
            let in_flight =
                self.slots[key].as_mut().expect("the kernel answers once for each entry");
            let result = answer.result();
            let moved =
                usize::try_from(result).map_err(|_| Errno::from_raw(result.saturating_neg()));
            match in_flight.task.advance(moved) {
                Step::Again => self.push(key),
                Step::Done => self.end(key, Ok(()), done),
                Step::Fault(fault) => self.end(key, Err(fault), done),
            }
        }
    }

    fn end(&mut self, key: usize, outcome: Result<(), StoreFault>, done: &mut Vec<StoreDone>) {
        let InFlight { task, .. } = self.slots[key].take().expect("the caller looked");
        self.free.push(key);
        done.push(task.finish(outcome));
    }
}

impl Store for UringStore {
    fn submit(&mut self, tag: Tag, op: StoreOp) -> Result<(), Full> {
        if self.in_flight() >= self.depth {
            return Err(Full);
        }
        let open = match op {
            StoreOp::ReadFile { file, .. } => self.files.get(&file),
            StoreOp::ReadSpill { .. } | StoreOp::WriteSpill { .. } => None,
        };
        let entry = match (open, &self.spill) {
            (Some(open), _) => open.entry,
            (None, Some((_, entry))) => *entry,
            (None, None) => None,
        };
        let file = open.map(|open| Arc::clone(&open.file));
        let mut task =
            Task::new(tag, op, &self.pool, file, self.spill.as_ref().map(|(spill, _)| spill));
        let outcome = match task.begin() {
            Ok(()) | Err(Step::Again) => {
                let key = self.free.pop().expect("fewer are in flight than there are slots");
                self.slots[key] = Some(InFlight { task, entry });
                self.push(key);
                return Ok(());
            }
            Err(Step::Done) => Ok(()),
            Err(Step::Fault(fault)) => Err(fault),
        };
        self.ready.push(task.finish(outcome));
        self.waker.wake();
        Ok(())
    }

    fn flush(&mut self) {
        self.enter_kernel();
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        done.append(&mut self.ready);
        self.enter_kernel();
        self.take_answers(done);
        // What was queued again goes now; its answers announce themselves.
        if !self.ring.ring.submission().is_empty() {
            self.enter_kernel();
        }
    }

    fn close_file(&mut self, file: FileId) {
        if let Some(OpenFile { entry: Some(entry), .. }) = self.files.remove(&file)
            && enter(&self.ring.ring, entry, -1).is_some()
        {
            self.entries.push(entry);
        }
    }
}

impl Drop for UringStore {
    fn drop(&mut self) {
        while self.free.len() < self.depth {
            let waited = self.ring.ring.submit_and_wait(1);
            while let Some(answer) = self.ring.ring.completion().next() {
                let key = usize::try_from(answer.user_data()).expect("we chose it");
                if self.slots[key].take().is_some() {
                    self.free.push(key);
                }
            }
            match waited.map_err(|error| error.raw_os_error()) {
                Ok(_) | Err(Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(_) => {
                    // We cannot learn when the kernel is done with the frames: they must stay.
                    tracing::error!(
                        "io_uring does not answer any more; the RAM tier's memory stays mapped"
                    );
                    mem::forget(mem::take(&mut self.slots));
                    return;
                }
            }
        }
    }
}

/// Puts a descriptor in the registered table, or takes it out with -1. `None` when the kernel refuses.
fn enter(ring: &IoUring, entry: u32, fd: RawFd) -> Option<u32> {
    ring.submitter()
        .register_files_update(entry, &[fd])
        .ok()
        .filter(|&entered| entered == 1)
        .map(|_| entry)
}

fn register_buffers(ring: &IoUring, pool: &Arc<RamPool>) -> bool {
    if !pool.is_fixed() {
        // The kernel would keep hold of frames whose memory was given back meanwhile.
        return false;
    }
    let chunks: Vec<_> = pool
        .chunks()
        .map(|(base, length)| libc::iovec { iov_base: base.as_ptr().cast(), iov_len: length })
        .collect();
    // SAFETY: the chunks are mapped as long as the pool, which the store keeps until the ring is gone.
    match unsafe { ring.submitter().register_buffers(&chunks) } {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(
                %error,
                "the RAM tier is not registered with io_uring, so each operation costs more: raise RLIMIT_MEMLOCK \
                 (LimitMEMLOCK=infinity in the unit) or grant CAP_IPC_LOCK"
            );
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_made_or_refused_with_a_way_out() {
        match Ring::new(8) {
            Ok(ring) => assert!(ring.ring.params().sq_entries() >= 8, "{ring:?}"),
            Err(error) => assert!(error.to_string().contains("kernel.io_uring_disabled")),
        }
    }
}
