//! The device: VRAM frames, and copies between them and RAM frames.
//!
//! Two implementations here, [`cuda`] (frames are a GPU's memory) and [`sim`] (frames are memfds), and the simulator's
//! virtual one in the tests. [`open`] chooses. A device never blocks its caller: [`Device::submit`] queues or refuses, [`Device::poll`] hands out what is
//! done. An operation in flight owns its frames: the engine gives neither to anyone before the completion.

use std::borrow::Cow;
use std::os::fd::OwnedFd;

use lapis::cuda::driver::CallFailed;
use lapis_proto::ids::VramFrame;
use lapis_proto::message::DeviceKind;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::engine::ids::{RamFrame, Tag};
use crate::sys::memory::MemoryError;

pub mod cuda;
pub mod open;
pub mod sim;

pub use cuda::CudaError;

/// Descriptors beside one a frame: sockets, files, and those on their way to clients.
const DESCRIPTORS_SPARE: u64 = 1024;

/// One operation on whole frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceOp {
    /// Copies one page: `source` from byte `shift` on, to all of `target`.
    Up {
        /// Holds the page at `shift`.
        source: RamFrame,
        /// Bytes before the page's first byte in the RAM frame, below 4096.
        shift: u32,
        /// Overwritten whole.
        target: VramFrame,
    },
    /// Copies one page: all of `source` to `target` from byte 0 on.
    Down {
        /// Holds the page.
        source: VramFrame,
        /// Its first page-size bytes are overwritten.
        target: RamFrame,
    },
    /// Fills a frame with zeros.
    Zero {
        /// Overwritten whole.
        target: VramFrame,
    },
    /// Gives a frame's memory back to the system. No process has it mapped; its bytes are gone.
    Release {
        /// Which.
        target: VramFrame,
    },
    /// Gives a released frame memory again, which reads as zeros.
    Restore {
        /// Which.
        target: VramFrame,
    },
}

/// The outcome of one operation.
#[derive(Debug)]
pub struct DeviceDone {
    /// As submitted.
    pub tag: Tag,
    /// What came of it.
    pub result: Result<(), DeviceFault>,
}

/// The device failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DeviceFault {
    /// A frame could not be created, mapped or exported.
    #[error("VRAM frame {frame}: {call} failed: {source}")]
    Frame {
        /// Which.
        frame: u32,
        /// The call that failed.
        call: &'static str,
        /// Why.
        source: nix::errno::Errno,
    },
    /// The driver refused something for a frame.
    #[error("VRAM frame {frame}: {failed}; {fix}")]
    Driver {
        /// Which.
        frame: u32,
        /// The call.
        failed: CallFailed,
        /// What to do.
        fix: &'static str,
    },
    /// The GPU can't be used as configured.
    #[error(transparent)]
    Cuda(Box<CudaError>),
    /// The device could not be set up, before any frame: threads, addresses.
    #[error("setting up the device: {call} failed: {source}")]
    Setup {
        /// The call that failed.
        call: &'static str,
        /// Why.
        source: nix::errno::Errno,
    },
    /// The frames are more than a limit of the system allows.
    #[error("{frames} VRAM frames need {limit} of {needed}, it is {found}: {fix}")]
    Limit {
        /// Frames asked for.
        frames: u32,
        /// The limit's name.
        limit: &'static str,
        /// What it would have to be.
        needed: u64,
        /// What it is.
        found: u64,
        /// What to do.
        fix: &'static str,
    },
    /// The frames' memory cannot be had.
    #[error("VRAM frames: {0}")]
    Memory(#[from] MemoryError),
    /// The device is gone; no operation will succeed any more.
    #[error("the device is lost: {reason}")]
    Lost {
        /// What it said.
        reason: Cow<'static, str>,
    },
}

impl From<CudaError> for DeviceFault {
    fn from(error: CudaError) -> Self {
        Self::Cuda(Box::new(error))
    }
}

/// Raises the limit of descriptors as far as it goes, and refuses frames, each of which takes one, that it does not
/// suffice for.
fn check_descriptors(frames: u32) -> Result<(), DeviceFault> {
    let setup = |call| move |source| DeviceFault::Setup { call, source };
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).map_err(setup("getrlimit"))?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).map_err(setup("setrlimit"))?;
    }
    let needed = u64::from(frames) + DESCRIPTORS_SPARE;
    if hard < needed {
        let fix = "raise LimitNOFILE= or ulimit -n, or take a larger page_size";
        let limit = "RLIMIT_NOFILE";
        return Err(DeviceFault::Limit { frames, limit, needed, found: hard, fix });
    }
    Ok(())
}

/// The queue is full: poll, then submit again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

/// What a device is.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Kind, as told to clients.
    pub kind: DeviceKind,
    /// VRAM and RAM are one memory.
    pub unified: bool,
    /// UUID, as told to clients; zeros on sim.
    pub uuid: [u8; 16],
    /// For people.
    pub name: String,
    /// Frames.
    pub frames: u32,
    /// Those of them, the first ones, that have their memory when the device is open. The others are to be restored.
    pub frames_ready: u32,
    /// What the frames are made of: `hugetlb`, `transparent huge pages`, `4 KiB pages`; for people.
    pub page_kind: &'static str,
}

/// A device that owns the VRAM frames.
pub trait Device {
    /// What it is.
    fn info(&self) -> &DeviceInfo;
    /// Starts an operation, or gives it back when the queue is full. Never blocks.
    ///
    /// # Errors
    /// [`Full`]: nothing was started.
    fn submit(&mut self, tag: Tag, op: DeviceOp) -> Result<(), Full>;
    /// Appends what has completed since the last call. Never blocks.
    fn poll(&mut self, done: &mut Vec<DeviceDone>);
    /// A descriptor through which another process can map this frame.
    ///
    /// # Errors
    /// [`DeviceFault::Frame`], e.g. out of descriptors.
    fn export(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault>;
}

impl<T: Device + ?Sized> Device for Box<T> {
    fn info(&self) -> &DeviceInfo {
        (**self).info()
    }

    fn submit(&mut self, tag: Tag, op: DeviceOp) -> Result<(), Full> {
        (**self).submit(tag, op)
    }

    fn poll(&mut self, done: &mut Vec<DeviceDone>) {
        (**self).poll(done);
    }

    fn export(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault> {
        (**self).export(frame)
    }
}
