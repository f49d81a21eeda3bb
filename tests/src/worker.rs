//! A client that uses all that a daemon offers, at random, and compares every byte that it maps with what it must be:
//! of its own memory it keeps a copy, of a file it knows the pattern.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lapis::model::pattern;
use lapis::{Access, Advice, Allocation, Client, Code, PrefetchOptions};

use crate::bytes::{edit, read};
use crate::random::Random;

/// Longer than anything takes while others can get at what they wait for.
pub const WAIT: Duration = Duration::from_secs(60);
/// Of a map that is asked for while another is held: two clients that do so may wait for one another.
const IMPATIENT: Duration = Duration::from_millis(20);
/// Pages of an allocation, and of one mapping.
const PAGES_MAX: u64 = 24;
const MAPPED_MAX: u64 = 4;
const ALLOCATIONS: usize = 2;

/// A file of which every byte is known: `pattern` with this seed.
#[derive(Debug, Clone)]
pub struct Known {
    /// Where it is.
    pub path: PathBuf,
    /// Of its pattern.
    pub seed: u64,
}

/// Memory of our own, and what it must hold.
struct Memory {
    allocation: Allocation,
    content: Vec<u8>,
}

/// Part of a known file.
struct Part {
    allocation: Allocation,
    seed: u64,
    offset: u64,
}

/// The client. See the module.
pub struct Worker {
    socket: PathBuf,
    known: Vec<Known>,
    random: Random,
    client: Client,
    memories: Vec<Memory>,
    parts: Vec<Part>,
    /// For comparing.
    expected: Vec<u8>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("random", &self.random).finish_non_exhaustive()
    }
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it fits in memory")
}

fn span(range: &Range<u64>) -> Range<usize> {
    index(range.start)..index(range.end)
}

impl Worker {
    /// Connects, and gets memory and files to work on.
    ///
    /// # Panics
    /// When it is refused anything.
    #[must_use]
    pub fn new(socket: &Path, known: Vec<Known>, seed: u64) -> Self {
        let client = Client::connect(socket).expect("the daemon serves");
        let mut worker = Self {
            socket: socket.to_owned(),
            known,
            random: Random::new(seed),
            client,
            memories: Vec::new(),
            parts: Vec::new(),
            expected: Vec::new(),
        };
        worker.furnish();
        worker
    }

    /// Does one thing.
    ///
    /// # Panics
    /// When a byte is wrong, or a request fails that can't.
    pub fn step(&mut self) {
        match self.random.below(64) {
            0..=23 => self.write(),
            24..=35 => self.read_memory(),
            36..=47 => self.read_file(),
            48..=50 => self.read_both(),
            51..=52 => self.hold_and_wait(),
            53..=55 => self.prefetch(),
            56..=57 => self.advise(),
            58..=59 => self.flush(),
            60..=61 => self.replace_memory(),
            62 => self.replace_part(),
            _ if self.random.one_in(8) => self.reconnect(),
            _ => drop(self.client.stats().expect("it serves")),
        }
        assert_eq!(self.client.take_refusal(), None);
    }

    fn furnish(&mut self) {
        while self.memories.len() < ALLOCATIONS {
            let memory = self.allocate();
            self.memories.push(memory);
        }
        for file in 0..self.known.len() {
            let part = self.open(file);
            self.parts.push(part);
        }
    }

    /// Memory of some pages, not all of them whole.
    fn allocate(&mut self) -> Memory {
        let page = self.client.page_size();
        let size = (1 + self.random.below(PAGES_MAX)) * page - self.random.below(page);
        let allocation = self.client.allocate(size).expect("there is room for all of us");
        Memory { allocation, content: vec![0; index(size)] }
    }

    /// A part of a file, at any byte.
    fn open(&mut self, file: usize) -> Part {
        let Known { path, seed } = self.known[file].clone();
        let size = path.metadata().expect("it is there").len();
        let offset = self.random.below(size / 2);
        let length = 1 + self.random.below(size - offset);
        let allocation = self.client.open_path(&path, offset, length).expect("it is a file");
        Part { allocation, seed, offset }
    }

    /// Some bytes of an allocation, in no more pages than a mapping of ours has.
    fn range(&mut self, size: u64) -> Range<u64> {
        let page = self.client.page_size();
        let start = self.random.below(size);
        let longest = (MAPPED_MAX - 1) * page;
        let length = 1 + self.random.below(longest.min(size - start));
        start..start + length
    }

    fn any_memory(&mut self) -> (usize, Range<u64>) {
        let which = self.random.index(self.memories.len());
        let size = self.memories[which].allocation.size();
        (which, self.range(size))
    }

    fn any_part(&mut self) -> (usize, Range<u64>) {
        let which = self.random.index(self.parts.len());
        let size = self.parts[which].allocation.size();
        (which, self.range(size))
    }

    fn write(&mut self) {
        let (which, range) = self.any_memory();
        let seed = self.random.any();
        let overwrite = self.random.one_in(3);
        let Memory { allocation, content } = &mut self.memories[which];
        let content = &mut content[span(&range)];
        let access = if overwrite { Access::Overwrite } else { Access::Write };
        let mut mapping =
            self.client.map(&[(allocation, range.clone())], access, WAIT).expect("room is made");
        if !overwrite {
            compare(&read(&mapping, 0), content, "memory", &range);
        }
        pattern(seed, 0, content);
        edit(&mut mapping, 0, |bytes| bytes.copy_from_slice(content));
    }

    fn read_memory(&mut self) {
        let (which, range) = self.any_memory();
        let Memory { allocation, content } = &self.memories[which];
        let mapping = self
            .client
            .map(&[(allocation, range.clone())], Access::Read, WAIT)
            .expect("room is made");
        compare(&read(&mapping, 0), &content[span(&range)], "memory", &range);
    }

    fn read_file(&mut self) {
        let (which, range) = self.any_part();
        let Part { allocation, seed, offset } = &self.parts[which];
        let mapping = self
            .client
            .map(&[(allocation, range.clone())], Access::Read, WAIT)
            .expect("room is made");
        self.expected.resize(mapping.length(0), 0);
        pattern(*seed, offset + range.start, &mut self.expected);
        compare(&read(&mapping, 0), &self.expected, "a file", &range);
    }

    /// Memory and a file in one mapping.
    fn read_both(&mut self) {
        let ((memory, own), (part, shared)) = (self.any_memory(), self.any_part());
        let Part { allocation: file, seed, offset } = &self.parts[part];
        let Memory { allocation, content } = &self.memories[memory];
        let ranges = [(allocation, own.clone()), (file, shared.clone())];
        let mapping = self.client.map(&ranges, Access::Read, WAIT).expect("room is made");
        compare(&read(&mapping, 0), &content[span(&own)], "memory", &own);
        self.expected.resize(mapping.length(1), 0);
        pattern(*seed, offset + shared.start, &mut self.expected);
        compare(&read(&mapping, 1), &self.expected, "a file", &shared);
    }

    /// Asks for more while it holds something: it may be told that it has waited long enough, and what it holds stays.
    fn hold_and_wait(&mut self) {
        let ((memory, own), (part, shared)) = (self.any_memory(), self.any_part());
        let Memory { allocation, content } = &self.memories[memory];
        let held = self
            .client
            .map(&[(allocation, own.clone())], Access::Read, WAIT)
            .expect("room is made");
        let more = [(&self.parts[part].allocation, shared)];
        match self.client.map(&more, Access::Read, IMPATIENT) {
            Ok(mapping) => drop(mapping),
            Err(error) => assert_eq!(error.code(), Some(Code::TimedOut), "{error}"),
        }
        compare(&read(&held, 0), &content[span(&own)], "memory that was held", &own);
    }

    fn prefetch(&mut self) {
        let ((memory, own), (part, shared)) = (self.any_memory(), self.any_part());
        let options = PrefetchOptions {
            priority: u8::try_from(self.random.below(3)).expect("below 3"),
            within: self.random.one_in(3).then_some(IMPATIENT),
        };
        let cancelled = self.random.one_in(4);
        let ranges =
            [(&self.memories[memory].allocation, own), (&self.parts[part].allocation, shared)];
        self.client.prefetch_with(&ranges, options).expect("ours");
        if cancelled {
            self.client.cancel_prefetch(&ranges).expect("ours");
        }
    }

    fn advise(&mut self) {
        let ((memory, own), (part, shared)) = (self.any_memory(), self.any_part());
        let all = [
            Advice::Normal,
            Advice::Sequential,
            Advice::Random,
            Advice::Keep,
            Advice::DontNeed,
            Advice::Chain,
        ];
        let advice = all[self.random.index(all.len())];
        let ranges =
            [(&self.memories[memory].allocation, own), (&self.parts[part].allocation, shared)];
        self.client.advise(&ranges, advice).expect("ours");
    }

    fn flush(&mut self) {
        let (memory, own) = self.any_memory();
        let ranges = [(&self.memories[memory].allocation, own)];
        self.client.flush(&ranges, WAIT).expect("the spill has room");
    }

    fn replace_memory(&mut self) {
        let which = self.random.index(self.memories.len());
        drop(self.memories.swap_remove(which));
        let memory = self.allocate();
        self.memories.push(memory);
    }

    fn replace_part(&mut self) {
        let which = self.random.index(self.parts.len());
        self.parts[which] = self.open(which);
    }

    /// Ends the session well, and begins another.
    fn reconnect(&mut self) {
        self.memories.clear();
        self.parts.clear();
        self.client = Client::connect(&self.socket).expect("the daemon serves");
        self.furnish();
    }
}

#[track_caller]
fn compare(found: &[u8], expected: &[u8], what: &str, range: &Range<u64>) {
    if found != expected {
        let differ = |(found, expected): (&u8, &u8)| found != expected;
        let first = found.iter().zip(expected).position(differ);
        let count = found.iter().zip(expected).filter(|pair| differ(*pair)).count();
        panic!("{count} bytes of {range:?} of {what} are wrong, the first is number {first:?}");
    }
}
