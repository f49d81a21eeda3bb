//! A link of a given speed: a transfer ends no earlier than the link could have carried it after those before it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A thread that sleeps wakes up this much late; the rest of a wait is spent looking at the clock.
const SPIN: Duration = Duration::from_micros(60);

/// One direction. Several threads share its bandwidth.
#[derive(Debug)]
pub(super) struct Link {
    bandwidth: Option<u64>,
    latency: Duration,
    free_at: Mutex<Option<Instant>>,
}

impl Link {
    pub(super) fn new(bandwidth: Option<u64>, latency: Duration) -> Self {
        Self { bandwidth, latency, free_at: Mutex::new(None) }
    }

    /// Takes the link's next slot for so many bytes; answers when the transfer may be reported done. One that was
    /// asked for while the link was busy follows at once, however late the thread is that carries it out.
    pub(super) fn begin(&self, bytes: u64, asked: Instant) -> Option<Instant> {
        if self.bandwidth.is_none() && self.latency.is_zero() {
            return None;
        }
        let carried = self.bandwidth.map_or(Duration::ZERO, |rate| carry_time(bytes, rate));
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let start = free_at.map_or(asked, |free| free.max(asked));
        *free_at = Some(start + carried);
        Some(start + carried + self.latency)
    }

    /// Waits until then.
    pub(super) fn finish(&self, turn: Option<Instant>) {
        let Some(end) = turn else { return };
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            if left > SPIN {
                std::thread::park_timeout(left - SPIN);
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

fn carry_time(bytes: u64, bytes_per_s: u64) -> Duration {
    let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s.max(1));
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_share_the_link_and_latency_adds_once_each() {
        let link = Link::new(Some(1_000_000_000), Duration::from_secs(5));
        let now = Instant::now();
        let first = link.begin(2_000_000_000, now).unwrap();
        let second = link.begin(1_000_000_000, now).unwrap();
        assert_eq!(second - first, Duration::from_secs(1));
        assert_eq!(Link::new(None, Duration::ZERO).begin(1 << 40, now), None);
    }

    #[test]
    fn a_thread_that_is_late_costs_the_link_nothing_while_transfers_are_in_line() {
        let link = Link::new(Some(1_000_000_000), Duration::ZERO);
        let asked = Instant::now();
        let first = link.begin(1_000_000, asked).unwrap();
        // The one thread comes to the second one long after the first has ended.
        link.finish(Some(first + Duration::from_millis(3)));
        assert_eq!(link.begin(1_000_000, asked).unwrap() - first, Duration::from_millis(1));
        // What nobody asked for has not begun.
        let later = Instant::now();
        assert_eq!(link.begin(1_000_000, later).unwrap() - later, Duration::from_millis(1));
    }

    #[test]
    fn a_finished_transfer_has_taken_its_time() {
        let link = Link::new(Some(1_000_000_000), Duration::from_micros(300));
        let started = Instant::now();
        let turn = link.begin(1_000_000, Instant::now());
        link.finish(turn);
        assert!(started.elapsed() >= Duration::from_micros(1_300));
    }
}
