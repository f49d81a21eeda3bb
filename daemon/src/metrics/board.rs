//! Where the reactor leaves its numbers and signs of life, and other threads read them.
//!
//! The reactor never waits here: what it writes is atomic, or behind a lock that it only tries and that readers hold for
//! the copy of a pointer. Readers wait for new numbers as long as they like, and then take the old ones.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use lapis_proto::message::DeviceKind;

use super::health::{Health, Signs};
use super::snapshot::Snapshot;
use crate::sys::waker::Waker;

/// What the daemon is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Making its tiers.
    Starting = 0,
    /// Serving clients.
    Serving = 1,
    /// Told to stop: what moves ends.
    Stopping = 2,
    /// The device is lost, the daemon ends.
    Lost = 3,
}

/// What the device and the store are.
#[derive(Debug, Clone)]
pub struct DeviceFacts {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Its UUID; zeros on sim.
    pub uuid: [u8; 16],
    /// For people.
    pub name: String,
    /// VRAM and RAM are one memory.
    pub unified: bool,
    /// How files are read and written.
    pub store: &'static str,
}

/// One daemon's board.
#[derive(Debug)]
pub struct Board {
    started: Instant,
    waker: Waker,
    phase: AtomicU8,
    /// When the reactor last turned.
    beat_us: AtomicU64,
    /// Since when hops are under way and none has ended; 0: none is, or one has at the last beat.
    stalled_since_us: AtomicU64,
    device: OnceLock<DeviceFacts>,
    /// Somebody waits for a new snapshot.
    wanted: AtomicBool,
    latest: Mutex<Arc<Snapshot>>,
    published: Condvar,
}

fn us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl Board {
    /// An empty one; `waker` makes the reactor look at [`Self::is_wanted`].
    #[must_use]
    pub fn new(waker: Waker) -> Self {
        Self {
            started: Instant::now(),
            waker,
            phase: AtomicU8::new(Phase::Starting as u8),
            beat_us: AtomicU64::new(0),
            stalled_since_us: AtomicU64::new(0),
            device: OnceLock::new(),
            wanted: AtomicBool::new(false),
            latest: Mutex::new(Arc::default()),
            published: Condvar::new(),
        }
    }

    /// Microseconds since the board was made.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        us(self.started.elapsed())
    }

    /// The daemon enters a phase; a device that is lost stays so.
    pub fn enter(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::Release);
        self.beat_us.store(self.now_us(), Ordering::Release);
    }

    /// What the daemon is doing.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Starting,
            1 => Phase::Serving,
            2 => Phase::Stopping,
            _ => Phase::Lost,
        }
    }

    /// The reactor turns, and hops have been under way for so long without one ending.
    pub fn beat(&self, stalled: Option<Duration>) {
        let now = self.now_us();
        // 0 means that nothing is stalled.
        let since = stalled.map_or(0, |stalled| now.saturating_sub(us(stalled)).max(1));
        self.stalled_since_us.store(since, Ordering::Release);
        self.beat_us.store(now, Ordering::Release);
    }

    /// What the device is, once it is known.
    pub fn describe(&self, device: DeviceFacts) {
        // Told once, when the tiers are made.
        let _told_before = self.device.set(device);
    }

    /// As told by [`Self::describe`].
    #[must_use]
    pub fn device(&self) -> Option<&DeviceFacts> {
        self.device.get()
    }

    /// Whether somebody waits for new numbers; true once a wait.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        // The plain load first: this is asked at every turn.
        self.wanted.load(Ordering::Acquire) && self.wanted.swap(false, Ordering::AcqRel)
    }

    /// New numbers. Never waits: if a reader is copying the pointer just now, the reactor is woken once more.
    pub fn publish(&self, mut snapshot: Snapshot) {
        snapshot.taken_us = self.now_us();
        let mut latest = match self.latest.try_lock() {
            Ok(latest) => latest,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return self.ask(),
        };
        *latest = Arc::new(snapshot);
        drop(latest);
        self.published.notify_all();
    }

    fn ask(&self) {
        self.wanted.store(true, Ordering::Release);
        self.waker.wake();
    }

    fn latest(&self) -> MutexGuard<'_, Arc<Snapshot>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers taken after this call, or the last ones if the reactor has none within `wait`.
    #[must_use]
    pub fn fresh(&self, wait: Duration) -> Arc<Snapshot> {
        let asked = self.now_us();
        let guard = self.latest();
        self.ask();
        let waited = self
            .published
            .wait_timeout_while(guard, wait, |latest| latest.taken_us < asked)
            .unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&waited.0)
    }

    /// What is known of the daemon's well-being.
    #[must_use]
    pub fn signs(&self) -> Signs {
        let now = self.now_us();
        let since = |us: u64| Duration::from_micros(now.saturating_sub(us));
        let stalled_since = self.stalled_since_us.load(Ordering::Acquire);
        Signs {
            phase: self.phase(),
            silent: since(self.beat_us.load(Ordering::Acquire)),
            stalled: if stalled_since == 0 { Duration::ZERO } else { since(stalled_since) },
        }
    }

    /// Whether the daemon is alive and ready, and why not.
    #[must_use]
    pub fn health(&self) -> Health {
        Health::of(self.signs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::stats::Observation;

    fn numbered(sessions: u64) -> Snapshot {
        Snapshot {
            engine: Observation { sessions, ..Observation::default() },
            ..Snapshot::default()
        }
    }

    #[test]
    fn a_reader_gets_numbers_from_after_it_asked_or_the_last_ones_in_time() {
        let waker = Waker::new().unwrap();
        let board = Board::new(waker);
        board.publish(numbered(1));
        assert!(!board.is_wanted());
        // No reactor: the old numbers, after the wait.
        let old = board.fresh(Duration::from_millis(1));
        assert_eq!(old.engine.sessions, 1);
        assert!(board.is_wanted() && !board.is_wanted());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| board.fresh(Duration::from_secs(10)));
            while !board.is_wanted() {
                std::thread::yield_now();
            }
            board.publish(numbered(2));
            // Should the reader hold the lock just then, the board wants them again.
            while board.is_wanted() {
                board.publish(numbered(2));
            }
            assert_eq!(reader.join().unwrap().engine.sessions, 2);
        });
    }

    #[test]
    fn the_reactor_never_waits_for_a_reader() {
        let board = Board::new(Waker::new().unwrap());
        let reader = board.latest();
        board.publish(numbered(3));
        drop(reader);
        assert!(board.is_wanted(), "it is asked again");
        assert_eq!(board.latest().engine.sessions, 0);
    }

    #[test]
    fn a_lost_device_stays_lost() {
        let board = Board::new(Waker::new().unwrap());
        board.enter(Phase::Lost);
        board.enter(Phase::Stopping);
        assert_eq!(board.phase(), Phase::Lost);
    }
}
