//! What the engine knows of one client connection.
//!
//! ```text
//! Open -- connection gone --> Lingering -- process gone --> (removed)
//!   +------------ bye, then connection gone -------------->
//! ```
//! A lingering session's mappings stay pinned: the process may still write there. Everything else of it goes at once.

use std::collections::BTreeSet;

use lapis_proto::message::Counters;

use super::ids::{AllocationId, Domain, MappingId, VramFrame};
use super::policy::learner::Learner;
use crate::policy::mrc::Curve;

/// One client connection.
#[derive(Debug)]
pub struct Session {
    /// Who it acts for.
    pub domain: Domain,
    /// Its primary group.
    pub gid: u32,
    /// May change tiers and quotas.
    pub admin: bool,
    /// The connection is gone, the process may live.
    pub lingering: bool,
    /// The client said that it holds no frame any more.
    pub said_bye: bool,
    /// Its allocations.
    pub allocations: BTreeSet<AllocationId>,
    /// Its mappings.
    pub mappings: BTreeSet<MappingId>,
    /// Maps that it waits for.
    pub waiting: u32,
    /// Flushes and changes of tiers that it waits for.
    pub flushing: u32,
    /// Its maps and hits.
    pub counters: Counters,
    /// Learns a plan from its maps; none yet, or it declares its own.
    pub(super) learner: Option<Box<Learner>>,
    /// What it uses, by a sample; none before its first map.
    pub(super) curve: Option<Box<Curve>>,
    imported: Vec<u64>,
}

impl Session {
    pub(super) fn new(domain: Domain, gid: u32, admin: bool) -> Self {
        Self {
            domain,
            gid,
            admin,
            lingering: false,
            said_bye: false,
            allocations: BTreeSet::new(),
            mappings: BTreeSet::new(),
            waiting: 0,
            flushing: 0,
            counters: Counters::default(),
            learner: None,
            curve: None,
            imported: Vec::new(),
        }
    }

    /// Whether the process may have this frame mapped.
    #[must_use]
    pub fn has_imported(&self, frame: VramFrame) -> bool {
        let (word, bit) = place(frame);
        self.imported.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// The process is being sent this frame.
    pub(super) fn import(&mut self, frame: VramFrame) {
        let (word, bit) = place(frame);
        if self.imported.len() <= word {
            self.imported.resize(word + 1, 0);
        }
        self.imported[word] |= bit;
    }

    /// The process has this frame no more. Answers whether it had it.
    pub(super) fn forget(&mut self, frame: VramFrame) -> bool {
        let had = self.has_imported(frame);
        let (word, bit) = place(frame);
        if had {
            self.imported[word] &= !bit;
        }
        had
    }

    /// Whether the process can touch no frame.
    #[must_use]
    pub fn holds_nothing(&self) -> bool {
        self.mappings.is_empty() && self.imported.iter().all(|bits| *bits == 0)
    }

    /// The process has no frame any more.
    pub(super) fn forget_all(&mut self) {
        self.imported = Vec::new();
    }
}

fn place(frame: VramFrame) -> (usize, u64) {
    ((frame.0 / 64) as usize, 1 << (frame.0 % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imports_are_kept_per_frame() {
        let mut session = Session::new(Domain(1), 1, false);
        session.import(VramFrame(64));
        assert!(session.has_imported(VramFrame(64)));
        assert!(!session.has_imported(VramFrame(0)));
        assert!(!session.has_imported(VramFrame(1_000_000)));
        assert!(session.forget(VramFrame(64)));
        assert!(!session.forget(VramFrame(64)));
    }
}
