//! Opens the device that the configuration asks for.

use std::sync::Arc;

use super::cuda::{CudaDevice, CudaError, Gpu};
use super::sim::{SimDevice, SimOptions};
use super::{Device, DeviceFault};
use crate::config::{Config, DeviceChoice, Rate};
use crate::sys::memory::{MemoryError, RamPool};
use crate::sys::waker::Waker;

/// The device or the RAM tier can't be had.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceFault),
    /// The RAM tier.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The GPU to use; none where VRAM is simulated. The log says which, and why.
///
/// # Errors
/// [`CudaError`], if a GPU is asked for by name.
pub fn gpu(config: &Config) -> Result<Option<Gpu>, CudaError> {
    let open = || Gpu::open(config.libcuda.as_deref(), config.gpu);
    let gpu = match config.device {
        DeviceChoice::Sim => return Ok(None),
        DeviceChoice::Auto if config.unified => {
            tracing::info!("device auto: sim, for only that plays a unified device");
            return Ok(None);
        }
        DeviceChoice::Auto => match open() {
            Ok(gpu) => gpu,
            Err(error) => {
                tracing::info!("device auto: VRAM is simulated in host memory, for {error}");
                return Ok(None);
            }
        },
        DeviceChoice::Cuda => open()?,
    };
    tracing::info!("device {}", gpu.label());
    Ok(Some(gpu))
}

/// The device, and the RAM tier beside it. `config` is settled, and `gpu` was opened by this thread.
///
/// # Errors
/// [`OpenError`].
pub fn device(
    config: &Config,
    gpu: Option<Gpu>,
    waker: &Waker,
) -> Result<(Box<dyn Device>, Arc<RamPool>), OpenError> {
    let pool = || RamPool::new(config.ram.bytes(), config.page_size).map(Arc::new);
    let frames = config.vram_frames();
    if let Some(gpu) = gpu {
        // What can't be is said before the RAM tier is taken, which takes its time.
        gpu.check(frames, config.page_size).map_err(DeviceFault::from)?;
        let pool = pool()?;
        let device = CudaDevice::new(gpu, frames, &pool, waker)?;
        return Ok((Box::new(device), pool));
    }
    let options = SimOptions {
        frames,
        page_size: config.page_size,
        copy_threads: config.copy_threads as usize,
        bandwidth_bytes_per_s: config.link.bandwidth.map(Rate::bytes_per_s),
        latency: config.link.latency,
    };
    if config.unified {
        let (device, pool) = SimDevice::unified(&options, waker)?;
        return Ok((Box::new(device), pool));
    }
    let pool = pool()?;
    Ok((Box::new(SimDevice::new(&options, &pool, waker)?), pool))
}
