//! The stores on real files, each against plain reads.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]
#![expect(unsafe_code, reason = "cachestat is not wrapped by libc or nix")]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use lapisd::device::Full;
use lapisd::engine::ids::{FileId, RamFrame, SpillSlot, Tag};
use lapisd::store::spill::{Spill, SpillError};
use lapisd::store::{AnyStore, Store, StoreDone, StoreFault, StoreOp};
use lapisd::sys::memory::RamPool;
use lapisd::sys::waker::Waker;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tempfile::TempDir;

#[path = "store/random.rs"]
mod random;

const PAGE: u64 = 64 << 10;
const PAGE_BYTES: usize = 64 << 10;
const FRAMES: u32 = 64;

/// A directory on the disk that the build is on: `/tmp` may be memory.
fn on_disk() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A store, what it works on, and how to wait for it.
struct Fixture {
    store: AnyStore,
    pool: Arc<RamPool>,
    waker: Waker,
}

impl Fixture {
    fn new(threads: bool, frames: u32, depth: u32, spill: Option<Spill>) -> Self {
        let pool = Arc::new(RamPool::new(u64::from(frames) * (PAGE + 4096), PAGE).unwrap());
        let waker = Waker::new().unwrap();
        let store =
            AnyStore::open(Arc::clone(&pool), spill, depth, waker.clone(), threads).unwrap();
        Self { store, pool, waker }
    }

    /// Waits until the store announces something, and takes it.
    fn wait(&mut self) -> Vec<StoreDone> {
        let mut fds = [PollFd::new(self.waker.as_fd(), PollFlags::POLLIN)];
        let ready = poll(&mut fds, PollTimeout::from(30_000_u16)).unwrap();
        assert_eq!(ready, 1, "no completion announced itself");
        self.waker.clear();
        let mut done = Vec::new();
        self.store.poll(&mut done);
        done
    }

    fn submit(&mut self, tag: u64, op: StoreOp) {
        assert_eq!(self.store.submit(Tag(tag), op), Ok(()));
    }

    fn run(&mut self, op: StoreOp) -> Result<u64, StoreFault> {
        self.submit(77, op);
        self.store.flush();
        loop {
            if let Some(done) = self.wait().pop() {
                assert_eq!(done.tag, Tag(77));
                return done.result;
            }
        }
    }

    fn page(&self, frame: u32, offset: u64) -> Vec<u8> {
        let shift = usize::try_from(offset % 4096).unwrap();
        let claim =
            self.pool.claim_read(RamFrame(frame)).expect("the frame is given back on completion");
        claim.bytes()[shift..shift + PAGE_BYTES].to_vec()
    }

    fn dirty(&self, frame: u32, byte: u8) {
        self.pool.claim_write(RamFrame(frame)).unwrap().bytes_mut().fill(byte);
    }
}

/// Both stores; where io_uring is refused, says so and tries the threads only.
fn with_both(test: impl Fn(bool)) {
    test(true);
    let probe = Fixture::new(false, 1, 1, None);
    if probe.store.kind() == "io_uring" {
        test(false);
    } else {
        eprintln!("SKIPPED on io_uring: this machine refuses it");
    }
}

fn bytes_of(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..length).map(|_| u8::try_from(next() & 0xff).unwrap()).collect()
}

fn write_file(path: &Path, content: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(content).unwrap();
    file.sync_all().unwrap();
}

fn open(path: &Path, direct: bool) -> OwnedFd {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).custom_flags(flags).open(path).unwrap().into()
}

fn read(file: u64, offset: u64, length: u32, frame: u32) -> StoreOp {
    StoreOp::ReadFile { file: FileId(file), offset, length, target: RamFrame(frame) }
}

/// What a page must hold: the file's bytes, then zeros.
fn expected(content: &[u8], offset: u64, length: u32) -> Vec<u8> {
    let start = usize::try_from(offset).unwrap();
    let mut page = content[start..start + usize::try_from(length).unwrap()].to_vec();
    page.resize(PAGE_BYTES, 0);
    page
}

fn compare_reads_in(directory: &Path, threads: bool, direct: bool) {
    let sizes =
        [1, 511, 512, 4095, 4096, 4097, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 777_777];
    let mut fixture = Fixture::new(threads, FRAMES, 32, None);
    for (number, size) in (1..).zip(sizes) {
        let content = bytes_of(size, number);
        let path = directory.join(format!("file-{threads}-{direct}-{number}"));
        write_file(&path, &content);
        let identity = fixture.store.open_file(FileId(number), open(&path, direct)).unwrap();
        let size = u64::try_from(size).unwrap();
        assert_eq!(identity.size, size);
        let mut state = number * 7919;
        let mut cases = vec![(0, size.min(PAGE)), (size - 1, 1), (size / 2, 0), (size, 0)];
        for _ in 0..40 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let offset = (state >> 33) % size;
            cases.push((offset, 1 + (state >> 20) % PAGE.min(size - offset)));
        }
        for (offset, length) in cases {
            let length = u32::try_from(length).unwrap();
            fixture.dirty(3, 0xEE);
            assert_eq!(
                fixture.run(read(number, offset, length, 3)),
                Ok(0),
                "{offset}+{length} of {size}"
            );
            let found = fixture.page(3, offset);
            assert!(
                found == expected(&content, offset, length),
                "{offset}+{length} of {size} differs"
            );
        }
        fixture.store.close_file(FileId(number));
    }
}

#[test]
fn pages_hold_what_plain_reads_return_and_zeros_behind() {
    with_both(|threads| {
        for direct in [true, false] {
            compare_reads_in(on_disk().path(), threads, direct);
        }
    });
}

#[test]
fn files_in_memory_read_the_same() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: no /dev/shm here");
        return;
    };
    with_both(|threads| {
        for direct in [true, false] {
            // Before Linux 6.6 tmpfs refuses the flag.
            let probe = directory.path().join("probe");
            fs::write(&probe, "x").unwrap();
            if direct
                && OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&probe).is_err()
            {
                eprintln!("skipped with O_DIRECT: tmpfs refuses it here");
                continue;
            }
            compare_reads_in(directory.path(), threads, direct);
        }
    });
}

#[test]
fn a_file_that_shrinks_while_open_is_truncated_not_wrong() {
    with_both(|threads| {
        for direct in [true, false] {
            let directory = on_disk();
            let path = directory.path().join("model");
            write_file(&path, &bytes_of(300_000, 5));
            let mut fixture = Fixture::new(threads, FRAMES, 8, None);
            fixture.store.open_file(FileId(1), open(&path, direct)).unwrap();
            OpenOptions::new().write(true).open(&path).unwrap().set_len(100_001).unwrap();
            let length = u32::try_from(PAGE).unwrap();
            let inside = fixture.run(read(1, 70_000, length, 0));
            assert_eq!(inside, Err(StoreFault::Truncated { offset: 70_000, end: 100_001 }));
            let behind = fixture.run(read(1, 200_000, length, 0));
            assert_eq!(behind, Err(StoreFault::Truncated { offset: 200_000, end: 100_001 }));
            let before = fixture.run(read(1, 5, 100, 0));
            assert_eq!(before, Err(StoreFault::Changed { offset: 5 }));
            let never_there = fixture.run(read(1, 299_999, 2, 0));
            assert_eq!(never_there, Err(StoreFault::Truncated { offset: 299_999, end: 100_001 }));
        }
    });
}

#[test]
fn a_file_that_is_overwritten_while_open_is_changed() {
    with_both(|threads| {
        let directory = on_disk();
        let path = directory.path().join("model");
        write_file(&path, &bytes_of(300_000, 5));
        let mut fixture = Fixture::new(threads, FRAMES, 8, None);
        fixture.store.open_file(FileId(1), open(&path, true)).unwrap();
        assert_eq!(fixture.run(read(1, 0, 4096, 0)), Ok(0));
        let writer = OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all_at(b"other bytes", 17).unwrap();
        // A file system may keep times in steps of some milliseconds: set a time that differs for certain.
        writer.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(fixture.run(read(1, 8192, 100, 0)), Err(StoreFault::Changed { offset: 8192 }));
    });
}

#[test]
fn what_is_no_model_file_is_refused() {
    with_both(|threads| {
        let directory = on_disk();
        let path = directory.path().join("model");
        write_file(&path, b"x");
        let mut fixture = Fixture::new(threads, 1, 1, None);
        let refuse =
            |fixture: &mut Fixture, fd| fixture.store.open_file(FileId(9), fd).unwrap_err();
        let folder = File::open(directory.path()).unwrap();
        assert_eq!(refuse(&mut fixture, folder.into()), StoreFault::NotRegular);
        let (pipe, _other_end) = nix::unistd::pipe().unwrap();
        assert_eq!(refuse(&mut fixture, pipe), StoreFault::NotRegular);
        let zero = File::open("/dev/zero").unwrap();
        assert_eq!(refuse(&mut fixture, zero.into()), StoreFault::NotRegular);
        let write_only = OpenOptions::new().write(true).open(&path).unwrap();
        assert_eq!(refuse(&mut fixture, write_only.into()), StoreFault::NotReadable);
        let by_path = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&path).unwrap();
        assert_eq!(refuse(&mut fixture, by_path.into()), StoreFault::NotReadable);
    });
}

#[test]
fn spilled_pages_come_back_and_a_corrupt_one_is_noticed() {
    with_both(|threads| {
        for directory in [on_disk(), tempfile::tempdir_in("/dev/shm").unwrap()] {
            let spill = Spill::create(directory.path(), 5, PAGE).unwrap();
            let mut fixture = Fixture::new(threads, FRAMES, 8, Some(spill));
            let mut checksums = Vec::new();
            for slot in 0..5_u32 {
                let content = bytes_of(PAGE_BYTES, u64::from(slot) + 40);
                fixture.pool.claim_write(RamFrame(slot)).unwrap().bytes_mut()[..PAGE_BYTES]
                    .copy_from_slice(&content);
                let op = StoreOp::WriteSpill { source: RamFrame(slot), slot: SpillSlot(4 - slot) };
                checksums.push(fixture.run(op).unwrap());
            }
            let back = |slot: u32, checksum| StoreOp::ReadSpill {
                slot: SpillSlot(slot),
                checksum,
                target: RamFrame(10),
            };
            for (written, &checksum) in (0_u32..).zip(&checksums) {
                assert_eq!(fixture.run(back(4 - written, checksum)), Ok(0));
                assert!(fixture.page(10, 0) == bytes_of(PAGE_BYTES, u64::from(written) + 40));
            }
            let behind_its_back = spill_file(directory.path());
            behind_its_back.write_all_at(&[0x5A], 3 * PAGE + 1234).unwrap();
            behind_its_back.sync_all().unwrap();
            let corrupt = fixture.run(back(3, checksums[1]));
            assert_eq!(corrupt, Err(StoreFault::Checksum { offset: 3 * PAGE }));
            assert_eq!(fixture.run(back(2, checksums[2])), Ok(0));
            behind_its_back.set_len(2 * PAGE).unwrap();
            let cut = fixture.run(back(2, checksums[2]));
            assert_eq!(cut, Err(StoreFault::Truncated { offset: 2 * PAGE, end: 2 * PAGE }));
        }
    });
}

/// The spill that this process has open in a directory, opened again.
fn spill_file(directory: &Path) -> File {
    let links =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok).map(|entry| entry.path());
    let of_directory = |link: &PathBuf| {
        fs::read_link(link).is_ok_and(|target| {
            target.starts_with(directory) && target.display().to_string().ends_with(" (deleted)")
        })
    };
    let link = links.into_iter().find(of_directory).expect("the spill is open");
    OpenOptions::new().read(true).write(true).open(link).unwrap()
}

#[test]
fn the_checksum_of_a_page_is_xxh3() {
    with_both(|threads| {
        let directory = on_disk();
        let spill = Spill::create(directory.path(), 1, PAGE).unwrap();
        let mut fixture = Fixture::new(threads, FRAMES, 8, Some(spill));
        fixture.dirty(0, 0);
        let written = fixture.run(StoreOp::WriteSpill { source: RamFrame(0), slot: SpillSlot(0) });
        assert_eq!(written, Ok(ZEROS_XXH3));
    });
}

/// XXH3-64 of 65,536 zeros, by the reference implementation: `head -c 65536 /dev/zero | xxhsum -H3`.
const ZEROS_XXH3: u64 = 0x33b2_02d3_02b6_5caa;

#[test]
fn five_hundred_operations_in_flight_complete_in_any_order_and_one_more_is_full() {
    const DEPTH: u32 = 512;
    with_both(|threads| {
        let directory = on_disk();
        let path = directory.path().join("model");
        let content = bytes_of(8 << 20, 99);
        write_file(&path, &content);
        let spill = Spill::create(directory.path(), DEPTH, PAGE).unwrap();
        let mut fixture = Fixture::new(threads, DEPTH + 1, DEPTH, Some(spill));
        fixture.store.open_file(FileId(1), open(&path, true)).unwrap();
        let offset =
            |tag: u64| (tag * 13_577) % (8 << 20) - (tag % 7) * (tag * 13_577 % (8 << 20) / 9);
        let length = |tag: u64| u32::try_from(((8 << 20) - offset(tag)).min(PAGE)).unwrap();
        for tag in 0..u64::from(DEPTH) {
            let frame = u32::try_from(tag).unwrap();
            // Every third is a write, so that quick and slow ones mix.
            if tag % 3 == 0 {
                fixture.submit(
                    tag,
                    StoreOp::WriteSpill { source: RamFrame(frame), slot: SpillSlot(frame) },
                );
            } else {
                fixture.submit(tag, read(1, offset(tag), length(tag), frame));
            }
        }
        assert_eq!(fixture.store.submit(Tag(512), read(1, 0, 1, DEPTH)), Err(Full));
        fixture.store.flush();
        let mut results = BTreeMap::new();
        while results.len() < 512 {
            for done in fixture.wait() {
                assert!(results.insert(done.tag, done.result).is_none(), "{:?} twice", done.tag);
            }
        }
        for (tag, result) in results {
            result.unwrap();
            if tag.0 % 3 != 0 {
                let found = fixture.page(u32::try_from(tag.0).unwrap(), offset(tag.0));
                assert!(found == expected(&content, offset(tag.0), length(tag.0)), "{tag:?}");
            }
        }
        assert_eq!(fixture.run(read(1, 0, 1, DEPTH)), Ok(0));
    });
}

#[test]
fn dropping_a_store_waits_for_what_is_in_flight() {
    with_both(|threads| {
        let directory = on_disk();
        let path = directory.path().join("model");
        write_file(&path, &bytes_of(4 << 20, 3));
        let mut fixture = Fixture::new(threads, FRAMES, FRAMES, None);
        fixture.store.open_file(FileId(1), open(&path, true)).unwrap();
        for frame in 0..FRAMES {
            fixture.submit(u64::from(frame), read(1, u64::from(frame) * PAGE, 65_536, frame));
        }
        fixture.store.flush();
        let Fixture { store, pool, .. } = fixture;
        drop(store);
        for frame in 0..FRAMES {
            assert!(pool.claim_write(RamFrame(frame)).is_some(), "frame {frame} is still owned");
        }
    });
}

#[test]
#[should_panic(expected = "the engine gives a frame to one operation at a time")]
fn a_frame_given_to_two_operations_is_a_bug() {
    let directory = on_disk();
    let path = directory.path().join("model");
    write_file(&path, &bytes_of(1 << 20, 3));
    let mut fixture = Fixture::new(false, 1, 2, None);
    fixture.store.open_file(FileId(1), open(&path, true)).unwrap();
    fixture.submit(1, read(1, 0, 65_536, 0));
    fixture.submit(2, read(1, 0, 65_536, 0));
}

/// `struct cachestat_range`.
#[repr(C)]
struct CacheRange {
    offset: u64,
    length: u64,
}

/// `struct cachestat`.
#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of a file in the page cache, or `None` before Linux 6.5.
fn cached_pages(file: &File) -> Option<u64> {
    const CACHESTAT: libc::c_long = 451;
    let range = CacheRange { offset: 0, length: 0 };
    let mut stat = CacheStat::default();
    // SAFETY: the descriptor is open; both structures are laid out as the kernel's and live during the call.
    let outcome = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0_u32)
    };
    (outcome == 0).then_some(stat.cached)
}

#[test]
fn reading_a_file_leaves_nothing_in_the_page_cache() {
    with_both(|threads| {
        for direct in [true, false] {
            let directory = on_disk();
            let path = directory.path().join("model");
            write_file(&path, &bytes_of(4 << 20, 3));
            let file = File::open(&path).unwrap();
            nix::fcntl::posix_fadvise(
                &file,
                0,
                0,
                nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED,
            )
            .unwrap();
            let Some(before) = cached_pages(&file) else {
                eprintln!("skipped: no cachestat here");
                return;
            };
            assert!(before < 64, "{before} pages cached before");
            let mut fixture = Fixture::new(threads, FRAMES, 8, None);
            fixture.store.open_file(FileId(1), open(&path, direct)).unwrap();
            for page in 0..64_u64 {
                assert_eq!(fixture.run(read(1, page * PAGE, 65_536, 0)), Ok(0));
            }
            let after = cached_pages(&file).unwrap();
            // Read-ahead may have gone further than our last advice.
            assert!(
                after <= if direct { before } else { 64 },
                "{after} of 1024 pages cached, direct: {direct}"
            );
        }
    });
}

/// A small file system that is unmounted when dropped.
struct Mount(TempDir);

impl Mount {
    fn tmpfs(options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "lapis-test"])
            .arg(directory.path())
            .output()
            .is_ok_and(|output| output.status.success());
        mounted.then_some(Self(directory))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.0.path()).status();
        assert!(unmounted.unwrap().success());
    }
}

#[test]
fn a_spill_larger_than_its_file_system_is_refused_with_numbers() {
    let Some(mount) = Mount::tmpfs("size=1m") else {
        eprintln!("skipped: mounting needs root");
        return;
    };
    match Spill::create(mount.0.path(), 32, PAGE).unwrap_err() {
        SpillError::NoRoom { path, asked, free } => {
            assert_eq!((path.as_path(), asked), (mount.0.path(), 2 << 20));
            assert!((900 << 10..=1 << 20).contains(&free), "{free}");
        }
        other => panic!("{other}"),
    }
    Spill::create(mount.0.path(), 8, PAGE).unwrap();
}

#[test]
fn a_spill_on_a_read_only_file_system_is_refused() {
    let Some(mount) = Mount::tmpfs("size=1m,ro") else {
        eprintln!("skipped: mounting needs root");
        return;
    };
    assert!(matches!(Spill::create(mount.0.path(), 1, PAGE), Err(SpillError::NotWritable { .. })));
}

#[test]
fn the_descriptor_keeps_its_position() {
    with_both(|threads| {
        let directory = on_disk();
        let path = directory.path().join("model");
        write_file(&path, &bytes_of(100_000, 3));
        let mut client = File::open(&path).unwrap();
        client.seek(SeekFrom::Start(123)).unwrap();
        let mut fixture = Fixture::new(threads, 1, 1, None);
        fixture.store.open_file(FileId(1), client.try_clone().unwrap().into()).unwrap();
        assert_eq!(fixture.run(read(1, 4096, 1000, 0)), Ok(0));
        assert_eq!(client.stream_position().unwrap(), 123);
    });
}
