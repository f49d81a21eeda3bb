//! What a file asks of direct I/O.
#![expect(unsafe_code, reason = "statx is not wrapped by nix")]

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;

/// What a file asks of direct I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DirectIo {
    /// The kernel or the file system does not say (before Linux 6.1).
    Unknown,
    /// There is none on this file.
    Unsupported,
    /// Offsets, lengths and addresses must be multiples of this.
    Aligned(u32),
}

/// Asks `statx(STATX_DIOALIGN)`.
pub(crate) fn direct_io(file: BorrowedFd<'_>) -> DirectIo {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the descriptor is open, as it is borrowed; the path is a NUL-terminated empty string, which AT_EMPTY_PATH
    // turns into the descriptor itself; `found` is writable and as large as the kernel's structure.
    let outcome = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            found.as_mut_ptr(),
        )
    };
    if Errno::result(outcome).is_err() {
        return DirectIo::Unknown;
    }
    // SAFETY: all fields are integers, for which zeros are valid, and the kernel wrote over those it knows.
    let found = unsafe { found.assume_init() };
    if found.stx_mask & libc::STATX_DIOALIGN == 0 {
        return DirectIo::Unknown;
    }
    match found.stx_dio_mem_align.max(found.stx_dio_offset_align) {
        0 => DirectIo::Unsupported,
        alignment => DirectIo::Aligned(alignment),
    }
}
