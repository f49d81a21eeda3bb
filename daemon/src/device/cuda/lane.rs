//! One direction: a stream of the GPU, and two threads. One starts copies, the other waits for them.
//!
//! Everything between them and the reactor goes through queues that are never full, because [`Lane::submit`] admits at
//! most [`DEPTH`] operations that have not been polled. So the reactor waits for no call of the driver, and copies are
//! started while others run. Several are marked by one event, as many as were waiting, up to [`BATCH`].
#![expect(unsafe_code, reason = "calls the driver")]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use lapis::cuda::driver::{CUevent, CUstream, CallFailed};
use lapis_proto::ids::VramFrame;

use super::gpu::Gpu;
use super::tier::Tier;
use crate::device::{DeviceDone, DeviceFault, Full};
use crate::engine::ids::Tag;
use crate::sys::memory::{FrameRead, FrameWrite};
use crate::sys::waker::Waker;

/// Operations that have not been polled.
pub(super) const DEPTH: usize = 64;
/// Operations that are reported together: few enough that the first does not wait long for the last.
const BATCH: usize = 8;
/// `CU_STREAM_NON_BLOCKING`.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_BLOCKING_SYNC` and `CU_EVENT_DISABLE_TIMING`: whoever waits sleeps.
const EVENT_FLAGS: u32 = 1 | 2;

/// One operation, with the right to the host memory that it touches.
#[derive(Debug)]
pub(super) enum Work {
    /// Copies a page up, from a byte of the RAM frame on.
    Up { source: FrameRead, shift: usize, target: VramFrame },
    /// Copies a page down.
    Down { source: VramFrame, target: FrameWrite },
    /// Fills with zeros.
    Zero { target: VramFrame },
    /// Gives memory back.
    Release { target: VramFrame },
    /// Takes memory again, and fills it with zeros.
    Restore { target: VramFrame },
}

impl Work {
    /// The VRAM frame.
    pub(super) fn frame(&self) -> VramFrame {
        match self {
            Self::Up { target, .. }
            | Self::Zero { target }
            | Self::Release { target }
            | Self::Restore { target } => *target,
            Self::Down { source, .. } => *source,
        }
    }
}

/// What came of an operation, or the panic of a thread.
type Outcome = thread::Result<DeviceDone>;

/// The reactor's end of one direction.
#[derive(Debug)]
pub(super) struct Lane {
    jobs: SyncSender<(Tag, Work)>,
    done: Receiver<Outcome>,
    /// Admitted and not polled.
    in_flight: usize,
}

/// Copies that were started, and the event behind them.
struct Batch {
    event: usize,
    /// The event could not be recorded.
    failed: Option<CallFailed>,
    works: Vec<(Tag, Work)>,
}

impl Lane {
    /// Starts the threads. They end when the lane is dropped and what it admitted is done; each then drops its `ended`.
    ///
    /// # Errors
    /// [`DeviceFault`]: no stream, or no thread.
    pub(super) fn new(
        name: &'static str,
        tier: &Arc<Tier>,
        waker: &Waker,
        ended: &SyncSender<()>,
    ) -> Result<Self, DeviceFault> {
        let stream = Stream::new(tier.gpu())?;
        let stream = Arc::new(stream);
        let (jobs, admitted) = sync_channel(DEPTH);
        let (started, batches) = sync_channel::<Batch>(DEPTH);
        // A panic of each thread beside an outcome of each operation.
        let (reports, done) = sync_channel(DEPTH + 2);
        let report = Report { reports, waker: waker.clone() };
        let starter = {
            let (tier, stream, report) = (Arc::clone(tier), Arc::clone(&stream), report.clone());
            move || start_copies(&tier, &stream, &admitted, &started, &report)
        };
        let waiter = {
            let (tier, report) = (Arc::clone(tier), report.clone());
            move || wait_for_copies(&tier, &stream, &batches, &report)
        };
        run(format!("{name}-start"), report.clone(), ended.clone(), starter)?;
        run(format!("{name}-wait"), report, ended.clone(), waiter)?;
        Ok(Self { jobs, done, in_flight: 0 })
    }

    /// Queues the operation that `make` makes, or does nothing if too many are in flight.
    pub(super) fn submit(&mut self, make: impl FnOnce() -> (Tag, Work)) -> Result<(), Full> {
        if self.in_flight >= DEPTH {
            return Err(Full);
        }
        // There is room. A thread that is gone has left its panic for `poll` to find.
        self.jobs.try_send(make()).map_err(|_| Full)?;
        self.in_flight += 1;
        Ok(())
    }

    /// Appends the outcomes since the last call. A panic of a thread goes on here: a bug must not look like a copy that
    /// takes for ever.
    pub(super) fn poll(&mut self, outcomes: &mut Vec<DeviceDone>) {
        for outcome in self.done.try_iter() {
            outcomes.push(outcome.unwrap_or_else(|panic| resume_unwind(panic)));
            self.in_flight -= 1;
        }
    }
}

/// How threads tell the reactor.
#[derive(Clone)]
struct Report {
    reports: SyncSender<Outcome>,
    waker: Waker,
}

impl Report {
    fn tell(&self, outcomes: impl Iterator<Item = Outcome>) {
        for outcome in outcomes {
            // If the reactor's end is gone, nobody asks any more.
            let _nobody = self.reports.try_send(outcome);
        }
        // After the outcomes are there.
        self.waker.wake();
    }
}

/// Starts a thread of a lane. All it holds is dropped before `ended` is.
fn run(
    name: String,
    report: Report,
    ended: SyncSender<()>,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), DeviceFault> {
    let body = move || {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(body)) {
            report.tell(std::iter::once(Err(panic)));
        }
        drop(ended);
    };
    let started = thread::Builder::new().name(name).spawn(body).map(drop);
    started.map_err(|error: io::Error| DeviceFault::Setup {
        call: "starting a copy thread",
        source: nix::errno::Errno::from_raw(error.raw_os_error().unwrap_or(0)),
    })
}

/// Starts what was admitted.
fn start_copies(
    tier: &Tier,
    stream: &Stream,
    admitted: &Receiver<(Tag, Work)>,
    started: &SyncSender<Batch>,
    report: &Report,
) {
    claim_thread(tier.gpu());
    let mut event = 0;
    while let Ok(first) = admitted.recv() {
        let mut works = Vec::with_capacity(BATCH);
        let mut over = Vec::new();
        for (tag, work) in std::iter::once(first).chain(admitted.try_iter()).take(BATCH) {
            match tier.start(&work, stream.raw) {
                Ok(true) => works.push((tag, work)),
                Ok(false) => over.push(Ok(DeviceDone { tag, result: Ok(()) })),
                Err(fault) => over.push(Ok(DeviceDone { tag, result: Err(fault) })),
            }
        }
        if !over.is_empty() {
            report.tell(over.into_iter());
        }
        if works.is_empty() {
            continue;
        }
        // The event is free: batches complete in order, and no more than DEPTH can be in flight.
        let failed = stream.record(event).err();
        if started.send(Batch { event, failed, works }).is_err() {
            return;
        }
        event = (event + 1) % DEPTH;
    }
}

/// Reports what was started once it has ended.
fn wait_for_copies(tier: &Tier, stream: &Stream, batches: &Receiver<Batch>, report: &Report) {
    claim_thread(tier.gpu());
    while let Ok(Batch { event, failed, works }) = batches.recv() {
        let waited = failed.map_or_else(|| stream.wait(event), Err);
        let fault = waited.err().map(|failed| {
            // Whatever the copies still do, it is over before their memory is used for something else. On a broken
            // context this fails at once.
            let _broken = stream.settle();
            // Which of them arrived is not known.
            tier.gpu().lose(format!("copies did not complete: {failed}"))
        });
        let result = |fault: &Option<DeviceFault>| fault.clone().map_or(Ok(()), Err);
        report.tell(works.into_iter().map(|(tag, work)| {
            // The frames are free before their owner hears of it.
            drop(work);
            Ok(DeviceDone { tag, result: result(&fault) })
        }));
    }
}

/// Each thread that calls the driver has the context. If it can't, every call will say so.
fn claim_thread(gpu: &Gpu) {
    if let Err(failed) = gpu.make_current() {
        let _told = gpu.lose(failed.to_string());
    }
}

/// A stream and the events that mark places in it.
#[derive(Debug)]
struct Stream {
    gpu: Arc<Gpu>,
    raw: CUstream,
    events: Vec<CUevent>,
}

// SAFETY: streams and events are handles of the process, which any thread with the context may use; the driver locks
// what it must. Nothing is reached through the pointers here.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    fn new(gpu: &Arc<Gpu>) -> Result<Self, DeviceFault> {
        let mut raw = std::ptr::null_mut();
        let setup = |failed| DeviceFault::from(gpu.cannot(failed));
        // SAFETY: the pointer is to our variable, and the thread has the context.
        unsafe { gpu.driver().stream_create(&raw mut raw, STREAM_NON_BLOCKING) }.map_err(setup)?;
        let mut stream = Self { gpu: Arc::clone(gpu), raw, events: Vec::new() };
        for _ in 0..DEPTH {
            let mut event = std::ptr::null_mut();
            // SAFETY: as above.
            unsafe { gpu.driver().event_create(&raw mut event, EVENT_FLAGS) }.map_err(setup)?;
            stream.events.push(event);
        }
        Ok(stream)
    }

    fn event(&self, index: usize) -> CUevent {
        // What is no event, the driver refuses.
        self.events.get(index).copied().unwrap_or(std::ptr::null_mut())
    }

    fn record(&self, event: usize) -> Result<(), CallFailed> {
        // SAFETY: both are live until this is dropped.
        unsafe { self.gpu.driver().event_record(self.event(event), self.raw) }
    }

    fn wait(&self, event: usize) -> Result<(), CallFailed> {
        // SAFETY: as above.
        unsafe { self.gpu.driver().event_synchronize(self.event(event)) }
    }

    fn settle(&self) -> Result<(), CallFailed> {
        // SAFETY: as above.
        unsafe { self.gpu.driver().stream_synchronize(self.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.gpu.lost().is_some() {
            return;
        }
        let mut outcome = Ok(());
        for event in self.events.drain(..) {
            // SAFETY: made by `new`, and nobody records or waits any more.
            outcome = outcome.and(unsafe { self.gpu.driver().event_destroy(event) });
        }
        // SAFETY: as above.
        outcome = outcome.and(unsafe { self.gpu.driver().stream_destroy(self.raw) });
        if let Err(failed) = outcome {
            tracing::warn!("GPU {}: {failed}", self.gpu.label());
        }
    }
}
