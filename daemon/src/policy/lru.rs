//! Least recently used: what was used last is kept. It is the best one can do where what was used just now is used
//! again soon, and gets nothing from a cycle larger than the cache.

use super::held::Held;
use super::list::{Links, List};
use super::{Directory, Slot};

/// A directory that keeps what was used last.
#[derive(Debug)]
pub struct Lru {
    held: Held,
    /// Least recently used first.
    order: List,
    links: Links,
}

impl Lru {
    /// An empty one of so many pages.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self { held: Held::new(capacity), order: List::default(), links: Links::default() }
    }

    fn shrink(&mut self, out: &mut Vec<Slot>) {
        while self.held.is_over() {
            let Some(victim) = self.order.pop_front(&mut self.links) else { break };
            self.held.remove(victim);
            out.push(victim);
        }
    }
}

impl Directory for Lru {
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool {
        let weight = weight.max(1);
        let hit = self.held.contains(slot);
        if !self.held.can_hold(weight) {
            self.forget(slot);
            out.push(slot);
            return hit;
        }
        if hit {
            self.order.move_to_back(&mut self.links, slot);
        } else {
            self.order.push_back(&mut self.links, slot);
        }
        self.held.set(slot, weight);
        self.shrink(out);
        hit
    }

    fn contains(&self, slot: Slot) -> bool {
        self.held.contains(slot)
    }

    fn forget(&mut self, slot: Slot) {
        if self.held.remove(slot) != 0 {
            self.order.remove(&mut self.links, slot);
        }
    }

    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>) {
        self.held.set_capacity(capacity);
        self.shrink(out);
    }

    fn used(&self) -> u64 {
        self.held.used()
    }
}
