//! One eventfd through which threads and the ring wake the reactor.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Wakes the reactor; cheap to clone, usable from any thread.
#[derive(Debug, Clone)]
pub struct Waker(Arc<EventFd>);

impl Waker {
    /// A new, silent one.
    ///
    /// # Errors
    /// The `eventfd` call's, e.g. out of descriptors.
    pub fn new() -> Result<Self, Errno> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self(Arc::new(EventFd::from_value_and_flags(0, flags)?)))
    }

    /// Makes the descriptor readable.
    pub fn wake(&self) {
        // The counter saturates at 2^64 - 2: a failed write means that it is readable already.
        let _saturated = self.0.write(1);
    }

    /// Makes the descriptor silent again; to be called before polling for completions.
    pub fn clear(&self) {
        // Would-block means that nobody woke us: as silent as asked for.
        let _silent = self.0.read();
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
