//! Bounded, positioned reads of one model file.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::error::{Defect, ModelError};

/// Bytes that [`Cursor`] reads at once.
const WINDOW_BYTES: u64 = 256 << 10;

/// What tells whether a file is still the one that was read: any change of its bytes changes one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileIdentity {
    /// The identity in a file's metadata.
    pub fn of(metadata: &Metadata) -> FileIdentity {
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// An open model file. Never mapped: a file that shrinks gives an error here, where a mapping would give SIGBUS.
#[derive(Debug)]
pub(super) struct Source {
    file: File,
    path: PathBuf,
    identity: FileIdentity,
}

impl Source {
    /// Opens a regular file. Never blocks on a FIFO.
    pub(super) fn open(path: &Path) -> Result<Source, ModelError> {
        let failed = |action| move |source| ModelError::Io { path: path.into(), action, source };
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(failed("open it"))?;
        let metadata = file.metadata().map_err(failed("stat it"))?;
        if !metadata.is_file() {
            return Err(ModelError::NotAFile { path: path.into() });
        }
        Ok(Source { file, path: path.into(), identity: FileIdentity::of(&metadata) })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// Bytes of the file when it was opened.
    pub(super) fn size(&self) -> u64 {
        self.identity.size
    }

    /// An error about one place in this file.
    pub(super) fn malformed(&self, offset: u64, defect: Defect) -> ModelError {
        ModelError::Malformed { path: self.path.clone(), offset, defect }
    }

    /// Refuses what passes the end of the file.
    pub(super) fn check(
        &self,
        offset: u64,
        length: u64,
        what: &'static str,
    ) -> Result<(), ModelError> {
        let available = self.size().saturating_sub(offset);
        if length > available {
            return Err(
                self.malformed(offset, Defect::Truncated { what, needed: length, available })
            );
        }
        Ok(())
    }

    /// Reads exactly `length` bytes. The caller has bounded `length`: that much is allocated, but never more than
    /// the file has.
    pub(super) fn read(
        &self,
        offset: u64,
        length: u64,
        what: &'static str,
    ) -> Result<Vec<u8>, ModelError> {
        self.check(offset, length, what)?;
        let size = usize::try_from(length).map_err(|_| {
            self.malformed(
                offset,
                Defect::OverLimit { what, value: length, limit: usize::MAX as u64 },
            )
        })?;
        let mut bytes = vec![0; size];
        self.file.read_exact_at(&mut bytes, offset).map_err(|source| {
            if source.kind() == io::ErrorKind::UnexpectedEof {
                return ModelError::Changed { path: self.path.clone() };
            }
            ModelError::Io { path: self.path.clone(), action: "read it", source }
        })?;
        Ok(bytes)
    }

    /// Fails if the file is no longer the one that was opened.
    pub(super) fn check_unchanged(&self) -> Result<(), ModelError> {
        let metadata = self.file.metadata().map_err(|source| ModelError::Io {
            path: self.path.clone(),
            action: "stat it",
            source,
        })?;
        if FileIdentity::of(&metadata) != self.identity {
            return Err(ModelError::Changed { path: self.path.clone() });
        }
        Ok(())
    }
}

/// Reads a source from front to back through a window, up to a limit.
#[derive(Debug)]
pub(super) struct Cursor<'a> {
    source: &'a Source,
    /// Next byte, from the start of the file.
    position: u64,
    /// No byte at or past this is read; at most the file's size.
    end: u64,
    window: Vec<u8>,
    window_start: u64,
}

impl<'a> Cursor<'a> {
    /// A cursor at the file's start that may go as far as `limit` bytes.
    pub(super) fn new(source: &'a Source, limit: u64) -> Cursor<'a> {
        let end = source.size().min(limit);
        Cursor { source, position: 0, end, window: Vec::new(), window_start: 0 }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes that may still be read.
    pub(super) fn remaining(&self) -> u64 {
        self.end - self.position
    }

    /// Makes errors at the byte that is next now.
    pub(super) fn malformed_at(&self) -> impl Fn(Defect) -> ModelError + use<'a> {
        let (source, position) = (self.source, self.position);
        move |defect| source.malformed(position, defect)
    }

    fn check(&self, length: u64, what: &'static str) -> Result<(), ModelError> {
        if length <= self.remaining() {
            return Ok(());
        }
        let reaches = self.position.saturating_add(length);
        if reaches <= self.source.size() {
            let defect =
                Defect::OverLimit { what: "the header's length", value: reaches, limit: self.end };
            return Err(self.malformed_at()(defect));
        }
        Err(self.malformed_at()(Defect::Truncated {
            what,
            needed: length,
            available: self.remaining(),
        }))
    }

    /// Passes over bytes without reading them.
    pub(super) fn skip(&mut self, length: u64, what: &'static str) -> Result<(), ModelError> {
        self.check(length, what)?;
        self.position += length;
        Ok(())
    }

    /// The next `N` bytes.
    pub(super) fn array<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], ModelError> {
        let mut out = [0; N];
        self.fill(&mut out, what)?;
        Ok(out)
    }

    /// A little-endian `u32`.
    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, ModelError> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// A little-endian `u64`.
    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, ModelError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// The next `length` bytes, which the caller has bounded.
    pub(super) fn bytes(&mut self, length: u64, what: &'static str) -> Result<Vec<u8>, ModelError> {
        self.check(length, what)?;
        let bytes = self.source.read(self.position, length, what)?;
        self.position += length;
        Ok(bytes)
    }

    fn fill(&mut self, out: &mut [u8], what: &'static str) -> Result<(), ModelError> {
        let length = u64::try_from(out.len()).expect("usize is at most 64 bits");
        self.check(length, what)?;
        let inside = |cursor: &Cursor<'_>| {
            let start = usize::try_from(cursor.position.checked_sub(cursor.window_start)?).ok()?;
            cursor.window.get(start..start.checked_add(out.len())?).map(|_| start)
        };
        let start = match inside(self) {
            Some(start) => start,
            None => {
                let ahead = WINDOW_BYTES.max(length).min(self.remaining());
                self.window = self.source.read(self.position, ahead, what)?;
                self.window_start = self.position;
                0
            }
        };
        out.copy_from_slice(&self.window[start..start + out.len()]);
        self.position += length;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
