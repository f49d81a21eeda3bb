//! Streams: a queue and a thread each, which does the work in order.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::code::{Code, Outcome};
use crate::driver::Driver;
use crate::work::Work;

/// What a stream's work waits for beside what is ahead in its own queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The null stream: work of all blocking streams.
    Null,
    /// Work of the null stream.
    Blocking,
    /// Nothing.
    NonBlocking,
}

#[derive(Debug, Default)]
struct Queue {
    works: VecDeque<Work>,
    submitted: u64,
    done: u64,
    closed: bool,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Stream {
    /// Starts its thread, which ends when the stream is closed and what is queued is done.
    pub(crate) fn start(driver: &'static Driver, device: usize, kind: Kind) -> Arc<Self> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let stream = Arc::new(Self { device, kind, queue, changed });
        let worker = Arc::clone(&stream);
        std::thread::Builder::new()
            .name("fake-cuda".to_owned())
            .spawn(move || worker.run(driver))
            .expect("a thread can be started");
        stream
    }

    pub(crate) fn push(&self, work: Work) -> u64 {
        let mut queue = self.lock();
        queue.works.push_back(work);
        queue.submitted += 1;
        self.changed.notify_all();
        queue.submitted
    }

    /// How much was ever submitted.
    pub(crate) fn submitted(&self) -> u64 {
        self.lock().submitted
    }

    pub(crate) fn is_idle(&self) -> bool {
        let queue = self.lock();
        queue.done == queue.submitted
    }

    /// Returns when that much is done, or with the device's fault.
    pub(crate) fn wait(&self, count: u64, fault: impl Fn() -> Option<Code>) -> Outcome {
        let mut queue = self.lock();
        loop {
            if let Some(code) = fault() {
                return Err(code);
            }
            if queue.done >= count {
                return Ok(());
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Makes all who wait look again.
    pub(crate) fn wake(&self) {
        // With the lock: who has looked and not yet begun to wait would miss it else.
        let _queue = self.lock();
        self.changed.notify_all();
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.wake();
    }

    fn run(&self, driver: &'static Driver) {
        let device = &driver.devices[self.device];
        while let Some(work) = self.next() {
            device.gate.pass();
            // Of a broken context nothing runs any more, host functions neither.
            if device.fault().is_none()
                && let Err(code) = work.run(driver, device)
            {
                driver.break_device(device, code);
            }
            let mut queue = self.lock();
            if device.fault().is_none() {
                // With the lock: who sees the event complete sees the stream done as well, and the other way round.
                work.complete_event();
            }
            queue.done += 1;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Work> {
        let mut queue = self.lock();
        loop {
            if let Some(work) = queue.works.pop_front() {
                return Some(work);
            }
            if queue.closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
