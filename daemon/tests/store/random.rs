//! Random requests, many in flight at once, against plain reads and writes: pages of files on disk and in memory, read
//! directly and buffered, from any byte to any byte and behind the end; pages that go to the spill and come back.

use xxhash_rust::xxh3::xxh3_64;

use super::*;

const SLOTS: u32 = 12;
const FRAMES: u32 = 16;
const STEPS: usize = 250;
const PAGE_LENGTH: u32 = 64 << 10;

/// xorshift64*: enough to choose among requests.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }

    fn below_u32(&mut self, n: u32) -> u32 {
        u32::try_from(self.below(u64::from(n))).unwrap()
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, things: &[T]) -> Option<T> {
        let count = u64::try_from(things.len()).unwrap();
        (count > 0).then(|| things[usize::try_from(self.below(count)).unwrap()])
    }
}

/// A file, opened again to read it plainly.
struct Plain {
    path: PathBuf,
    file: File,
    size: u64,
}

/// A request under way.
#[derive(Debug, Clone, Copy)]
enum Asked {
    Read { file: u64, offset: u64, length: u32 },
    Back { slot: u32, intact: bool },
    Out { slot: u32 },
}

struct World {
    random: Random,
    fixture: Fixture,
    depth: usize,
    /// By the store's id.
    files: BTreeMap<u64, Plain>,
    spill: File,
    /// What each slot of the spill holds, once it has been written.
    slots: Vec<Option<Vec<u8>>>,
    /// What each RAM frame holds, whole.
    frames: Vec<Vec<u8>>,
    /// Requests and their frames, by tag.
    asked: BTreeMap<u64, (Asked, u32)>,
    next: u64,
    out_of_order: u64,
    _directories: Vec<TempDir>,
}

/// `O_DIRECT` where it can be had: not every file system knows it.
fn open_either(path: &Path, direct: bool) -> OwnedFd {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let direct = OpenOptions::new().read(true).custom_flags(flags).open(path);
    direct.map_or_else(|_| open(path, false), OwnedFd::from)
}

fn plain(file: &File, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

impl World {
    fn new(threads: bool, seed: u64) -> Self {
        let mut random = Random(seed * 2 + 1);
        let depth = 1 + random.below_u32(FRAMES - 2);
        let mut directories = vec![on_disk()];
        directories.extend(tempfile::tempdir_in("/dev/shm"));
        let spill = Spill::create(directories[0].path(), SLOTS, PAGE).unwrap();
        let mut world = Self {
            fixture: Fixture::new(threads, FRAMES, depth, Some(spill)),
            depth: usize::try_from(depth).unwrap(),
            files: BTreeMap::new(),
            spill: spill_file(directories[0].path()),
            slots: vec![None; usize::try_from(SLOTS).unwrap()],
            frames: vec![vec![0; PAGE_BYTES + 4096]; usize::try_from(FRAMES).unwrap()],
            asked: BTreeMap::new(),
            next: 0,
            out_of_order: 0,
            random,
            _directories: directories,
        };
        for number in 0..4 {
            let directories = &world._directories;
            let path = directories[number % directories.len()].path().join(number.to_string());
            let size = 1 + world.random.below(6 * PAGE);
            write_file(&path, &bytes_of(usize::try_from(size).unwrap(), seed + size));
            world.open(path);
        }
        world
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn open(&mut self, path: PathBuf) {
        let (id, direct) = (self.fresh(), self.random.one_in(2));
        let identity =
            self.fixture.store.open_file(FileId(id), open_either(&path, direct)).unwrap();
        let (file, size) = (File::open(&path).unwrap(), identity.size);
        self.files.insert(id, Plain { path, file, size });
    }

    /// Closes a file that nothing is read from, and opens it under another id.
    fn reopen(&mut self) {
        let busy = |id: &u64| {
            let reads =
                |(asked, _): &(Asked, u32)| matches!(asked, Asked::Read { file, .. } if file == id);
            self.asked.values().any(reads)
        };
        let idle: Vec<_> = self.files.keys().copied().filter(|id| !busy(id)).collect();
        let Some(id) = self.random.of(&idle) else { return };
        self.fixture.store.close_file(FileId(id));
        let Plain { path, .. } = self.files.remove(&id).unwrap();
        self.open(path);
    }

    fn step(&mut self) {
        match self.random.below(16) {
            0 => self.reopen(),
            1..=3 => self.take(true),
            4 => self.take(false),
            5 => self.fixture.store.flush(),
            _ => self.submit(),
        }
    }

    fn idle_frames(&self) -> Vec<u32> {
        let busy = |frame: &u32| self.asked.values().any(|(_, owned)| owned == frame);
        (0..FRAMES).filter(|frame| !busy(frame)).collect()
    }

    fn submit(&mut self) {
        let Some(frame) = self.random.of(&self.idle_frames()) else { return };
        self.check_frame(frame);
        let Some(asked) = self.any_request() else { return };
        let op = match asked {
            Asked::Read { file, offset, length } => read(file, offset, length, frame),
            Asked::Back { slot, intact } => {
                let content = self.slots[usize::try_from(slot).unwrap()].as_ref().unwrap();
                let checksum = xxh3_64(content) ^ u64::from(!intact);
                StoreOp::ReadSpill { slot: SpillSlot(slot), checksum, target: RamFrame(frame) }
            }
            Asked::Out { slot } => {
                let content = bytes_of(PAGE_BYTES + 4096, self.next + 1);
                let mut claim = self.fixture.pool.claim_write(RamFrame(frame)).unwrap();
                claim.bytes_mut().copy_from_slice(&content);
                self.frames[usize::try_from(frame).unwrap()] = content;
                StoreOp::WriteSpill { source: RamFrame(frame), slot: SpillSlot(slot) }
            }
        };
        let tag = self.fresh();
        let submitted = self.fixture.store.submit(Tag(tag), op);
        if self.asked.len() == self.depth {
            assert_eq!(submitted, Err(Full), "{} of {} in flight", self.asked.len(), self.depth);
            self.take(true);
        } else {
            assert_eq!(submitted, Ok(()), "{} of {} in flight", self.asked.len(), self.depth);
            self.asked.insert(tag, (asked, frame));
        }
    }

    fn any_request(&mut self) -> Option<Asked> {
        let written = |slot: &u32| self.slots[usize::try_from(*slot).unwrap()].is_some();
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        for slot in 0..SLOTS {
            let mut uses = self.asked.values().filter_map(|(asked, _)| match asked {
                Asked::Out { slot: used } => (*used == slot).then_some(true),
                Asked::Back { slot: used, .. } => (*used == slot).then_some(false),
                Asked::Read { .. } => None,
            });
            // Several may read a slot at once; one that is written is left alone.
            match uses.next() {
                None => {
                    writable.push(slot);
                    readable.extend(written(&slot).then_some(slot));
                }
                Some(false) => readable.push(slot),
                Some(true) => {}
            }
        }
        match self.random.below(5) {
            0 => self.random.of(&writable).map(|slot| Asked::Out { slot }),
            1 => {
                let intact = !self.random.one_in(8);
                self.random.of(&readable).map(|slot| Asked::Back { slot, intact })
            }
            _ => Some(self.any_read()),
        }
    }

    fn any_read(&mut self) -> Asked {
        let ids: Vec<_> = self.files.keys().copied().collect();
        let file = self.random.of(&ids).unwrap();
        let size = self.files[&file].size;
        let mut offset = self.random.below(size + 1);
        if self.random.one_in(3) {
            offset -= offset % 4096;
        }
        let rest = (size - offset).min(PAGE);
        let length = match self.random.below(8) {
            0 => self.random.below(2).min(rest),
            1 => self.random.below(PAGE + 1),
            2..=4 => rest,
            _ => self.random.below(rest + 1),
        };
        if self.random.one_in(20) {
            offset += self.random.below(2 * PAGE);
        }
        Asked::Read { file, offset, length: u32::try_from(length).unwrap() }
    }

    /// Takes what has completed; waits for something if it is to, and anything is under way.
    fn take(&mut self, wait: bool) {
        let done = if wait && !self.asked.is_empty() {
            self.fixture.store.flush();
            self.fixture.wait()
        } else {
            let mut done = Vec::new();
            self.fixture.store.poll(&mut done);
            done
        };
        for StoreDone { tag, result } in done {
            let (asked, frame) = self.asked.remove(&tag.0).expect("each completes once");
            let older = self.asked.first_key_value().is_some_and(|(oldest, _)| *oldest < tag.0);
            self.out_of_order += u64::from(older);
            self.completed(asked, frame, result);
        }
    }

    fn completed(&mut self, asked: Asked, frame: u32, result: Result<u64, StoreFault>) {
        match asked {
            Asked::Read { file, offset, length } => {
                let Plain { file, size, .. } = &self.files[&file];
                if offset + u64::from(length) > *size {
                    assert_eq!(result, Err(StoreFault::Truncated { offset, end: *size }));
                } else {
                    assert_eq!(result, Ok(0), "{asked:?} of {size} bytes");
                    let mut expected = plain(file, offset, length);
                    expected.resize(PAGE_BYTES, 0);
                    let found = self.fixture.page(frame, offset);
                    assert!(found == expected, "{asked:?} of {size} bytes differs");
                }
                self.frames[usize::try_from(frame).unwrap()] = self.frame(frame);
            }
            Asked::Back { slot, intact } => {
                let offset = u64::from(slot) * PAGE;
                let checked = if intact { Ok(0) } else { Err(StoreFault::Checksum { offset }) };
                assert_eq!(result, checked, "{asked:?}");
                let content = self.slots[usize::try_from(slot).unwrap()].as_ref().unwrap();
                assert!(self.fixture.page(frame, 0) == *content, "{asked:?} differs");
                self.frames[usize::try_from(frame).unwrap()] = self.frame(frame);
            }
            Asked::Out { slot } => {
                self.check_frame(frame);
                let content = self.fixture.page(frame, 0);
                assert_eq!(result, Ok(xxh3_64(&content)), "{asked:?}");
                self.slots[usize::try_from(slot).unwrap()] = Some(content);
                self.check_slot(slot);
            }
        }
    }

    fn frame(&self, frame: u32) -> Vec<u8> {
        let claim = self.fixture.pool.claim_read(RamFrame(frame)).expect("nothing is under way");
        claim.bytes().to_vec()
    }

    /// Nothing has written to a frame that was nobody's target.
    fn check_frame(&self, frame: u32) {
        let known = &self.frames[usize::try_from(frame).unwrap()];
        assert!(self.frame(frame) == *known, "frame {frame} has changed");
    }

    /// A slot holds what was written there last, for whoever reads the file plainly.
    fn check_slot(&self, slot: u32) {
        let Some(content) = &self.slots[usize::try_from(slot).unwrap()] else { return };
        let found = plain(&self.spill, u64::from(slot) * PAGE, PAGE_LENGTH);
        assert!(found == *content, "slot {slot} differs");
    }

    /// Ends with everything done, or with a store dropped in the middle of it.
    fn finish(mut self) -> u64 {
        let idle = self.idle_frames();
        if self.random.one_in(2) {
            while !self.asked.is_empty() {
                self.take(true);
            }
            (0..FRAMES).for_each(|frame| self.check_frame(frame));
            (0..SLOTS).for_each(|slot| self.check_slot(slot));
            return self.out_of_order;
        }
        let out_of_order = self.out_of_order;
        self.drop_store(&idle);
        out_of_order
    }

    /// What is under way when the store is dropped has arrived when it is gone.
    fn drop_store(self, idle: &[u32]) {
        let Fixture { store, pool, .. } = self.fixture;
        drop(store);
        for frame in 0..FRAMES {
            let claim = pool.claim_write(RamFrame(frame)).expect("the dropped store has let it go");
            let known = &self.frames[usize::try_from(frame).unwrap()];
            assert!(!idle.contains(&frame) || claim.bytes() == known, "frame {frame} has changed");
        }
        for (asked, frame) in self.asked.into_values() {
            let claim = pool.claim_read(RamFrame(frame)).unwrap();
            let (at, expected) = match asked {
                Asked::Read { file, offset, length } => {
                    let Plain { file, size, .. } = &self.files[&file];
                    if offset + u64::from(length) > *size {
                        continue;
                    }
                    (offset % 4096, plain(file, offset, length))
                }
                Asked::Back { slot, .. } | Asked::Out { slot } => {
                    (0, plain(&self.spill, u64::from(slot) * PAGE, PAGE_LENGTH))
                }
            };
            let found = &claim.bytes()[usize::try_from(at).unwrap()..][..expected.len()];
            assert!(found == expected, "{asked:?} is not done");
        }
    }
}

/// `LAPIS_SEEDS=1000 cargo test -p lapisd --test store random` for more.
#[test]
fn random_requests_do_what_plain_reads_and_writes_do() {
    with_both(|threads| {
        let seeds = std::env::var("LAPIS_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(16);
        let mut out_of_order = 0;
        for seed in 0..seeds {
            eprintln!("seed {seed}, threads {threads}");
            let mut world = World::new(threads, seed);
            for _ in 0..STEPS {
                world.step();
            }
            out_of_order += world.finish();
        }
        eprintln!("{out_of_order} requests completed before an older one");
    });
}
