//! Traces of accesses: page ids, one a line, or KV blocks as JSON lines with `hash_ids`; plain or gzip.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use lapisd::policy::Slot;
use lapisd::policy::patterns::Pattern;
use serde::Deserialize;

/// Most bytes of a line.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Most accesses of a trace.
const ACCESSES_MAX: usize = 1 << 30;
/// What a gzip file begins with.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A trace can't be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// The file or directory.
    #[error("cannot open {}", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its bytes, or what they are packed in.
    #[error("cannot read {} after line {line}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Lines that could be read.
        line: usize,
        /// Why.
        source: io::Error,
    },
    /// A line that is no access.
    #[error("{}:{line}: {what}", path.display())]
    Line {
        /// Which.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong with it.
        what: LineError,
    },
    /// Nothing is accessed.
    #[error("{} has no accesses", path.display())]
    Empty {
        /// Which.
        path: PathBuf,
    },
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineError {
    /// Neither form.
    #[error("not a page id: a number below 2^64 was expected")]
    NotAnId,
    /// It begins as JSON does.
    #[error("not an object with hash_ids, a list of numbers below 2^64")]
    NotBlocks,
    /// More than anyone would write.
    #[error("the line is longer than 16 MiB")]
    TooLong,
    /// More accesses than can be counted.
    #[error("the trace has more than 2^30 accesses")]
    TooMany,
}

/// A trace: which units are used, one after another.
#[derive(Debug)]
pub(super) struct Trace {
    /// How it is called in a report.
    pub(super) name: String,
    /// Units in order; they are numbered as they appear.
    pub(super) accesses: Vec<Slot>,
    /// How many there are.
    pub(super) distinct: u32,
    /// Whether it is of blocks of KV caches.
    pub(super) blocks: bool,
}

impl From<Pattern> for Trace {
    fn from(pattern: Pattern) -> Trace {
        let mut numbers = Numbers::default();
        pattern.accesses.into_iter().for_each(|slot| numbers.access(u64::from(slot)));
        numbers.into_trace(pattern.name.to_owned(), false)
    }
}

/// What a request of a KV block trace says about blocks.
#[derive(Deserialize)]
struct Blocks {
    hash_ids: Vec<u64>,
}

/// The file, or the files of a directory that are traces by their names.
pub(super) fn files(path: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let open = |source| TraceError::Open { path: path.to_owned(), source };
    if !path.metadata().map_err(open)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in path.read_dir().map_err(open)? {
        let file = entry.map_err(open)?.path();
        let ends = |end: &&str| file.to_str().is_some_and(|name| name.ends_with(end));
        if file.is_file() && [".trace", ".trace.gz", ".jsonl", ".jsonl.gz"].iter().any(ends) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

/// Reads a trace.
pub(super) fn read(path: &Path) -> Result<Trace, TraceError> {
    let open = |source| TraceError::Open { path: path.to_owned(), source };
    let mut file = BufReader::new(File::open(path).map_err(open)?);
    let start = file.fill_buf().map_err(|source| TraceError::Read {
        path: path.to_owned(),
        line: 0,
        source,
    })?;
    if start.starts_with(&GZIP) {
        parse(path, BufReader::new(MultiGzDecoder::new(file)))
    } else {
        parse(path, file)
    }
}

fn parse(path: &Path, mut reader: impl BufRead) -> Result<Trace, TraceError> {
    let (mut numbers, mut line) = (Numbers::default(), Vec::new());
    let mut blocks = false;
    for number in 1.. {
        line.clear();
        let read = reader.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        let read = read.map_err(|source| TraceError::Read {
            path: path.to_owned(),
            line: number - 1,
            source,
        })?;
        let wrong = |what| TraceError::Line { path: path.to_owned(), line: number, what };
        if read == 0 {
            break;
        }
        if read as u64 == LINE_BYTES_MAX {
            return Err(wrong(LineError::TooLong));
        }
        blocks |= numbers.line(line.trim_ascii()).map_err(wrong)?;
        if numbers.accesses.len() > ACCESSES_MAX {
            return Err(wrong(LineError::TooMany));
        }
    }
    if numbers.accesses.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let name = name.split('.').next().unwrap_or(&name).to_owned();
    Ok(numbers.into_trace(name, blocks))
}

/// Numbers units as they appear.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    known: HashMap<u64, Slot>,
    accesses: Vec<Slot>,
}

impl Numbers {
    pub(super) fn access(&mut self, id: u64) {
        let next = Slot::try_from(self.known.len()).unwrap_or(Slot::MAX);
        self.accesses.push(*self.known.entry(id).or_insert(next));
    }

    pub(super) fn into_trace(self, name: String, blocks: bool) -> Trace {
        let distinct = u32::try_from(self.known.len()).unwrap_or(u32::MAX);
        Trace { name, accesses: self.accesses, distinct, blocks }
    }

    /// One line without the space around it. Whether it was of blocks.
    fn line(&mut self, line: &[u8]) -> Result<bool, LineError> {
        if line.starts_with(b"{") {
            let blocks: Blocks = serde_json::from_slice(line).map_err(|_| LineError::NotBlocks)?;
            blocks.hash_ids.into_iter().for_each(|id| self.access(id));
            return Ok(true);
        }
        // The traces of the LIRS paper have a line with an asterisk between their parts.
        if line.is_empty() || line == b"*" {
            return Ok(false);
        }
        let text = std::str::from_utf8(line).map_err(|_| LineError::NotAnId)?;
        self.access(text.parse().map_err(|_| LineError::NotAnId)?);
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn parse(text: &[u8]) -> Result<Trace, TraceError> {
        super::parse(Path::new("dir/cs.trace.gz"), text)
    }

    fn complaint(text: &[u8]) -> String {
        parse(text).unwrap_err().to_string()
    }

    #[test]
    fn units_are_numbered_as_they_appear() {
        let trace = parse(b"7\r\n*\n\n 9 \n18446744073709551615\n7").unwrap();
        assert_eq!(trace.accesses, [0, 1, 2, 0]);
        assert_eq!((trace.name.as_str(), trace.distinct, trace.blocks), ("cs", 3, false));
        let trace = parse(
            br#"{"timestamp": 0, "hash_ids": [5, 6]}
            {"hash_ids": [5, 7], "output_length": 3}"#,
        );
        let trace = trace.unwrap();
        assert_eq!((trace.accesses, trace.blocks), (vec![0, 1, 0, 2], true));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let id = "dir/cs.trace.gz:2: not a page id: a number below 2^64 was expected";
        assert_eq!(complaint(b"1\nx\n"), id);
        assert_eq!(complaint(b"1\n-1"), id);
        assert_eq!(complaint(b"1\n18446744073709551616"), id);
        assert_eq!(complaint(b"1\n\xff\n"), id);
        let blocks = "dir/cs.trace.gz:1: not an object with hash_ids, a list of numbers below 2^64";
        assert_eq!(complaint(b"{}"), blocks);
        assert_eq!(complaint(br#"{"hash_ids": [1, "2"]}"#), blocks);
        assert_eq!(complaint(b"* \n"), "dir/cs.trace.gz has no accesses");
        let long = vec![b'1'; 16 << 20];
        assert_eq!(complaint(&long), "dir/cs.trace.gz:1: the line is longer than 16 MiB");
    }

    #[test]
    fn files_may_be_gzip_whatever_their_names() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.trace");
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(b"1\n2\n1\n").unwrap();
        let packed = packed.finish().unwrap();
        std::fs::write(&path, &packed).unwrap();
        std::fs::write(directory.path().join("README"), "no trace").unwrap();
        assert_eq!(files(directory.path()).unwrap(), [path.as_path()]);
        assert_eq!(read(&path).unwrap().accesses, [0, 1, 0]);
        std::fs::write(&path, &packed[..packed.len() - 9]).unwrap();
        let cut = read(&path).unwrap_err().to_string();
        assert_eq!(cut, format!("cannot read {} after line 3", path.display()));
    }
}
