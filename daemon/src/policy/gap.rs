//! Lets go what is worth least: by the learned plan where that is certified, by the index elsewhere.
//!
//! The worth of a unit changes as time passes, so there is no order to keep: victims are the worst of a random sample,
//! and of the worst of the samples before.

use super::held::Held;
use super::index::Index;
use super::learned::Learned;
use super::{Directory, Slot};

/// With so many units or fewer all of them are looked at.
const ALL_MAX: usize = 64;
/// Units drawn to be looked at for a victim.
const SAMPLE: usize = 8;
/// The worst of them that are looked at again for the next one.
const KEPT: usize = 12;
/// The units used last, which are looked at too: in a cycle they are the ones that come last.
const RECENT: usize = 6;

/// A directory that keeps what is worth most.
#[derive(Debug)]
pub struct Gap {
    held: Held,
    /// All that is held, in no order, to draw from.
    slots: Vec<Slot>,
    /// By slot: where it is among them.
    places: Vec<u32>,
    learned: Learned,
    /// Whether the learned plan counts.
    planned: bool,
    index: Index,
    /// The worst of the last sample.
    worst: Vec<Slot>,
    /// The last units used, in turn.
    recent: [Slot; RECENT],
    next_recent: usize,
    /// By worth.
    sample: Vec<(f32, Slot)>,
    random: u64,
}

impl Gap {
    /// An empty one of so many pages.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self { planned: true, ..Self::index_only(capacity) }
    }

    /// An empty one of so many pages, without a learned plan.
    #[must_use]
    pub fn index_only(capacity: u64) -> Self {
        Self {
            held: Held::new(capacity),
            slots: Vec::new(),
            places: Vec::new(),
            learned: Learned::new(),
            planned: false,
            index: Index::new(u32::try_from(capacity).unwrap_or(u32::MAX)),
            worst: Vec::with_capacity(KEPT),
            recent: [0; RECENT],
            next_recent: 0,
            sample: Vec::with_capacity(ALL_MAX),
            random: 0x2545_f491_4f6c_dd1d,
        }
    }

    /// The learned plan.
    #[must_use]
    pub fn learned(&self) -> &Learned {
        &self.learned
    }

    /// What a unit is worth to keep: one over the accesses until it is used, as far as known.
    fn worth(&self, certified: bool, slot: Slot) -> f32 {
        let due = if certified { self.learned.due(slot) } else { None };
        match due {
            Some(due) => 1.0 / due as f32,
            None => self.index.worth(slot),
        }
    }

    fn add(&mut self, slot: Slot, weight: u32) {
        if !self.held.contains(slot) {
            if self.places.len() <= slot as usize {
                self.places.resize(slot as usize + 1, 0);
            }
            self.places[slot as usize] = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
            self.slots.push(slot);
        }
        self.held.set(slot, weight);
    }

    fn remove(&mut self, slot: Slot) {
        if self.held.remove(slot) == 0 {
            return;
        }
        let place = self.places[slot as usize];
        self.slots.swap_remove(place as usize);
        if let Some(moved) = self.slots.get(place as usize) {
            self.places[*moved as usize] = place;
        }
    }

    fn shrink(&mut self, spared: Option<Slot>, out: &mut Vec<Slot>) {
        if self.held.is_over() {
            self.index.set_capacity(u32::try_from(self.slots.len()).unwrap_or(u32::MAX));
        }
        while self.held.is_over() {
            let Some(victim) = self.victim(spared) else { break };
            self.remove(victim);
            out.push(victim);
        }
    }

    /// The worst of those looked at.
    fn victim(&mut self, spared: Option<Slot>) -> Option<Slot> {
        let certified = self.planned && self.learned.certified();
        let mut sample = std::mem::take(&mut self.sample);
        sample.clear();
        let mut random = self.random;
        let mut look = |slot: Slot| {
            if spared != Some(slot) {
                sample.push((self.worth(certified, slot), slot));
            }
        };
        if self.slots.len() <= ALL_MAX {
            self.slots.iter().copied().for_each(&mut look);
        } else {
            let held = |slot: &Slot| self.held.contains(*slot);
            self.worst.iter().chain(&self.recent).copied().filter(held).for_each(&mut look);
            for _ in 0..SAMPLE {
                random = next_random(random);
                let drawn = usize::try_from(random >> 16).unwrap_or(0) % self.slots.len();
                look(self.slots[drawn]);
            }
        }
        self.random = random;
        let by_worth = |a: &(f32, Slot), b: &(f32, Slot)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if sample.len() > KEPT + 1 {
            sample.select_nth_unstable_by(KEPT, by_worth);
            sample.truncate(KEPT + 1);
        }
        sample.sort_unstable_by(by_worth);
        sample.dedup_by_key(|looked| looked.1);
        self.worst.clear();
        self.worst.extend(sample.iter().skip(1).map(|looked| looked.1));
        let victim = sample.first().map(|looked| looked.1);
        self.sample = sample;
        victim
    }
}

/// The number after one, for numbers other than 0 (xorshift).
fn next_random(mut number: u64) -> u64 {
    number ^= number << 13;
    number ^= number >> 7;
    number ^= number << 17;
    number
}

impl Directory for Gap {
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool {
        let weight = weight.max(1);
        let hit = self.held.contains(slot);
        if self.planned {
            self.learned.observe(slot);
        }
        self.index.observe(slot);
        self.recent[self.next_recent] = slot;
        self.next_recent = (self.next_recent + 1) % RECENT;
        if !self.held.can_hold(weight) {
            self.remove(slot);
            out.push(slot);
            return hit;
        }
        self.add(slot, weight);
        self.shrink(Some(slot), out);
        hit
    }

    fn contains(&self, slot: Slot) -> bool {
        self.held.contains(slot)
    }

    fn forget(&mut self, slot: Slot) {
        self.learned.forget(slot);
        self.index.forget(slot);
        self.remove(slot);
    }

    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>) {
        self.held.set_capacity(capacity);
        self.shrink(None, out);
    }

    fn used(&self) -> u64 {
        self.held.used()
    }
}
