//! Doubly linked lists of slots. Several lists share one set of links, for units that are in one of them at a time.

use super::Slot;

const NONE: Slot = Slot::MAX;

/// The neighbours of each slot in the list that it is in.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// By slot: the one before and the one after.
    links: Vec<(Slot, Slot)>,
}

impl Links {
    fn at(&mut self, slot: Slot) -> &mut (Slot, Slot) {
        if self.links.len() <= slot as usize {
            self.links.resize(slot as usize + 1, (NONE, NONE));
        }
        &mut self.links[slot as usize]
    }
}

/// A list: where it begins and ends. The slot `u32::MAX` can't be in one.
#[derive(Debug)]
pub(crate) struct List {
    front: Slot,
    back: Slot,
}

impl Default for List {
    fn default() -> Self {
        Self { front: NONE, back: NONE }
    }
}

impl List {
    pub(crate) fn front(&self) -> Option<Slot> {
        (self.front != NONE).then_some(self.front)
    }

    /// Adds a slot that is in no list of these links.
    pub(crate) fn push_back(&mut self, links: &mut Links, slot: Slot) {
        *links.at(slot) = (self.back, NONE);
        match self.back {
            NONE => self.front = slot,
            back => links.at(back).1 = slot,
        }
        self.back = slot;
    }

    /// Takes a slot out that is in this list.
    pub(crate) fn remove(&mut self, links: &mut Links, slot: Slot) {
        let (before, after) = std::mem::replace(links.at(slot), (NONE, NONE));
        match before {
            NONE => self.front = after,
            before => links.at(before).1 = after,
        }
        match after {
            NONE => self.back = before,
            after => links.at(after).0 = before,
        }
    }

    pub(crate) fn move_to_back(&mut self, links: &mut Links, slot: Slot) {
        if self.back != slot {
            self.remove(links, slot);
            self.push_back(links, slot);
        }
    }

    pub(crate) fn pop_front(&mut self, links: &mut Links) -> Option<Slot> {
        let front = self.front()?;
        self.remove(links, front);
        Some(front)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(list: &mut List, links: &mut Links) -> Vec<Slot> {
        std::iter::from_fn(|| list.pop_front(links)).collect()
    }

    #[test]
    fn lists_keep_their_order() {
        let (mut links, mut a, mut b) = (Links::default(), List::default(), List::default());
        for slot in 0..4 {
            a.push_back(&mut links, slot);
        }
        a.remove(&mut links, 1);
        b.push_back(&mut links, 1);
        a.move_to_back(&mut links, 0);
        a.move_to_back(&mut links, 0);
        assert_eq!(a.front(), Some(2));
        assert_eq!(slots(&mut a, &mut links), vec![2, 3, 0]);
        assert_eq!(slots(&mut b, &mut links), vec![1]);
        assert_eq!(b.front(), None);
    }
}
