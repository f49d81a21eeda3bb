//! First come, first served, and those of a higher priority first, as far as it can be told from outside: of two maps
//! that never had room together, the one that is behind is not granted while the other waits, if it needs room; and
//! the first in line, if there is room for it, waits for something that moves. Not looked at where quotas let some
//! pass.

use std::collections::{BTreeMap, BTreeSet};

use lapisd::engine::ids::{RequestId, SessionId};

use super::ledger::PageId;

type Key = (SessionId, RequestId);

/// A map that waits.
#[derive(Debug)]
struct Waiting {
    came: u64,
    priority: u8,
    pages: BTreeSet<PageId>,
    /// When it came, nobody had one of its pages or asked for it.
    needs_room: bool,
    /// Its place is where its priority puts it.
    is_known: bool,
    /// With all that was mapped, its pages were too many at any time so far: it is in line.
    found_none: bool,
    /// Maps ahead of it, with whose pages and all that was mapped its own were too many at any time so far.
    ahead: Vec<Key>,
}

/// All maps that wait.
#[derive(Debug, Default)]
pub(super) struct Order {
    waiting: BTreeMap<Key, Waiting>,
    last: u64,
}

fn too_many(sets: &[&BTreeSet<PageId>], most: u32) -> bool {
    let all: BTreeSet<_> = sets.iter().copied().flatten().collect();
    all.len() > most as usize
}

impl Order {
    /// A map comes, while these pages are mapped, and `most` may be. Answers whether it needs room for sure.
    pub(super) fn came(
        &mut self,
        (key, priority): (Key, u8),
        pages: &[PageId],
        mapped: &BTreeSet<PageId>,
        most: u32,
    ) -> bool {
        self.last += 1;
        let pages: BTreeSet<_> = pages.iter().copied().collect();
        let others = |page: &PageId| self.waiting.values().any(|other| other.pages.contains(page));
        let needs_room = pages.iter().any(|page| !mapped.contains(page) && !others(page));
        let found_none = too_many(&[&pages, mapped], most);
        let mut ahead = Vec::new();
        let known = self.waiting.iter_mut().filter(|(_, other)| other.is_known);
        for (other_key, other) in known {
            if !too_many(&[&pages, &other.pages, mapped], most) {
                continue;
            }
            if other.priority >= priority {
                ahead.push(*other_key);
            } else if other.found_none {
                other.ahead.push(key);
            }
        }
        let came = self.last;
        let is_known = true;
        let new = Waiting { came, priority, pages, needs_room, is_known, found_none, ahead };
        self.waiting.insert(key, new);
        needs_room
    }

    /// Fewer pages are mapped.
    pub(super) fn unmapped(&mut self, mapped: &BTreeSet<PageId>, most: u32) {
        let mut changed = Vec::new();
        for (key, map) in &self.waiting {
            let stays = |other: &Key| {
                let other = self.waiting.get(other);
                other.is_some_and(|other| too_many(&[&map.pages, &other.pages, mapped], most))
            };
            let ahead: Vec<_> = map.ahead.iter().copied().filter(stays).collect();
            let found_none = map.found_none && too_many(&[&map.pages, mapped], most);
            changed.push((*key, ahead, found_none));
        }
        for (key, ahead, found_none) in changed {
            let map = self.waiting.get_mut(&key).expect("listed above");
            (map.ahead, map.found_none) = (ahead, found_none);
        }
    }

    /// What those that came before may wait for has changed.
    pub(super) fn reordered(&mut self) {
        for map in self.waiting.values_mut() {
            map.is_known = false;
            map.ahead.clear();
        }
    }

    /// Maps wait no longer, and get nothing.
    pub(super) fn gone(&mut self, is_gone: impl Fn(Key) -> bool) {
        self.waiting.retain(|key, _| !is_gone(*key));
    }

    /// Nothing moves, while these pages are mapped and `most` may be: so nobody waits for bytes. The map that came
    /// first has its place if there is any, for those that came later and are ahead of it take no more room.
    pub(super) fn nothing_moves(&self, mapped: &BTreeSet<PageId>, most: u32) {
        let first = self.waiting.iter().min_by_key(|(_, map)| map.came);
        let stuck = first.filter(|(_, map)| !too_many(&[&map.pages, mapped], most));
        assert!(
            stuck.is_none(),
            "there is room for {:?}, and nothing moves",
            stuck.map(|(key, _)| key)
        );
    }

    /// A map is granted.
    pub(super) fn granted(&mut self, key: Key, looked_at: bool) {
        let Some(map) = self.waiting.remove(&key).filter(|map| looked_at && map.needs_room) else {
            return;
        };
        let waits = map.ahead.iter().find(|other| self.waiting.contains_key(other));
        assert!(waits.is_none(), "{key:?} overtakes {waits:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: (SessionId, RequestId) = (SessionId(1), RequestId(1));
    const SECOND: (SessionId, RequestId) = (SessionId(2), RequestId(1));

    fn both_wait(mapped: &BTreeSet<PageId>, priority: u8) -> Order {
        let mut order = Order::default();
        order.came((FIRST, 0), &[(1, 0), (1, 1)], mapped, 3);
        order.came((SECOND, priority), &[(2, 0)], mapped, 3);
        order
    }

    #[test]
    #[should_panic(expected = "(SessionId(2), RequestId(1)) overtakes")]
    fn who_comes_later_does_not_overtake() {
        let mapped = BTreeSet::from([(3, 0), (3, 1)]);
        both_wait(&mapped, 0).granted(SECOND, true);
    }

    #[test]
    #[should_panic(expected = "(SessionId(1), RequestId(1)) overtakes")]
    fn who_comes_later_with_a_higher_priority_is_not_overtaken() {
        let mapped = BTreeSet::from([(3, 0), (3, 1), (3, 2)]);
        both_wait(&mapped, 0).granted(SECOND, false);
        both_wait(&mapped, 1).granted(FIRST, true);
    }

    #[test]
    #[should_panic(expected = "there is room for Some((SessionId(1), RequestId(1)))")]
    fn who_has_room_waits_for_something() {
        let order = both_wait(&BTreeSet::from([(3, 0), (3, 1)]), 0);
        order.nothing_moves(&BTreeSet::from([(3, 0), (3, 1)]), 3);
        order.nothing_moves(&BTreeSet::from([(3, 0)]), 3);
    }

    #[test]
    fn who_may_have_found_room_is_not_overtaken() {
        let mapped = BTreeSet::from([(3, 0), (3, 1)]);
        let mut order = both_wait(&mapped, 0);
        order.unmapped(&BTreeSet::new(), 3);
        order.granted(SECOND, true);
        let mut order = both_wait(&mapped, 0);
        order.gone(|key| key == FIRST);
        order.granted(SECOND, true);
        both_wait(&mapped, 0).granted(SECOND, false);
    }
}
