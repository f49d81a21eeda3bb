//! Waiting for a descriptor to become readable.
#![expect(unsafe_code, reason = "registering a descriptor relies on it staying the same")]

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Watches a descriptor for being readable, in the reactor that runs.
///
/// # Errors
/// The kernel's: this kind of descriptor can't be watched, or too many are.
pub fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is one open descriptor, the same at every call, until it is dropped, and it is dropped by
    // the AsyncFd that owns it from here on.
    let watched = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) };
    watched.map_err(|error| error.into_parts().1)
}
