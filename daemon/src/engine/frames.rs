//! Free frames of each tier.
//!
//! A VRAM frame that a client of one domain has imported may be reused inside that domain only, until that client gave
//! it back or died: there is no way to take a frame out of a process.

use std::collections::{BTreeMap, BTreeSet};

use super::ids::{Domain, VramFrame};

/// Free slots of the RAM tier or the spill. Those given back go first, then the lowest that was never used, so that a
/// small use touches little memory.
#[derive(Debug)]
pub struct FreeSlots {
    free: Vec<u32>,
    capacity: u32,
}

impl FreeSlots {
    /// All free.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self { free: (0..capacity).rev().collect(), capacity }
    }

    /// Takes one.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives one back.
    pub fn put(&mut self, slot: u32) {
        debug_assert!(slot < self.capacity, "slot {slot} of {}", self.capacity);
        self.free.push(slot);
    }

    /// Gives one back to be taken last.
    pub fn put_last(&mut self, slot: u32) {
        debug_assert!(slot < self.capacity, "slot {slot} of {}", self.capacity);
        self.free.insert(0, slot);
    }

    /// Free ones.
    #[must_use]
    pub fn free(&self) -> u32 {
        u32::try_from(self.free.len()).expect("bounded by the capacity")
    }

    /// All.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The free ones, for checks.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.free.iter().copied()
    }
}

/// Free VRAM frames, by who may still see them.
#[derive(Debug)]
pub struct VramFrames {
    capacity: u32,
    /// No process has them.
    unseen: Vec<VramFrame>,
    /// Clients of this domain may have them.
    seen: BTreeMap<Domain, Vec<VramFrame>>,
    /// Asked back from sessions that still have them.
    revoking: BTreeSet<VramFrame>,
    free: u32,
}

impl VramFrames {
    /// All free and unseen.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        Self {
            capacity,
            unseen: (0..capacity).rev().map(VramFrame).collect(),
            seen: BTreeMap::new(),
            revoking: BTreeSet::new(),
            free: capacity,
        }
    }

    /// Takes a frame that a client of `domain` may be shown: one its own domain used last if there is one, which the
    /// second value says.
    pub fn take(&mut self, domain: Domain) -> Option<(VramFrame, bool)> {
        let own = self.seen.get_mut(&domain).and_then(Vec::pop);
        let frame = own.or_else(|| self.unseen.pop())?;
        self.free -= 1;
        Some((frame, own.is_some()))
    }

    /// Gives back a frame that clients of `domain` may have seen.
    pub fn put(&mut self, domain: Domain, frame: VramFrame) {
        self.seen.entry(domain).or_default().push(frame);
        self.free += 1;
    }

    /// Takes a free frame of a domain other than this one that `may` come back, to have it asked back.
    pub fn take_foreign(
        &mut self,
        domain: Domain,
        may: impl Fn(VramFrame) -> bool,
    ) -> Option<(Domain, VramFrame)> {
        let mut others = self.seen.iter_mut().filter(|(owner, _)| **owner != domain);
        let (owner, frame) = others.find_map(|(owner, frames)| {
            let index = frames.iter().rposition(|frame| may(*frame))?;
            Some((*owner, frames.remove(index)))
        })?;
        self.free -= 1;
        Some((owner, frame))
    }

    /// Takes a free frame that clients of some domain have seen, to have it asked back.
    pub fn take_seen(&mut self) -> Option<(Domain, VramFrame)> {
        let (owner, frame) = self
            .seen
            .iter_mut()
            .find_map(|(owner, frames)| frames.pop().map(|frame| (*owner, frame)))?;
        self.free -= 1;
        Some((owner, frame))
    }

    /// Takes a free frame that no process has.
    pub fn take_unseen(&mut self) -> Option<VramFrame> {
        let frame = self.unseen.pop()?;
        self.free -= 1;
        Some(frame)
    }

    /// Whether there is a free frame that no process has.
    #[must_use]
    pub fn has_unseen(&self) -> bool {
        !self.unseen.is_empty()
    }

    /// A frame waits for its importers.
    pub fn revoke(&mut self, frame: VramFrame) {
        let new = self.revoking.insert(frame);
        debug_assert!(new, "{frame:?} is being revoked already");
    }

    /// Whether a frame waits for its importers.
    #[must_use]
    pub fn is_revoking(&self, frame: VramFrame) -> bool {
        self.revoking.contains(&frame)
    }

    /// Frames that wait for their importers.
    pub fn revoking(&self) -> impl Iterator<Item = VramFrame> {
        self.revoking.iter().copied()
    }

    /// How many wait for their importers.
    #[must_use]
    pub fn revoking_count(&self) -> u32 {
        u32::try_from(self.revoking.len()).expect("bounded by the capacity")
    }

    /// Nobody has it any more.
    pub fn revoked(&mut self, frame: VramFrame) {
        if self.revoking.remove(&frame) {
            self.unseen_again(frame);
        }
    }

    /// A frame that was taken, and that no process has.
    pub fn unseen_again(&mut self, frame: VramFrame) {
        self.unseen.push(frame);
        self.free += 1;
    }

    /// Free ones that hold no page, whoever may see them.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// All.
    #[must_use]
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The free ones, for checks.
    pub fn iter(&self) -> impl Iterator<Item = VramFrame> {
        self.unseen.iter().copied().chain(self.seen.values().flatten().copied())
    }
}

#[cfg(test)]
mod tests;
