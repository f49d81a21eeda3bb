//! S3-FIFO (Yang et al., SOSP'23): what is used once passes through a small queue, what is used again there moves to
//! the main one. A cycle larger than the cache stays in part, so most of a scan's hits are kept.
//!
//! The variant is that of libCacheSim: while the cache fills, what doesn't fit in the small queue goes to the main
//! one; two uses in the small queue move a unit on; what is found among the ghosts goes to the main queue.

use super::held::Held;
use super::list::{Links, List};
use super::{Directory, Slot};

/// Uses in the small queue that move a unit to the main one.
const USES_TO_MOVE: u8 = 2;
/// Most uses that count in the main queue.
const USES_MAX: u8 = 3;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Out,
    Small,
    Main,
    Ghost,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    place: Place,
    uses: u8,
    /// Pages when it was last held.
    weight: u32,
}

/// A directory of two queues and a memory of what left the first.
#[derive(Debug)]
pub struct S3Fifo {
    held: Held,
    entries: Vec<Entry>,
    links: Links,
    small: List,
    small_used: u64,
    main: List,
    ghosts: List,
    ghosts_used: u64,
    /// Whether anything was let go since it began: then it is full.
    warm: bool,
}

impl S3Fifo {
    /// An empty one of so many pages.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            held: Held::new(capacity),
            entries: Vec::new(),
            links: Links::default(),
            small: List::default(),
            small_used: 0,
            main: List::default(),
            ghosts: List::default(),
            ghosts_used: 0,
            warm: false,
        }
    }

    fn small_capacity(&self) -> u64 {
        (self.held.capacity() / 10).max(1)
    }

    fn main_capacity(&self) -> u64 {
        self.held.capacity() - self.held.capacity() / 10
    }

    fn entry(&mut self, slot: Slot) -> &mut Entry {
        if self.entries.len() <= slot as usize {
            self.entries.resize(slot as usize + 1, Entry::default());
        }
        &mut self.entries[slot as usize]
    }

    /// Takes a unit out of the queue that it is in.
    fn take(&mut self, slot: Slot) -> Entry {
        let entry = std::mem::take(self.entry(slot));
        match entry.place {
            Place::Out => {}
            Place::Small => {
                self.small.remove(&mut self.links, slot);
                self.small_used -= u64::from(self.held.remove(slot));
            }
            Place::Main => {
                self.main.remove(&mut self.links, slot);
                self.held.remove(slot);
            }
            Place::Ghost => {
                self.ghosts.remove(&mut self.links, slot);
                self.ghosts_used -= u64::from(entry.weight);
            }
        }
        entry
    }

    /// Puts a unit that is in no queue at the end of one.
    fn put(&mut self, slot: Slot, place: Place, weight: u32, uses: u8) {
        *self.entry(slot) = Entry { place, uses, weight };
        let weight_pages = u64::from(weight);
        match place {
            Place::Out => {}
            Place::Small => {
                self.small.push_back(&mut self.links, slot);
                self.small_used += weight_pages;
                self.held.set(slot, weight);
            }
            Place::Main => {
                self.main.push_back(&mut self.links, slot);
                self.held.set(slot, weight);
            }
            Place::Ghost => {
                self.ghosts.push_back(&mut self.links, slot);
                self.ghosts_used += weight_pages;
            }
        }
    }

    /// Lets one unit go.
    fn evict(&mut self, out: &mut Vec<Slot>) {
        self.warm = true;
        let main_used = self.held.used() - self.small_used;
        let from_main = main_used > self.main_capacity() || self.small.front().is_none();
        if from_main { self.evict_main(out) } else { self.evict_small(out) }
    }

    fn evict_small(&mut self, out: &mut Vec<Slot>) {
        while let Some(slot) = self.small.front() {
            let Entry { uses, weight, .. } = self.take(slot);
            if uses >= USES_TO_MOVE {
                self.put(slot, Place::Main, weight, 0);
                continue;
            }
            self.put(slot, Place::Ghost, weight, 0);
            self.trim_ghosts();
            out.push(slot);
            return;
        }
    }

    fn evict_main(&mut self, out: &mut Vec<Slot>) {
        while let Some(slot) = self.main.front() {
            let Entry { uses, weight, .. } = self.take(slot);
            if uses == 0 {
                out.push(slot);
                return;
            }
            self.put(slot, Place::Main, weight, uses.min(USES_MAX) - 1);
        }
    }

    fn trim_ghosts(&mut self) {
        while self.ghosts_used > self.main_capacity() {
            let Some(slot) = self.ghosts.front() else { break };
            self.take(slot);
        }
    }
}

impl Directory for S3Fifo {
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool {
        let weight = weight.max(1);
        let hit = self.held.contains(slot);
        if !self.held.can_hold(weight) {
            self.take(slot);
            out.push(slot);
            return hit;
        }
        if hit && self.held.weight(slot) == weight {
            let entry = self.entry(slot);
            entry.uses = entry.uses.saturating_add(1);
            return true;
        }
        if hit {
            // Out of the way while room is made for the new weight.
            let old = self.take(slot);
            while self.held.is_over_with(weight) {
                self.evict(out);
            }
            self.put(slot, old.place, weight, old.uses.saturating_add(1));
            return true;
        }
        while self.held.is_over_with(weight) {
            self.evict(out);
        }
        let ghost = self.take(slot).place == Place::Ghost;
        let filling = !self.warm && self.small_used >= self.small_capacity();
        let place = if ghost || filling { Place::Main } else { Place::Small };
        self.put(slot, place, weight, 0);
        false
    }

    fn contains(&self, slot: Slot) -> bool {
        self.held.contains(slot)
    }

    fn forget(&mut self, slot: Slot) {
        if self.entries.len() > slot as usize {
            self.take(slot);
        }
    }

    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>) {
        self.held.set_capacity(capacity);
        while self.held.is_over() {
            self.evict(out);
        }
        self.trim_ghosts();
    }

    fn used(&self) -> u64 {
        self.held.used()
    }
}
