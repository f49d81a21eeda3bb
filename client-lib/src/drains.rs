//! Mappings that end when the GPU has come to a point in its work: a thread that looks, so that no caller waits.
//!
//! The thread starts with the first of them and ends with the session. A mapping that waits here keeps its session, so
//! the connection says goodbye only after the last of them has ended, on that thread if need be.
//!
//! It looks again and again and never waits inside the driver, so that it notices when a point isn't reached for long:
//! then the mapping is left as it is, for unmapping what the GPU may still use would break the program, and telling the
//! daemon that it ended would let others' bytes be written. Its pages stay in VRAM until this process is dead.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, SigmaskHow};

use crate::cuda::gpu::Mark;
use crate::error::Error;
use crate::lock;
use crate::mapping::Mapping;

/// How long the GPU may take to come to a point: longer than any queue of work that makes sense.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(600);
/// Between two looks, at first and at most.
const LOOK_FIRST: Duration = Duration::from_micros(50);
const LOOK_LAST: Duration = Duration::from_millis(2);
/// The thread makes driver calls and writes short messages.
const STACK_BYTES: usize = 256 * 1024;

/// See the module.
#[derive(Debug)]
pub(crate) struct Drains {
    queue: Arc<Queue>,
    wait_max: Duration,
}

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<Waiting>,
    started: bool,
    closed: bool,
    /// Mappings that were left as they are.
    abandoned: usize,
}

#[derive(Debug)]
struct Waiting {
    mark: Mark,
    mapping: Mapping,
    deadline: Instant,
}

impl Drains {
    pub(crate) fn new(wait_max: Duration) -> Drains {
        Drains { queue: Arc::default(), wait_max }
    }

    /// Ends `mapping` when `mark` is reached. On error it is dropped, which waits for the GPU.
    pub(crate) fn push(&self, mark: Mark, mapping: Mapping) -> Result<(), Error> {
        let mut state = lock(&self.queue.state);
        if !state.started {
            start(Arc::clone(&self.queue))?;
            state.started = true;
        }
        let deadline = Instant::now() + self.wait_max;
        state.waiting.push(Waiting { mark, mapping, deadline });
        self.queue.changed.notify_one();
        Ok(())
    }

    /// Ends the thread, once nothing waits any more.
    pub(crate) fn close(&self) {
        lock(&self.queue.state).closed = true;
        self.queue.changed.notify_one();
    }

    /// Mappings that were left as they are.
    #[cfg(test)]
    pub(crate) fn abandoned(&self) -> usize {
        lock(&self.queue.state).abandoned
    }
}

/// Starts the thread. It takes no signals: those are for the program's own threads.
fn start(queue: Arc<Queue>) -> Result<(), Error> {
    let failed = |call| move |source| Error::Io { call, source };
    let before = SigSet::all()
        .thread_swap_mask(SigmaskHow::SIG_SETMASK)
        .map_err(io::Error::from)
        .map_err(failed("pthread_sigmask"))?;
    let thread = std::thread::Builder::new()
        .name("lapis-drains".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || run(&queue));
    before.thread_set_mask().map_err(io::Error::from).map_err(failed("pthread_sigmask"))?;
    thread.map(drop).map_err(failed("thread spawn"))
}

fn run(queue: &Queue) {
    let mut pause = LOOK_FIRST;
    while let Some(waiting) = queue.next() {
        let (kept, ended) = look(waiting, Instant::now());
        let none = ended.is_empty();
        let mut abandoned = 0;
        for (mapping, end) in ended {
            match end {
                // Drop takes the session along if this was its last handle, so no lock is held here.
                End::Reached => mapping.end_unused(),
                End::Late => {
                    abandoned += 1;
                    std::mem::forget(mapping);
                }
            }
        }
        pause = if none { (pause * 2).min(LOOK_LAST) } else { LOOK_FIRST };
        let mut state = lock(&queue.state);
        state.abandoned += abandoned;
        state.waiting.extend(kept);
        if none {
            drop(queue.changed.wait_timeout(state, pause));
        }
    }
}

/// Why a mapping doesn't wait any more.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Reached,
    Late,
}

fn look(waiting: Vec<Waiting>, now: Instant) -> (Vec<Waiting>, Vec<(Mapping, End)>) {
    let (mut kept, mut ended) = (Vec::new(), Vec::new());
    for one in waiting {
        if one.mark.is_reached() {
            ended.push((one.mapping, End::Reached));
        } else if now >= one.deadline {
            ended.push((one.mapping, End::Late));
        } else {
            kept.push(one);
        }
    }
    (kept, ended)
}

impl Queue {
    /// All that waits, once something does; `None` when nothing ever will.
    fn next(&self) -> Option<Vec<Waiting>> {
        let mut state = lock(&self.state);
        loop {
            if !state.waiting.is_empty() {
                return Some(std::mem::take(&mut state.waiting));
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
