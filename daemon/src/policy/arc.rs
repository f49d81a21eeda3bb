//! ARC (Megiddo and Modha, FAST'03): what was used once and what was used more often share the cache, and hits among
//! the ghosts of either say which of the two should have more of it.

use super::held::Held;
use super::list::{Links, List};
use super::{Directory, Slot};

/// The list a unit is in: used once or more often, held or a ghost of that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Out,
    Once,
    Often,
    OnceGhost,
    OftenGhost,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    place: Place,
    weight: u32,
}

/// A list and the pages of its units.
#[derive(Debug, Default)]
struct Queue {
    list: List,
    pages: u64,
}

/// A directory that balances recency and frequency.
#[derive(Debug)]
pub struct Arc {
    held: Held,
    entries: Vec<Entry>,
    links: Links,
    once: Queue,
    often: Queue,
    once_ghosts: Queue,
    often_ghosts: Queue,
    /// Pages that units used once should have.
    target: u64,
}

impl Arc {
    /// An empty one of so many pages.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        Self {
            held: Held::new(capacity),
            entries: Vec::new(),
            links: Links::default(),
            once: Queue::default(),
            often: Queue::default(),
            once_ghosts: Queue::default(),
            often_ghosts: Queue::default(),
            target: 0,
        }
    }

    fn place(&self, slot: Slot) -> Place {
        self.entries.get(slot as usize).map_or(Place::Out, |entry| entry.place)
    }

    fn queue(&mut self, place: Place) -> Option<&mut Queue> {
        match place {
            Place::Out => None,
            Place::Once => Some(&mut self.once),
            Place::Often => Some(&mut self.often),
            Place::OnceGhost => Some(&mut self.once_ghosts),
            Place::OftenGhost => Some(&mut self.often_ghosts),
        }
    }

    /// Takes a unit out of the list that it is in. Its pages.
    fn take(&mut self, slot: Slot) -> u32 {
        let Some(entry) = self.entries.get_mut(slot as usize) else { return 0 };
        let Entry { place, weight } = std::mem::take(entry);
        let mut links = std::mem::take(&mut self.links);
        if let Some(queue) = self.queue(place) {
            queue.list.remove(&mut links, slot);
            queue.pages -= u64::from(weight);
        }
        self.links = links;
        self.held.remove(slot);
        weight
    }

    /// Puts a unit that is in no list at the end of one.
    fn put(&mut self, slot: Slot, place: Place, weight: u32) {
        if self.entries.len() <= slot as usize {
            self.entries.resize(slot as usize + 1, Entry::default());
        }
        self.entries[slot as usize] = Entry { place, weight };
        let mut links = std::mem::take(&mut self.links);
        if let Some(queue) = self.queue(place) {
            queue.list.push_back(&mut links, slot);
            queue.pages += u64::from(weight);
        }
        self.links = links;
        if matches!(place, Place::Once | Place::Often) {
            self.held.set(slot, weight);
        }
    }

    /// Lets one unit go; `often` if what comes is a ghost of those used often.
    fn evict(&mut self, often: bool, out: &mut Vec<Slot>) {
        let pages = self.once.pages;
        let once = pages > self.target || (often && pages == self.target && pages > 0);
        let from_once = if once { self.once.list.front() } else { None };
        let (victim, ghost) = match (from_once, self.often.list.front(), self.once.list.front()) {
            (Some(slot), _, _) | (None, None, Some(slot)) => (slot, Place::OnceGhost),
            (None, Some(slot), _) => (slot, Place::OftenGhost),
            (None, None, None) => return,
        };
        let weight = self.take(victim);
        self.put(victim, ghost, weight);
        out.push(victim);
    }

    /// Forgets the oldest ghosts until there are no more than allowed.
    fn trim(&mut self) {
        let capacity = self.held.capacity();
        while self.once.pages + self.once_ghosts.pages > capacity {
            let Some(slot) = self.once_ghosts.list.front() else { break };
            self.take(slot);
        }
        let ghosts = |arc: &Self| arc.once_ghosts.pages + arc.often_ghosts.pages;
        while self.held.used() + ghosts(self) > capacity.saturating_mul(2) {
            let Some(slot) = self.often_ghosts.list.front() else { break };
            self.take(slot);
        }
    }

    /// A ghost was wanted: its kind should have had more.
    fn adapt(&mut self, place: Place, weight: u32) {
        let (once, often) = (self.once_ghosts.pages.max(1), self.often_ghosts.pages.max(1));
        let step = |more: u64, less: u64| u64::from(weight).saturating_mul((more / less).max(1));
        match place {
            Place::OnceGhost => {
                let target = self.target.saturating_add(step(often, once));
                self.target = target.min(self.held.capacity());
            }
            Place::OftenGhost => self.target = self.target.saturating_sub(step(once, often)),
            Place::Out | Place::Once | Place::Often => {}
        }
    }
}

impl Directory for Arc {
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool {
        let weight = weight.max(1);
        let place = self.place(slot);
        let hit = matches!(place, Place::Once | Place::Often);
        if !self.held.can_hold(weight) {
            self.take(slot);
            out.push(slot);
            return hit;
        }
        self.adapt(place, weight);
        self.take(slot);
        while self.held.is_over_with(weight) {
            self.evict(place == Place::OftenGhost, out);
        }
        let place = if place == Place::Out { Place::Once } else { Place::Often };
        self.put(slot, place, weight);
        self.trim();
        hit
    }

    fn contains(&self, slot: Slot) -> bool {
        self.held.contains(slot)
    }

    fn forget(&mut self, slot: Slot) {
        self.take(slot);
    }

    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>) {
        self.held.set_capacity(capacity);
        self.target = self.target.min(capacity);
        while self.held.is_over() {
            self.evict(false, out);
        }
        self.trim();
    }

    fn used(&self) -> u64 {
        self.held.used()
    }
}
