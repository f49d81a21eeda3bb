//! A device that doesn't answer: while a gate's file exists, what comes to the gate waits.
//!
//! `device-N/paused` stops work in the queues of a device, in every process; what runs already goes on to its end.
//! `wedged` stops driver calls as well, all of them. Waiting is on inotify, so that a shell or Python can open a gate too.
#![expect(unsafe_code, reason = "inotify")]

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Where a gate's file is, if it is shut.
#[derive(Debug)]
pub(crate) struct Gate {
    file: PathBuf,
}

impl Gate {
    /// For the queues of one device, whose directory this is.
    pub(crate) fn of_device(directory: &Path) -> Self {
        Self { file: directory.join("paused") }
    }

    /// For every call of the driver.
    pub(crate) fn of_calls(directory: &Path) -> Self {
        Self { file: directory.join("wedged") }
    }

    pub(crate) fn shut(&self) -> std::io::Result<()> {
        File::create(&self.file).map(drop)
    }

    /// Opens it; it may be open.
    pub(crate) fn open(&self) -> std::io::Result<()> {
        match std::fs::remove_file(&self.file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns when the gate is open.
    pub(crate) fn pass(&self) {
        while self.file.exists() {
            let mut watch = watch(&self.file);
            // It may have gone before the watch began; if so, no event would come.
            if self.file.exists() {
                let mut event = [0; 256];
                let _read = watch.read(&mut event).expect("an inotify descriptor can be read");
            }
        }
    }
}

/// An inotify descriptor that becomes readable when the file goes away.
fn watch(file: &Path) -> File {
    let directory = file.parent().expect("a gate's file is in a directory");
    let path = CString::new(directory.as_os_str().as_bytes()).expect("a path has no zero byte");
    // SAFETY: takes no pointers.
    let inotify = unsafe { libc::inotify_init1(libc::IN_CLOEXEC) };
    assert!(inotify >= 0, "inotify: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was made above, and nothing else knows it.
    let watch = unsafe { File::from_raw_fd(inotify) };
    let events = libc::IN_DELETE | libc::IN_MOVED_FROM | libc::IN_DELETE_SELF;
    // SAFETY: `path` is a string that ends in zero and lives through the call.
    let added = unsafe { libc::inotify_add_watch(inotify, path.as_ptr(), events) };
    assert!(added >= 0 || !file.exists(), "inotify: {}", std::io::Error::last_os_error());
    watch
}
