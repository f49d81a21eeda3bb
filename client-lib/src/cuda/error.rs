//! What can go wrong with this process's CUDA driver.

use std::fmt::Write;

use super::driver::{CallFailed, DriverError, code};

/// Why the GPU's memory can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver, or it doesn't start.
    #[error("the daemon's memory is on a CUDA device: {0}")]
    Driver(#[from] DriverError),
    /// This process doesn't see the daemon's GPU.
    #[error(
        "this process sees {devices} CUDA devices, and none is the daemon's (UUID {uuid}): add it to \
         CUDA_VISIBLE_DEVICES, or to the devices of this container"
    )]
    NotVisible {
        /// The daemon's device, as `nvidia-smi -L` writes it.
        uuid: String,
        /// How many this process sees.
        devices: i32,
    },
    /// A call failed.
    #[error("{failed}{}", hint_for(failed.code))]
    Call {
        /// Which, and how.
        failed: CallFailed,
    },
    /// The context is broken: nothing on this device works in this process any more.
    #[error(
        "the CUDA context of this process is broken: {failed}; end the process and start it again"
    )]
    Broken {
        /// Which call said so.
        failed: CallFailed,
    },
}

impl CudaError {
    /// Whether the same call may succeed later, when somebody has given memory back.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            CudaError::Call { failed } => failed.code == code::OUT_OF_MEMORY,
            CudaError::Driver(_) | CudaError::NotVisible { .. } | CudaError::Broken { .. } => false,
        }
    }

    /// Whether an answer to a question about the GPU's work means that there is none: the context is broken or gone.
    pub(crate) fn means_idle(&self) -> bool {
        match self {
            CudaError::Broken { .. } => true,
            CudaError::Call { failed } => matches!(
                failed.code,
                code::NOT_INITIALIZED | code::DEINITIALIZED | code::INVALID_CONTEXT
            ),
            CudaError::Driver(_) | CudaError::NotVisible { .. } => false,
        }
    }
}

impl From<CallFailed> for CudaError {
    fn from(failed: CallFailed) -> CudaError {
        if code::is_sticky(failed.code) {
            CudaError::Broken { failed }
        } else {
            CudaError::Call { failed }
        }
    }
}

fn hint_for(failed: u32) -> &'static str {
    match failed {
        code::OUT_OF_MEMORY => "; free memory of the GPU that other programs use",
        code::INVALID_DEVICE => {
            "; the daemon's GPU is not visible here: see CUDA_VISIBLE_DEVICES and the container's devices"
        }
        _ => "",
    }
}

/// A UUID as `nvidia-smi -L` writes it, without what comes before it.
pub(super) fn uuid_text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        // Writing to a String doesn't fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_to_do() {
        let call = |code| CallFailed { call: "cuMemMap", code, name: "NAME".to_owned() };
        let error = CudaError::from(call(700));
        assert_eq!(
            error.to_string(),
            "the CUDA context of this process is broken: cuMemMap failed with 700 (NAME); \
             end the process and start it again"
        );
        assert!(!error.is_retryable());
        let error = CudaError::from(call(2));
        assert_eq!(
            error.to_string(),
            "cuMemMap failed with 2 (NAME); free memory of the GPU that other programs use"
        );
        assert!(error.is_retryable());
        let idle = [700, 3, 4, 201].map(|code| CudaError::from(call(code)).means_idle());
        assert_eq!(idle, [true; 4]);
        let unknown = [1, 2, 600, 800, 999].map(|code| CudaError::from(call(code)).means_idle());
        assert_eq!(unknown, [false; 5]);
        assert_eq!(CudaError::from(call(1)).to_string(), "cuMemMap failed with 1 (NAME)");
        let uuid = uuid_text(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(uuid, "00010203-0405-0607-0809-0a0b0c0d0eff");
    }
}
