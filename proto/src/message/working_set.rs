//! What sessions use again and again.

use bincode::{Decode, Encode};

use super::Counters;
use crate::ids::SessionId;

/// Sessions in one [`WorkingSets`], so that it always fits into a message.
pub const WORKING_SETS_MAX: usize = 1024;
/// Sizes of a cache in one [`SessionSet`].
pub const CURVE_POINTS_MAX: usize = 24;

/// Asks for the working sets of sessions. Administrators see those of all, others those of their own user. Reply:
/// [`WorkingSets`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct WorkingSet {
    /// Only this one. If it isn't there, or of somebody else, the reply names none.
    pub session: Option<SessionId>,
}

/// Answer to [`WorkingSet`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct WorkingSets {
    /// What decides on pages that no plan speaks of.
    pub leader: Recency,
    /// At most [`WORKING_SETS_MAX`], by number.
    pub sessions: Vec<SessionSet>,
}

/// The policy that has lost the least of those that are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub enum Recency {
    /// By how often units came back lately.
    Lirs,
    /// By the time between uses.
    Gap,
    /// By the last use.
    Lru,
}

/// What one session does.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct SessionSet {
    /// Which.
    pub session: SessionId,
    /// Its user.
    pub uid: u32,
    /// Pages of its allocations.
    pub pages: u64,
    /// The order that was found in what it maps.
    pub pattern: AccessPattern,
    /// Pages used in the last ten seconds, minute, and ten minutes, about.
    pub windows: [u64; 3],
    /// Its maps, hits, stalls, and prefetches that were of use or late; hops, pages dropped and prefetches in vain are not
    /// counted by session, and are 0.
    pub counters: Counters,
    /// The share of its page uses that VRAM of some sizes would have hit, by size; at most [`CURVE_POINTS_MAX`]. For
    /// this session alone, and at least: with a plan or a cycle as Belady's MIN has it, else as LRU has it.
    pub curve: Vec<CurvePoint>,
}

/// The order in which a session maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub enum AccessPattern {
    /// None that is known.
    None,
    /// It declared plans.
    Planned {
        /// Steps of all of them.
        steps: u32,
    },
    /// It declared none, and does the same maps over and over.
    Cycle {
        /// Maps of a round.
        steps: u32,
    },
}

/// One size of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct CurvePoint {
    /// Its size.
    pub pages: u64,
    /// Hits in a million page uses.
    pub hits_per_million: u32,
}
