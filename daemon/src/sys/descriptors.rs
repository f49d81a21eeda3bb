//! Descriptors that are kept for those who are served already: frames are sent to a client as copies of theirs. Clients
//! that come, and files that they open, may not take the last ones.

use std::os::fd::{AsFd, AsRawFd};

use nix::sys::resource::{Resource, getrlimit};

/// Frames go out at most 253 at a time, to some clients at once.
const KEPT: u64 = 512;

/// Whether, with this descriptor, no more are left than are kept. The lowest free number is always given out, so a high
/// one means that nearly all are taken.
#[must_use]
pub fn are_scarce_with(fd: impl AsFd) -> bool {
    let number = u64::try_from(fd.as_fd().as_raw_fd()).unwrap_or(0);
    getrlimit(Resource::RLIMIT_NOFILE).is_ok_and(|(limit, _)| number >= limit.saturating_sub(KEPT))
}

/// Whether no more are left than are kept.
#[must_use]
pub fn are_scarce(any: impl AsFd) -> bool {
    any.as_fd().try_clone_to_owned().map_or(true, are_scarce_with)
}
