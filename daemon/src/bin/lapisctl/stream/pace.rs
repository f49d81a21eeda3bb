//! Simulated compute, and what a pass would take if nothing were ever waited for.

use std::time::{Duration, Instant};

/// Waits until `deadline` as a client does whose GPU is busy: without using the processor.
pub(crate) fn wait_until(deadline: Instant) {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        // May return early, hence the loop.
        std::thread::park_timeout(left);
    }
}

/// Bytes a second; `None` for no time or no bytes.
pub(crate) fn rate(bytes: u64, time: Duration) -> Option<f64> {
    (bytes > 0 && !time.is_zero()).then(|| bytes as f64 / time.as_secs_f64())
}

/// The least time for a pass: computing and transferring overlap perfectly, so the longer of the two.
pub(crate) fn ideal(compute: Duration, transferred: u64, best: Option<f64>) -> Duration {
    // A rate comes from bytes and time that are both above zero.
    let transfer = best.map_or(Duration::ZERO, |rate| {
        Duration::try_from_secs_f64(transferred as f64 / rate).unwrap_or(Duration::MAX)
    });
    compute.max(transfer)
}

/// The share of a pass's time that could not be avoided; 1 is best.
pub(crate) fn efficiency(ideal: Duration, actual: Duration) -> f64 {
    if actual.is_zero() { 1.0 } else { ideal.as_secs_f64() / actual.as_secs_f64() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ideal_is_the_longer_of_compute_and_transfer() {
        let compute = Duration::from_millis(200);
        assert_eq!(ideal(compute, 1_000_000_000, Some(1e10)), Duration::from_millis(200));
        assert_eq!(ideal(compute, 1_000_000_000, Some(2e9)), Duration::from_millis(500));
        assert_eq!(ideal(compute, 1_000_000_000, None), Duration::from_millis(200));
    }

    #[test]
    fn efficiency_is_the_ideal_over_the_actual() {
        let of =
            |ideal, actual| efficiency(Duration::from_millis(ideal), Duration::from_millis(actual));
        assert_eq!(of(500, 1000).to_bits(), 0.5_f64.to_bits());
        assert_eq!(of(0, 0).to_bits(), 1.0_f64.to_bits());
    }

    #[test]
    fn rates_need_bytes_and_time() {
        assert_eq!(rate(1000, Duration::from_millis(500)), Some(2000.0));
        assert_eq!(rate(0, Duration::from_millis(500)), None);
        assert_eq!(rate(1000, Duration::ZERO), None);
    }

    #[test]
    fn a_past_deadline_is_not_waited_for() {
        wait_until(Instant::now());
    }
}
