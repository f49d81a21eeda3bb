//! Which units a directory holds, and how many pages they are.

use super::Slot;

/// The weights of the units held.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// By slot; 0 for those that aren't held.
    weights: Vec<u32>,
    used: u64,
    capacity: u64,
}

impl Held {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, ..Self::default() }
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(crate) fn set_capacity(&mut self, capacity: u64) {
        self.capacity = capacity;
    }

    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Whether more is held than fits.
    pub(crate) fn is_over(&self) -> bool {
        self.used > self.capacity
    }

    /// Whether so many pages more would be too many.
    pub(crate) fn is_over_with(&self, weight: u32) -> bool {
        self.used.saturating_add(u64::from(weight)) > self.capacity
    }

    /// Whether a unit of so many pages can be held at all.
    pub(crate) fn can_hold(&self, weight: u32) -> bool {
        u64::from(weight) <= self.capacity
    }

    pub(crate) fn contains(&self, slot: Slot) -> bool {
        self.weight(slot) != 0
    }

    /// Its pages, 0 if it isn't held.
    pub(crate) fn weight(&self, slot: Slot) -> u32 {
        self.weights.get(slot as usize).copied().unwrap_or(0)
    }

    /// Holds a unit, or changes the weight of one that is held.
    pub(crate) fn set(&mut self, slot: Slot, weight: u32) {
        if self.weights.len() <= slot as usize {
            self.weights.resize(slot as usize + 1, 0);
        }
        let old = std::mem::replace(&mut self.weights[slot as usize], weight);
        self.used = self.used - u64::from(old) + u64::from(weight);
    }

    /// Lets a unit go. Its pages, 0 if it wasn't held.
    pub(crate) fn remove(&mut self, slot: Slot) -> u32 {
        let weight = self.weight(slot);
        if weight != 0 {
            self.set(slot, 0);
        }
        weight
    }
}
