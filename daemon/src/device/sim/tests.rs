#![expect(unsafe_code, reason = "maps exported frames as a client does")]

use std::num::NonZeroUsize;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::os::fd::AsFd;

use super::*;
use crate::engine::ids::RamFrame;

const PAGE: u64 = 64 << 10;

struct Bench {
    device: SimDevice,
    pool: Arc<RamPool>,
    waker: Waker,
    next: u64,
}

impl Bench {
    fn new(frames: u32, page_size: u64) -> Self {
        let pool = Arc::new(RamPool::new(8 * (page_size + 4096), page_size).unwrap());
        let waker = Waker::new().unwrap();
        let options = SimOptions {
            frames,
            page_size,
            copy_threads: 2,
            bandwidth_bytes_per_s: None,
            latency: Duration::ZERO,
        };
        let device = SimDevice::new(&options, &pool, &waker).unwrap();
        Self { device, pool, waker, next: 0 }
    }

    fn run(&mut self, op: DeviceOp) {
        self.next += 1;
        self.device.submit(Tag(self.next), op).unwrap();
        let done = self.wait(1);
        assert_eq!(done[0].tag, Tag(self.next));
        assert!(done[0].result.is_ok());
    }

    fn wait(&mut self, count: usize) -> Vec<DeviceDone> {
        let mut done = Vec::new();
        while done.len() < count {
            let mut fds = [PollFd::new(self.waker.as_fd(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::NONE).unwrap();
            self.waker.clear();
            self.device.poll(&mut done);
        }
        done
    }

    fn fill(&self, frame: RamFrame, seed: u8) {
        let mut claim = self.pool.claim_write(frame).unwrap();
        for (index, byte) in claim.bytes_mut().iter_mut().enumerate() {
            *byte = (index * 31 / 7 + usize::from(seed)).to_le_bytes()[0];
        }
    }
}

/// Maps an exported frame as a client does.
fn with_mapped(bench: &Bench, frame: u32, look: impl FnOnce(&mut [u8])) {
    let fd = bench.device.export(VramFrame(frame)).unwrap();
    let length = NonZeroUsize::new(bench.device.frames.page_bytes()).unwrap();
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a fresh mapping of a sealed memfd as long as the mapping, unmapped below; nothing else writes to it
    // while the test looks.
    unsafe {
        let at = mmap(None, length, protection, MapFlags::MAP_SHARED, &fd, 0).unwrap();
        look(std::slice::from_raw_parts_mut(at.as_ptr().cast(), length.get()));
        munmap(at, length.get()).unwrap();
    }
}

#[test]
fn pages_go_up_from_any_shift_and_come_down_whole() {
    let mut bench = Bench::new(4, PAGE);
    for shift in [0, 1, 31, 32, 511, 1216, 3224, 4095] {
        bench.fill(RamFrame(0), 5);
        bench.fill(RamFrame(1), 99);
        let (source, target) = (RamFrame(0), VramFrame(2));
        bench.run(DeviceOp::Up { source, shift, target });
        let expected =
            bench.pool.claim_read(source).unwrap().bytes()[shift as usize..][..65_536].to_vec();
        with_mapped(&bench, 2, |frame| assert!(frame == expected, "up with shift {shift}"));
        bench.run(DeviceOp::Down { source: VramFrame(2), target: RamFrame(1) });
        let down = bench.pool.claim_read(RamFrame(1)).unwrap();
        assert!(down.bytes()[..65_536] == expected, "down with shift {shift}");
    }
}

#[test]
fn a_client_writes_what_comes_down_and_zeroing_clears_it() {
    let mut bench = Bench::new(2, PAGE);
    with_mapped(&bench, 1, |frame| frame.fill(0xAB));
    bench.run(DeviceOp::Down { source: VramFrame(1), target: RamFrame(3) });
    assert!(
        bench.pool.claim_read(RamFrame(3)).unwrap().bytes()[..65_536].iter().all(|b| *b == 0xAB)
    );
    bench.run(DeviceOp::Zero { target: VramFrame(1) });
    with_mapped(&bench, 1, |frame| assert!(frame.iter().all(|byte| *byte == 0)));
}

#[test]
fn a_released_frame_gives_its_memory_back_and_is_zeros_when_restored() {
    let mut bench = Bench::new(2, PAGE);
    with_mapped(&bench, 0, |frame| frame.fill(7));
    let blocks = |bench: &Bench| {
        nix::sys::stat::fstat(bench.device.export(VramFrame(0)).unwrap()).unwrap().st_blocks
    };
    assert_eq!(blocks(&bench), 128);
    bench.run(DeviceOp::Release { target: VramFrame(0) });
    assert_eq!(blocks(&bench), 0);
    bench.run(DeviceOp::Restore { target: VramFrame(0) });
    assert_eq!(blocks(&bench), 128);
    with_mapped(&bench, 0, |frame| assert!(frame.iter().all(|byte| *byte == 0)));
}

#[test]
fn frames_can_not_be_resized_by_whoever_has_them() {
    let bench = Bench::new(1, PAGE);
    let fd = bench.device.export(VramFrame(0)).unwrap();
    let seals = SealFlag::from_bits_truncate(fcntl(fd.as_fd(), FcntlArg::F_GET_SEALS).unwrap());
    assert!(
        seals.contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL)
    );
    assert_eq!(nix::unistd::ftruncate(&fd, 0), Err(Errno::EPERM));
}

#[test]
fn a_full_queue_gives_the_operation_back_and_leaves_the_other_direction_open() {
    let pool = Arc::new(RamPool::new(8 * (PAGE + 4096), PAGE).unwrap());
    let options = SimOptions {
        frames: 2,
        page_size: PAGE,
        copy_threads: 1,
        // Nothing completes while the test fills the queue.
        bandwidth_bytes_per_s: Some(PAGE * 4),
        latency: Duration::ZERO,
    };
    let waker = Waker::new().unwrap();
    let mut device = SimDevice::new(&options, &pool, &waker).unwrap();
    let mut taken = 0;
    while device.submit(Tag(taken), DeviceOp::Zero { target: VramFrame(0) }).is_ok() {
        taken += 1;
        assert!(taken <= 65, "{taken} operations fit in a queue of 64 and one thread");
    }
    assert!(taken >= 64);
    let down = DeviceOp::Down { source: VramFrame(1), target: RamFrame(0) };
    assert!(device.submit(Tag(1000), down).is_ok());
    // Ends at once: the queue would take a quarter of a second an operation.
    std::mem::forget(device);
}

#[test]
fn large_frames_lie_in_huge_pages_or_say_that_they_do_not() {
    let bench = Bench::new(3, 2 << 20);
    let kinds = ["hugetlb", "transparent huge pages", "4 KiB pages"];
    assert!(kinds.contains(&bench.device.info().page_kind), "{}", bench.device.info().page_kind);
    assert_eq!(bench.device.info().frames, 3);
}

#[test]
fn too_many_frames_are_refused_with_the_limit_and_the_fix() {
    let pool = Arc::new(RamPool::new(8 * (PAGE + 4096), PAGE).unwrap());
    let options = SimOptions {
        frames: 100_000_000,
        page_size: PAGE,
        copy_threads: 1,
        bandwidth_bytes_per_s: None,
        latency: Duration::ZERO,
    };
    let error = SimDevice::new(&options, &pool, &Waker::new().unwrap()).unwrap_err();
    assert!(matches!(error, DeviceFault::Limit { frames: 100_000_000, .. }), "{error}");
    assert!(error.to_string().contains("page_size"), "{error}");
}
