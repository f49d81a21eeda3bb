//! Evict the page whose next use is farthest, by a prediction: a page used before comes back after as many accesses
//! as last time, a page used once after as many accesses as its backing has pages (layers run in a cycle).
//! A prediction that has passed without a use says less and less: the page counts as being as far in the future as
//! it is overdue. So the farthest page is always at one of the two ends of the order.
//!
//! The clock counts page accesses of all sessions.

use std::collections::BTreeSet;

use crate::engine::ids::PageRef;

/// A set of pages in order of predicted next use.
#[derive(Debug, Default)]
pub struct NextUse {
    order: BTreeSet<(u64, PageRef)>,
}

/// So many accesses away that it will not be used again, as far as anyone can say.
pub const NEVER: u64 = 1 << 40;

/// Accesses from `clock` to a use predicted at `next`, or as many as it is overdue.
#[must_use]
pub fn distance(next: u64, clock: u64) -> u64 {
    next.abs_diff(clock)
}

/// When a page used now will be used again.
#[must_use]
pub fn predict(last_use: u64, clock: u64, backing_pages: u32) -> u64 {
    if last_use == 0 { clock + u64::from(backing_pages) } else { clock + (clock - last_use) }
}

impl NextUse {
    /// Adds a page.
    pub fn insert(&mut self, next: u64, page: PageRef) {
        let new = self.order.insert((next, page));
        debug_assert!(new, "{page:?} was in the order already");
    }

    /// Takes a page out.
    pub fn remove(&mut self, next: u64, page: PageRef) {
        let was_there = self.order.remove(&(next, page));
        debug_assert!(was_there, "{page:?} was not in the order");
    }

    /// The page that can best be done without.
    #[must_use]
    pub fn farthest(&self, clock: u64) -> Option<(u64, PageRef)> {
        let (first, last) = (*self.order.first()?, *self.order.last()?);
        let overdue = first.0 < clock && distance(first.0, clock) > distance(last.0, clock);
        Some(if overdue { first } else { last })
    }

    /// The page that can best be done without among those that `may` go.
    pub fn farthest_where(
        &self,
        clock: u64,
        may: impl Fn(PageRef) -> bool,
    ) -> Option<(u64, PageRef)> {
        let mut ends = self.order.iter().copied();
        let (mut first, mut last) = (ends.next(), ends.next_back());
        loop {
            // The farther of the two ends; the remaining one when they have met.
            let from_front = match (first, last) {
                (Some(front), Some(back)) => {
                    front.0 < clock && distance(front.0, clock) > distance(back.0, clock)
                }
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (None, None) => return None,
            };
            let candidate = if from_front { first } else { last }?;
            if may(candidate.1) {
                return Some(candidate);
            }
            if from_front {
                first = ends.next();
            } else {
                last = ends.next_back();
            }
        }
    }

    /// The first page in order.
    #[must_use]
    pub fn first(&self) -> Option<(u64, PageRef)> {
        self.order.first().copied()
    }

    /// The last page in order.
    #[must_use]
    pub fn last(&self) -> Option<(u64, PageRef)> {
        self.order.last().copied()
    }

    /// Pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether a page is there under this key.
    #[must_use]
    pub fn contains(&self, next: u64, page: PageRef) -> bool {
        self.order.contains(&(next, page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ids::BackingId;

    fn page(index: u32) -> PageRef {
        PageRef { backing: BackingId(0), index }
    }

    #[test]
    fn first_use_predicts_a_cycle_over_the_backing_and_the_second_its_period() {
        assert_eq!(predict(0, 5, 80), 85);
        assert_eq!(predict(5, 35, 80), 65);
    }

    #[test]
    fn farthest_is_the_latest_or_the_longest_overdue() {
        let mut order = NextUse::default();
        assert_eq!(order.farthest(10), None);
        order.insert(100, page(1));
        order.insert(140, page(2));
        assert_eq!(order.farthest(100), Some((140, page(2))));
        assert_eq!(order.farthest(119), Some((140, page(2))));
        assert_eq!(order.farthest(121), Some((100, page(1))));
        assert_eq!(order.farthest_where(121, |at| at != page(1)), Some((140, page(2))));
        assert_eq!(order.farthest_where(100, |at| at != page(2)), Some((100, page(1))));
        assert_eq!(order.farthest_where(100, |_| false), None);
        order.remove(100, page(1));
        assert_eq!(order.farthest(1_000), Some((140, page(2))));
    }
}
