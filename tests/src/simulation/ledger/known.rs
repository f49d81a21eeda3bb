//! What is known of allocations, mappings and sessions, and of requests without a reply.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::{Access, PageRange, Quota, Tier};
use lapisd::engine::ids::{AllocationId, Domain, FileId, MappingId, SessionId, VramFrame};

use super::{PageId, Place, SharedRange};
use crate::simulation::rules::Verdict;
use crate::simulation::served::Served;

/// One allocation.
#[derive(Debug, Clone, Copy)]
pub(in crate::simulation) struct Allocated {
    /// Pages.
    pub(in crate::simulation) pages: u32,
    /// Whether it is of a file.
    pub(in crate::simulation) file: bool,
    /// Which pages: equal for those who share a file.
    pub(in crate::simulation) backing: u64,
}

/// One granted mapping.
#[derive(Debug)]
pub(in crate::simulation) struct Granted {
    /// What it holds.
    pub(in crate::simulation) ranges: Vec<PageRange>,
    /// Where, page by page.
    pub(in crate::simulation) frames: Vec<VramFrame>,
    /// For what.
    pub(in crate::simulation) access: Access,
    pub(super) pages: Vec<PageId>,
}

/// One session.
#[derive(Debug)]
pub(in crate::simulation) struct Session {
    /// Its trust domain.
    pub(in crate::simulation) domain: Domain,
    /// Its group.
    pub(super) gid: u32,
    /// It may change tiers and quotas.
    pub(in crate::simulation) admin: bool,
    /// Its connection stands.
    pub(in crate::simulation) open: bool,
    /// It said bye, and that was accepted.
    pub(in crate::simulation) said_bye: bool,
    /// Its allocations.
    pub(in crate::simulation) allocations: BTreeMap<AllocationId, Allocated>,
    /// Its mappings.
    pub(in crate::simulation) mappings: BTreeMap<MappingId, Granted>,
    /// Frames that it was sent and has not given back.
    pub(in crate::simulation) imported: BTreeSet<VramFrame>,
    pub(super) served: Served,
}

impl Session {
    /// The pages of a range.
    pub(super) fn pages(&self, range: &PageRange) -> impl Iterator<Item = PageId> + use<> {
        let backing = self.allocations[&range.allocation].backing;
        (range.first..range.first + range.count).map(move |page| (backing, page))
    }
}

/// A reply that is due.
#[derive(Debug)]
pub(super) struct Owed {
    pub(super) verdict: Verdict,
    pub(super) what: Asked,
    pub(super) since: u64,
}

/// What of a request its reply is checked against.
#[derive(Debug)]
pub(super) enum Asked {
    Allocate {
        pages: u64,
    },
    OpenFile {
        file: FileId,
        pages: u64,
        range: SharedRange,
    },
    Free(AllocationId),
    Map {
        ranges: Vec<PageRange>,
        access: Access,
        deadline: u64,
        wait_us: u64,
        /// Pages of it that were mapped when it came.
        least_hits: usize,
        /// There was no room when it came.
        no_room: bool,
        /// The event that it came in.
        event: u64,
    },
    Flush {
        ranges: Vec<PageRange>,
        /// Pages that must be in the spill when it is done.
        places: BTreeSet<Place>,
        deadline: u64,
    },
    SetTier {
        tier: Tier,
        deadline: u64,
        wait_us: u64,
    },
    SetQuota(Quota),
    ListQuotas,
    Unmap(Vec<MappingId>),
    Revoked(Vec<VramFrame>),
    Bye,
    Stat,
    WorkingSet(Option<SessionId>),
    /// What is answered at once, with nothing to check.
    Hint,
}

impl Asked {
    /// When it is refused at the latest, if it may have to wait.
    pub(super) fn deadline(&self) -> Option<u64> {
        match self {
            Asked::Map { deadline, .. }
            | Asked::Flush { deadline, .. }
            | Asked::SetTier { deadline, .. } => Some(*deadline),
            _ => None,
        }
    }
}
