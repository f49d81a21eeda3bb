//! Belady's MIN: lets go what is used again last. It knows the whole trace, so it is what others are measured by.

use std::collections::BinaryHeap;

use super::held::Held;
use super::{Directory, Slot};

/// Never used again.
const NEVER: u32 = u32::MAX;

/// A directory that knows what comes.
#[derive(Debug)]
pub struct Opt {
    held: Held,
    /// By number of the access: when its unit is used the next time.
    next: Vec<u32>,
    /// By slot: when it is used the next time.
    due: Vec<u32>,
    /// What is held by when it is due, and entries that no longer say so.
    farthest: BinaryHeap<(u32, Slot)>,
    clock: usize,
}

impl Opt {
    /// An empty one of so many pages, that will see these accesses.
    #[must_use]
    pub fn new(capacity: u64, trace: &[Slot]) -> Self {
        let slots = trace.iter().max().map_or(0, |last| *last as usize + 1);
        let mut seen = vec![NEVER; slots];
        let mut next = vec![NEVER; trace.len()];
        for (at, slot) in trace.iter().enumerate().rev() {
            let later = &mut seen[*slot as usize];
            next[at] = *later;
            *later = u32::try_from(at).unwrap_or(NEVER);
        }
        let (held, farthest) = (Held::new(capacity), BinaryHeap::new());
        Self { held, next, due: vec![NEVER; slots], farthest, clock: 0 }
    }

    /// Makes room, but not by letting `spared` go.
    fn shrink(&mut self, spared: Option<Slot>, out: &mut Vec<Slot>) {
        let mut again = None;
        while self.held.is_over() {
            let Some((due, victim)) = self.farthest.pop() else { break };
            if self.due[victim as usize] != due || !self.held.contains(victim) {
                continue;
            }
            if spared == Some(victim) {
                again = Some((due, victim));
                continue;
            }
            self.held.remove(victim);
            out.push(victim);
        }
        self.farthest.extend(again);
    }
}

impl Directory for Opt {
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool {
        let weight = weight.max(1);
        let due = self.next.get(self.clock).copied().unwrap_or(NEVER);
        self.clock += 1;
        let hit = self.held.contains(slot);
        if !self.held.can_hold(weight) {
            self.forget(slot);
            out.push(slot);
            return hit;
        }
        if self.due.len() <= slot as usize {
            self.due.resize(slot as usize + 1, NEVER);
        }
        self.due[slot as usize] = due;
        self.farthest.push((due, slot));
        self.held.set(slot, weight);
        self.shrink(Some(slot), out);
        hit
    }

    fn contains(&self, slot: Slot) -> bool {
        self.held.contains(slot)
    }

    fn forget(&mut self, slot: Slot) {
        self.held.remove(slot);
    }

    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>) {
        self.held.set_capacity(capacity);
        self.shrink(None, out);
    }

    fn used(&self) -> u64 {
        self.held.used()
    }
}
