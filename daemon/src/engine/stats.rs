//! The engine's numbers, as told to clients.

use lapis_proto::message::{Stats, TierStats};

use super::Engine;
use super::ids::SessionId;

impl Engine {
    pub(super) fn stats(&self, session: SessionId) -> Stats {
        let page = self.limits.page_size;
        let bytes = |pages: u32| u64::from(pages) * page;
        let tier = |capacity: u32, free: u32, pinned: u32, run: u32| TierStats {
            capacity: bytes(capacity),
            used: bytes(capacity - free),
            pinned: bytes(pinned),
            free_run_longest: bytes(run),
            degraded: false,
        };
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let moving = if self.limits.unified { 0 } else { self.reads + self.downs + self.outs };
        let revoking = self.vram.revoking_count();
        let free = self.vram.iter().map(|frame| frame.0);
        let vram_free = self.vram.free() + revoking;
        let parked = count(self.sizes.frames_out());
        let vram_capacity = self.vram.capacity() - parked;
        let vram = tier(vram_capacity, vram_free, self.table.pinned, longest_run(free));
        let slots = &self.slots;
        let slots_capacity = slots.capacity() - count(self.sizes.slots_aside.len());
        let nvme = tier(slots_capacity, slots.free(), self.outs, longest_run(slots.iter()));
        let ram_capacity = self.ram.capacity() - count(self.sizes.ram_aside.len());
        Stats {
            vram: TierStats { degraded: revoking > 0, ..vram },
            ram: tier(ram_capacity, self.ram.free(), moving, longest_run(self.ram.iter())),
            nvme: TierStats { degraded: self.spill_rests_until > 0, ..nvme },
            total: self.counters,
            session: self.session(session).counters,
            sessions: count(self.sessions.len()),
            allocations: count(self.allocations.len()),
            mappings: count(self.mappings.len()),
            quarantined_frames: revoking,
            metadata_bytes: self.table.metadata_bytes(),
        }
    }
}

/// The longest run of consecutive numbers.
fn longest_run(numbers: impl Iterator<Item = u32>) -> u32 {
    let mut sorted: Vec<_> = numbers.collect();
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
