//! The RAM tier, pinned for the GPU: the same memory that io_uring reads into, so nothing is bounced.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::c_uint;
use std::sync::Arc;

use super::error::CudaError;
use super::gpu::Gpu;
use crate::config::Size;
use crate::sys::memory::RamPool;

/// For one context, not to be read by kernels.
const FLAGS: c_uint = 0;

/// The RAM tier while it is pinned; dropped, it is so no longer.
#[derive(Debug)]
pub(super) struct Pinned {
    // In this order: unpinned first, by `drop`, and with a driver that is still there.
    pool: Arc<RamPool>,
    gpu: Arc<Gpu>,
    /// Chunks of the pool that are registered, the first ones.
    registered: usize,
}

impl Pinned {
    /// Registers all chunks. The calling thread has the context.
    pub(super) fn new(gpu: &Arc<Gpu>, pool: &Arc<RamPool>) -> Result<Self, CudaError> {
        let (gpu, pool) = (Arc::clone(gpu), Arc::clone(pool));
        let mut pinned = Self { pool, gpu, registered: 0 };
        for (start, length) in Arc::clone(&pinned.pool).chunks() {
            // SAFETY: the chunk is mapped, readable and writable, and stays so until it is unregistered: this holds
            // the pool, and unregisters before it lets go of it.
            let registered =
                unsafe { pinned.gpu.driver().host_register(start.as_ptr().cast(), length, FLAGS) };
            registered.map_err(|failed| CudaError::Pin {
                gpu: pinned.gpu.label().to_owned(),
                bytes: Size::from_bytes(length as u64),
                failed,
            })?;
            pinned.registered += 1;
        }
        Ok(pinned)
    }

    /// What is pinned.
    pub(super) fn pool(&self) -> &RamPool {
        &self.pool
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.lost().is_some() {
            // The driver answers nothing else any more; its end unpins.
            return;
        }
        for (start, _) in self.pool.chunks().take(self.registered) {
            // SAFETY: registered by `new`, at this address; no copy is in flight, for those hold what holds this.
            let unregistered = unsafe { self.gpu.driver().host_unregister(start.as_ptr().cast()) };
            if let Err(failed) = unregistered {
                tracing::error!("RAM stays pinned until the process ends: {failed}");
            }
        }
    }
}
