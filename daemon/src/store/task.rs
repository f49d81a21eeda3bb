//! One operation in flight: what it owns, how far it is, and what is checked when all has moved. Shared by the
//! stores, which only differ in how they ask the kernel.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::errno::Errno;
use xxhash_rust::xxh3::xxh3_64;

use super::file::ModelFile;
use super::progress::{Direction, Progress, Segment, Step};
use super::spill::Spill;
use super::{StoreDone, StoreFault, StoreOp};
use crate::engine::ids::{RamFrame, Tag};
use crate::sys::memory::{FrameRead, FrameWrite, RamPool};

/// What an operation owns while it is in flight.
#[derive(Debug)]
enum Work {
    ReadFile { file: Arc<ModelFile>, target: FrameWrite },
    ReadSpill { spill: Arc<Spill>, target: FrameWrite, checksum: u64 },
    WriteSpill { spill: Arc<Spill>, source: FrameRead, checksum: u64 },
}

/// One operation in flight.
#[derive(Debug)]
pub(crate) struct Task {
    tag: Tag,
    work: Work,
    progress: Progress,
    page_bytes: usize,
}

impl Task {
    /// Takes hold of the operation's frame. `file` is the one that a `ReadFile` names, `spill` the store's.
    ///
    /// # Panics
    /// If the operation names a frame that is in use or does not exist, more bytes than a page, or a spill that there
    /// is none of: bugs of the engine.
    pub(crate) fn new(
        tag: Tag,
        op: StoreOp,
        pool: &Arc<RamPool>,
        file: Option<Arc<ModelFile>>,
        spill: Option<&Arc<Spill>>,
    ) -> Self {
        let page = u32::try_from(pool.page_size()).expect("a pool has pages of at most 512 MiB");
        let write = |frame| {
            pool.claim_write(frame).expect("the engine gives a frame to one operation at a time")
        };
        let slot = |slot| {
            let spill = spill.expect("the engine spills only where there is a spill");
            (Arc::clone(spill), spill.offset(slot))
        };
        let (work, progress) = match op {
            StoreOp::ReadFile { file: id, offset, length, target } => {
                assert!(length <= page, "{length} bytes of {id:?} do not fit in a page");
                let file = file.expect("the engine reads only files that it registered");
                (
                    Work::ReadFile { file, target: write(target) },
                    Progress::new(Direction::Read, offset, length),
                )
            }
            StoreOp::ReadSpill { slot: from, checksum, target } => {
                let (spill, offset) = slot(from);
                let progress = Progress::new(Direction::Read, offset, page);
                (Work::ReadSpill { spill, target: write(target), checksum }, progress)
            }
            StoreOp::WriteSpill { source, slot: to } => {
                let (spill, offset) = slot(to);
                let source = pool
                    .claim_read(source)
                    .expect("the engine writes to no frame that is being spilled");
                (
                    Work::WriteSpill { spill, source, checksum: 0 },
                    Progress::new(Direction::Write, offset, page),
                )
            }
        };
        let page_bytes = usize::try_from(page).expect("Linux has no 16-bit machines");
        Self { tag, work, progress, page_bytes }
    }

    /// To be called once before the first segment: checks what needs no I/O, computes what is written along.
    ///
    /// # Errors
    /// How the operation ends without any I/O: well if nothing is to be read, badly if it lies behind the file's end.
    pub(crate) fn begin(&mut self) -> Result<(), Step> {
        let page_bytes = self.page_bytes;
        match &mut self.work {
            Work::ReadFile { file, .. } => {
                let (offset, end) = (self.progress.offset(), self.progress.end());
                let size = file.identity().size;
                if end > size {
                    return Err(Step::Fault(StoreFault::Truncated { offset, end: size }));
                }
                if offset == end { Err(Step::Done) } else { Ok(()) }
            }
            Work::ReadSpill { .. } => Ok(()),
            Work::WriteSpill { source, checksum, .. } => {
                *checksum = xxh3_64(&source.bytes()[..page_bytes]);
                Ok(())
            }
        }
    }

    /// What to ask the kernel for next.
    pub(crate) fn segment(&self) -> Segment {
        self.progress.segment()
    }

    /// Which way.
    pub(crate) fn direction(&self) -> Direction {
        self.progress.direction()
    }

    /// Of what.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match &self.work {
            Work::ReadFile { file, .. } => file.as_fd(),
            Work::ReadSpill { spill, .. } | Work::WriteSpill { spill, .. } => spill.as_fd(),
        }
    }

    /// The current segment, as `pread` and `pwrite` take it.
    pub(crate) fn request(&mut self) -> (BorrowedFd<'_>, Buffer<'_>) {
        let Segment { frame_offset, length, .. } = self.progress.segment();
        let range = frame_offset..frame_offset + length;
        match &mut self.work {
            Work::ReadFile { file, target } => {
                ((**file).as_fd(), Buffer::Read(&mut target.bytes_mut()[range]))
            }
            Work::ReadSpill { spill, target, .. } => {
                ((**spill).as_fd(), Buffer::Read(&mut target.bytes_mut()[range]))
            }
            Work::WriteSpill { spill, source, .. } => {
                ((**spill).as_fd(), Buffer::Write(&source.bytes()[range]))
            }
        }
    }

    /// Which RAM frame it owns.
    pub(crate) fn frame(&self) -> RamFrame {
        match &self.work {
            Work::ReadFile { target, .. } | Work::ReadSpill { target, .. } => target.frame(),
            Work::WriteSpill { source, .. } => source.frame(),
        }
    }

    /// Takes the kernel's answer to the current segment.
    pub(crate) fn advance(&mut self, answer: Result<usize, Errno>) -> Step {
        if let (Err(Errno::EINVAL), Work::ReadFile { file, .. }) = (answer, &self.work)
            && file.is_direct()
            && file.leave_direct().is_ok()
        {
            return Step::Again;
        }
        self.progress.advance(answer)
    }

    /// Ends the operation after [`Step::Done`] or [`Step::Fault`]: looks whether what has moved is right, and gives
    /// the frame back.
    pub(crate) fn finish(self, outcome: Result<(), StoreFault>) -> StoreDone {
        let result = match self.work {
            Work::ReadFile { file, mut target } => {
                file.forget_cached(self.progress.range());
                let (offset, end) = (self.progress.offset(), self.progress.end());
                let checked = match outcome {
                    // The file's own size tells more than where a read ended.
                    Ok(()) | Err(StoreFault::Truncated { .. }) => {
                        file.verify(offset, end).and(outcome)
                    }
                    Err(_) => outcome,
                };
                target.bytes_mut()[self.progress.needed()..self.progress.begin() + self.page_bytes]
                    .fill(0);
                checked.map(|()| 0)
            }
            Work::ReadSpill { target, checksum, .. } => {
                let found = outcome.map(|()| xxh3_64(&target.bytes()[..self.page_bytes]));
                match found {
                    Ok(found) if found != checksum => {
                        Err(StoreFault::Checksum { offset: self.progress.offset() })
                    }
                    found => found.map(|_| 0),
                }
            }
            Work::WriteSpill { checksum, .. } => outcome.map(|()| checksum),
        };
        StoreDone { tag: self.tag, result }
    }
}

/// What a segment moves.
#[derive(Debug)]
pub(crate) enum Buffer<'a> {
    /// Into these bytes.
    Read(&'a mut [u8]),
    /// From these bytes.
    Write(&'a [u8]),
}
