//! Threads that take jobs from a bounded queue, and what came of the jobs.
//!
//! The owner waits for the threads only when it drops them, the threads never wait for the owner. An outcome is put
//! where [`Workers::poll`] finds it *before* the owner is woken, and the owner makes its waker silent *before* it
//! polls: so none is overlooked.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;

use super::sync::{Arc, Builder, Condvar, JoinHandle, Mutex, MutexGuard};
use super::waker::Waker;
use crate::device::Full;

/// Threads that turn jobs into outcomes. Dropping them waits until all jobs are done.
#[derive(Debug)]
pub(crate) struct Workers<J, O> {
    shared: Arc<Shared<J, O>>,
    /// Jobs whose outcome has not been polled.
    in_flight: usize,
    depth: usize,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared<J, O> {
    state: Mutex<State<J, O>>,
    /// There is a job, or there will be no more.
    changed: Condvar,
}

#[derive(Debug)]
struct State<J, O> {
    jobs: VecDeque<J>,
    /// Outcomes; of a job that panicked, the panic.
    done: VecDeque<std::thread::Result<O>>,
    closed: bool,
}

impl<J: Send + 'static, O: Send + 'static> Workers<J, O> {
    /// Starts `threads` threads, at least one, that `run` at most `depth` jobs, and wake `waker` after each.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub(crate) fn new(
        name: &str,
        threads: usize,
        depth: usize,
        waker: &Waker,
        run: impl Fn(J) -> O + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let (jobs, done) = (VecDeque::with_capacity(depth), VecDeque::with_capacity(depth));
        let state = Mutex::new(State { jobs, done, closed: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let run = Arc::new(run);
        let mut workers = Self { shared, in_flight: 0, depth, threads: Vec::new() };
        for number in 0..threads.max(1) {
            let (shared, run) = (Arc::clone(&workers.shared), Arc::clone(&run));
            let waker = waker.clone();
            let thread = Builder::new().name(format!("{name}-{number}")).spawn(move || {
                while let Some(job) = shared.next() {
                    let outcome = catch_unwind(AssertUnwindSafe(|| run(job)));
                    shared.lock().done.push_back(outcome);
                    waker.wake();
                }
            });
            workers.threads.push(thread?);
        }
        Ok(workers)
    }

    /// Queues the job that `make` makes, or does nothing if `depth` jobs are in flight: not polled yet.
    ///
    /// # Errors
    /// [`Full`].
    pub(crate) fn submit(&mut self, make: impl FnOnce() -> J) -> Result<(), Full> {
        if self.in_flight >= self.depth {
            return Err(Full);
        }
        let job = make();
        self.shared.lock().jobs.push_back(job);
        self.shared.changed.notify_one();
        self.in_flight += 1;
        Ok(())
    }

    /// Appends the outcomes since the last call.
    ///
    /// # Panics
    /// As a job did: a bug of a job must not look like one that takes for ever.
    pub(crate) fn poll(&mut self, outcomes: &mut Vec<O>) {
        let mut state = self.shared.lock();
        self.in_flight -= state.done.len();
        for outcome in state.done.drain(..) {
            outcomes.push(outcome.unwrap_or_else(|panic| resume_unwind(panic)));
        }
    }
}

impl<J, O> Shared<J, O> {
    /// No thread panics while it holds the lock, but the owner may, with a job's panic: the state is whole all the same.
    fn lock(&self) -> MutexGuard<'_, State<J, O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a job; `None` once there will be no more.
    fn next(&self) -> Option<J> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<J, O> Drop for Workers<J, O> {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker thread panicked");
            }
        }
    }
}
