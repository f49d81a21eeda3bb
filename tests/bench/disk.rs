//! Reads of a large file: fio, our store alone, and the whole way through a daemon to VRAM.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapis::Access;
use lapis_tests::binaries::scratch;
use lapis_tests::daemon::Daemon;
use lapisd::engine::ids::{FileId, RamFrame, Tag};
use lapisd::store::{AnyStore, Store, StoreOp};
use lapisd::sys::memory::RamPool;
use lapisd::sys::waker::Waker;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

const PAGE: u64 = 2 << 20;
const DEPTH: u32 = 8;
/// Bytes mapped at once on the way to VRAM: like a layer.
const WINDOW: u64 = 16 << 20;

/// Huge pages that fio's buffers take, and some to spare.
const FIO_HUGE_PAGES: u32 = 32;
const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Huge pages set aside while this lives.
struct HugePages {
    before: u32,
}

impl HugePages {
    fn count() -> Option<u32> {
        std::fs::read_to_string(NR_HUGEPAGES).ok()?.trim().parse().ok()
    }

    fn reserve(count: u32) -> Option<Self> {
        let before = Self::count()?;
        std::fs::write(NR_HUGEPAGES, (before + count).to_string()).ok()?;
        let guard = Self { before };
        (Self::count()? >= before + count).then_some(guard)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // What can be reserved can be given back; if not, the next run says so again.
        let _given_back = std::fs::write(NR_HUGEPAGES, self.before.to_string());
    }
}

/// A file on the disk under test.
pub(crate) struct Disk {
    path: PathBuf,
    bytes: u64,
    _directory: tempfile::TempDir,
}

impl Disk {
    /// Writes the file. `None`, said aloud, without fio to compare with.
    pub(crate) fn new(bytes: u64) -> Option<Self> {
        if Command::new("fio").arg("--version").output().is_err() {
            eprintln!("SKIPPED: fio is not installed; the disk lines need it");
            return None;
        }
        let directory = scratch();
        let path = directory.path().join("file");
        let mut file = File::create(&path).expect("target is writable");
        let mut block = vec![0u8; 1 << 20];
        for index in 0..bytes >> 20 {
            let mut word = index.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            for bytes in block.chunks_exact_mut(8) {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            file.write_all(&block).expect("the disk has room");
        }
        file.sync_all().expect("the disk works");
        Some(Self { path, bytes, _directory: directory })
    }

    fn gigabytes_per_second(&self, took: Duration) -> f64 {
        // A file's size is far below 2^52.
        #[expect(clippy::cast_precision_loss, reason = "exact up to 2^52")]
        let bytes = self.bytes as f64;
        bytes / took.as_secs_f64() / 1e9
    }

    /// fio: io_uring, `O_DIRECT`, fixed buffers in huge pages where there are any, the same depth.
    pub(crate) fn fio(&self) -> f64 {
        // With 4 KiB pages the disk is several times slower: no limit to be measured against.
        let huge = HugePages::reserve(FIO_HUGE_PAGES);
        if huge.is_none() {
            eprintln!("fio runs without huge pages (not root?): its figures are too low");
        }
        let output = Command::new("fio")
            .args(["--name=read", "--rw=read", "--bs=2m", "--ioengine=io_uring", "--direct=1"])
            .args(["--fixedbufs=1", "--registerfiles=1", "--output-format=json"])
            .arg(if huge.is_some() { "--iomem=mmaphuge" } else { "--iomem=mmap" })
            .arg(format!("--iodepth={DEPTH}"))
            .arg(format!("--filename={}", self.path.display()))
            .arg(format!("--size={}", self.bytes))
            .output()
            .expect("fio runs");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("fio: {}", String::from_utf8_lossy(&output.stderr)));
        let rate = report["jobs"][0]["read"]["bw_bytes"].as_f64().expect("fio reports a rate");
        rate / 1e9
    }

    /// Our store alone.
    pub(crate) fn to_ram(&self) -> f64 {
        let pool = Arc::new(RamPool::new(64 << 20, PAGE).expect("64 MiB"));
        let frames = pool.frames();
        let waker = Waker::new().expect("an eventfd");
        let mut store = AnyStore::open(pool, None, DEPTH, waker.clone(), false).expect("a store");
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_DIRECT)
            .open(&self.path)
            .expect("O_DIRECT works in target");
        store.open_file(FileId(1), file.into()).expect("a regular file");
        let pages = self.bytes / PAGE;
        let started = Instant::now();
        let (mut next, mut finished, mut done) = (0, 0, Vec::new());
        while finished < pages {
            while next < pages && next < finished + u64::from(frames) {
                let target = RamFrame(u32::try_from(next % u64::from(frames)).expect("a frame"));
                let length = u32::try_from(PAGE).expect("a page");
                let offset = next * PAGE;
                let op = StoreOp::ReadFile { file: FileId(1), offset, length, target };
                if store.submit(Tag(next), op).is_err() {
                    break;
                }
                next += 1;
            }
            store.flush();
            waker.clear();
            store.poll(&mut done);
            if done.is_empty() {
                let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(&waker), PollFlags::POLLIN)];
                poll(&mut fds, PollTimeout::NONE).expect("poll works");
            }
            for one in done.drain(..) {
                one.result.expect("the disk works");
                finished += 1;
            }
        }
        self.gigabytes_per_second(started.elapsed())
    }

    /// Through a daemon and its socket: windows mapped in order, the next two prefetched.
    pub(crate) fn to_vram(&self) -> f64 {
        let daemon = Daemon::start(&["--vram", "128MiB", "--ram", "128MiB"]);
        let client = daemon.connect();
        let file = client.open_path(&self.path, 0, self.bytes).expect("the file opens");
        let windows = self.bytes / WINDOW;
        let window = |index: u64| index * WINDOW..((index + 1) * WINDOW).min(self.bytes);
        let started = Instant::now();
        for index in 0..windows {
            for ahead in 1..=2 {
                if index + ahead < windows {
                    file.prefetch(window(index + ahead)).expect("a hint");
                }
            }
            drop(file.map(window(index), Access::Read).expect("room for a window"));
        }
        self.gigabytes_per_second(started.elapsed())
    }
}
