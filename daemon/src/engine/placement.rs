//! Placement: turns "this page is wanted in VRAM" into hops, and makes room.
//!
//! A page takes its resources in one order: VRAM frame, then RAM frame, then I/O. Getting a RAM frame never depends on
//! VRAM (its pages are dropped, or written to the spill, for which admission holds a slot ready), and the last few RAM
//! frames are kept for pages on their way down. So room can always be made and no cycle of waits can close.

use super::Engine;
use super::event::{Command, Hop, Outbox, Reply, TransferFault};
use super::ids::{PageRef, RamFrame, SpillSlot, VramFrame};
use super::limits::{PREFETCH_EXPIRES_AFTER_TIERS, READ_RETRIES, SPILL_REST_US};
use super::page::Motion;
use super::page_table::Source;
use super::policy::next_use::{NextUse, distance};
use super::quota::Instance;
use crate::store;

/// What came of asking for a VRAM frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Frame {
    /// Here it is, and whether only the page's own domain has used it.
    Got(VramFrame, bool),
    /// None now; room is being made.
    TierFull,
    /// Not for this page, whose owner has used up a quota; others may get one.
    QuotaFull,
}

/// What a RAM frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RamUse {
    /// A page on its way from VRAM: may take the last ones.
    Leaving,
    /// A page being read.
    Reading,
}

/// Why a page is wanted in VRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// A map waits for it.
    Demand,
    /// A prefetch: may not do harm.
    Prefetch,
}

impl Engine {
    /// Restores what must always hold: whatever can be granted is granted, whatever can move moves.
    pub(super) fn advance(&mut self, now: u64, outbox: &mut Outbox) {
        loop {
            self.admit_queued();
            self.grant_complete(now, outbox);
            if self.device_lost {
                return;
            }
            self.fill(Need::Demand, now, outbox);
            self.read(Need::Demand, now, outbox);
            self.fill(Need::Prefetch, now, outbox);
            self.read(Need::Prefetch, now, outbox);
            self.write_flushes(now, outbox);
            self.answer_flushed(outbox);
            self.resize(now, outbox);
            // A page that is going to be overwritten may be ready without a hop.
            if self.complete.is_empty() {
                return;
            }
        }
    }

    fn fill(&mut self, need: Need, now: u64, outbox: &mut Outbox) {
        let mut passed = 0;
        loop {
            let (next, waiting) = match need {
                Need::Demand => (self.fill_demand.front().copied(), self.fill_demand.len()),
                Need::Prefetch => (self.next_prefetch(now), self.fill_prefetch.len()),
            };
            let Some(at) = next else { return };
            if !self.table.find(at).is_some_and(super::page::Page::needs_fill) {
                self.fill_taken(need);
                continue;
            }
            let waiting = u32::try_from(waiting).unwrap_or(u32::MAX);
            let (frame, own) = match self.vram_frame(at, need, waiting, now, outbox) {
                Frame::Got(frame, own) => (frame, own),
                Frame::TierFull => return,
                // Others may pass: their frames are not what it waits for.
                Frame::QuotaFull if need == Need::Demand && passed < waiting => {
                    passed += 1;
                    self.fill_demand.rotate_left(1);
                    continue;
                }
                Frame::QuotaFull => return,
            };
            self.fill_taken(need);
            if own && self.table.page(at).overwriters > 0 {
                self.take_as_is(at, frame, outbox);
            } else {
                self.start_fill(at, frame, need, outbox);
            }
        }
    }

    /// The page at the head of its queue is being taken care of.
    fn fill_taken(&mut self, need: Need) {
        match need {
            Need::Demand => drop(self.fill_demand.pop_front()),
            Need::Prefetch => drop(self.fill_prefetch.pop_first()),
        }
    }

    /// The first page to prefetch that is still worth it.
    fn next_prefetch(&mut self, now: u64) -> Option<PageRef> {
        while let Some((_, wanted)) = self.fill_prefetch.first_key_value() {
            let at = wanted.page;
            if wanted.until_us > now {
                return Some(at);
            }
            self.fill_prefetch.pop_first();
            if self.table.find(at).is_some_and(|page| page.prefetched && page.vram.is_none()) {
                self.table.update(at, |page| page.prefetched = false);
            }
        }
        None
    }

    /// A page that will be overwritten needs no bytes, and what its own domain left in the frame is no secret.
    fn take_as_is(&mut self, at: PageRef, frame: VramFrame, outbox: &mut Outbox) {
        self.table.update(at, |page| {
            page.vram = Some(frame);
            page.provisional = true;
        });
        self.page_settled(at, outbox);
    }

    /// A VRAM frame for this page, and whether only its own domain has used it: a free one, or one whose page can be
    /// dropped; else starts to make room.
    fn vram_frame(
        &mut self,
        at: PageRef,
        need: Need,
        waiting: u32,
        now: u64,
        outbox: &mut Outbox,
    ) -> Frame {
        let domain = self.table.backing(at.backing).domain;
        if need == Need::Prefetch && !self.prefetch_has_room() {
            return Frame::TierFull;
        }
        while let Some(full) = self.vram_used_up(at) {
            let victim = if need == Need::Demand { self.victim_of(full) } else { None };
            let evicted = victim.is_some_and(|victim| self.evict(victim, now, outbox));
            if !evicted {
                return Frame::QuotaFull;
            }
        }
        let guarded = self.guarded_from(at);
        loop {
            if let Some((frame, own)) = self.vram.take(domain) {
                return Frame::Got(frame, own);
            }
            let coming = self.downs + self.revocations_awaited();
            if coming >= waiting.min(self.limits.depth) {
                return Frame::TierFull;
            }
            if self.revoke_foreign(domain, now, outbox) {
                continue;
            }
            let Some(victim) = self.vram_victim(need, &guarded) else { return Frame::TierFull };
            let (downs, ram) = (self.downs, self.ram.free());
            if !self.evict(victim, now, outbox) && (downs, ram) == (self.downs, self.ram.free()) {
                return Frame::TierFull;
            }
        }
    }

    /// Drops a page from VRAM, or starts to copy it down. Answers whether its frame is free now.
    fn evict(&mut self, victim: PageRef, now: u64, outbox: &mut Outbox) -> bool {
        let file_backed = self.table.backing(victim.backing).file_backed();
        if self.table.page(victim).vram_droppable(file_backed) {
            self.drop_from_vram(victim);
            return true;
        }
        if self.downs < self.limits.depth
            && let Some(ram) = self.ram_frame(RamUse::Leaving, now, outbox)
        {
            self.start_down(victim, ram, outbox);
        }
        false
    }

    /// Pages that are prefetched and unused, and pages that are mapped, stay below the cap together.
    fn prefetch_has_room(&self) -> bool {
        let held = u64::from(self.table.pinned)
            + u64::from(self.vram.revoking_count())
            + self.table.protected.len() as u64
            + u64::from(self.prefetches_moving);
        held < u64::from(self.mapped_pages_max())
    }

    fn vram_victim(&mut self, need: Need, guarded: &[Instance]) -> Option<PageRef> {
        let clock = self.clock;
        let expires = u64::from(self.limits.vram_frames) * PREFETCH_EXPIRES_AFTER_TIERS;
        while let Some((at_clock, at)) = self.table.protected.first() {
            if clock.saturating_sub(at_clock) <= expires {
                break;
            }
            self.counters.prefetch_wasted += 1;
            self.table.update(at, |page| page.prefetched = false);
        }
        let best = |order: &NextUse| {
            if guarded.is_empty() {
                return order.farthest(clock);
            }
            order.farthest_where(clock, |at| !self.is_guarded(at, guarded))
        };
        let evictable = best(&self.table.evictable);
        match need {
            Need::Demand => evictable
                // The one prefetched last will be needed last.
                .or_else(|| {
                    self.table.protected.last().filter(|(_, at)| !self.is_guarded(*at, guarded))
                })
                .or_else(|| best(&self.table.protected))
                .or_else(|| best(&self.table.kept))
                .map(|(_, at)| at),
            Need::Prefetch => {
                // Do no harm: what goes must be needed later than what comes, which is behind all prefetched so far.
                let ahead = self.table.protected.len() as u64 + u64::from(self.prefetches_moving);
                evictable.filter(|(next, _)| distance(*next, clock) > ahead).map(|(_, at)| at)
            }
        }
    }

    fn drop_from_vram(&mut self, at: PageRef) {
        let (frame, prefetched) = self.table.update(at, |page| {
            let prefetched = std::mem::take(&mut page.prefetched);
            page.zeros = false;
            page.retained = false;
            (page.vram.take().expect("victims are in VRAM"), prefetched)
        });
        self.counters.dropped_vram += 1;
        self.counters.prefetch_wasted += u64::from(prefetched);
        self.vram.put(self.table.backing(at.backing).domain, frame);
    }

    pub(super) fn start_down(&mut self, at: PageRef, ram: RamFrame, outbox: &mut Outbox) {
        self.downs += 1;
        let source = self.table.update(at, |page| {
            page.motion = Motion::Down { ram };
            page.vram.expect("victims are in VRAM")
        });
        self.start(at, Hop::Down { source, target: ram }, outbox);
    }

    fn start_fill(&mut self, at: PageRef, target: VramFrame, need: Need, outbox: &mut Outbox) {
        self.prefetches_moving += u32::from(need == Need::Prefetch);
        let backing = self.table.backing(at.backing);
        let shift = self.shift_of(at);
        let page = self.table.page(at);
        if let (Some(source), 0) = (page.ram, page.overwriters) {
            self.table.update(at, |page| {
                page.motion = Motion::Up { target };
                page.filled_by_prefetch = need == Need::Prefetch;
            });
            self.start(at, Hop::Up { source, shift, target }, outbox);
        } else if page.overwriters == 0 && (backing.file_backed() || page.slot.is_some()) {
            self.table.update(at, |page| {
                page.motion = Motion::NeedRam { target };
                page.filled_by_prefetch = need == Need::Prefetch;
            });
            match need {
                Need::Demand => self.read_demand.push_back(at),
                Need::Prefetch => self.read_prefetch.push_back(at),
            }
        } else {
            self.table.update(at, |page| {
                page.motion = Motion::Zero { target };
                page.filled_by_prefetch = need == Need::Prefetch;
            });
            self.start(at, Hop::Zero { target }, outbox);
        }
    }

    fn read(&mut self, need: Need, now: u64, outbox: &mut Outbox) {
        // A map may come at any moment: what is fetched ahead leaves it half of the disk's queue.
        let depth = match need {
            Need::Demand => self.limits.depth,
            Need::Prefetch => self.limits.depth.div_ceil(2),
        };
        while self.reads < depth {
            let queue = match need {
                Need::Demand => &mut self.read_demand,
                Need::Prefetch => &mut self.read_prefetch,
            };
            let Some(at) = queue.front().copied() else { return };
            let motion = self.table.find(at).map(|page| page.motion);
            let Some(Motion::NeedRam { target }) = motion else {
                queue.pop_front();
                continue;
            };
            let Some(ram) = self.ram_frame(RamUse::Reading, now, outbox) else { return };
            match need {
                Need::Demand => self.read_demand.pop_front(),
                Need::Prefetch => self.read_prefetch.pop_front(),
            };
            self.reads += 1;
            self.table.update(at, |page| page.motion = Motion::Reading { target, ram });
            let hop = self.read_hop(at, ram);
            self.start(at, hop, outbox);
        }
    }

    fn read_hop(&self, at: PageRef, target: RamFrame) -> Hop {
        let page_size = self.limits.page_size;
        match self.table.backing(at.backing).source {
            Source::File { file, key } => {
                let start = u64::from(at.index) * page_size;
                let length = (key.length - start).min(page_size);
                let length = u32::try_from(length).expect("a page is far below 4 GiB");
                Hop::ReadFile { file, offset: key.offset + start, length, target }
            }
            Source::Anonymous(_) => {
                let page = self.table.page(at);
                let slot = page.slot.expect("only spilled pages are read");
                Hop::ReadSpill { slot, checksum: page.checksum, target }
            }
        }
    }

    fn shift_of(&self, at: PageRef) -> u32 {
        match self.table.backing(at.backing).source {
            Source::File { key, .. } => store::shift(key.offset),
            Source::Anonymous(_) => 0,
        }
    }

    /// A RAM frame: a free one, or one whose copy can be dropped; else starts writes to the spill. The last frames
    /// are for pages that leave VRAM.
    fn ram_frame(&mut self, use_: RamUse, now: u64, outbox: &mut Outbox) -> Option<RamFrame> {
        let reserve = match use_ {
            RamUse::Leaving => 0,
            RamUse::Reading => self.limits.ram_reserve(),
        };
        if self.ram.free() > reserve {
            return self.ram.take().map(RamFrame);
        }
        let clock = self.clock;
        let victim = self.table.ram_duplicate.last();
        if let Some((_, at)) = victim.or_else(|| self.table.ram_clean.farthest(clock)) {
            let frame = self.table.update(at, |page| page.ram.take());
            self.counters.dropped_ram += 1;
            return Some(frame.expect("victims are in RAM"));
        }
        self.write_out(now, outbox);
        None
    }

    /// Starts writes of RAM's sole copies to the spill, so that their frames can be dropped.
    fn write_out(&mut self, now: u64, outbox: &mut Outbox) {
        if self.spill_rests_until > now {
            return;
        }
        while self.outs < self.limits.depth {
            let Some((_, at)) = self.table.ram_sole.farthest(self.clock) else { return };
            let Some(slot) = self.slots.take().map(SpillSlot) else { return };
            self.begin_out(at, slot, outbox);
        }
    }

    pub(super) fn begin_out(&mut self, at: PageRef, slot: SpillSlot, outbox: &mut Outbox) {
        self.outs += 1;
        let source = self.table.update(at, |page| {
            page.motion = Motion::Out { slot };
            page.ram.expect("what goes out is in RAM")
        });
        self.start(at, Hop::WriteSpill { source, slot }, outbox);
    }

    /// A frame of a RAM tier that is to be smaller.
    pub(super) fn ram_frame_to_set_aside(
        &mut self,
        now: u64,
        outbox: &mut Outbox,
    ) -> Option<RamFrame> {
        self.ram_frame(RamUse::Reading, now, outbox)
    }

    /// Makes a page leave VRAM for a tier that is to be smaller. Answers whether its frame is free now.
    pub(super) fn evict_for_resize(&mut self, now: u64, outbox: &mut Outbox) -> bool {
        let Some(victim) = self.vram_victim(Need::Demand, &[]) else { return false };
        self.evict(victim, now, outbox)
    }

    /// A flush is no reason to use the last frames.
    pub(super) fn ram_frame_for_flush(
        &mut self,
        now: u64,
        outbox: &mut Outbox,
    ) -> Option<RamFrame> {
        self.ram_frame(RamUse::Reading, now, outbox)
    }

    fn start(&mut self, at: PageRef, hop: Hop, outbox: &mut Outbox) {
        let tag = self.next_tag();
        self.transfers.insert(tag, at);
        outbox.push(Command::Transfer { tag, hop });
    }

    /// Bytes of a page that are not padding.
    fn useful_bytes(&self, at: PageRef) -> u64 {
        let page_size = self.limits.page_size;
        match self.table.backing(at.backing).source {
            Source::File { key, .. } => {
                (key.length - u64::from(at.index) * page_size).min(page_size)
            }
            Source::Anonymous(_) => page_size,
        }
    }

    /// Advances a page whose hop ended well.
    pub(super) fn hop_succeeded(&mut self, at: PageRef, checksum: u64, outbox: &mut Outbox) {
        let bytes = self.useful_bytes(at);
        let file_backed = self.table.backing(at.backing).file_backed();
        let motion = self.table.page(at).motion;
        let hop = match motion {
            Motion::Still | Motion::NeedRam { .. } => unreachable!("nothing was in flight"),
            Motion::Reading { target, ram } => {
                self.reads -= 1;
                let shift = self.shift_of(at);
                self.table.update(at, |page| {
                    page.ram = Some(ram);
                    page.motion = Motion::Up { target };
                    page.read_failures = 0;
                });
                self.start(at, Hop::Up { source: ram, shift, target }, outbox);
                if file_backed {
                    &mut self.counters.file_to_ram
                } else {
                    &mut self.counters.spill_to_ram
                }
            }
            Motion::Up { target } => {
                self.filled(at, target, false);
                &mut self.counters.ram_to_vram
            }
            Motion::Zero { target } => {
                self.filled(at, target, true);
                &mut self.counters.zeroed
            }
            Motion::Down { ram } => {
                self.downs -= 1;
                self.left_vram(at, ram);
                &mut self.counters.vram_to_ram
            }
            Motion::Out { slot } => {
                self.outs -= 1;
                self.table.update(at, |page| {
                    page.slot = Some(slot);
                    page.checksum = checksum;
                    page.motion = Motion::Still;
                });
                &mut self.counters.ram_to_spill
            }
        };
        hop.pages += 1;
        hop.bytes += bytes;
    }

    fn filled(&mut self, at: PageRef, target: VramFrame, zeros: bool) {
        let page = self.table.page(at);
        let others = page.ram.is_some() || page.slot.is_some();
        if zeros && others && page.overwriters == 0 {
            // Whoever was going to overwrite it has given up: its bytes are elsewhere.
            return self.cancel_fill(at, target);
        }
        let by_prefetch = self.table.update(at, |page| {
            page.vram = Some(target);
            page.motion = Motion::Still;
            page.zeros = zeros && !others;
            page.provisional = zeros && others;
            page.fetched = page.pins == 0;
            std::mem::take(&mut page.filled_by_prefetch)
        });
        self.prefetches_moving -= u32::from(by_prefetch);
    }

    /// A page was copied down to leave VRAM. It goes unless somebody wants it again by now.
    fn left_vram(&mut self, at: PageRef, ram: RamFrame) {
        let frame = self.table.update(at, |page| {
            page.ram = Some(ram);
            page.motion = Motion::Still;
            if page.pins > 0 || page.prefetched || page.flushing {
                return None;
            }
            page.retained = false;
            page.vram.take()
        });
        if let Some(frame) = frame {
            self.vram.put(self.table.backing(at.backing).domain, frame);
        }
    }

    /// Takes back what a failed hop held, and tells who waited.
    pub(super) fn hop_failed(
        &mut self,
        at: PageRef,
        fault: &TransferFault,
        now: u64,
        outbox: &mut Outbox,
    ) {
        if self.read_again(at, fault, outbox) {
            return;
        }
        let file_backed = self.table.backing(at.backing).file_backed();
        let motion = self.table.page(at).motion;
        let hop = match motion {
            Motion::Still | Motion::NeedRam { .. } => unreachable!("nothing was in flight"),
            Motion::Reading { target, ram } => {
                self.reads -= 1;
                self.ram.put(ram.0);
                self.cancel_fill(at, target);
                if file_backed {
                    &mut self.counters.file_to_ram
                } else {
                    &mut self.counters.spill_to_ram
                }
            }
            Motion::Up { target } => {
                self.cancel_fill(at, target);
                &mut self.counters.ram_to_vram
            }
            Motion::Zero { target } => {
                self.cancel_fill(at, target);
                &mut self.counters.zeroed
            }
            Motion::Down { ram } => {
                self.downs -= 1;
                self.ram.put(ram.0);
                self.table.update(at, |page| page.motion = Motion::Still);
                &mut self.counters.vram_to_ram
            }
            Motion::Out { slot } => {
                self.outs -= 1;
                // The page stays in RAM. Other slots come first, after a rest.
                self.slots.put_last(slot.0);
                self.spill_rests_until = now.saturating_add(SPILL_REST_US);
                self.table.update(at, |page| page.motion = Motion::Still);
                &mut self.counters.ram_to_spill
            }
        };
        hop.errors += 1;
        if let TransferFault::Store(store::StoreFault::Checksum { .. }) = fault {
            self.counters.checksum_errors += 1;
        }
        if let TransferFault::Device(_) = fault {
            self.device_lost = true;
        }
        let page = self.table.page(at);
        if page.vram.is_none() && !matches!(motion, Motion::Out { .. }) {
            self.table.update(at, |page| page.prefetched = false);
            self.fail_waiters(at, fault, outbox);
        }
        if let Motion::Out { .. } | Motion::Down { .. } = motion {
            self.fail_flushes(at, fault, outbox);
        }
        if self.device_lost {
            self.fail_all(fault, outbox);
        }
    }

    /// A read that failed may do better the next time: a bus error, a reset of the disk. A file that changed won't.
    fn read_again(&mut self, at: PageRef, fault: &TransferFault, outbox: &mut Outbox) -> bool {
        let Motion::Reading { ram, .. } = self.table.page(at).motion else { return false };
        let may_pass = matches!(
            fault,
            TransferFault::Store(store::StoreFault::Io { .. } | store::StoreFault::Checksum { .. })
        );
        let failures = self.table.update(at, |page| {
            page.read_failures = page.read_failures.saturating_add(1);
            page.read_failures
        });
        let again = may_pass && failures <= READ_RETRIES;
        if again {
            self.counters.read_retries += 1;
            let hop = self.read_hop(at, ram);
            self.start(at, hop, outbox);
        } else {
            self.table.update(at, |page| page.read_failures = 0);
        }
        again
    }

    /// A page in line to be filled gives its VRAM frame back.
    pub(super) fn cancel_fill(&mut self, at: PageRef, target: VramFrame) {
        let by_prefetch = self.table.update(at, |page| {
            page.motion = Motion::Still;
            std::mem::take(&mut page.filled_by_prefetch)
        });
        self.prefetches_moving -= u32::from(by_prefetch);
        self.vram.put(self.table.backing(at.backing).domain, target);
    }

    /// The device is lost: nobody who waits will be served.
    fn fail_all(&mut self, fault: &TransferFault, outbox: &mut Outbox) {
        while let Some((id, pending)) = self.flushes.first_key_value() {
            let at = pending.spans[0].pages().next().expect("spans aren't empty");
            let refused = super::refusal::fault(at.index, fault);
            let id = *id;
            self.end_flush(id, Reply::Refused(Box::new(refused)), outbox);
        }
        while let Some((id, pending)) = self.pending.first_key_value() {
            let (id, page) = (*id, pending.spans[0].first);
            self.refuse_pending(id, super::refusal::fault(page, fault), outbox);
        }
    }
}
