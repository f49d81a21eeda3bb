//! The sim device: VRAM frames are memfds, exported to clients and mapped by them as a GPU's would be; copies run on
//! threads of their own, at the speed of memory or of a configured link.
//!
//! Each direction has its own queue, threads and link, so neither waits for the other; zeroing goes with the way up.

mod copy;
mod frames;
mod link;

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use lapis_proto::ids::VramFrame;
use lapis_proto::message::DeviceKind;
use nix::errno::Errno;

use super::{Device, DeviceDone, DeviceFault, DeviceInfo, DeviceOp, Full};
use crate::engine::ids::Tag;
use crate::sys::memory::RamPool;
use crate::sys::waker::Waker;
use frames::Frames;
use link::Link;

/// Operations that wait in one direction.
const QUEUE: usize = 64;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// VRAM frames.
    pub frames: u32,
    /// Bytes of a frame, a power of two.
    pub page_size: u64,
    /// Threads a direction.
    pub copy_threads: usize,
    /// Bytes a second of each direction; as fast as memory goes if `None`.
    pub bandwidth_bytes_per_s: Option<u64>,
    /// Added to each operation.
    pub latency: Duration,
}

/// VRAM played by host memory.
#[derive(Debug)]
pub struct SimDevice {
    info: DeviceInfo,
    frames: Arc<Frames>,
    /// Dropped to end the threads.
    up: Option<SyncSender<(Tag, DeviceOp)>>,
    down: Option<SyncSender<(Tag, DeviceOp)>>,
    done: Receiver<DeviceDone>,
    threads: Vec<JoinHandle<()>>,
}

/// What a copy thread works with.
struct Worker {
    jobs: Arc<Mutex<Receiver<(Tag, DeviceOp)>>>,
    frames: Arc<Frames>,
    pool: Arc<RamPool>,
    link: Arc<Link>,
    done: SyncSender<DeviceDone>,
    waker: Waker,
}

impl SimDevice {
    /// Makes the frames, all touched, and starts the threads.
    ///
    /// # Errors
    /// [`DeviceFault`]: which frame or limit, and what to do.
    pub fn new(
        options: &SimOptions,
        pool: &Arc<RamPool>,
        waker: &Waker,
    ) -> Result<Self, DeviceFault> {
        let frames = Arc::new(Frames::new(options.frames, options.page_size)?);
        let threads_count = options.copy_threads.max(1);
        // Room for every operation that can be queued or in hand, so that no thread ever waits for the reactor.
        let (sender, done) = sync_channel(2 * (QUEUE + threads_count));
        let mut threads = Vec::new();
        let mut direction = |name: &str| -> Result<_, DeviceFault> {
            let (jobs, receiver) = sync_channel(QUEUE);
            let receiver = Arc::new(Mutex::new(receiver));
            let link = Arc::new(Link::new(options.bandwidth_bytes_per_s, options.latency));
            for index in 0..threads_count {
                let worker = Worker {
                    jobs: Arc::clone(&receiver),
                    frames: Arc::clone(&frames),
                    pool: Arc::clone(pool),
                    link: Arc::clone(&link),
                    done: sender.clone(),
                    waker: waker.clone(),
                };
                let thread = std::thread::Builder::new()
                    .name(format!("copy-{name}-{index}"))
                    .spawn(move || worker.run())
                    .map_err(|error| DeviceFault::Setup {
                        call: "starting a copy thread",
                        source: Errno::from_raw(error.raw_os_error().unwrap_or(0)),
                    })?;
                threads.push(thread);
            }
            Ok(jobs)
        };
        let (up, down) = (Some(direction("up")?), Some(direction("down")?));
        let info = DeviceInfo {
            kind: DeviceKind::Sim,
            unified: false,
            uuid: [0; 16],
            name: "simulated in host memory".to_owned(),
            frames: options.frames,
            page_kind: frames.page_kind().name(),
        };
        Ok(Self { info, frames, up, down, done, threads })
    }
}

impl Device for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn submit(&mut self, tag: Tag, op: DeviceOp) -> Result<(), Full> {
        let direction = match op {
            DeviceOp::Up { .. }
            | DeviceOp::Zero { .. }
            | DeviceOp::Release { .. }
            | DeviceOp::Restore { .. } => &self.up,
            DeviceOp::Down { .. } => &self.down,
        };
        match direction.as_ref().expect("open until dropped").try_send((tag, op)) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(Full),
            Err(TrySendError::Disconnected(_)) => unreachable!("threads end only with the device"),
        }
    }

    fn poll(&mut self, done: &mut Vec<DeviceDone>) {
        done.extend(self.done.try_iter());
    }

    fn export(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault> {
        self.frames.export(frame)
    }
}

impl Drop for SimDevice {
    fn drop(&mut self) {
        (self.up, self.down) = (None, None);
        // What is queued is finished first: an operation in flight owns its frames.
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                // Completions that nobody polls any more must not hold up the thread that reports them.
                let _unpolled = self.done.recv_timeout(Duration::from_millis(1));
            }
            if thread.join().is_err() {
                tracing::error!("a copy thread panicked");
            }
        }
    }
}

impl Worker {
    fn run(&self) {
        loop {
            let job = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok((tag, op)) = job else { return };
            let turn = self.link.begin(self.frames.page_size());
            let result = self.execute(op);
            self.link.finish(turn);
            if self.done.send(DeviceDone { tag, result }).is_err() {
                return;
            }
            self.waker.wake();
        }
    }

    fn execute(&self, op: DeviceOp) -> Result<(), DeviceFault> {
        const OWNED: &str = "an operation in flight owns its frames";
        match op {
            DeviceOp::Up { source, shift, target } => {
                let source = self.pool.claim_read(source).expect(OWNED);
                let page = &source.bytes()[shift as usize..];
                self.frames.write(target, &page[..self.frames.page_bytes()]);
            }
            DeviceOp::Down { source, target } => {
                let mut target = self.pool.claim_write(target).expect(OWNED);
                self.frames.read(source, &mut target.bytes_mut()[..self.frames.page_bytes()]);
            }
            DeviceOp::Zero { target } => self.frames.zero(target),
            DeviceOp::Release { target } => self.frames.release(target)?,
            DeviceOp::Restore { target } => self.frames.restore(target)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
