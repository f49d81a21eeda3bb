//! Why a GPU can't be used: what failed, on which, and what to do.

use lapis::cuda::driver::{CallFailed, DriverError, code};

use crate::config::{GpuChoice, Size};

/// No VRAM tier on a GPU.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CudaError {
    /// There is no driver, or it does not start.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver does not say what devices there are.
    #[error("the GPUs can't be listed: {failed}; {}", fix(failed.code))]
    List {
        /// The call.
        failed: CallFailed,
    },
    /// A driver without devices.
    #[error(
        "the CUDA driver sees no GPU: look whether `nvidia-smi` shows one, and what CUDA_VISIBLE_DEVICES hides"
    )]
    NoGpu,
    /// The configured device is not among those that are seen.
    #[error(
        "there is no GPU {asked} here, but {seen}: take one of these, or look at `nvidia-smi -L` and what \
         CUDA_VISIBLE_DEVICES hides"
    )]
    NoSuchGpu {
        /// As configured.
        asked: GpuChoice,
        /// What there is.
        seen: String,
    },
    /// The device can't be opened or asked.
    #[error("GPU {gpu} can't be used: {failed}; {}", fix(failed.code))]
    Open {
        /// Which.
        gpu: String,
        /// The call.
        failed: CallFailed,
    },
    /// The device has no memory that other processes can map.
    #[error(
        "GPU {gpu} can't be used: memory that other processes can map can't be had: {failed}; {}",
        fix(failed.code)
    )]
    Unusable {
        /// Which.
        gpu: String,
        /// The call.
        failed: CallFailed,
    },
    /// A frame would be no memory that the driver can make.
    #[error(
        "page_size is {page_size}, but memory of GPU {gpu} comes in multiples of {granularity}: set page_size to \
         {granularity} or a multiple of it, or device to sim"
    )]
    PageSize {
        /// Which.
        gpu: String,
        /// As configured.
        page_size: Size,
        /// Of the driver.
        granularity: Size,
    },
    /// More VRAM than is free.
    #[error(
        "vram is {asked}, but GPU {gpu} has {free} free of {total}: lower vram, or end what else uses the GPU \
         (`nvidia-smi` shows it)"
    )]
    NoRoom {
        /// Which.
        gpu: String,
        /// The tier.
        asked: Size,
        /// Of the device's memory.
        free: Size,
        /// The device's memory.
        total: Size,
    },
    /// The RAM tier can't be pinned.
    #[error("{bytes} of the RAM tier can't be pinned for GPU {gpu}: {failed}; {}", pin_fix(failed.code))]
    Pin {
        /// Which.
        gpu: String,
        /// The piece.
        bytes: Size,
        /// The call.
        failed: CallFailed,
    },
}

/// What to do about a code.
pub(super) fn fix(failed: u32) -> &'static str {
    match failed {
        code::OUT_OF_MEMORY => "end what else uses the GPU (`nvidia-smi` shows it), or lower vram",
        code::INVALID_DEVICE => {
            "this process may not see the GPU, or it is WSL, whose driver can't do this: use device sim there"
        }
        304 => "raise LimitNOFILE= or ulimit -n, or take a larger page_size",
        800 | code::NOT_SUPPORTED => {
            "this GPU or its driver can't do it: update the driver, or use device sim"
        }
        802 => "start the fabric manager (`systemctl status nvidia-fabricmanager`)",
        failed if is_gone(failed) => "look for `Xid` in the kernel's log; start the daemon again",
        _ => "look whether `nvidia-smi` works, and into the kernel's log",
    }
}

fn pin_fix(failed: u32) -> &'static str {
    match failed {
        1 | code::OUT_OF_MEMORY | 304 => "lower ram: the system can't lock so much memory",
        failed => fix(failed),
    }
}

/// Whether a call that moves bytes says by this code that no other will succeed: the device, the context or the driver
/// is gone, or nobody knows what happened.
pub(super) fn is_gone(failed: u32) -> bool {
    // Not or no longer initialised, device unavailable, none or a wrong one, no context, unknown.
    code::is_sticky(failed) || matches!(failed, 3 | 4 | 46 | 100 | 101 | 201 | 999)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_breaks_the_context_is_the_end_and_what_is_full_is_not() {
        for gone in [700, 719, 214, 999, 201] {
            assert!(is_gone(gone), "{gone}");
        }
        for other in [1, 2, 304, 600, 801, 1234] {
            assert!(!is_gone(other), "{other}");
        }
    }
}
