//! What a client is going to map, in order.
//!
//! The daemon evicts what is needed last and fetches what is needed next just in time, across all clients that have
//! plans. A plan is a hint: bytes are right whatever it says, and a client that does something else is only slower.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

use lapis_proto::message::{
    Access, Done, PLAN_STEPS_MAX, PLAN_USES_MAX, PLANS_PER_SESSION_MAX, PlanStep, PlanUse, SetPlan,
};

use crate::allocation::{Allocation, Owned};
use crate::client::{Client, merge, page_range};
use crate::error::Error;
use crate::lock;
use crate::memory::Held;
use crate::session::Session;

/// What is mapped together: ranges of bytes, each with what it is mapped for.
pub type Step<'a> = Vec<(&'a Allocation, Range<u64>, Access)>;

/// A plan in force. Dropping it takes it back.
#[derive(Debug)]
pub struct Plan {
    session: Arc<Session>,
    number: u32,
}

impl Client {
    /// Declares in which order ranges are going to be mapped: once, or `cyclic`, over and over. Where the client is
    /// in it, its maps tell. Returns at once; the first steps are fetched from then on.
    ///
    /// Steps of no bytes are left out. A client has up to 4 plans at a time, for whatever it does side by side.
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::TooLarge`] beyond 16,384 steps or 32,768 ranges; [`Error::Refused`], e.g. with
    /// [`crate::Code::TooMany`] plans.
    pub fn plan(&self, steps: &[Step<'_>], cyclic: bool) -> Result<Plan, Error> {
        if self.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        let mut wire = Vec::with_capacity(steps.len());
        let mut uses_count = 0;
        for step in steps {
            let uses = self.uses(step)?;
            uses_count += uses.len();
            if !uses.is_empty() {
                wire.push(PlanStep { uses });
            }
        }
        at_most(wire.len(), "steps of a plan", PLAN_STEPS_MAX)?;
        at_most(uses_count, "ranges of pages of a plan", PLAN_USES_MAX)?;
        self.set_plan(wire, cyclic)
    }

    /// Takes down what is mapped from now on, in order, by all threads, until [`Recording::finish`]: one pass through a
    /// model makes the plan of the next ones.
    #[must_use]
    pub fn record(&self) -> Recording {
        let mut recorders = lock(&self.session.recorders);
        let number = recorders.next;
        recorders.next += 1;
        recorders.active.push((number, Vec::new()));
        Recording { client: self.clone(), number }
    }

    fn set_plan(&self, steps: Vec<PlanStep>, cyclic: bool) -> Result<Plan, Error> {
        let number = self.session.plans.fetch_add(1, Ordering::Relaxed);
        let request = SetPlan { plan: number, cyclic, steps };
        let Done {} = self.session.connection().call(&request, None)?;
        Ok(Plan { session: Arc::clone(&self.session), number })
    }

    fn uses(&self, step: &Step<'_>) -> Result<Vec<PlanUse>, Error> {
        let mut uses = Vec::new();
        for access in [Access::Read, Access::Write, Access::Overwrite] {
            let ranges: Vec<_> = step
                .iter()
                .filter(|(.., other)| *other == access)
                .map(|(allocation, bytes, _)| (*allocation, bytes.clone()))
                .collect();
            self.check(&ranges)?;
            // In their order, which is the order to fetch them in.
            let mut pages: Vec<Held> =
                ranges.iter().filter_map(|range| self.pages_of(range)).collect();
            merge(&mut pages);
            let access = self.access_of(&ranges, access);
            for held in &pages {
                uses.push(PlanUse { range: page_range(held)?, access });
            }
        }
        Ok(uses)
    }
}

fn at_most(asked: usize, unit: &'static str, limit: usize) -> Result<(), Error> {
    if asked <= limit {
        return Ok(());
    }
    Err(Error::TooLarge { asked: asked as u64, unit, limit: limit as u64 })
}

impl Drop for Plan {
    fn drop(&mut self) {
        if self.session.connection().is_forked() {
            return;
        }
        // Nobody waits for the answer; if the connection is gone, so is the plan.
        let over = SetPlan { plan: self.number, cyclic: false, steps: Vec::new() };
        let _ = self.session.connection().post(&over);
    }
}

/// What is being recorded of a client's maps.
#[derive(Debug, Default)]
pub(crate) struct Recorders {
    next: u64,
    active: Vec<(u64, Vec<RecordedStep>)>,
}

/// Pages of one map, without keeping their allocations alive.
type RecordedStep = Vec<(Weak<Owned>, Range<usize>, Access)>;

/// Adds a map to all recordings.
pub(crate) fn record(recorders: &Mutex<Recorders>, pages: &[Held], access: Access) {
    let mut recorders = lock(recorders);
    for (_, steps) in &mut recorders.active {
        // One more than fits a plan tells that it is too long.
        if steps.len() <= PLAN_STEPS_MAX {
            let one = |held: &Held| (Arc::downgrade(&held.allocation), held.pages.clone(), access);
            steps.push(pages.iter().map(one).collect());
        }
    }
}

/// Maps being recorded; see [`Client::record`]. Dropping it forgets them.
#[derive(Debug)]
pub struct Recording {
    client: Client,
    number: u64,
}

impl Recording {
    /// The maps since it began.
    #[must_use]
    pub fn finish(self) -> Recorded {
        let steps = self.take();
        Recorded { client: self.client.clone(), steps }
    }

    fn take(&self) -> Vec<RecordedStep> {
        let mut recorders = lock(&self.client.session.recorders);
        let place = recorders.active.iter().position(|(number, _)| *number == self.number);
        place.map(|place| recorders.active.swap_remove(place).1).unwrap_or_default()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.take();
    }
}

/// Maps that were recorded.
#[derive(Debug)]
pub struct Recorded {
    client: Client,
    steps: Vec<RecordedStep>,
}

impl Recorded {
    /// How many maps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether nothing was mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Declares that the same will be mapped again, once or over and over; see [`Client::plan`]. Allocations that are
    /// gone by now are left out.
    ///
    /// # Errors
    /// As [`Client::plan`].
    pub fn plan(&self, cyclic: bool) -> Result<Plan, Error> {
        if self.client.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        at_most(self.steps.len(), "maps of a recording", PLAN_STEPS_MAX)?;
        let mut wire = Vec::with_capacity(self.steps.len());
        for step in &self.steps {
            let mut uses = Vec::with_capacity(step.len());
            for (allocation, pages, access) in step {
                let Some(allocation) = allocation.upgrade() else { continue };
                let range = page_range(&Held { allocation, pages: pages.clone() })?;
                uses.push(PlanUse { range, access: *access });
            }
            if !uses.is_empty() {
                wire.push(PlanStep { uses });
            }
        }
        let uses_count = wire.iter().map(|step| step.uses.len()).sum();
        at_most(uses_count, "ranges of pages of a plan", PLAN_USES_MAX)?;
        self.client.set_plan(wire, cyclic)
    }
}

/// Most plans of one client at a time.
pub const PLANS_MAX: usize = PLANS_PER_SESSION_MAX;

#[cfg(test)]
mod tests;
