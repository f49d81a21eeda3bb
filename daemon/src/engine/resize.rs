//! Tiers that shrink and grow while the daemon runs, up to the size it was started with.
//!
//! VRAM shrinks frame by frame: a page in the way is dropped or copied down, clients give the frame back, and its memory
//! is released. RAM frames and spill slots are set aside: their memory is pinned for I/O, their disk space reserved, for
//! as long as the daemon runs.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::code::Code;
use lapis_proto::message::{Refused, SetTier, Tier};

use super::Engine;
use super::event::{Command, Hop, Outbox, Reply, TransferFault};
use super::frames::FreeSlots;
use super::ids::{RequestId, SessionId, VramFrame};
use super::limits::{Limits, RESTORES_MAX};
use super::maps::PendingId;
use super::refusal;
use super::room::{MayGo, RamUse, Spared};
use super::tally::Eviction;
use crate::device::DeviceFault;

/// A tier change that waits for its size.
#[derive(Debug)]
pub(super) struct PendingResize {
    pub(super) session: SessionId,
    request: RequestId,
    tier: Tier,
    deadline_us: u64,
}

/// How much of each tier is used.
#[derive(Debug)]
pub(super) struct Sizes {
    pub(super) vram_target: u32,
    /// VRAM frames whose memory is being released, ...
    pub(super) releasing: BTreeSet<VramFrame>,
    /// ... that have none, ...
    pub(super) parked: BTreeSet<VramFrame>,
    /// ... and whose memory is being made.
    pub(super) restoring: BTreeSet<VramFrame>,
    pub(super) ram_target: u32,
    pub(super) ram_aside: Vec<u32>,
    pub(super) slots_target: u32,
    pub(super) slots_aside: Vec<u32>,
    pub(super) pending: BTreeMap<PendingId, PendingResize>,
}

impl Sizes {
    pub(super) fn new(vram: u32, ram: u32, slots: u32) -> Self {
        Self {
            vram_target: vram,
            releasing: BTreeSet::new(),
            parked: BTreeSet::new(),
            restoring: BTreeSet::new(),
            ram_target: ram,
            ram_aside: Vec::new(),
            slots_target: slots,
            slots_aside: Vec::new(),
            pending: BTreeMap::new(),
        }
    }

    /// VRAM frames out of use.
    pub(super) fn frames_out(&self) -> usize {
        self.releasing.len() + self.parked.len() + self.restoring.len()
    }
}

/// Takes free slots out of use, or puts them back, until `capacity - target` are aside.
/// The last `keep` free ones stay where they are.
fn set_aside(free: &mut FreeSlots, aside: &mut Vec<u32>, target: u32, keep: u32) {
    let wanted = free.capacity().saturating_sub(target) as usize;
    while aside.len() > wanted {
        let slot = aside.pop().expect("not empty");
        free.put(slot);
    }
    while aside.len() < wanted && free.free() > keep {
        aside.extend(free.take());
    }
}

impl Engine {
    /// Only the first `ready` VRAM frames have their memory; the others get it from the first event on. Before any.
    pub fn begin_with(&mut self, ready: u32) {
        let mut frames: Vec<_> = std::iter::from_fn(|| self.vram.take_unseen()).collect();
        // The lowest goes back last, so that it is taken first again.
        while let Some(frame) = frames.pop() {
            if frame.0 < ready {
                self.vram.unseen_again(frame);
            } else {
                self.sizes.parked.insert(frame);
            }
        }
    }

    /// The daemon ends: no more frames are made.
    pub fn stop_growing(&mut self) {
        self.sizes.vram_target = self.sizes.vram_target.min(self.frames_made());
    }

    /// Pages that mappings of all sessions may hold at once, with the VRAM that is in use now.
    #[must_use]
    pub fn mapped_pages_max(&self) -> u32 {
        Limits::mapped_pages_of(self.sizes.vram_target)
    }

    /// Pages that anonymous allocations may have, with the RAM and spill that are in use now.
    pub(super) fn anonymous_pages_max(&self) -> u64 {
        self.limits.anonymous_pages_of(self.sizes.ram_target, self.sizes.slots_target)
    }

    pub(super) fn set_tier(
        &mut self,
        session: SessionId,
        request: RequestId,
        set: &SetTier,
        now: u64,
    ) -> Result<(), Refused> {
        self.require_admin(session)?;
        self.check_waiting(session)?;
        self.aim_tier(set.tier, set.size / self.limits.page_size)?;
        self.last_id += 1;
        let id = PendingId(self.last_id);
        // At least an instant: what needs no waiting is done even so.
        let wait = set.wait_us.clamp(1, self.limits.map_wait_us_max);
        let deadline_us = now.saturating_add(wait);
        self.deadlines.insert((deadline_us, id));
        self.session_mut(session).flushing += 1;
        let pending = PendingResize { session, request, tier: set.tier, deadline_us };
        self.sizes.pending.insert(id, pending);
        Ok(())
    }

    /// A tier is to have so many pages; it moves there with the next events.
    ///
    /// # Errors
    /// `BadRequest`: not so many; `OutOfMemory`: what is allocated would not fit; `OverCapacity`: more is reserved.
    pub fn aim_tier(&mut self, tier: Tier, pages: u64) -> Result<(), Refused> {
        let (least, most) = match tier {
            Tier::Vram => (2, self.limits.vram_frames),
            Tier::Ram => (2 * self.limits.ram_reserve() + 2, self.limits.ram_frames),
            Tier::Nvme => (0, self.limits.spill_slots),
        };
        if tier == Tier::Ram && most == 0 {
            let message = "the device shares the host's memory: there is no RAM tier; set vram";
            return Err(refusal::plain(Code::BadRequest, message));
        }
        let target = match u32::try_from(pages) {
            Ok(pages) if (least..=most).contains(&pages) => pages,
            _ => return Err(self.bad_size(pages, least, most)),
        };
        let old = (self.sizes.ram_target, self.sizes.slots_target);
        match tier {
            Tier::Vram => {
                let (reserved, mappable) = (self.reserved_pages(), Limits::mapped_pages_of(target));
                if reserved > u64::from(mappable) {
                    return Err(refusal::over_reserved(reserved, mappable));
                }
                self.sizes.vram_target = target;
            }
            Tier::Ram => self.sizes.ram_target = target,
            Tier::Nvme => self.sizes.slots_target = target,
        }
        let (limit, in_use) = (self.anonymous_pages_max(), self.anonymous_pages);
        if in_use > limit {
            (self.sizes.ram_target, self.sizes.slots_target) = old;
            let message = format!(
                "anonymous allocations hold {in_use} pages, RAM and spill would hold {limit}: free some first"
            );
            return Err(Refused {
                asked: in_use,
                limit,
                ..refusal::plain(Code::OutOfMemory, &message)
            });
        }
        self.bounds_changed = true;
        Ok(())
    }

    fn bad_size(&self, pages: u64, least: u32, most: u32) -> Refused {
        let page = self.limits.page_size;
        let message = format!(
            "the tier can have {least} to {most} pages of {page} bytes while the daemon runs, not {pages}; \
             for more, change the configuration and restart"
        );
        let (asked, limit) = (pages.saturating_mul(page), u64::from(most) * page);
        Refused { asked, limit, ..refusal::plain(Code::BadRequest, &message) }
    }

    /// Moves each tier towards its size, and answers who waited for that.
    pub(super) fn resize(&mut self, now: u64, outbox: &mut Outbox) {
        let keep = self.limits.ram_reserve();
        let sizes = &mut self.sizes;
        set_aside(&mut self.ram, &mut sizes.ram_aside, sizes.ram_target, keep);
        set_aside(&mut self.slots, &mut sizes.slots_aside, sizes.slots_target, 0);
        self.make_ram_room(now, outbox);
        self.restore_frames(outbox);
        self.park_frames(now, outbox);
        let done: Vec<_> = self
            .sizes
            .pending
            .iter()
            .filter(|(_, p)| self.has_size(p.tier))
            .map(|(id, _)| *id)
            .collect();
        for id in done {
            self.end_resize(id, Reply::Done, outbox);
        }
    }

    /// VRAM frames that have their memory.
    pub(super) fn vram_in_use(&self) -> u64 {
        u64::from(self.vram.capacity()) - self.sizes.frames_out() as u64
    }

    /// VRAM frames that have their memory or are about to.
    fn frames_made(&self) -> u32 {
        let out = self.sizes.parked.len() + self.sizes.releasing.len();
        self.vram.capacity() - u32::try_from(out).expect("bounded by the frames")
    }

    /// VRAM frames that are to have their memory and don't yet.
    #[must_use]
    pub fn frames_growing(&self) -> u64 {
        let restoring = self.sizes.restoring.len() as u64;
        u64::from(self.sizes.vram_target.saturating_sub(self.frames_made())) + restoring
    }

    fn has_size(&self, tier: Tier) -> bool {
        let sizes = &self.sizes;
        let out = |capacity: u32, target: u32| capacity.saturating_sub(target) as usize;
        match tier {
            Tier::Vram => {
                let settled = sizes.releasing.is_empty() && sizes.restoring.is_empty();
                settled && sizes.parked.len() == out(self.vram.capacity(), sizes.vram_target)
            }
            Tier::Ram => sizes.ram_aside.len() == out(self.ram.capacity(), sizes.ram_target),
            Tier::Nvme => sizes.slots_aside.len() == out(self.slots.capacity(), sizes.slots_target),
        }
    }

    /// RAM copies that can go make room for a smaller tier; sole ones are written out first.
    fn make_ram_room(&mut self, now: u64, outbox: &mut Outbox) {
        while !self.has_size(Tier::Ram) {
            let Some(frame) = self.ram_frame(RamUse::Reading, now, outbox) else { return };
            self.sizes.ram_aside.push(frame.0);
        }
    }

    fn restore_frames(&mut self, outbox: &mut Outbox) {
        while self.frames_made() < self.sizes.vram_target
            && self.sizes.restoring.len() < RESTORES_MAX
        {
            let Some(frame) = self.sizes.parked.pop_first() else { return };
            self.sizes.restoring.insert(frame);
            self.start_frame(frame, Hop::Restore { target: frame }, outbox);
        }
    }

    fn park_frames(&mut self, now: u64, outbox: &mut Outbox) {
        // Maps that were admitted before get the frames they were admitted for.
        let target = u64::from(self.sizes.vram_target).max(self.promised_pages());
        let wanted = u64::from(self.vram.capacity()).saturating_sub(target);
        let wanted = usize::try_from(wanted).expect("at most the capacity");
        // Frames that clients have been asked for come back through here.
        let coming = |engine: &Self| engine.vram.revoking_count() as usize + engine.downs as usize;
        while self.sizes.frames_out() + coming(self) < wanted
            || (self.sizes.frames_out() < wanted && self.vram.has_unseen())
        {
            if let Some(frame) = self.vram.take_unseen() {
                self.sizes.releasing.insert(frame);
                self.start_frame(frame, Hop::Release { target: frame }, outbox);
            } else if !self.revoke_any(now, outbox) {
                let Some(victim) = self.vram_victim(MayGo::Any, &Spared::default()) else {
                    return;
                };
                if !self.evict(victim, Eviction::Resize, now, outbox) {
                    return;
                }
            }
        }
    }

    fn start_frame(&mut self, frame: VramFrame, hop: Hop, outbox: &mut Outbox) {
        let tag = self.next_tag();
        self.frame_transfers.insert(tag, frame);
        outbox.push(Command::Transfer { tag, hop });
    }

    /// A frame's memory was released or made anew, or could not be.
    pub(super) fn frame_done(
        &mut self,
        frame: VramFrame,
        result: &Result<u64, TransferFault>,
        outbox: &mut Outbox,
    ) {
        if let Err(fault @ TransferFault::Device(DeviceFault::Lost { .. })) = result {
            self.device_lost = true;
            self.fail_all(fault, outbox);
        }
        if self.sizes.releasing.remove(&frame) {
            // Out of use either way, even if the device did not take its memory.
            self.sizes.parked.insert(frame);
            return;
        }
        assert!(self.sizes.restoring.remove(&frame), "{frame:?} has no hop of its own");
        if result.is_ok() {
            return self.vram.unseen_again(frame);
        }
        self.sizes.parked.insert(frame);
        // No memory for it: the tier stays smaller, unless it is to be that small by now.
        self.sizes.vram_target = self.sizes.vram_target.min(self.frames_made());
        self.bounds_changed = true;
    }

    pub(super) fn end_resize(&mut self, id: PendingId, reply: Reply, outbox: &mut Outbox) {
        let (session, request) = self.abandon_resize(id);
        outbox.push(Command::Reply { session, request, reply });
    }

    /// Ends a wait for a size without a reply; the tier goes on towards it.
    pub(super) fn abandon_resize(&mut self, id: PendingId) -> (SessionId, RequestId) {
        let pending = self.sizes.pending.remove(&id).expect("the caller looked it up");
        self.deadlines.remove(&(pending.deadline_us, id));
        if let Some(session) = self.sessions.get_mut(&pending.session) {
            session.flushing -= 1;
        }
        (pending.session, pending.request)
    }

    /// The device is lost: no tier will get its size.
    pub(super) fn fail_resizes(&mut self, outbox: &mut Outbox) {
        while let Some(id) = self.sizes.pending.keys().next().copied() {
            self.end_resize(id, Reply::Refused(Box::new(refusal::device_lost())), outbox);
        }
    }

    pub(super) fn expire_resize(&mut self, id: PendingId, outbox: &mut Outbox) {
        let message = "the tier has not its size yet: mappings hold it, or clients that do not give frames back; it goes on by \
             itself as they do";
        let refused = refusal::plain(Code::TimedOut, message);
        self.end_resize(id, Reply::Refused(Box::new(refused)), outbox);
    }
}
