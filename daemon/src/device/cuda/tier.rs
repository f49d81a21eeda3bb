//! What the copy threads share: the frames, the pinned RAM, and the GPU they are for.
#![expect(unsafe_code, reason = "starts copies")]

use std::sync::Arc;

use lapis::cuda::driver::{CUstream, CallFailed};

use super::gpu::Gpu;
use super::lane::Work;
use super::pinned::Pinned;
use super::vram::Vram;
use crate::device::DeviceFault;

/// Both ends of every copy. Dropped by the thread that ends last, which has the context.
#[derive(Debug)]
pub(super) struct Tier {
    // Dropped in this order; the first two need the driver.
    vram: Vram,
    pinned: Pinned,
    gpu: Arc<Gpu>,
}

impl Tier {
    pub(super) fn new(vram: Vram, pinned: Pinned, gpu: Arc<Gpu>) -> Self {
        Self { vram, pinned, gpu }
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Starts an operation. Answers whether something was queued in the stream that must be waited for.
    pub(super) fn start(&self, work: &Work, stream: CUstream) -> Result<bool, DeviceFault> {
        if let Some(lost) = self.gpu.lost() {
            return Err(lost);
        }
        let queued = !matches!(work, Work::Release { .. });
        let started = self.call(work, stream);
        started.map(|()| queued).map_err(|failed| {
            let fault = self.gpu.fault(work.frame(), failed);
            if matches!(work, Work::Restore { .. }) {
                tracing::warn!(
                    "VRAM stays smaller until `lapisctl tier set vram` asks again: {fault}"
                );
            }
            fault
        })
    }

    fn call(&self, work: &Work, stream: CUstream) -> Result<(), CallFailed> {
        let (driver, bytes) = (self.gpu.driver(), self.vram.page_bytes());
        match work {
            Work::Up { source, shift, target } => {
                // A RAM frame has room for a page at any shift.
                let page = &source.bytes()[*shift..][..bytes];
                // SAFETY: `page` is as long as is copied and stays readable and unwritten until the copy has ended:
                // the work holds the claim on its frame, and is dropped then. The target is a whole frame of ours.
                unsafe {
                    driver.copy_up(self.vram.place(*target), page.as_ptr().cast(), bytes, stream)
                }
            }
            Work::Down { source, target } => {
                let page = self.pinned.pool().frame_ptr(target.frame()).as_ptr();
                // SAFETY: the RAM frame is longer than a page, writable, and reached by no reference while the copy
                // runs: the work holds the only claim on it, and is dropped when the copy has ended. The source is a
                // whole frame of ours.
                unsafe { driver.copy_down(page.cast(), self.vram.place(*source), bytes, stream) }
            }
            Work::Zero { target } => {
                // SAFETY: a whole frame of ours.
                unsafe { driver.fill(self.vram.place(*target), 0, bytes, stream) }
            }
            Work::Release { target } => self.vram.release(*target),
            Work::Restore { target } => {
                self.vram.restore(*target)?;
                // SAFETY: a whole frame of ours, mapped just now. Whether the driver clears memory isn't promised.
                unsafe { driver.fill(self.vram.place(*target), 0, bytes, stream) }
            }
        }
    }
}
