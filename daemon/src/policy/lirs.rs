//! LIRS (Jiang and Zhang, SIGMETRICS'02): keeps units whose last two uses were close together, however long ago the
//! last one was. It holds on to a part of a cycle larger than the cache, so nearly all hits that there can be are hits.
//!
//! Nearly all of the cache is for *hot* units, those with a short distance between their last two uses. The *stack*
//! has units by their last use, down to the hot unit that was used longest ago: a unit that is used while in the stack
//! was away for less long than that one and takes its place. The *queue* holds cold units, next victim first.

use super::held::Held;
use super::list::{Links, List};
use super::{Directory, Slot};

/// The cold units' share of the capacity is one in this many.
const COLD_ONE_IN: u64 = 100;
/// Units let go that are remembered, in capacities.
const GHOSTS: u64 = 2;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Kind {
    #[default]
    Out,
    /// In the stack.
    Hot,
    /// In the queue, and in the stack or not.
    Cold,
    /// Not held; in the stack and in the line of ghosts.
    Ghost,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    kind: Kind,
    in_stack: bool,
    weight: u32,
}

/// A directory that keeps what is used at short distances.
#[derive(Debug)]
pub struct Lirs {
    held: Held,
    hot_used: u64,
    ghosts_used: u64,
    entries: Vec<Entry>,
    stack_links: Links,
    /// Used longest ago first.
    stack: List,
    queue_links: Links,
    queue: List,
    /// Let go longest ago first.
    ghosts: List,
}

impl Lirs {
    /// An empty one of so many pages.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            held: Held::new(capacity),
            hot_used: 0,
            ghosts_used: 0,
            entries: Vec::new(),
            stack_links: Links::default(),
            stack: List::default(),
            queue_links: Links::default(),
            queue: List::default(),
            ghosts: List::default(),
        }
    }

    fn hot_capacity(&self) -> u64 {
        self.held.capacity() - (self.held.capacity() / COLD_ONE_IN).max(1).min(self.held.capacity())
    }

    fn entry(&self, slot: Slot) -> Entry {
        self.entries.get(slot as usize).copied().unwrap_or_default()
    }

    /// Takes a unit out of everything.
    fn take(&mut self, slot: Slot) {
        let Some(entry) = self.entries.get_mut(slot as usize) else { return };
        let Entry { kind, in_stack, weight } = std::mem::take(entry);
        if in_stack {
            self.stack.remove(&mut self.stack_links, slot);
        }
        match kind {
            Kind::Out => {}
            Kind::Hot => self.hot_used -= u64::from(weight),
            Kind::Cold => self.queue.remove(&mut self.queue_links, slot),
            Kind::Ghost => {
                self.ghosts.remove(&mut self.queue_links, slot);
                self.ghosts_used -= u64::from(weight);
            }
        }
        self.held.remove(slot);
    }

    /// Puts a unit that was just used on top of the stack, as a cold one at the end of the queue too.
    fn put(&mut self, slot: Slot, kind: Kind, weight: u32) {
        if self.entries.len() <= slot as usize {
            self.entries.resize(slot as usize + 1, Entry::default());
        }
        self.entries[slot as usize] = Entry { kind, in_stack: true, weight };
        self.stack.push_back(&mut self.stack_links, slot);
        if kind == Kind::Hot {
            self.hot_used += u64::from(weight);
        } else {
            self.queue.push_back(&mut self.queue_links, slot);
        }
        self.held.set(slot, weight);
    }

    /// Below the hot unit that was used longest ago, the stack says nothing.
    fn prune(&mut self) {
        while let Some(slot) = self.stack.front() {
            match self.entry(slot).kind {
                Kind::Hot => break,
                Kind::Ghost => self.take(slot),
                Kind::Cold | Kind::Out => {
                    self.stack.remove(&mut self.stack_links, slot);
                    self.entries[slot as usize].in_stack = false;
                }
            }
        }
    }

    /// The hot unit used longest ago becomes cold. Whether there was one.
    fn cool(&mut self) -> bool {
        self.prune();
        let Some(slot) = self.stack.pop_front(&mut self.stack_links) else { return false };
        let entry = &mut self.entries[slot as usize];
        (entry.kind, entry.in_stack) = (Kind::Cold, false);
        self.hot_used -= u64::from(entry.weight);
        self.queue.push_back(&mut self.queue_links, slot);
        self.prune();
        true
    }

    /// Lets one unit go.
    fn evict(&mut self, out: &mut Vec<Slot>) {
        if self.queue.front().is_none() {
            self.cool();
        }
        let Some(slot) = self.queue.pop_front(&mut self.queue_links) else { return };
        self.held.remove(slot);
        out.push(slot);
        let entry = &mut self.entries[slot as usize];
        if entry.in_stack {
            entry.kind = Kind::Ghost;
            self.ghosts_used += u64::from(entry.weight);
            self.ghosts.push_back(&mut self.queue_links, slot);
            self.trim();
        } else {
            *entry = Entry::default();
        }
    }

    fn trim(&mut self) {
        while self.ghosts_used > self.held.capacity().saturating_mul(GHOSTS) {
            let Some(slot) = self.ghosts.front() else { break };
            self.take(slot);
        }
    }
}

impl Directory for Lirs {
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool {
        let weight = weight.max(1);
        let before = self.entry(slot);
        let hit = matches!(before.kind, Kind::Hot | Kind::Cold);
        if !self.held.can_hold(weight) {
            self.take(slot);
            self.prune();
            out.push(slot);
            return hit;
        }
        self.take(slot);
        // Room is made while a ghost is out of the stack: so it isn't the one to be forgotten.
        while self.held.is_over_with(weight) {
            self.evict(out);
        }
        let room = self.hot_used + u64::from(weight) <= self.hot_capacity();
        let hot = before.in_stack || room;
        self.put(slot, if hot { Kind::Hot } else { Kind::Cold }, weight);
        self.prune();
        while self.hot_used > self.hot_capacity() && self.cool() {}
        hit
    }

    fn contains(&self, slot: Slot) -> bool {
        self.held.contains(slot)
    }

    fn forget(&mut self, slot: Slot) {
        self.take(slot);
        self.prune();
    }

    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>) {
        self.held.set_capacity(capacity);
        while self.held.is_over() {
            self.evict(out);
        }
        while self.hot_used > self.hot_capacity() && self.cool() {}
        self.trim();
    }

    fn used(&self) -> u64 {
        self.held.used()
    }
}
