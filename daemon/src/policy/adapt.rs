//! What the daemon should keep and let go of a client's units, from their accesses alone: a [`Duel`] that speaks of
//! units, and says what changes.

use super::duel::{Duel, Leader};
use super::learned::Learned;
use super::units::Units;
use super::{Directory, Slot, Unit};

/// What a call changed of what should be kept.
///
/// Whoever follows holds a set of units; those let go and not taken back since are to be evicted when room is
/// needed, what was let go first going first. Applied in order, `let_go` after `taken`, changes describe the set exactly.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Units that should be kept from now on.
    pub taken: Vec<Unit>,
    /// Units that may go, first the one that should go first.
    pub let_go: Vec<Unit>,
}

impl Changes {
    /// Whether nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty() && self.let_go.is_empty()
    }
}

/// A recommender.
#[derive(Debug)]
pub struct Adapt {
    units: Units,
    duel: Duel,
    scratch: Vec<Slot>,
}

impl Adapt {
    /// One that has seen nothing, for a cache of so many pages.
    #[must_use]
    pub fn new(capacity: u64, leader: Leader) -> Self {
        let (units, scratch) = (Units::default(), Vec::new());
        Self { units, duel: Duel::new(capacity, leader), scratch }
    }

    /// A unit of `weight` pages (0 counts as 1) is used; `changes` are replaced by what that changes. Whether it was
    /// in the cache, had the cache followed.
    pub fn touch(&mut self, unit: Unit, weight: u32, changes: &mut Changes) -> bool {
        self.scratch.clear();
        let Some(slot) = self.units.enter(unit) else {
            (changes.taken, changes.let_go) = (Vec::new(), vec![unit]);
            return false;
        };
        let hit = self.duel.access(slot, weight, &mut self.scratch);
        self.tell(changes);
        hit
    }

    /// A unit is gone for good.
    pub fn forget(&mut self, unit: Unit) {
        if let Some(slot) = self.units.leave(unit) {
            self.duel.forget(slot);
        }
    }

    /// The cache has so many pages now; `changes` are replaced by what that changes.
    pub fn resize(&mut self, capacity: u64, changes: &mut Changes) {
        self.scratch.clear();
        self.duel.resize(capacity, &mut self.scratch);
        self.tell(changes);
    }

    /// Whether a unit should be kept.
    #[must_use]
    pub fn keeps(&self, unit: Unit) -> bool {
        self.units.slot(unit).is_some_and(|slot| self.duel.leader_has(slot))
    }

    /// The policy that is followed.
    #[must_use]
    pub fn leader(&self) -> Leader {
        self.duel.leader()
    }

    /// Units known: all that were used and not forgotten.
    #[must_use]
    pub fn known(&self) -> usize {
        self.units.len()
    }

    /// What is expected to come.
    #[must_use]
    pub fn learned(&self) -> Expected<'_> {
        Expected { learned: self.duel.learned(), units: &self.units }
    }

    fn tell(&self, changes: &mut Changes) {
        let unit = |slot: &Slot| self.units.unit(*slot);
        changes.taken.clear();
        changes.taken.extend(self.duel.taken().iter().filter_map(unit));
        changes.let_go.clear();
        changes.let_go.extend(self.duel.let_go().iter().filter_map(unit));
    }
}

/// The plan that nobody declared, as far as it is known.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    learned: &'a Learned,
    units: &'a Units,
}

impl<'a> Expected<'a> {
    /// Whether it came true often enough to rely on.
    #[must_use]
    pub fn certified(&self) -> bool {
        self.learned.certified()
    }

    /// Accesses from one round to the next; 0 if nothing repeats.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.learned.period()
    }

    /// Accesses from now to the next use of a unit, if that is known.
    #[must_use]
    pub fn next_use(&self, unit: Unit) -> Option<u64> {
        self.learned.next_use(self.units.slot(unit)?)
    }

    /// The units that come next, soonest first, for one round.
    pub fn upcoming(&self) -> impl Iterator<Item = Unit> + 'a {
        let units = self.units;
        // Slots of units that are gone may still be in the plan, and are left out unless others have them now.
        let unit = move |slot| units.unit(slot).filter(|unit| units.slot(*unit) == Some(slot));
        self.learned.upcoming().filter_map(unit)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Units up to 29 are of 1 to 3 pages.
    fn weight(unit: Unit) -> u32 {
        if unit < 30 { [3, 1, 1, 2, 1, 1][usize::try_from(unit % 6).unwrap()] } else { 1 }
    }

    /// Follows what is recommended as the engine does.
    struct Follower {
        adapt: Adapt,
        changes: Changes,
        capacity: u64,
        kept: BTreeSet<Unit>,
    }

    impl Follower {
        fn new(capacity: u64, leader: Leader) -> Self {
            let (adapt, changes) = (Adapt::new(capacity, leader), Changes::default());
            Self { adapt, changes, capacity, kept: BTreeSet::new() }
        }

        fn touch(&mut self, unit: Unit) {
            self.adapt.touch(unit, weight(unit), &mut self.changes);
            self.apply();
        }

        fn apply(&mut self) {
            for unit in &self.changes.taken {
                assert!(self.kept.insert(*unit), "{unit} was kept");
            }
            for unit in &self.changes.let_go {
                assert!(self.kept.remove(unit), "{unit} was not kept");
            }
            let pages: u64 = self.kept.iter().map(|unit| u64::from(weight(*unit))).sum();
            assert!(pages <= self.capacity, "{pages} of {}", self.capacity);
        }
    }

    proptest! {
        #[test]
        fn changes_say_exactly_what_is_kept(
            ops in proptest::collection::vec((0..40u32, 0..30u64), 0..400),
            start in 0..3u32,
        ) {
            let start = [Leader::Lirs, Leader::Gap, Leader::Lru][start as usize];
            let mut follower = Follower::new(12, start);
            for (what, unit) in ops {
                match what {
                    0 => {
                        follower.adapt.forget(unit);
                        follower.kept.remove(&unit);
                    }
                    1 => {
                        follower.capacity = unit;
                        follower.adapt.resize(unit, &mut follower.changes);
                        follower.apply();
                    }
                    2..20 => follower.touch(unit),
                    // Rounds, so that there is something to learn and to switch for.
                    _ => (0..unit).for_each(|unit| follower.touch(unit)),
                }
                for unit in 0..30 {
                    prop_assert_eq!(follower.adapt.keeps(unit), follower.kept.contains(&unit));
                }
            }
        }
    }

    #[test]
    fn another_leads_where_the_first_does_badly_and_the_difference_is_told() {
        let mut follower = Follower::new(50, Leader::Lirs);
        let mut told = 0;
        for round in 0..20u64 {
            let back = round % 2 == 1;
            for at in 0..100 {
                follower.touch(1000 + if back { 99 - at } else { at });
                told = told.max(follower.changes.let_go.len());
            }
        }
        assert_ne!(follower.adapt.leader(), Leader::Lirs);
        assert!(told > 20, "{told}");
    }

    #[test]
    fn what_comes_is_told_by_unit() {
        let mut follower = Follower::new(50, Leader::Lirs);
        let unit = |at: u64| 1_000_000_007 * (at % 100);
        (0..130).for_each(|at| follower.touch(unit(at)));
        let expected = follower.adapt.learned();
        assert!(!expected.certified(), "a rate of success takes some 50 accesses");
        (130..430).for_each(|at| follower.touch(unit(at)));
        let expected = follower.adapt.learned();
        assert!(expected.certified());
        assert_eq!((expected.period(), expected.next_use(unit(30))), (100, Some(1)));
        assert_eq!(expected.upcoming().take(2).collect::<Vec<_>>(), [unit(30), unit(31)]);
        follower.adapt.forget(unit(30));
        let expected = follower.adapt.learned();
        assert_eq!((expected.upcoming().next(), follower.adapt.known()), (Some(unit(31)), 99));
        assert_eq!(expected.next_use(unit(30)), None);
    }
}
