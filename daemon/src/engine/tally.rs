//! What is counted for operators beside what clients are told: a few integer additions where something happens.

use super::Engine;
use super::event::{Hop, TransferFault};
use super::ids::PageRef;
use super::page::Motion;
use super::policy::pace::Link;
use crate::store::StoreFault;

/// Upper bounds of all but the last bucket of [`Waits`] are 10 µs times powers of two: 10 µs to 5.2 s.
pub const WAIT_BUCKETS: usize = 20;
const WAIT_US_MIN: u64 = 10;

/// How long maps waited, from request to grant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    /// By upper bound, [`Waits::bound_us`]; the last one has none.
    pub buckets: [u64; WAIT_BUCKETS + 1],
    /// All together, microseconds.
    pub sum_us: u64,
}

impl Waits {
    /// Upper bound of a bucket, itself included.
    #[must_use]
    pub fn bound_us(bucket: usize) -> u64 {
        WAIT_US_MIN << bucket
    }

    /// One more.
    pub fn add(&mut self, us: u64) {
        let bucket = us.div_ceil(WAIT_US_MIN).max(1).next_power_of_two().trailing_zeros() as usize;
        self.buckets[bucket.min(WAIT_BUCKETS)] += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }
}

/// Kinds of hops that move a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HopKind {
    /// File to RAM; to VRAM on a unified device.
    FileToRam,
    /// Spill to RAM; to VRAM on a unified device.
    SpillToRam,
    /// RAM to VRAM.
    RamToVram,
    /// VRAM to RAM.
    VramToRam,
    /// RAM to spill; VRAM to spill on a unified device.
    RamToSpill,
    /// Zeros to VRAM.
    Zero,
}

impl HopKind {
    /// Every one, in the order of their numbers.
    pub const ALL: [HopKind; 6] = [
        HopKind::FileToRam,
        HopKind::SpillToRam,
        HopKind::RamToVram,
        HopKind::VramToRam,
        HopKind::RamToSpill,
        HopKind::Zero,
    ];

    fn of(hop: &Hop) -> Option<HopKind> {
        match hop {
            Hop::ReadFile { .. } => Some(HopKind::FileToRam),
            Hop::ReadSpill { .. } => Some(HopKind::SpillToRam),
            Hop::Up { .. } => Some(HopKind::RamToVram),
            Hop::Down { .. } => Some(HopKind::VramToRam),
            Hop::WriteSpill { .. } => Some(HopKind::RamToSpill),
            Hop::Zero { .. } => Some(HopKind::Zero),
            Hop::Release { .. } | Hop::Restore { .. } => None,
        }
    }
}

/// Hops of one kind over time. The time that each took is never looked at: all of it together is the number under way,
/// summed over time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flow {
    /// Ordered and not completed.
    pub in_flight: u64,
    busy_us: u64,
    since_us: u64,
}

impl Flow {
    fn advance(&mut self, now: u64) {
        self.busy_us += self.in_flight * now.saturating_sub(self.since_us);
        self.since_us = now;
    }

    /// Microseconds that all of them took from order to completion, those under way counted up to now.
    #[must_use]
    pub fn busy_us(mut self, now: u64) -> u64 {
        self.advance(now);
        self.busy_us
    }
}

/// Why a page has to leave VRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eviction {
    /// For a page that a map waits for.
    Demand,
    /// For a page that is prefetched.
    Prefetch,
    /// Its owner has used up a quota, and wants another page.
    Quota,
    /// The tier is to be smaller.
    Resize,
}

impl Eviction {
    /// Every one, in the order of their numbers.
    pub const ALL: [Eviction; 4] =
        [Eviction::Demand, Eviction::Prefetch, Eviction::Quota, Eviction::Resize];
}

/// Why a transfer failed, each attempt counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// A system call.
    Io,
    /// The file ended early.
    Truncated,
    /// The file was changed.
    Changed,
    /// Spilled bytes came back different.
    Checksum,
    /// The device.
    Device,
}

impl Failure {
    /// Every one, in the order of their numbers.
    pub const ALL: [Failure; 5] =
        [Failure::Io, Failure::Truncated, Failure::Changed, Failure::Checksum, Failure::Device];

    fn of(fault: &TransferFault) -> Failure {
        match fault {
            TransferFault::Store(StoreFault::Truncated { .. }) => Failure::Truncated,
            TransferFault::Store(StoreFault::Changed { .. }) => Failure::Changed,
            TransferFault::Store(StoreFault::Checksum { .. }) => Failure::Checksum,
            TransferFault::Store(
                StoreFault::Io { .. } | StoreFault::NotRegular | StoreFault::NotReadable,
            ) => Failure::Io,
            TransferFault::Device(_) => Failure::Device,
        }
    }
}

/// All of it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    /// By [`HopKind`].
    pub flows: [Flow; HopKind::ALL.len()],
    /// Pages that were dropped from VRAM, or began to be copied down, by [`Eviction`].
    pub evictions: [u64; Eviction::ALL.len()],
    /// By [`Failure`].
    pub failures: [u64; Failure::ALL.len()],
    /// Of granted maps.
    pub waits: Waits,
    /// VRAM frames asked back from clients.
    pub revocations: u64,
}

impl Tally {
    fn hop_started(&mut self, kind: HopKind, now: u64) {
        let flow = &mut self.flows[kind as usize];
        flow.advance(now);
        flow.in_flight += 1;
    }

    fn hop_ended(&mut self, kind: HopKind, now: u64) {
        let flow = &mut self.flows[kind as usize];
        flow.advance(now);
        flow.in_flight -= 1;
    }

    pub(super) fn evicted(&mut self, why: Eviction) {
        self.evictions[why as usize] += 1;
    }
}

impl Engine {
    /// The link that a hop takes up, if its pace is of interest.
    fn link(&mut self, kind: HopKind) -> Option<&mut Link> {
        match kind {
            HopKind::FileToRam | HopKind::SpillToRam => Some(&mut self.read_link),
            HopKind::RamToVram => Some(&mut self.up_link),
            HopKind::VramToRam | HopKind::RamToSpill | HopKind::Zero => None,
        }
    }

    /// A page's hop is ordered.
    pub(super) fn hop_started(&mut self, hop: &Hop) {
        let Some(kind) = HopKind::of(hop) else { return };
        let now = self.now;
        self.tally.hop_started(kind, now);
        if let Some(link) = self.link(kind) {
            link.started(now);
        }
    }

    /// A page's hop ended, well or not.
    pub(super) fn hop_ended(&mut self, at: PageRef, fault: Option<&TransferFault>) {
        let file_backed = self.table.backing(at.backing).file_backed();
        let kind = match self.table.page(at).motion {
            Motion::Still | Motion::NeedRam { .. } => unreachable!("nothing was in flight"),
            Motion::Reading { .. } if file_backed => HopKind::FileToRam,
            Motion::Reading { .. } => HopKind::SpillToRam,
            Motion::Up { .. } => HopKind::RamToVram,
            Motion::Down { .. } => HopKind::VramToRam,
            Motion::Out { .. } => HopKind::RamToSpill,
            Motion::Zero { .. } => HopKind::Zero,
        };
        let now = self.now;
        self.tally.hop_ended(kind, now);
        if let Some(link) = self.link(kind) {
            link.ended(now);
        }
        if let Some(fault) = fault {
            self.tally.failures[Failure::of(fault) as usize] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_counted_in_the_first_bucket_that_holds_them() {
        let mut waits = Waits::default();
        for us in [0, 10, 11, 20, 21, 5_242_880, 5_242_881, u64::MAX / 2] {
            waits.add(us);
        }
        let mut expected = [0; WAIT_BUCKETS + 1];
        (expected[0], expected[1], expected[2]) = (2, 2, 1);
        (expected[19], expected[20]) = (1, 2);
        assert_eq!(waits.buckets, expected);
        assert_eq!((Waits::bound_us(0), Waits::bound_us(19)), (10, 5_242_880));
    }

    #[test]
    fn the_time_of_hops_is_their_number_over_time() {
        let mut tally = Tally::default();
        tally.hop_started(HopKind::Zero, 100);
        tally.hop_started(HopKind::Zero, 110);
        tally.hop_ended(HopKind::Zero, 130);
        tally.hop_ended(HopKind::Zero, 150);
        let flow = tally.flows[HopKind::Zero as usize];
        // 100 to 130 and 110 to 150, or 100 to 150 and 110 to 130.
        assert_eq!((flow.in_flight, flow.busy_us(9999)), (0, 70));
    }
}
