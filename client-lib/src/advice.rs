//! What a client says of ranges beside mapping them: soon, how, no more, down to the disk.
//!
//! Whole pages are meant, and ranges may be of several allocations, overlap or be empty. As many requests are sent as
//! the ranges take; an error may leave the first ones done.

use std::ops::Range;
use std::time::{Duration, Instant};

use lapis_proto::kind::Message;
use lapis_proto::message::{
    Advice, Advise, CancelPrefetch, Done, Flush, PageRange, Prefetch, RANGES_PER_REQUEST_MAX,
};

use crate::allocation::Allocation;
use crate::client::{Client, merge, micros, page_range};
use crate::error::Error;
use crate::memory::Held;

/// How long [`Allocation::flush`] waits: long enough to write a tier of VRAM to a slow disk.
pub const FLUSH_WAIT_DEFAULT: Duration = Duration::from_secs(60);

/// How to prefetch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefetchOptions {
    /// Higher ones are fetched first; 0 is the usual.
    pub priority: u8,
    /// How soon the ranges must be under way to be worth fetching at all; `None`: whenever.
    pub within: Option<Duration>,
}

impl Client {
    /// Says that these ranges will be mapped soon, in this order. Returns at once.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Refused`].
    pub fn prefetch(&self, ranges: &[(&Allocation, Range<u64>)]) -> Result<(), Error> {
        self.prefetch_with(ranges, PrefetchOptions::default())
    }

    /// As [`Self::prefetch`], with a priority and a time after which it is too late.
    ///
    /// # Errors
    /// As [`Self::prefetch`].
    pub fn prefetch_with(
        &self,
        ranges: &[(&Allocation, Range<u64>)],
        options: PrefetchOptions,
    ) -> Result<(), Error> {
        let PrefetchOptions { priority, within } = options;
        // On the wire 0 means `None`.
        let within_us = within.map_or(0, |within| micros(within).max(1));
        self.may_say(ranges)?;
        // In their order, which is the order to fetch them in.
        let mut pages: Vec<Held> = ranges.iter().filter_map(|range| self.pages_of(range)).collect();
        merge(&mut pages);
        self.say(&pages, |ranges| Prefetch { ranges, priority, within_us })
    }

    /// Takes prefetches of these ranges back, as far as they have not begun, and lets what they brought go like any
    /// other page.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Refused`].
    pub fn cancel_prefetch(&self, ranges: &[(&Allocation, Range<u64>)]) -> Result<(), Error> {
        self.may_say(ranges)?;
        self.say(&self.pages_in_order(ranges), |ranges| CancelPrefetch { ranges })
    }

    /// Says how these ranges will be used, which changes what is evicted first and nothing else. It holds until
    /// other advice is given. Returns at once.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Refused`].
    pub fn advise(
        &self,
        ranges: &[(&Allocation, Range<u64>)],
        advice: Advice,
    ) -> Result<(), Error> {
        self.may_say(ranges)?;
        self.say(&self.pages_in_order(ranges), |ranges| Advise { ranges, advice })
    }

    /// Writes these ranges of allocated memory down to the NVMe tier, as far as it has no copy of them yet, and
    /// leaves them where they are as well. Waits up to `wait` until all is written.
    ///
    /// It makes later evictions cheap; it does not make bytes outlive the allocation.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::Refused`], e.g. with [`crate::Code::InUse`] when some of the pages are mapped
    /// for writing, or [`crate::Code::TimedOut`].
    pub fn flush(&self, ranges: &[(&Allocation, Range<u64>)], wait: Duration) -> Result<(), Error> {
        self.may_say(ranges)?;
        let started = Instant::now();
        self.say(&self.pages_in_order(ranges), |ranges| {
            let wait_us = micros(wait.saturating_sub(started.elapsed()));
            Flush { ranges, wait_us }
        })
    }

    /// Before anything of the ranges is looked at.
    fn may_say(&self, ranges: &[(&Allocation, Range<u64>)]) -> Result<(), Error> {
        if self.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        self.check(ranges)
    }

    /// Sends as many requests as the pages take, one after the other.
    fn say<M: Message>(
        &self,
        pages: &[Held],
        request: impl Fn(Vec<PageRange>) -> M,
    ) -> Result<(), Error> {
        for part in pages.chunks(RANGES_PER_REQUEST_MAX) {
            let ranges = part.iter().map(page_range).collect::<Result<_, Error>>()?;
            let Done {} = self.session.connection().call(&request(ranges), None)?;
        }
        Ok(())
    }
}

impl Allocation {
    /// Says that these bytes will be mapped soon. Returns at once.
    ///
    /// # Errors
    /// As [`Client::prefetch`].
    pub fn prefetch(&self, bytes: Range<u64>) -> Result<(), Error> {
        self.client().prefetch(&[(self, bytes)])
    }

    /// Takes prefetches of these bytes back.
    ///
    /// # Errors
    /// As [`Client::cancel_prefetch`].
    pub fn cancel_prefetch(&self, bytes: Range<u64>) -> Result<(), Error> {
        self.client().cancel_prefetch(&[(self, bytes)])
    }

    /// Says how these bytes will be used.
    ///
    /// # Errors
    /// As [`Client::advise`].
    pub fn advise(&self, bytes: Range<u64>, advice: Advice) -> Result<(), Error> {
        self.client().advise(&[(self, bytes)], advice)
    }

    /// Writes these bytes down to the NVMe tier, waiting up to [`FLUSH_WAIT_DEFAULT`].
    ///
    /// # Errors
    /// As [`Client::flush`].
    pub fn flush(&self, bytes: Range<u64>) -> Result<(), Error> {
        self.client().flush(&[(self, bytes)], FLUSH_WAIT_DEFAULT)
    }
}

#[cfg(test)]
mod tests;
