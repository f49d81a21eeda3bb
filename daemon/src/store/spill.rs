//! The spill: one file without a name, in a directory that one daemon locks, cut into page-sized slots.
//!
//! Its space is reserved at creation, so that a page that was admitted can always be written (a file system that
//! copies on write keeps that promise for the first write of a slot only). Nothing survives the daemon: the file
//! disappears with its last descriptor. A file system without `fallocate` is refused: writing zeros would take minutes
//! and promise nothing on one that compresses.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, Flock, FlockArg, OFlag, fallocate, fcntl};
use nix::sys::statvfs::fstatvfs;

use super::ALIGNMENT;
use crate::engine::ids::SpillSlot;
use crate::sys::direct::{DirectIo, direct_io};

/// Held by the daemon that uses the directory.
const LOCK_NAME: &str = "lapis.lock";
/// The spill's name between its creation and its removal, on file systems without unnamed files.
const SPILL_NAME: &str = "lapis.spill";

/// The spill cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SpillError {
    /// No such directory.
    #[error("the spill directory {path} does not exist: create it, or name another")]
    Missing {
        /// The directory.
        path: PathBuf,
    },
    /// Something else has that name.
    #[error("{path} is not a directory: name a directory for the spill")]
    NotDirectory {
        /// What was named.
        path: PathBuf,
    },
    /// No permission, or a read-only file system.
    #[error(
        "the spill directory {path} is not writable ({source}): give the daemon's user write access, or name another"
    )]
    NotWritable {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
    /// Another daemon uses it.
    #[error(
        "the spill directory {path} is in use by another daemon: stop that one, or name another directory"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The disk is too small.
    #[error(
        "a spill of {asked} bytes does not fit in {path}, {free} bytes are free there: make the spill smaller or free some space"
    )]
    NoRoom {
        /// The directory.
        path: PathBuf,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free.
        free: u64,
    },
    /// The file system cannot reserve space.
    #[error(
        "the file system of {path} cannot reserve space: use a directory on ext4, XFS, Btrfs or tmpfs"
    )]
    NoReservation {
        /// The directory.
        path: PathBuf,
    },
    /// Another call failed.
    #[error("{call} in the spill directory {path} failed: {source}")]
    Call {
        /// The directory.
        path: PathBuf,
        /// Which.
        call: &'static str,
        /// Why.
        source: Errno,
    },
}

/// The spill file. Dropping it gives its space back, then unlocks the directory.
#[derive(Debug)]
pub struct Spill {
    file: File,
    slots: u32,
    page_size: u64,
    direct: bool,
    /// Unlocked when dropped, after the file.
    _lock: Flock<File>,
}

impl Spill {
    /// Locks `directory` and reserves `slots` pages of `page_size` bytes, a multiple of 4096, in it.
    ///
    /// # Errors
    /// [`SpillError`]; nothing stays behind but the lock file.
    pub fn create(directory: &Path, slots: u32, page_size: u64) -> Result<Self, SpillError> {
        debug_assert!(page_size.is_multiple_of(ALIGNMENT));
        let place = Place(directory);
        place.check()?;
        let lock = place.lock()?;
        let (file, direct) = place.create()?;
        place.reserve(&file, u64::from(slots).saturating_mul(page_size))?;
        Ok(Self { file, slots, page_size, direct, _lock: lock })
    }

    /// Slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Whether it goes past the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// First byte of a slot in the file.
    ///
    /// # Panics
    /// If there is no such slot.
    pub(crate) fn offset(&self, slot: SpillSlot) -> u64 {
        assert!(slot.0 < self.slots, "spill slot {} of {}", slot.0, self.slots);
        u64::from(slot.0) * self.page_size
    }
}

impl AsFd for Spill {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The directory, to speak of in errors.
struct Place<'a>(&'a Path);

impl Place<'_> {
    fn path(&self) -> PathBuf {
        self.0.to_path_buf()
    }

    fn failed(&self, call: &'static str, source: Errno) -> SpillError {
        let path = self.path();
        match source {
            Errno::ENOENT => SpillError::Missing { path },
            Errno::ENOTDIR => SpillError::NotDirectory { path },
            Errno::EACCES | Errno::EPERM | Errno::EROFS => SpillError::NotWritable { path, source },
            _ => SpillError::Call { path, call, source },
        }
    }

    fn check(&self) -> Result<(), SpillError> {
        match self.0.metadata() {
            Ok(metadata) if metadata.is_dir() => Ok(()),
            Ok(_) => Err(SpillError::NotDirectory { path: self.path() }),
            Err(error) => Err(self.failed("stat", errno(&error))),
        }
    }

    fn lock(&self) -> Result<Flock<File>, SpillError> {
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW);
        let file = options
            .open(self.0.join(LOCK_NAME))
            .map_err(|error| self.failed("open(lapis.lock)", errno(&error)))?;
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_file, source)| match source {
            Errno::EWOULDBLOCK => SpillError::InUse { path: self.path() },
            _ => self.failed("flock(lapis.lock)", source),
        })
    }

    /// An empty file without a name, and whether it goes past the page cache.
    fn create(&self) -> Result<(File, bool), SpillError> {
        match self.open(libc::O_DIRECT) {
            Ok(file) => {
                let direct = match direct_io(file.as_fd()) {
                    DirectIo::Aligned(bytes) => ALIGNMENT.is_multiple_of(u64::from(bytes)),
                    DirectIo::Unsupported => false,
                    DirectIo::Unknown => true,
                };
                if !direct {
                    let flags = fcntl(&file, FcntlArg::F_GETFL)
                        .map_err(|errno| self.failed("fcntl(F_GETFL)", errno))?;
                    let flags = OFlag::from_bits_retain(flags) & !OFlag::O_DIRECT;
                    fcntl(&file, FcntlArg::F_SETFL(flags))
                        .map_err(|errno| self.failed("fcntl(F_SETFL)", errno))?;
                    self.say_buffered();
                }
                Ok((file, direct))
            }
            Err(Errno::EINVAL) => {
                let file = self.open(0).map_err(|errno| self.failed("open", errno))?;
                self.say_buffered();
                Ok((file, false))
            }
            Err(errno) => Err(self.failed("open", errno)),
        }
    }

    fn say_buffered(&self) {
        tracing::warn!(
            directory = %self.0.display(),
            "direct I/O is not to be had here: the spill goes through the page cache and competes with it for memory"
        );
    }

    fn open(&self, flags: i32) -> Result<File, Errno> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        match options.custom_flags(libc::O_TMPFILE | flags).open(self.0) {
            Ok(file) => return Ok(file),
            // What the kernel answers where unnamed files are not known: by the file system, or by itself.
            Err(error) if matches!(errno(&error), Errno::EOPNOTSUPP | Errno::EISDIR) => {}
            Err(error) => return Err(errno(&error)),
        }
        self.open_and_unlink(options.create_new(true).custom_flags(libc::O_NOFOLLOW | flags))
    }

    /// We hold the directory's lock, so a file of that name was left by a daemon that died in between.
    fn open_and_unlink(&self, options: &OpenOptions) -> Result<File, Errno> {
        let path = self.0.join(SPILL_NAME);
        let file = match options.open(&path) {
            Err(error) if errno(&error) == Errno::EEXIST => {
                std::fs::remove_file(&path).map_err(|error| errno(&error))?;
                options.open(&path)
            }
            outcome => outcome,
        };
        // A refused O_DIRECT can leave the file behind.
        let removed = std::fs::remove_file(&path);
        let file = file.map_err(|error| errno(&error))?;
        removed.map_err(|error| errno(&error))?;
        Ok(file)
    }

    fn reserve(&self, file: &File, bytes: u64) -> Result<(), SpillError> {
        let Ok(length) = i64::try_from(bytes) else {
            return Err(self.failed("fallocate", Errno::EFBIG));
        };
        if length == 0 {
            return Ok(());
        }
        loop {
            return match fallocate(file, FallocateFlags::empty(), 0, length) {
                Ok(()) => Ok(()),
                Err(Errno::EINTR) => continue,
                Err(Errno::ENOSPC) => {
                    // Part of it may have been reserved before the disk was full.
                    let _emptied = file.set_len(0);
                    let free = fstatvfs(file)
                        .map_or(0, |space| space.blocks_available() * space.fragment_size());
                    Err(SpillError::NoRoom { path: self.path(), asked: bytes, free })
                }
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {
                    Err(SpillError::NoReservation { path: self.path() })
                }
                Err(errno) => Err(self.failed("fallocate", errno)),
            };
        }
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn space_is_reserved_and_no_name_is_left() {
        let directory = scratch();
        let spill = Spill::create(directory.path(), 4, 1 << 20).unwrap();
        let metadata = spill.file.metadata().unwrap();
        assert_eq!(metadata.len(), 4 << 20);
        assert!(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512 >= 4 << 20);
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&metadata) & 0o777, 0o600);
        let names: Vec<_> =
            directory.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["lapis.lock"]);
        assert_eq!(spill.offset(SpillSlot(3)), 3 << 20);
    }

    #[test]
    fn a_second_spill_in_one_directory_is_refused_by_name_until_the_first_is_gone() {
        let directory = scratch();
        let first = Spill::create(directory.path(), 1, 4096).unwrap();
        let refused = Spill::create(directory.path(), 1, 4096).unwrap_err();
        assert!(matches!(&refused, SpillError::InUse { path } if path == directory.path()));
        assert!(refused.to_string().contains(&directory.path().display().to_string()));
        drop(first);
        Spill::create(directory.path(), 1, 4096).unwrap();
    }

    #[test]
    fn a_directory_that_is_none_is_refused() {
        let directory = scratch();
        let missing = directory.path().join("missing");
        assert!(
            matches!(Spill::create(&missing, 1, 4096), Err(SpillError::Missing { path }) if path == missing)
        );
        let file = directory.path().join("file");
        std::fs::write(&file, "x").unwrap();
        assert!(
            matches!(Spill::create(&file, 1, 4096), Err(SpillError::NotDirectory { path }) if path == file)
        );
    }

    #[test]
    fn a_directory_we_may_not_write_is_refused() {
        // Not even root may create files there.
        let refused = Spill::create(Path::new("/proc/self"), 1, 4096).unwrap_err();
        assert!(
            matches!(refused, SpillError::NotWritable { .. } | SpillError::Missing { .. }),
            "{refused}"
        );
    }

    #[test]
    fn a_disk_that_is_too_small_is_refused_with_numbers() {
        let directory = scratch();
        match Spill::create(directory.path(), u32::MAX, 64 << 10).unwrap_err() {
            SpillError::NoRoom { asked, free, .. } => {
                assert_eq!(asked, 281_474_976_645_120);
                assert!(free > 0 && free < asked);
            }
            // ext4 with 4 KiB blocks ends at 16 TiB.
            SpillError::Call { source: Errno::EFBIG, .. } => {}
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_file_left_by_a_dead_daemon_is_replaced() {
        let directory = scratch();
        std::fs::write(directory.path().join("lapis.spill"), "stale").unwrap();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = Place(directory.path()).open_and_unlink(&options).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 0);
        assert!(!directory.path().join("lapis.spill").exists());
    }
}
