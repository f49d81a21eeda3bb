//! Room: frames for pages that come, made from those of pages that go.
//!
//! A VRAM frame is free, or its page is dropped, or copied down to RAM first. A RAM frame is free, or its copy is
//! dropped, or written to the spill first. The last RAM frames are for pages on their way down.

use lapis_proto::message::Advice;

use super::Engine;
use super::event::{Hop, Outbox};
use super::ids::{PageRef, RamFrame, SessionId, SpillSlot, VramFrame};
use super::limits::PREFETCH_EXPIRES_AFTER_TIERS;
use super::page::Motion;
use super::policy::order::{Candidate, Order};
use super::policy::plan::NO_PLAN;
use super::quota::Instance;
use super::tally::Eviction;

/// What came of asking for a VRAM frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// Here it is, and whether only the page's own domain has used it.
    Got(VramFrame, bool),
    /// None now; room is being made.
    TierFull,
    /// Not for this page, whose owner has used up a quota; others may get one.
    QuotaFull,
}

/// Which pages may go for one that comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MayGo {
    /// All: somebody waits for it.
    Any,
    /// It is fetched ahead and may do no harm: only pages that are not used within so many nanoseconds.
    UnusedFor(u64),
}

/// What a RAM frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RamUse {
    /// A page on its way from VRAM: may take the last ones.
    Leaving,
    /// A page being read, or copied out for a smaller tier: no reason to use the last ones.
    Reading,
    /// A page on its way to the spill for a flush: not the place of another one that waits for that.
    Flushing,
}

/// Whose pages are no victims for a page.
#[derive(Debug, Default)]
pub(super) struct Spared {
    /// They hold no more than is reserved for them.
    guarded: Vec<Instance>,
    /// They keep frames: theirs would not come back.
    overdue: Vec<SessionId>,
}

impl Spared {
    fn is_nobody(&self) -> bool {
        self.guarded.is_empty() && self.overdue.is_empty()
    }
}

impl Engine {
    /// A VRAM frame for this page, and whether only its own domain has used it: a free one, or one whose page can be
    /// dropped; else starts to make room.
    pub(super) fn vram_frame(
        &mut self,
        at: PageRef,
        may_go: MayGo,
        waiting: u32,
        now: u64,
        outbox: &mut Outbox,
    ) -> Frame {
        let domain = self.table.backing(at.backing).domain;
        if may_go != MayGo::Any && !self.prefetch_has_room() {
            return Frame::TierFull;
        }
        while let Some(full) = self.vram_used_up(at) {
            let victim = if may_go == MayGo::Any { self.victim_of(full) } else { None };
            let evicted =
                victim.is_some_and(|victim| self.evict(victim, Eviction::Quota, now, outbox));
            if !evicted {
                return Frame::QuotaFull;
            }
        }
        let overdue = self.overdue_beside(domain);
        loop {
            if let Some((frame, own)) = self.vram.take(domain) {
                return Frame::Got(frame, own);
            }
            let leaving = if self.limits.unified { self.outs } else { self.downs };
            let coming = leaving + self.revocations_awaited();
            if coming >= waiting.min(self.limits.depth) {
                return Frame::TierFull;
            }
            if self.revoke_foreign(domain, &overdue, now, outbox) {
                continue;
            }
            // Anew for each victim: its owner may hold no more than its reserve now.
            let guarded = self.guarded_from(at);
            let mut spared = Spared { guarded, overdue: overdue.clone() };
            let mut victim = self.vram_victim(may_go, &spared);
            if victim.is_none() && may_go == MayGo::Any && self.is_overpromised() {
                spared.guarded.clear();
                victim = self.vram_victim(may_go, &spared);
            }
            let Some(victim) = victim else { return Frame::TierFull };
            let before = (self.downs, self.outs, self.ram.free());
            let why = match may_go {
                MayGo::Any => Eviction::Demand,
                MayGo::UnusedFor(_) => Eviction::Prefetch,
            };
            let freed = self.evict(victim, why, now, outbox);
            if !freed && before == (self.downs, self.outs, self.ram.free()) {
                return Frame::TierFull;
            }
        }
    }

    /// Drops a page from VRAM, or starts to copy it down, or on a unified device out; of a chain, the last one. Answers
    /// whether its frame is free now.
    pub(super) fn evict(
        &mut self,
        victim: PageRef,
        why: Eviction,
        now: u64,
        outbox: &mut Outbox,
    ) -> bool {
        let page = self.table.page(victim);
        let chained = page.advice == Advice::Chain && page.plan == NO_PLAN;
        let victim = if chained { self.table.leaf_of(victim) } else { victim };
        let file_backed = self.table.backing(victim.backing).file_backed();
        if self.table.page(victim).vram_droppable(file_backed) {
            self.drop_from_vram(victim);
            self.tally.evicted(why);
            return true;
        }
        if self.limits.unified {
            // It is dropped, and counted, once it is written.
            self.start_out(victim, now, outbox);
            return false;
        }
        if self.downs < self.limits.depth
            && let Some(ram) = self.ram_frame(RamUse::Leaving, now, outbox)
        {
            self.start_down(victim, ram, outbox);
            self.tally.evicted(why);
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

    /// A page that is prefetched now is used behind all that were prefetched before it.
    pub(super) fn behind_all_prefetched(&self) -> MayGo {
        let ahead = self.table.protected.len() as u64 + u64::from(self.prefetches_moving);
        MayGo::UnusedFor(self.moment().unplanned_ns(ahead))
    }

    pub(super) fn vram_victim(&mut self, may_go: MayGo, spared: &Spared) -> Option<PageRef> {
        let clock = self.clock;
        let expires = u64::from(self.limits.vram_frames) * PREFETCH_EXPIRES_AFTER_TIERS;
        while let Some((at_clock, at)) = self.table.protected.first() {
            if clock.saturating_sub(at_clock) <= expires {
                break;
            }
            self.counters.prefetch_wasted += 1;
            self.table.update(at, |page| page.prefetched = false);
        }
        let moment = self.moment();
        let best = |order: &Order| {
            if spared.is_nobody() {
                return order.farthest(&moment);
            }
            order.farthest_where(&moment, |at| !self.is_spared(at, spared))
        };
        let evictable = self.dearer_spared(best(&self.table.evictable), best(&self.table.cheap));
        match may_go {
            MayGo::Any => evictable
                .map(|found| found.at)
                // The one prefetched last will be needed last.
                .or_else(|| {
                    let (_, last) = self.table.protected.last()?;
                    if !self.is_spared(last, spared) {
                        return Some(last);
                    }
                    let may = |at| !self.is_spared(at, spared);
                    self.table.protected.farthest_where(clock, may).map(|(_, at)| at)
                })
                .or_else(|| best(&self.table.kept).map(|found| found.at)),
            MayGo::UnusedFor(ns) => {
                evictable.filter(|found| found.eta_ns > ns).map(|found| found.at)
            }
        }
    }

    /// Of two that might go, the one whose coming back costs less for the time until then.
    fn dearer_spared(
        &self,
        dear: Option<Candidate>,
        cheap: Option<Candidate>,
    ) -> Option<Candidate> {
        let (Some(from_below), Some(from_ram)) = (dear, cheap) else { return dear.or(cheap) };
        let up = u128::from(self.up_link.page_ns().max(1));
        let read = u128::from(self.read_link.page_ns()).max(up);
        let keeps = u128::from(from_ram.eta_ns) * read >= u128::from(from_below.eta_ns) * up;
        if keeps { cheap } else { dear }
    }

    fn is_spared(&self, at: PageRef, spared: &Spared) -> bool {
        self.is_guarded(at, &spared.guarded) || self.is_kept_by(at, &spared.overdue)
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

    /// A RAM frame: a free one, or one whose copy can be dropped; else starts writes to the spill. The last frames
    /// are for pages that leave VRAM.
    pub(super) fn ram_frame(
        &mut self,
        use_: RamUse,
        now: u64,
        outbox: &mut Outbox,
    ) -> Option<RamFrame> {
        let reserve = match use_ {
            RamUse::Leaving => 0,
            RamUse::Reading | RamUse::Flushing => self.limits.ram_reserve(),
        };
        if self.ram.free() > reserve {
            return self.ram.take().map(RamFrame);
        }
        let moment = &self.moment();
        let (duplicate, clean) = (&self.table.ram_duplicate, &self.table.ram_clean);
        let victim = if use_ == RamUse::Flushing {
            let may = |at| !self.table.page(at).flushing;
            duplicate.farthest_where(moment, may).or_else(|| clean.farthest_where(moment, may))
        } else {
            // VRAM will let go what is used last: of that, the copy here is kept longest.
            duplicate.nearest(moment).or_else(|| clean.farthest(moment))
        };
        if let Some(found) = victim {
            return Some(self.drop_from_ram(found.at));
        }
        self.write_out(now, outbox);
        if self.outs > 0 || use_ == RamUse::Flushing {
            return None;
        }
        // RAM is full of pages that wait for VRAM, which may be full of pages that wait for RAM: one of them is read
        // again rather than all of them wait for one another.
        let found = self.table.ram_wanted.farthest(&self.moment())?;
        Some(self.drop_from_ram(found.at))
    }

    fn drop_from_ram(&mut self, at: PageRef) -> RamFrame {
        let frame = self.table.update(at, |page| page.ram.take());
        self.counters.dropped_ram += 1;
        frame.expect("victims are in RAM")
    }

    /// Starts writes of RAM's sole copies to the spill, so that their frames can be dropped.
    fn write_out(&mut self, now: u64, outbox: &mut Outbox) {
        if self.spill_rests_until > now {
            return;
        }
        while self.outs < self.limits.depth {
            let Some(at) = self.spill_victim() else { return };
            let Some(slot) = self.slots.take().map(SpillSlot) else { return };
            self.begin_out(at, slot, outbox);
        }
    }

    /// The sole copy to write out next. One that is wanted in VRAM only if nothing else can make room.
    fn spill_victim(&self) -> Option<PageRef> {
        let last_resort = self.outs == 0 && self.table.ram_wanted.is_empty();
        let moment = self.moment();
        let sole = self.table.ram_sole.farthest(&moment);
        let wanted = || self.table.ram_wanted_sole.farthest(&moment);
        sole.or_else(|| last_resort.then(wanted).flatten()).map(|found| found.at)
    }

    pub(super) fn begin_out(&mut self, at: PageRef, slot: SpillSlot, outbox: &mut Outbox) {
        self.outs += 1;
        let unified = self.limits.unified;
        let source = self.table.update(at, |page| {
            page.motion = Motion::Out { slot };
            let unified = page.vram.filter(|_| unified).map(|frame| RamFrame(frame.0));
            page.ram.or(unified).expect("what goes out is in RAM")
        });
        self.start(at, Hop::WriteSpill { source, slot }, outbox);
    }
}
