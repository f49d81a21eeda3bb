//! What a client is going to map, in order.

use bincode::{Decode, Encode};

use super::{Access, PageRange};

/// Steps of one plan.
pub const PLAN_STEPS_MAX: usize = 16_384;
/// Uses of one plan, of all its steps together.
pub const PLAN_USES_MAX: usize = 32_768;
/// Plans of one session.
pub const PLANS_PER_SESSION_MAX: usize = 4;

/// Declares the order in which this session is going to map ranges, or replaces what it declared under the same
/// number, or with no steps takes that back. A plan is a hint: pages are fetched ahead and evicted by it, and a wrong
/// one costs speed and nothing else. Where the client is in its plan, its maps tell: they may skip steps, repeat
/// them, and make a step of several maps. Reply: [`Done`](super::Done), at once.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct SetPlan {
    /// The client's number for it; at most [`PLANS_PER_SESSION_MAX`] are in force.
    pub plan: u32,
    /// After the last step comes the first one again.
    pub cyclic: bool,
    /// At most [`PLAN_STEPS_MAX`], with [`PLAN_USES_MAX`] uses in all.
    pub steps: Vec<PlanStep>,
}

/// What is mapped together.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct PlanStep {
    /// At least 1, with no more pages than a map may have.
    pub uses: Vec<PlanUse>,
}

/// A range and what it is mapped for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct PlanUse {
    /// Which pages.
    pub range: PageRange,
    /// For what. Pages whose next use is an overwrite are not fetched for it.
    pub access: Access,
}
