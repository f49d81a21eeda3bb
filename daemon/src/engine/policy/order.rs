//! Pages in the order in which they would go: those of each plan by its own count of steps, those of no plan by the
//! prediction. Between them decides the time that is left until the next use.

use std::collections::{BTreeMap, BTreeSet};

use super::next_use::{NextUse, distance};
use super::plan::{NO_PLAN, Plan, PlanId};
use crate::engine::ids::PageRef;

/// The plans in force.
pub type Plans = BTreeMap<PlanId, Plan>;

/// What "from now on" means to each order.
#[derive(Debug, Clone, Copy)]
pub struct Moment<'a> {
    /// Page accesses so far.
    pub clock: u64,
    /// What an access takes on average, nanoseconds, at least 1.
    pub access_ns: u64,
    /// Microseconds.
    pub now: u64,
    /// The plans in force.
    pub plans: &'a Plans,
}

impl Moment<'_> {
    /// Nanoseconds to a use of a page of no plan.
    #[must_use]
    pub fn unplanned_ns(&self, accesses: u64) -> u64 {
        accesses.saturating_mul(self.access_ns)
    }

    /// Nanoseconds to a use that a page's key stands for.
    #[must_use]
    pub fn eta_ns(&self, plan: PlanId, key: u64) -> u64 {
        match self.plans.get(&plan) {
            Some(plan) => plan.eta_ns(key, self.now),
            None => self.unplanned_ns(distance(key, self.clock)),
        }
    }
}

/// A page that might go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub at: PageRef,
    /// Nanoseconds until it is used again, as far as anyone can say.
    pub eta_ns: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Order {
    unplanned: NextUse,
    planned: BTreeMap<PlanId, BTreeSet<(u64, PageRef)>>,
    planned_len: usize,
}

impl Order {
    /// Adds a page.
    pub fn insert(&mut self, plan: PlanId, key: u64, at: PageRef) {
        if plan == NO_PLAN {
            return self.unplanned.insert(key, at);
        }
        let new = self.planned.entry(plan).or_default().insert((key, at));
        debug_assert!(new, "{at:?} was in the order of {plan:?} already");
        self.planned_len += 1;
    }

    /// Takes a page out.
    pub fn remove(&mut self, plan: PlanId, key: u64, at: PageRef) {
        if plan == NO_PLAN {
            return self.unplanned.remove(key, at);
        }
        let order = self.planned.get_mut(&plan);
        let was_there = order.is_some_and(|order| order.remove(&(key, at)));
        debug_assert!(was_there, "{at:?} was not in the order of {plan:?}");
        self.planned_len -= 1;
        if self.planned.get(&plan).is_some_and(BTreeSet::is_empty) {
            self.planned.remove(&plan);
        }
    }

    /// The page that can best be done without.
    #[must_use]
    pub fn farthest(&self, moment: &Moment<'_>) -> Option<Candidate> {
        let unplanned = self.unplanned.farthest(moment.clock);
        let unplanned = unplanned.map(|(next, at)| (NO_PLAN, next, at));
        let planned = self.planned.iter().filter_map(|(plan, order)| {
            let (key, at) = order.last()?;
            Some((*plan, *key, *at))
        });
        later(unplanned.into_iter().chain(planned), moment)
    }

    /// The page that can best be done without among those that `may` go.
    pub fn farthest_where(
        &self,
        moment: &Moment<'_>,
        may: impl Fn(PageRef) -> bool,
    ) -> Option<Candidate> {
        let unplanned = self.unplanned.farthest_where(moment.clock, &may);
        let unplanned = unplanned.map(|(next, at)| (NO_PLAN, next, at));
        let planned = self.planned.iter().filter_map(|(plan, order)| {
            let (key, at) = order.iter().rev().find(|(_, at)| may(*at))?;
            Some((*plan, *key, *at))
        });
        later(unplanned.into_iter().chain(planned), moment)
    }

    /// The page that will be used first; of no plan, the one used last.
    #[must_use]
    pub fn nearest(&self, moment: &Moment<'_>) -> Option<Candidate> {
        let first = self.planned.iter().filter_map(|(plan, order)| {
            let (key, at) = *order.first()?;
            Some(Candidate { at, eta_ns: moment.eta_ns(*plan, key) })
        });
        first.min_by_key(|candidate| candidate.eta_ns).or_else(|| self.farthest(moment))
    }

    /// Pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.unplanned.len() + self.planned_len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a page is there under this key.
    #[must_use]
    pub fn contains(&self, plan: PlanId, key: u64, at: PageRef) -> bool {
        if plan == NO_PLAN {
            return self.unplanned.contains(key, at);
        }
        self.planned.get(&plan).is_some_and(|order| order.contains(&(key, at)))
    }
}

/// The one that is used last.
fn later(
    candidates: impl Iterator<Item = (PlanId, u64, PageRef)>,
    moment: &Moment<'_>,
) -> Option<Candidate> {
    let candidate = |(plan, key, at)| Candidate { at, eta_ns: moment.eta_ns(plan, key) };
    candidates.map(candidate).max_by_key(|candidate| candidate.eta_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ids::BackingId;

    #[test]
    fn orders_of_plans_and_of_none_are_kept_apart() {
        let plans = Plans::new();
        let moment = Moment { clock: 100, access_ns: 10, now: 0, plans: &plans };
        let page = |index| PageRef { backing: BackingId(0), index };
        let mut order = Order::default();
        assert_eq!((order.farthest(&moment), order.is_empty()), (None, true));
        order.insert(NO_PLAN, 150, page(1));
        order.insert(PlanId(7), 150, page(2));
        order.insert(PlanId(7), 160, page(3));
        assert_eq!(order.len(), 3);
        assert!(order.contains(PlanId(7), 160, page(3)) && !order.contains(NO_PLAN, 160, page(3)));
        // A plan that is over counts like none: accesses.
        assert_eq!(order.farthest(&moment), Some(Candidate { at: page(3), eta_ns: 600 }));
        let not_last = order.farthest_where(&moment, |at| at != page(3));
        assert_eq!(not_last.map(|found| found.eta_ns), Some(500));
        order.remove(PlanId(7), 160, page(3));
        order.remove(PlanId(7), 150, page(2));
        assert_eq!(order.farthest(&moment), Some(Candidate { at: page(1), eta_ns: 500 }));
    }
}
