//! A device, its RAM, and a client's look at its frames.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{null_mut, without_provenance_mut};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::super::*;
use super::alone::machine;
use crate::engine::ids::RamFrame;

pub(super) const PAGE: u64 = 2 << 20;
/// Longest wait for what should come at once, on a busy machine.
const WAIT: Duration = Duration::from_secs(60);

pub(super) fn page() -> usize {
    usize::try_from(PAGE).unwrap()
}

pub(super) fn gpu() -> Gpu {
    Gpu::open(Some(&machine().library()), None).unwrap()
}

/// A device with RAM of eight frames.
pub(super) fn device(gpu: Gpu, frames: u32) -> Result<Bench, DeviceFault> {
    let pool = Arc::new(RamPool::new(8 * (PAGE + 4096), PAGE).unwrap());
    let waker = Waker::new().unwrap();
    let device = CudaDevice::new(gpu, frames, &pool, &waker)?;
    Ok(Bench { device, pool, waker, next: 0 })
}

/// Waits for what another thread does.
pub(super) fn until(what: &str, mut look: impl FnMut() -> bool) {
    let end = Instant::now() + WAIT;
    while !look() {
        assert!(Instant::now() < end, "{what}: not yet");
        std::thread::yield_now();
    }
}

pub(super) struct Bench {
    pub(super) device: CudaDevice,
    pub(super) pool: Arc<RamPool>,
    waker: Waker,
    next: u64,
}

impl Bench {
    pub(super) fn new(frames: u32) -> Self {
        device(gpu(), frames).unwrap()
    }

    fn outcome(&mut self, op: DeviceOp) -> Result<(), DeviceFault> {
        self.next += 1;
        self.device.submit(Tag(self.next), op).unwrap();
        let mut done = self.wait(1);
        assert_eq!(done[0].tag, Tag(self.next));
        done.remove(0).result
    }

    pub(super) fn run(&mut self, op: DeviceOp) {
        self.outcome(op).unwrap();
    }

    pub(super) fn fails(&mut self, op: DeviceOp) -> DeviceFault {
        self.outcome(op).unwrap_err()
    }

    pub(super) fn wait(&mut self, count: usize) -> Vec<DeviceDone> {
        let mut done = Vec::new();
        while done.len() < count {
            let mut fds = [PollFd::new(self.waker.as_fd(), PollFlags::POLLIN)];
            let wait = PollTimeout::try_from(WAIT).unwrap();
            assert_eq!(poll(&mut fds, wait).unwrap(), 1, "{} of {count} are done", done.len());
            self.waker.clear();
            self.device.poll(&mut done);
        }
        done
    }

    pub(super) fn fill(&self, frame: RamFrame, seed: u8) {
        let mut claim = self.pool.claim_write(frame).unwrap();
        for (index, byte) in claim.bytes_mut().iter_mut().enumerate() {
            *byte = (index * 31 / 7 + usize::from(seed)).to_le_bytes()[0];
        }
    }

    pub(super) fn ram(&self, frame: RamFrame) -> Vec<u8> {
        self.pool.claim_read(frame).unwrap().bytes().to_vec()
    }

    /// Imports an exported frame and maps it, as a client does. The fake lets the CPU reach device memory.
    pub(super) fn with_imported(&self, frame: u32, look: impl FnOnce(&mut [u8])) {
        let gpu = gpu();
        let (driver, access) = (gpu.driver(), gpu.access());
        let fd = self.device.export(VramFrame(frame)).unwrap();
        let (mut handle, mut place) = (0, 0);
        let number = without_provenance_mut(usize::try_from(fd.as_raw_fd()).unwrap());
        // SAFETY: the pointers are to our variables; the memory is a page that is imported, mapped at an address of
        // its own and made accessible, and nothing else writes to it while the test looks. All is undone.
        unsafe {
            driver.mem_import(&raw mut handle, number, 1).unwrap();
            driver.address_reserve(&raw mut place, page(), 0, 0, 0).unwrap();
            driver.mem_map(place, page(), 0, handle, 0).unwrap();
            driver.mem_set_access(place, page(), &raw const access, 1).unwrap();
            let start = null_mut::<u8>().with_addr(usize::try_from(place).unwrap());
            look(std::slice::from_raw_parts_mut(start, page()));
            driver.mem_unmap(place, page()).unwrap();
            driver.mem_release(handle).unwrap();
            driver.address_free(place, page()).unwrap();
        }
    }
}
