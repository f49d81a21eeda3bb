//! The engine's numbers, as told to clients and to operators.

use lapis_proto::message::{Counters, Quota, QuotaSubject, Stats, TierStats};

use super::Engine;
use super::ids::SessionId;
use super::quota::Instance;
use super::tally::Tally;

/// Quotas whose use is shown to operators; sums for more would hold up everybody else.
pub const QUOTAS_SHOWN_MAX: usize = 64;

/// What operators are shown, in plain numbers.
#[derive(Debug, Clone, Default)]
pub struct Observation {
    /// Bytes of a page.
    pub page_size: u64,
    /// VRAM, RAM, spill; `free_run_longest` is left to whoever has the time, see [`longest_run`].
    pub tiers: [TierStats; 3],
    /// Numbers of the free frames of each tier.
    pub free: [Vec<u32>; 3],
    /// What clients are told.
    pub total: Counters,
    /// And beside that.
    pub tally: Tally,
    /// What waits, in no more than one place each.
    pub queues: Queues,
    /// Open sessions.
    pub sessions: u64,
    /// Sessions whose process lives on.
    pub lingering: u64,
    /// Live allocations.
    pub allocations: u64,
    /// Live mappings.
    pub mappings: u64,
    /// Frames that clients have been asked for.
    pub revoking: u64,
    /// VRAM frames that are to be made yet.
    pub growing: u64,
    /// Bytes of page metadata.
    pub metadata_bytes: u64,
    /// Bytes of anonymous allocations, and how many there may be.
    pub anonymous: (u64, u64),
    /// Quotas, each with bytes of VRAM and of anonymous memory in use; the first [`QUOTAS_SHOWN_MAX`] of users and groups.
    pub quotas: Vec<(Quota, u64, u64)>,
}

/// Lengths of what waits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Queues {
    /// Maps, for room in VRAM.
    pub maps_for_room: u64,
    /// Maps, for bytes.
    pub maps_for_bytes: u64,
    /// Flushes, for their pages.
    pub flushes: u64,
    /// Tiers, for their new size.
    pub resizes: u64,
    /// Pages, for a VRAM frame.
    pub pages_for_vram: u64,
    /// Prefetched pages, for a VRAM frame.
    pub prefetches_for_vram: u64,
    /// Pages, for a RAM frame or their turn to be read.
    pub pages_for_ram: u64,
    /// Pages, to be written by a flush.
    pub pages_to_flush: u64,
}

impl Engine {
    pub(super) fn stats(&self, session: SessionId) -> Stats {
        let mut tiers = self.tiers();
        let free = self.free_numbers();
        for (tier, free) in tiers.iter_mut().zip(free) {
            tier.free_run_longest = u64::from(longest_run(free)) * self.limits.page_size;
        }
        let [vram, ram, nvme] = tiers;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Stats {
            vram,
            ram,
            nvme,
            total: self.counters,
            session: self.session(session).counters,
            sessions: count(self.sessions.len()),
            allocations: count(self.allocations.len()),
            mappings: count(self.mappings.len()),
            quarantined_frames: self.vram.revoking_count(),
            metadata_bytes: self.table.metadata_bytes(),
        }
    }

    /// What operators are shown.
    #[must_use]
    pub fn observe(&self) -> Observation {
        let page_size = self.limits.page_size;
        let reads = self.read_demand.len() + self.read_prefetch.len();
        let lingering = self.sessions.values().filter(|session| session.lingering).count() as u64;
        Observation {
            page_size,
            tiers: self.tiers(),
            free: self.free_numbers(),
            total: self.counters,
            tally: self.tally,
            queues: Queues {
                maps_for_room: self.queue.len() as u64,
                maps_for_bytes: (self.pending.len() - self.queue.len()) as u64,
                flushes: self.flushes.len() as u64,
                resizes: self.sizes.pending.len() as u64,
                pages_for_vram: self.fill_demand.len() as u64,
                prefetches_for_vram: self.fill_prefetch.len() as u64,
                pages_for_ram: reads as u64,
                pages_to_flush: (self.flush_down.len() + self.flush_out.len()) as u64,
            },
            sessions: self.sessions.len() as u64 - lingering,
            lingering,
            allocations: self.allocations.len() as u64,
            mappings: self.mappings.len() as u64,
            revoking: u64::from(self.vram.revoking_count()),
            growing: self.frames_growing(),
            metadata_bytes: self.table.metadata_bytes(),
            anonymous: (self.anonymous_pages * page_size, self.anonymous_pages_max() * page_size),
            quotas: self.quotas_in_use(),
        }
    }

    /// Quotas of users and groups with what they use, found in one pass.
    fn quotas_in_use(&self) -> Vec<(Quota, u64, u64)> {
        let named = self.quotas.values().filter_map(|quota| match quota.subject {
            QuotaSubject::Uid(uid) => Some((*quota, Instance::Uid(super::ids::Domain(uid)))),
            QuotaSubject::Gid(gid) => Some((*quota, Instance::Gid(gid))),
            QuotaSubject::EachUid | QuotaSubject::EachSession => None,
        });
        let mut uses: Vec<_> = named.take(QUOTAS_SHOWN_MAX).map(|(q, i)| (q, i, 0, 0)).collect();
        if uses.is_empty() {
            return Vec::new();
        }
        for (_, backing) in self.table.iter() {
            for (_, instance, vram, anonymous) in &mut uses {
                if instance.owns(&backing.owner) {
                    *vram += u64::from(backing.in_vram);
                    if !backing.file_backed() {
                        *anonymous += u64::from(backing.pages_count());
                    }
                }
            }
        }
        let page = self.limits.page_size;
        uses.into_iter().map(|(quota, _, vram, anon)| (quota, vram * page, anon * page)).collect()
    }

    fn free_numbers(&self) -> [Vec<u32>; 3] {
        [
            self.vram.iter().map(|frame| frame.0).collect(),
            self.ram.iter().collect(),
            self.slots.iter().collect(),
        ]
    }

    /// The tiers, their longest free runs left out.
    #[must_use]
    pub fn tiers(&self) -> [TierStats; 3] {
        let page = self.limits.page_size;
        let bytes = |pages: u32| u64::from(pages) * page;
        let tier = |capacity: u32, free: u32, pinned: u32| TierStats {
            capacity: bytes(capacity),
            used: bytes(capacity - free),
            pinned: bytes(pinned),
            free_run_longest: 0,
            degraded: false,
        };
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let moving = if self.limits.unified { 0 } else { self.reads + self.downs + self.outs };
        let revoking = self.vram.revoking_count();
        let vram_free = self.vram.free() + revoking;
        let parked = count(self.sizes.frames_out());
        let vram_capacity = self.vram.capacity() - parked;
        let vram = tier(vram_capacity, vram_free, self.table.pinned);
        let slots = &self.slots;
        let slots_capacity = slots.capacity() - count(self.sizes.slots_aside.len());
        let nvme = tier(slots_capacity, slots.free(), self.outs);
        let ram_capacity = self.ram.capacity() - count(self.sizes.ram_aside.len());
        [
            TierStats { degraded: revoking > 0, ..vram },
            tier(ram_capacity, self.ram.free(), moving),
            TierStats { degraded: self.spill_rests_until > 0, ..nvme },
        ]
    }
}

/// The longest run of consecutive numbers.
#[must_use]
pub fn longest_run(mut sorted: Vec<u32>) -> u32 {
    sorted.sort_unstable();
    let (mut longest, mut run, mut last) = (0, 0, None);
    for number in sorted {
        run = if last.is_some_and(|last: u32| last.checked_add(1) == Some(number)) {
            run + 1
        } else {
            1
        };
        longest = longest.max(run);
        last = Some(number);
    }
    longest
}
