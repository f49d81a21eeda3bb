//! Plain reads of model files: the bytes that the tiers must show.
//!
//! They go around the page cache where the file system allows it, so that the check neither warms the cache for the
//! daemon nor pushes other programs' files out of it, and use one buffer of a few MiB whatever the model's size.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Direct reads start, end and land at multiples of this; no device needs more.
const ALIGNMENT: usize = 4096;
/// Bytes of a read.
const BLOCK_BYTES: usize = 4 << 20;
/// The same for a system call that takes it signed.
const BLOCK_BYTES_SIGNED: i64 = 4 << 20;
const _: () = assert!(BLOCK_BYTES_SIGNED.cast_unsigned() == BLOCK_BYTES as u64);

/// A file could not be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot read {length} bytes at byte {offset} to check them", path.display())]
pub(crate) struct ReferenceError {
    /// Which file.
    pub(crate) path: PathBuf,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) length: usize,
    /// Why.
    pub(crate) source: io::Error,
}

/// Reads one file, block by block; keeps the last block, for neighbouring ranges share one.
#[derive(Debug)]
pub(crate) struct PlainReader {
    path: PathBuf,
    file: File,
    direct: bool,
    /// A block, and room to start it at a multiple of [`ALIGNMENT`].
    buffer: Vec<u8>,
    /// The bytes of the file that the buffer holds.
    held: Range<u64>,
}

impl PlainReader {
    /// Opens a file.
    pub(crate) fn open(path: &Path) -> Result<PlainReader, ReferenceError> {
        let failed =
            |source| ReferenceError { path: path.to_owned(), offset: 0, length: 0, source };
        let direct = OpenOptions::new().read(true).custom_flags(nix::libc::O_DIRECT).open(path);
        let (file, direct) = match direct {
            Ok(file) => (file, true),
            // File systems without direct I/O refuse it here or at the first read.
            Err(_) => (File::open(path).map_err(failed)?, false),
        };
        let buffer = vec![0; BLOCK_BYTES + ALIGNMENT];
        Ok(PlainReader { path: path.to_owned(), file, direct, buffer, held: 0..0 })
    }

    /// Hands out the bytes of `range` in order, in pieces.
    pub(crate) fn read(
        &mut self,
        range: &Range<u64>,
        mut piece: impl FnMut(&[u8]),
    ) -> Result<(), ReferenceError> {
        let mut at = range.start;
        while at < range.end {
            if !self.held.contains(&at) {
                self.load(at)?;
            }
            let end = self.held.end.min(range.end);
            let start = self.aligned_start();
            let from = start + offset_in(self.held.start, at);
            let to = start + offset_in(self.held.start, end);
            piece(&self.buffer[from..to]);
            at = end;
        }
        Ok(())
    }

    /// XXH3-64 of the bytes of `range`.
    pub(crate) fn hash(&mut self, range: &Range<u64>) -> Result<u64, ReferenceError> {
        let mut hash = Xxh3::new();
        self.read(range, |bytes| hash.update(bytes))?;
        Ok(hash.digest())
    }

    /// Compares the bytes of `range` with `found`, which has as many.
    pub(crate) fn compare(
        &mut self,
        range: &Range<u64>,
        found: &[u8],
    ) -> Result<Option<Difference>, ReferenceError> {
        let mut difference: Option<Difference> = None;
        let mut at = 0;
        self.read(range, |expected| {
            let part = found.get(at..at + expected.len()).unwrap_or_default();
            // The hash of equal pieces is cheaper than a look at each byte.
            if xxh3_64(part) != xxh3_64(expected) {
                for (index, _) in expected.iter().zip(part).enumerate().filter(|(_, (a, b))| a != b)
                {
                    let position = (at + index) as u64;
                    let first = Difference { first: position, last: position, count: 0 };
                    let known = difference.get_or_insert(first);
                    known.last = position;
                    known.count += 1;
                }
            }
            at += expected.len();
        })?;
        Ok(difference)
    }

    /// Reads the block that holds byte `at`.
    fn load(&mut self, at: u64) -> Result<(), ReferenceError> {
        let block_start = at - at % BLOCK_BYTES as u64;
        self.held = 0..0;
        let start = self.aligned_start();
        let block = &mut self.buffer[start..start + BLOCK_BYTES];
        let mut read = read_whole(&self.file, block, block_start);
        if self.direct
            && read.as_ref().is_err_and(|error| error.raw_os_error() == Some(nix::libc::EINVAL))
        {
            self.direct = false;
            self.file = File::open(&self.path).map_err(|source| self.failed(at, source))?;
            let block = &mut self.buffer[start..start + BLOCK_BYTES];
            read = read_whole(&self.file, block, block_start);
        }
        let length = read.map_err(|source| self.failed(at, source))?;
        if !self.direct {
            // Advice: what it can't do, it leaves.
            let (offset, length) = (block_start.cast_signed(), BLOCK_BYTES_SIGNED);
            let _ignored =
                posix_fadvise(&self.file, offset, length, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
        let end = block_start + length as u64;
        if end <= at {
            let source = io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!("the file ends at byte {end}"),
            );
            return Err(self.failed(at, source));
        }
        self.held = block_start..end;
        Ok(())
    }

    /// Where in the buffer the block starts.
    fn aligned_start(&self) -> usize {
        // usize::MAX stands for "cannot be computed", which happens only in constant evaluation.
        self.buffer.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT)
    }

    fn failed(&self, offset: u64, source: io::Error) -> ReferenceError {
        ReferenceError { path: self.path.clone(), offset, length: BLOCK_BYTES, source }
    }
}

/// Where two versions of the same bytes differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Difference {
    /// First byte that differs, from the start of the range.
    pub(crate) first: u64,
    /// Last byte that differs.
    pub(crate) last: u64,
    /// Bytes that differ.
    pub(crate) count: u64,
}

/// Fills the block unless the file ends first; returns the bytes read.
fn read_whole(file: &impl FileExt, block: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < block.len() {
        // A direct read may stop off the alignment, at the end of the file or before it, and can't go on from
        // there: the last piece is read again, until that brings nothing new.
        let from = filled - filled % ALIGNMENT;
        match file.read_at(&mut block[from..], offset + from as u64) {
            Ok(read) if from + read <= filled => break,
            Ok(read) => filled = from + read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

fn offset_in(start: u64, at: u64) -> usize {
    usize::try_from(at - start).expect("both lie in one block of a few MiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(length: usize) -> Vec<u8> {
        (0..length).map(|index| u8::try_from(index * 7 % 251).unwrap()).collect()
    }

    fn file(length: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let contents = contents(length);
        std::fs::write(file.path(), &contents).unwrap();
        (file, contents)
    }

    #[test]
    fn ranges_across_blocks_are_read_as_they_are() {
        let (file, contents) = file(2 * BLOCK_BYTES + 4099);
        let mut reader = PlainReader::open(file.path()).unwrap();
        for range in
            [0..8, 11..BLOCK_BYTES + 1, 4095..4097, 2 * BLOCK_BYTES - 1..contents.len(), 5..5]
        {
            let wide = range.start as u64..range.end as u64;
            let mut read = Vec::new();
            reader.read(&wide, |bytes| read.extend_from_slice(bytes)).unwrap();
            assert!(read == contents[range.clone()], "{range:?}");
            assert_eq!(reader.hash(&wide).unwrap(), xxh3_64(&contents[range]));
        }
    }

    #[test]
    fn differences_are_located_and_counted() {
        let (file, mut found) = file(BLOCK_BYTES + 9000);
        let mut reader = PlainReader::open(file.path()).unwrap();
        let range = 100..found.len() as u64;
        found.drain(..100);
        assert_eq!(reader.compare(&range, &found).unwrap(), None);
        found[17] ^= 1;
        found[BLOCK_BYTES + 50] ^= 1;
        found[BLOCK_BYTES + 60] ^= 0x80;
        let difference = reader.compare(&range, &found).unwrap();
        assert_eq!(
            difference,
            Some(Difference { first: 17, last: BLOCK_BYTES as u64 + 60, count: 3 })
        );
    }

    /// A file whose reads stop early, and which can't be read from any other byte than a multiple of the alignment.
    struct Halting(Vec<u8>);

    impl FileExt for Halting {
        fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
            let offset = usize::try_from(offset).unwrap();
            if !offset.is_multiple_of(ALIGNMENT) {
                return Err(io::Error::from_raw_os_error(nix::libc::EINVAL));
            }
            let rest = &self.0[offset.min(self.0.len())..];
            let read = rest.len().min(into.len()).min(ALIGNMENT + 512);
            into[..read].copy_from_slice(&rest[..read]);
            Ok(read)
        }

        fn write_at(&self, _from: &[u8], _offset: u64) -> io::Result<usize> {
            unreachable!("nothing is written")
        }
    }

    #[test]
    fn reads_that_stop_early_go_on_where_they_may() {
        let file = Halting(contents(5 * ALIGNMENT + 100));
        let mut block = vec![0; 8 * ALIGNMENT];
        assert_eq!(read_whole(&file, &mut block, 0).unwrap(), 5 * ALIGNMENT + 100);
        assert!(block[..5 * ALIGNMENT + 100] == file.0);
        assert_eq!(read_whole(&file, &mut block[..3 * ALIGNMENT], 0).unwrap(), 3 * ALIGNMENT);
        assert_eq!(read_whole(&file, &mut block, 5 * ALIGNMENT as u64).unwrap(), 100);
        assert_eq!(read_whole(&file, &mut block, 6 * ALIGNMENT as u64).unwrap(), 0);
    }

    #[test]
    fn the_end_of_the_file_is_an_error() {
        let (file, _) = file(5000);
        let mut reader = PlainReader::open(file.path()).unwrap();
        let error = reader.hash(&(4000..5001)).unwrap_err();
        assert_eq!(error.source.to_string(), "the file ends at byte 5000");
        assert_eq!(error.offset, 5000);
    }
}
