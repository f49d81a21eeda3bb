//! A CUDA GPU: VRAM frames are pieces of its memory that clients map, copies are DMA between them and pinned RAM.
//!
//! The driver may hang, so the reactor calls it only here, at start. Afterwards each direction has threads of its own
//! ([`lane`]) that own all of the driver's objects; the reactor has queues and descriptors. An error that breaks the
//! context, and a copy that ended nobody knows how, make the device lost, for good: the daemon ends, and its service
//! manager starts another.
//!
//! A device that shares the host's memory is used like any other, with two tiers: that is right everywhere, and what it
//! costs there is a copy.

mod error;
mod gpu;
mod lane;
mod pinned;
mod tier;
mod vram;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use lapis_proto::ids::VramFrame;
use lapis_proto::message::DeviceKind;

use super::{Device, DeviceDone, DeviceFault, DeviceInfo, DeviceOp, Full};
use crate::engine::ids::Tag;
use crate::sys::memory::RamPool;
use crate::sys::waker::Waker;
use lane::{Lane, Work};
use pinned::Pinned;
use tier::Tier;
use vram::{Exports, Vram};

pub use error::CudaError;
pub use gpu::Gpu;

/// How long the driver may take to clear up when the daemon ends.
const END_WAIT: Duration = Duration::from_secs(5);

/// VRAM of a GPU.
#[derive(Debug)]
pub struct CudaDevice {
    info: DeviceInfo,
    pool: Arc<RamPool>,
    exports: Arc<Exports>,
    /// Both directions; none once it ends.
    lanes: Option<Lanes>,
    /// Cut off when all threads have ended.
    ended: Receiver<()>,
}

#[derive(Debug)]
struct Lanes {
    up: Lane,
    down: Lane,
}

impl CudaDevice {
    /// Makes the first frames, pins the RAM tier and starts the threads. Whoever opened the GPU calls this, on the same thread.
    ///
    /// # Errors
    /// [`DeviceFault`]: what can't be had, and what to do.
    pub fn new(
        gpu: Gpu,
        frames: u32,
        pool: &Arc<RamPool>,
        waker: &Waker,
    ) -> Result<Self, DeviceFault> {
        let gpu = Arc::new(gpu);
        let vram = Vram::new(&gpu, frames, pool.page_size())?;
        let pinned = Pinned::new(&gpu, pool)?;
        if let Some(how) = gpu.unified() {
            tracing::info!("the GPU is {how}; it is used with a VRAM and a RAM tier all the same");
        }
        let info = DeviceInfo {
            kind: DeviceKind::Cuda,
            unified: false,
            uuid: gpu.uuid(),
            name: gpu.name().to_owned(),
            frames,
            frames_ready: vram.ready(),
            page_kind: "device memory",
        };
        let exports = vram.exports();
        let tier = Arc::new(Tier::new(vram, pinned, gpu));
        let (end, ended) = sync_channel(1);
        let up = Lane::new("copy-up", &tier, waker, &end)?;
        let down = Lane::new("copy-down", &tier, waker, &end)?;
        let pool = Arc::clone(pool);
        Ok(Self { info, pool, exports, lanes: Some(Lanes { up, down }), ended })
    }

    /// The operation with its claims on RAM: it owns its buffers from here on.
    fn work(pool: &Arc<RamPool>, op: DeviceOp) -> Work {
        const OWNED: &str =
            "an operation in flight owns its frames: the engine gives them to no other";
        match op {
            DeviceOp::Up { source, shift, target } => {
                let source = pool.claim_read(source).expect(OWNED);
                Work::Up { source, shift: shift as usize, target }
            }
            DeviceOp::Down { source, target } => {
                let target = pool.claim_write(target).expect(OWNED);
                Work::Down { source, target }
            }
            DeviceOp::Zero { target } => Work::Zero { target },
            DeviceOp::Release { target } => Work::Release { target },
            DeviceOp::Restore { target } => Work::Restore { target },
        }
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, tag: Tag, op: DeviceOp) -> Result<(), Full> {
        let lanes = self.lanes.as_mut().ok_or(Full)?;
        let lane = match op {
            DeviceOp::Up { .. }
            | DeviceOp::Zero { .. }
            | DeviceOp::Release { .. }
            | DeviceOp::Restore { .. } => &mut lanes.up,
            DeviceOp::Down { .. } => &mut lanes.down,
        };
        lane.submit(|| (tag, Self::work(&self.pool, op)))
    }

    fn poll(&mut self, done: &mut Vec<DeviceDone>) {
        if let Some(lanes) = &mut self.lanes {
            lanes.up.poll(done);
            lanes.down.poll(done);
        }
    }

    fn export(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault> {
        self.exports.of(frame)
    }
}

impl Drop for CudaDevice {
    /// Waits until the threads have cleared up, but not for a driver that hangs: the memory then stays as it is until
    /// the process ends, and what a copy may still touch with it, for the threads own it.
    fn drop(&mut self) {
        drop(self.lanes.take());
        if self.ended.recv_timeout(END_WAIT) == Err(RecvTimeoutError::Timeout) {
            tracing::error!(
                "the CUDA driver hangs: GPU memory is given back when the process ends; see the kernel's log"
            );
        }
    }
}

#[cfg(test)]
mod tests;
