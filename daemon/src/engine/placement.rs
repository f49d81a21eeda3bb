//! Placement: turns "this page is wanted in VRAM" into hops, and makes room.
//!
//! A page takes its resources in one order: VRAM frame, then RAM frame, then I/O. Getting a RAM frame never depends on
//! VRAM (its pages are dropped, or written to the spill, for which admission holds a slot ready), and the last few RAM
//! frames are kept for pages on their way down. So room can always be made and no cycle of waits can close.

use super::Engine;
use super::event::{Command, Hop, Outbox};
use super::ids::{PageRef, RamFrame, VramFrame};
use super::page::Motion;
use super::page_table::Source;
use super::room::{Frame, MayGo, RamUse};
use crate::store;

/// Why a page is wanted in VRAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// A map waits for it.
    Demand,
    /// A prefetch: may not do harm.
    Prefetch,
}

impl Engine {
    /// Restores what must always hold: whatever can be granted is granted, whatever can move moves.
    pub(super) fn advance(&mut self, now: u64, outbox: &mut Outbox) {
        if std::mem::take(&mut self.bounds_changed) {
            self.refuse_impossible(outbox);
        }
        loop {
            self.admit_queued();
            self.grant_complete(now, outbox);
            if self.device_lost {
                return;
            }
            self.fill(Need::Demand, now, outbox);
            self.read(Need::Demand, now, outbox);
            self.fill(Need::Prefetch, now, outbox);
            self.fetch_planned(now, outbox);
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
            let may_go = match need {
                Need::Demand => MayGo::Any,
                Need::Prefetch => self.behind_all_prefetched(),
            };
            let (frame, own) = match self.vram_frame(at, may_go, waiting, now, outbox) {
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

    pub(super) fn start_fill(
        &mut self,
        at: PageRef,
        target: VramFrame,
        need: Need,
        outbox: &mut Outbox,
    ) {
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
            let ram = if self.limits.unified {
                RamFrame(target.0)
            } else {
                let Some(ram) = self.ram_frame(RamUse::Reading, now, outbox) else { return };
                ram
            };
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

    pub(super) fn read_hop(&self, at: PageRef, target: RamFrame) -> Hop {
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

    pub(super) fn shift_of(&self, at: PageRef) -> u32 {
        match self.table.backing(at.backing).source {
            Source::File { key, .. } => store::shift(key.offset),
            Source::Anonymous(_) => 0,
        }
    }

    pub(super) fn start(&mut self, at: PageRef, hop: Hop, outbox: &mut Outbox) {
        let tag = self.next_tag();
        self.hop_started(&hop);
        self.transfers.insert(tag, at);
        outbox.push(Command::Transfer { tag, hop });
    }

    /// Bytes of a page that are not padding.
    pub(super) fn useful_bytes(&self, at: PageRef) -> u64 {
        let page_size = self.limits.page_size;
        match self.table.backing(at.backing).source {
            Source::File { key, .. } => {
                (key.length - u64::from(at.index) * page_size).min(page_size)
            }
            Source::Anonymous(_) => page_size,
        }
    }
}
