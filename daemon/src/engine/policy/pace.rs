//! How long a transfer of a page takes when many are under way, from when they end.

/// Weight of a new sample: one part of so many.
const SMOOTHING: u64 = 16;

/// One link.
#[derive(Debug, Default)]
pub struct Link {
    in_flight: u32,
    /// When the last transfer ended, or the first of those under way began; microseconds.
    since_us: u64,
    /// Nanoseconds per page; 0: none was seen.
    page_ns: u64,
}

impl Link {
    /// A transfer starts.
    pub fn started(&mut self, now: u64) {
        if self.in_flight == 0 {
            self.since_us = now;
        }
        self.in_flight += 1;
    }

    /// A transfer ends.
    pub fn ended(&mut self, now: u64) {
        self.in_flight -= 1;
        let took_ns = now.saturating_sub(self.since_us).saturating_mul(1000);
        self.since_us = now;
        self.page_ns = match self.page_ns {
            0 => took_ns,
            old => (old.saturating_mul(SMOOTHING - 1).saturating_add(took_ns)) / SMOOTHING,
        };
    }

    /// Transfers under way.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Nanoseconds per page, 0 before any was moved.
    #[must_use]
    pub fn page_ns(&self) -> u64 {
        self.page_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_under_way_together_share_the_time() {
        let mut link = Link::default();
        let mut now = 5;
        for _ in 0..4 {
            link.started(now);
        }
        for _ in 0..400 {
            now += 100;
            link.ended(now);
            link.started(now);
        }
        assert_eq!(link.page_ns(), 100_000);
        for _ in 0..4 {
            link.ended(now + 100);
        }
        // Time without a transfer is no transfer's time.
        link.started(1_000_000_000);
        link.ended(1_000_000_100);
        assert!(link.page_ns() <= 100_000, "{}", link.page_ns());
    }
}
