//! What a device's memory is used for, across processes, right after a `kill -9` of any of them.
//!
//! Memory of the device is a file in its directory. Who holds it, holds an *open file description* of that file with a shared
//! `flock` on it: a mapping does, and so does an exported descriptor, even one in flight between two processes. The
//! kernel drops the lock with the last reference, however the process ended. So memory is in use exactly when an exclusive
//! lock can't be had. (A descriptor for each piece of memory would do as well, but processes run out of those.)
//!
//! `ledger` holds the bytes in use, as a hint that is never too low: it is raised before a file is made, lowered after
//! one is removed, and set right by looking at all files when the memory seems to be full, or when somebody asks.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::code::{Code, OPERATING_SYSTEM, OUT_OF_MEMORY, Outcome};

/// Files of memory are called that and a number.
pub(crate) const PREFIX: &str = "memory-";
/// Clients of several users share a device.
const ANYONE_DIRECTORY: u32 = 0o777;
const ANYONE_FILE: u32 = 0o666;

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct Ledger {
    directory: PathBuf,
    capacity: u64,
    /// Locked by processes with `flock` and, as that doesn't keep out threads of one process, with the mutex.
    total: Mutex<File>,
}

impl Ledger {
    /// Opens the device's directory, or makes it.
    pub(crate) fn open(directory: PathBuf, capacity: u64) -> io::Result<Self> {
        shared_directory(&directory)?;
        let total = open_shared(&directory.join("ledger"))?;
        Ok(Self { directory, capacity, total: Mutex::new(total) })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// A new piece of memory: its file, locked, and its name.
    pub(crate) fn create(&self, bytes: u64) -> Outcome<(File, String)> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{serial}", std::process::id());
        self.locked(|total| {
            let mut used = read(total)?;
            if used.saturating_add(bytes) > self.capacity {
                used = self.count(PREFIX)?;
            }
            if used.saturating_add(bytes) > self.capacity {
                write(total, used)?;
                return Ok(None);
            }
            write(total, used + bytes)?;
            let file = open_shared(&self.directory.join(&name))?;
            file.lock_shared()?;
            file.set_len(bytes)?;
            Ok(Some(file))
        })?
        .map(|file| (file, name))
        .ok_or(OUT_OF_MEMORY)
    }

    /// A description of its own for memory that is alive.
    pub(crate) fn reopen(&self, path: &Path) -> io::Result<File> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        file.lock_shared()?;
        Ok(file)
    }

    /// One of this process's holds is gone: frees the memory if that was the last anywhere.
    pub(crate) fn settle(&self, name: &str, bytes: u64) {
        let path = self.directory.join(name);
        // If it fails, the hint stays too high until somebody counts.
        let _counted_later = self.locked(|total| {
            if remove_unless_held(&path)? {
                let used = read(total)?.saturating_sub(bytes);
                write(total, used)?;
            }
            Ok(())
        });
    }

    /// Bytes held by live processes, counted.
    pub(crate) fn used(&self) -> Outcome<u64> {
        self.locked(|total| {
            let used = self.count(PREFIX)?;
            write(total, used)?;
            Ok(used)
        })
    }

    fn locked<T>(&self, body: impl FnOnce(&File) -> io::Result<T>) -> Outcome<T> {
        let total = self.total.lock().unwrap_or_else(PoisonError::into_inner);
        let all = || {
            total.lock()?;
            let done = body(&total);
            total.unlock()?;
            done
        };
        all().map_err(|error| said(&self.directory, &error))
    }

    /// Bytes that live processes hold of what one process made.
    pub(crate) fn made_by(&self, process: u32) -> io::Result<u64> {
        let total = self.total.lock().unwrap_or_else(PoisonError::into_inner);
        total.lock()?;
        let counted = self.count(&format!("{PREFIX}{process}-"));
        total.unlock()?;
        counted
    }

    /// Looks at each file whose name begins so; those that nobody holds are removed.
    fn count(&self, prefix: &str) -> io::Result<u64> {
        let mut used = 0;
        for entry in std::fs::read_dir(&self.directory)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(prefix) {
                let bytes = entry.metadata()?.len();
                if !remove_unless_held(&entry.path())? {
                    used += bytes;
                }
            }
        }
        Ok(used)
    }
}

/// Whether it is removed.
fn remove_unless_held(path: &Path) -> io::Result<bool> {
    let file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    match file.try_lock() {
        Ok(()) => std::fs::remove_file(path).map(|()| true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// A directory that every user can use; it may be there.
pub(crate) fn shared_directory(path: &Path) -> io::Result<()> {
    std::fs::create_dir_all(path)?;
    // Whoever made it set its mode; only that one may.
    drop(std::fs::set_permissions(path, PermissionsExt::from_mode(ANYONE_DIRECTORY)));
    Ok(())
}

/// A file that every user can use; it may be there.
pub(crate) fn open_shared(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(ANYONE_FILE);
    let file = options.open(path)?;
    drop(file.set_permissions(PermissionsExt::from_mode(ANYONE_FILE)));
    Ok(file)
}

/// What the host refused, said: the code alone tells too little.
pub(crate) fn said(path: &Path, error: &io::Error) -> Code {
    eprintln!("fake-cuda: {}: {error}", path.display());
    OPERATING_SYSTEM
}

fn read(total: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    match total.read_exact_at(&mut bytes, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
        other => other.map(|()| u64::from_le_bytes(bytes)),
    }
}

fn write(total: &File, used: u64) -> io::Result<()> {
    total.write_all_at(&used.to_le_bytes(), 0)
}
