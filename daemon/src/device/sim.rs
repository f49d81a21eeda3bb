//! The sim device: VRAM frames are memfds, exported to clients and mapped by them as a GPU's would be; copies run on
//! threads of their own, at the speed of memory or of a configured link.
//!
//! Each direction has its own queue, threads and link, so neither waits for the other; zeroing goes with the way up.

mod copy;
mod frames;
mod link;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapis_proto::ids::VramFrame;
use lapis_proto::message::DeviceKind;
use nix::errno::Errno;

use super::{Device, DeviceDone, DeviceFault, DeviceInfo, DeviceOp, Full};
use crate::engine::ids::Tag;
use crate::sys::memory::RamPool;
use crate::sys::waker::Waker;
use crate::sys::workers::Workers;
use frames::Frames;
use link::Link;

/// Operations of one direction in flight, beside one in hand a thread.
const QUEUE: usize = 64;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// VRAM frames.
    pub frames: u32,
    /// Bytes of a frame, a power of two.
    pub page_size: u64,
    /// Threads a direction.
    pub copy_threads: usize,
    /// Bytes a second of each direction; as fast as memory goes if `None`.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Added to each operation.
    pub latency: Duration,
}

/// VRAM played by host memory.
#[derive(Debug)]
pub struct SimDevice {
    info: DeviceInfo,
    frames: Arc<Frames>,
    up: Workers<(Tag, DeviceOp, Instant), DeviceDone>,
    down: Workers<(Tag, DeviceOp, Instant), DeviceDone>,
}

/// What the copy threads of one direction work with.
struct Copier {
    frames: Arc<Frames>,
    pool: Arc<RamPool>,
    link: Link,
}

impl SimDevice {
    /// Makes the frames, all touched, and starts the threads.
    ///
    /// # Errors
    /// [`DeviceFault`]: which frame or limit, and what to do.
    pub fn new(
        options: &SimOptions,
        pool: &Arc<RamPool>,
        waker: &Waker,
    ) -> Result<Self, DeviceFault> {
        let frames = Frames::new(options.frames, options.page_size)?;
        Self::with(frames, options, pool, false, waker)
    }

    /// One whose memory is the host's own: its frames are what files are read into, and nothing is copied up or down.
    ///
    /// # Errors
    /// As [`SimDevice::new`].
    pub fn unified(
        options: &SimOptions,
        waker: &Waker,
    ) -> Result<(Self, Arc<RamPool>), DeviceFault> {
        let frames = Frames::new(options.frames, options.page_size)?;
        let pool = Arc::new(frames.as_pool()?);
        Ok((Self::with(frames, options, &pool, true, waker)?, pool))
    }

    fn with(
        frames: Frames,
        options: &SimOptions,
        pool: &Arc<RamPool>,
        unified: bool,
        waker: &Waker,
    ) -> Result<Self, DeviceFault> {
        let frames = Arc::new(frames);
        let threads_count = options.copy_threads.max(1);
        let direction = |name: &str| {
            let copier = Copier {
                frames: Arc::clone(&frames),
                pool: Arc::clone(pool),
                link: Link::new(options.bandwidth_bytes_per_s, options.latency),
            };
            let depth = QUEUE + threads_count;
            Workers::new(name, threads_count, depth, waker, move |(tag, op, asked)| {
                copier.run(tag, op, asked)
            })
            .map_err(|error| DeviceFault::Setup {
                call: "starting a copy thread",
                source: Errno::from_raw(error.raw_os_error().unwrap_or(0)),
            })
        };
        let (up, down) = (direction("copy-up")?, direction("copy-down")?);
        let info = DeviceInfo {
            kind: DeviceKind::Sim,
            unified,
            uuid: [0; 16],
            name: "simulated in host memory".to_owned(),
            frames: options.frames,
            frames_ready: options.frames,
            page_kind: frames.page_kind().name(),
        };
        Ok(Self { info, frames, up, down })
    }
}

impl Device for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, tag: Tag, op: DeviceOp) -> Result<(), Full> {
        let direction = match op {
            DeviceOp::Up { .. }
            | DeviceOp::Zero { .. }
            | DeviceOp::Release { .. }
            | DeviceOp::Restore { .. } => &mut self.up,
            DeviceOp::Down { .. } => &mut self.down,
        };
        direction.submit(|| (tag, op, Instant::now()))
    }

    fn poll(&mut self, done: &mut Vec<DeviceDone>) {
        self.up.poll(done);
        self.down.poll(done);
    }

    fn export(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault> {
        self.frames.export(frame)
    }
}

impl Copier {
    fn run(&self, tag: Tag, op: DeviceOp, asked: Instant) -> DeviceDone {
        let turn = self.link.begin(self.frames.page_size(), asked);
        let result = self.execute(op);
        self.link.finish(turn);
        DeviceDone { tag, result }
    }

    fn execute(&self, op: DeviceOp) -> Result<(), DeviceFault> {
        const OWNED: &str = "an operation in flight owns its frames";
        match op {
            DeviceOp::Up { source, shift, target } => {
                let source = self.pool.claim_read(source).expect(OWNED);
                let page = &source.bytes()[shift as usize..];
                self.frames.write(target, &page[..self.frames.page_bytes()]);
            }
            DeviceOp::Down { source, target } => {
                let mut target = self.pool.claim_write(target).expect(OWNED);
                self.frames.read(source, &mut target.bytes_mut()[..self.frames.page_bytes()]);
            }
            DeviceOp::Zero { target } => self.frames.zero(target),
            DeviceOp::Release { target } => self.frames.release(target)?,
            DeviceOp::Restore { target } => self.frames.restore(target)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
