//! A model file: a descriptor that a client opened, and what must not change about it.
//!
//! The descriptor is used as it came, for direct I/O if the client opened it with `O_DIRECT`. No path is ever opened
//! here. A file changed in place through a memory mapping that was written to before we looked, and is not written
//! back yet, is the one change that a comparison of times cannot see.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, PosixFadviseAdvice, fcntl, posix_fadvise};
use nix::sys::stat::{FileStat, SFlag, fstat};

use super::{ALIGNMENT, FileIdentity, StoreFault};
use crate::sys::direct::{DirectIo, direct_io};

/// A file that pages are read from.
#[derive(Debug)]
pub(crate) struct ModelFile {
    fd: OwnedFd,
    identity: FileIdentity,
    /// Reads go past the page cache.
    direct: AtomicBool,
}

impl ModelFile {
    /// Looks at what a client passed.
    ///
    /// # Errors
    /// [`StoreFault::NotRegular`], [`StoreFault::NotReadable`], or the call's.
    pub(crate) fn open(fd: OwnedFd) -> Result<Self, StoreFault> {
        let failed = |errno| StoreFault::Io { offset: 0, errno };
        let stat = fstat(&fd).map_err(failed)?;
        if SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT != SFlag::S_IFREG {
            return Err(StoreFault::NotRegular);
        }
        let flags = status_flags(&fd).map_err(failed)?;
        // O_PATH descriptors claim to be readable, and are not.
        if flags & OFlag::O_ACCMODE == OFlag::O_WRONLY || flags.contains(OFlag::O_PATH) {
            return Err(StoreFault::NotReadable);
        }
        let direct = AtomicBool::new(flags.contains(OFlag::O_DIRECT));
        let file = Self { fd, identity: identity(&stat), direct };
        if file.is_direct() {
            match direct_io(file.fd.as_fd()) {
                DirectIo::Aligned(bytes) if ALIGNMENT.is_multiple_of(u64::from(bytes)) => {}
                // Tried; the first refused read tells.
                DirectIo::Unknown => {}
                DirectIo::Aligned(_) | DirectIo::Unsupported => {
                    file.leave_direct().map_err(failed)?;
                }
            }
        }
        if !file.is_direct() {
            file.stop_reading_ahead();
        }
        Ok(file)
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Whether reads go past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Reads through the page cache from here on. We cannot open the file a second time, so the flag of the
    /// description that we share with the client changes.
    pub(crate) fn leave_direct(&self) -> Result<(), Errno> {
        let flags = status_flags(&self.fd)? & !OFlag::O_DIRECT;
        fcntl(&self.fd, FcntlArg::F_SETFL(flags))?;
        self.stop_reading_ahead();
        if self.direct.swap(false, Ordering::Relaxed) {
            let FileIdentity { device, inode, .. } = self.identity;
            tracing::warn!(
                device,
                inode,
                "direct I/O in units of 4 KiB is not to be had on this file: reading it buffered"
            );
        }
        Ok(())
    }

    /// Compares the file with what it was, after bytes up to `end` were read for the page at `offset`.
    ///
    /// # Errors
    /// [`StoreFault::Truncated`] or [`StoreFault::Changed`]: what was read may be wrong.
    pub(crate) fn verify(&self, offset: u64, end: u64) -> Result<(), StoreFault> {
        let stat = fstat(&self.fd).map_err(|errno| StoreFault::Io { offset, errno })?;
        let now = identity(&stat);
        if now.size < end {
            Err(StoreFault::Truncated { offset, end: now.size })
        } else if now == self.identity {
            Ok(())
        } else {
            Err(StoreFault::Changed { offset })
        }
    }

    /// Read-ahead would fill the page cache beyond what is read and then forgotten.
    fn stop_reading_ahead(&self) {
        // Advice: nothing depends on it.
        let _advised = posix_fadvise(&self.fd, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM);
    }

    /// Lets the page cache forget a range that was read through it, as it lies in our frames now.
    pub(crate) fn forget_cached(&self, (offset, length): (u64, u64)) {
        if let (false, Ok(offset), Ok(length)) =
            (self.is_direct(), i64::try_from(offset), i64::try_from(length))
        {
            // Advice: nothing depends on it.
            let _advised =
                posix_fadvise(&self.fd, offset, length, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
    }
}

impl AsFd for ModelFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn status_flags(fd: &OwnedFd) -> Result<OFlag, Errno> {
    fcntl(fd, FcntlArg::F_GETFL).map(OFlag::from_bits_retain)
}

fn identity(stat: &FileStat) -> FileIdentity {
    let nanoseconds =
        |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
    FileIdentity {
        device: stat.st_dev,
        inode: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_ns: nanoseconds(stat.st_mtime, stat.st_mtime_nsec),
        ctime_ns: nanoseconds(stat.st_ctime, stat.st_ctime_nsec),
    }
}
