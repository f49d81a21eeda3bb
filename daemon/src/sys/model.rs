//! The code that threads share, through every interleaving of their threads and every order in which one may see the
//! other's writes: the same source files, built a second time on loom's types.
//!
//! What is checked: [`workers`], under the sim device and the store on threads, and [`claims`] of RAM frames. What is
//! not: the kernel's eventfd and rings (the waker here is a model of an eventfd), the bytes of VRAM frames (only the
//! engine keeps their owners apart), and the reactor, whose loop is written again in [`Owner::next`].
#![expect(unsafe_code, reason = "shares memory that claims protect, as the RAM tier does")]

use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};

use claims::{Claimed, Claims, Exclusive, Shared};
use waker::Waker;
use workers::Workers;

use crate::device::Full;

#[path = "memory/claims.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, on other types")]
#[expect(unreachable_pub, dead_code, reason = "the product uses more of it, from elsewhere")]
mod claims;
#[path = "workers.rs"]
#[expect(clippy::duplicate_mod, reason = "built a second time, on other types")]
mod workers;

/// The types of `sync.rs`, as loom has them.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering};
    pub(super) use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(super) use loom::thread::{Builder, JoinHandle};
}

/// `waker.rs` with an eventfd that loom knows.
mod waker {
    use super::sync::{Arc, Condvar, Mutex};

    #[derive(Debug, Clone)]
    pub(super) struct Waker(Arc<(Mutex<bool>, Condvar)>);

    impl Waker {
        pub(super) fn new() -> Self {
            Self(Arc::new((Mutex::new(false), Condvar::new())))
        }

        pub(super) fn wake(&self) {
            *self.0.0.lock().unwrap() = true;
            self.0.1.notify_all();
        }

        pub(super) fn clear(&self) {
            *self.0.0.lock().unwrap() = false;
        }

        /// Waits until the descriptor is readable.
        pub(super) fn wait(&self) {
            let mut readable = self.0.0.lock().unwrap();
            while !*readable {
                readable = self.0.1.wait(readable).unwrap();
            }
        }
    }
}

/// Runs a model through its interleavings, with at most three preemptions each: more take hours.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// A job: its number, and memory that it writes. Memory that a thread touches before it can know of another's writes
/// is what loom looks for.
type Job = (u32, UnsafeCell<()>);

/// Who submits and polls, as the reactor does.
struct Owner {
    workers: Workers<Job, Job>,
    waker: Waker,
    jobs_run: Arc<AtomicU32>,
}

impl Owner {
    fn new(threads: usize, depth: usize) -> Self {
        let (waker, jobs_run) = (Waker::new(), Arc::new(AtomicU32::new(0)));
        let counter = Arc::clone(&jobs_run);
        let run = move |job: Job| {
            job.1.with_mut(|_| ());
            // Relaxed: it must not be this that orders anything.
            counter.fetch_add(1, Ordering::Relaxed);
            job
        };
        let workers = Workers::new("job", threads, depth, &waker, run).unwrap();
        Self { workers, waker, jobs_run }
    }

    fn submit(&mut self, number: u32) -> Result<(), Full> {
        self.workers.submit(|| (number, UnsafeCell::default()))
    }

    /// Waits for outcomes. Silence first, then poll: the other way round an outcome can be overlooked, and this waits
    /// for ever, which loom notices.
    fn next(&mut self) -> Vec<u32> {
        self.waker.wait();
        self.waker.clear();
        let mut outcomes = Vec::new();
        self.workers.poll(&mut outcomes);
        let look = |(number, cell): Job| cell.with(|_| number);
        outcomes.into_iter().map(look).collect()
    }
}

#[test]
fn each_outcome_arrives_once_with_what_its_job_wrote() {
    check(|| {
        let mut owner = Owner::new(2, 2);
        assert_eq!((owner.submit(0), owner.submit(1)), (Ok(()), Ok(())));
        let mut seen = Vec::new();
        while seen.len() < 2 {
            seen.extend(owner.next());
        }
        seen.sort_unstable();
        assert_eq!(seen, [0, 1]);
    });
}

#[test]
fn a_full_queue_has_room_again_once_it_is_polled() {
    check(|| {
        let mut owner = Owner::new(1, 1);
        assert_eq!((owner.submit(0), owner.submit(1)), (Ok(()), Err(Full)));
        assert_eq!(owner.next(), [0]);
        assert_eq!(owner.submit(2), Ok(()));
        assert_eq!(owner.next(), [2]);
    });
}

#[test]
fn dropping_the_workers_waits_until_every_job_is_done() {
    check(|| {
        let mut owner = Owner::new(2, 2);
        assert_eq!((owner.submit(0), owner.submit(1)), (Ok(()), Ok(())));
        drop(owner.workers);
        assert_eq!(owner.jobs_run.load(Ordering::Relaxed), 2);
    });
}

/// A RAM frame: who may touch it, and what it holds.
struct Frame {
    claims: Claims,
    bytes: UnsafeCell<()>,
}

// SAFETY: whoever touches `bytes` holds a claim, which keeps others away; loom panics where it does not.
unsafe impl Sync for Frame {}

impl Claimed for Frame {
    fn claims(&self) -> &Claims {
        &self.claims
    }
}

fn frame() -> Arc<Frame> {
    Arc::new(Frame { claims: Claims::new(1), bytes: UnsafeCell::new(()) })
}

fn try_read(frame: &Arc<Frame>) {
    if let Some(_claim) = Shared::new(frame, 0) {
        frame.bytes.with(|_| ());
    }
}

fn try_write(frame: &Arc<Frame>) {
    if let Some(_claim) = Exclusive::new(frame, 0) {
        frame.bytes.with_mut(|_| ());
    }
}

#[test]
fn nobody_touches_a_frame_that_another_writes() {
    for other in [try_read, try_write] {
        check(move || {
            let frame = frame();
            let threads = [try_write, other].map(|touch| {
                let frame = Arc::clone(&frame);
                loom::thread::spawn(move || touch(&frame))
            });
            try_read(&frame);
            try_write(&frame);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(Exclusive::new(&frame, 0).is_some(), "all claims have been given back");
        });
    }
}

#[test]
fn a_claim_that_moves_to_another_thread_covers_what_is_done_there() {
    check(|| {
        let frame = frame();
        let claim = Exclusive::new(&frame, 0).unwrap();
        let thread = loom::thread::spawn(move || claim.owner().bytes.with_mut(|_| ()));
        try_write(&frame);
        try_read(&frame);
        thread.join().unwrap();
        assert!(Exclusive::new(&frame, 0).is_some(), "the claim has been given back");
    });
}
