//! The policies that can be compared.

use clap::ValueEnum;
use lapisd::policy::Directory;
use lapisd::policy::arc::Arc;
use lapisd::policy::duel::{Duel, Leader};
use lapisd::policy::gap::Gap;
use lapisd::policy::lirs::Lirs;
use lapisd::policy::lru::Lru;
use lapisd::policy::opt::Opt;
use lapisd::policy::s3fifo::S3Fifo;
use serde::Serialize;

use super::trace::Trace;

/// A policy by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Policy {
    /// What the daemon does without a declared plan: follows the best of lirs, gap and lru
    Lapis,
    /// The learned plan, and the index where there is none
    Gap,
    /// The index alone
    Index,
    /// Least recently used
    Lru,
    /// S3-FIFO
    S3fifo,
    /// ARC
    Arc,
    /// LIRS
    Lirs,
    /// Belady's MIN, which knows the future
    Opt,
}

impl Policy {
    pub(super) const DEFAULT: [Policy; 6] =
        [Policy::Lapis, Policy::Lru, Policy::S3fifo, Policy::Arc, Policy::Lirs, Policy::Opt];

    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn directory(self, pages: u64, trace: &Trace) -> Box<dyn Directory> {
        // What is the best to begin with depends on what is cached, as it does in the daemon.
        let leader = if trace.blocks { Leader::Gap } else { Leader::Lirs };
        match self {
            Policy::Lapis => Box::new(Duel::new(pages, leader)),
            Policy::Gap => Box::new(Gap::new(pages)),
            Policy::Index => Box::new(Gap::index_only(pages)),
            Policy::Lru => Box::new(Lru::new(pages)),
            Policy::S3fifo => Box::new(S3Fifo::new(pages)),
            Policy::Arc => Box::new(Arc::new(pages)),
            Policy::Lirs => Box::new(Lirs::new(pages)),
            Policy::Opt => Box::new(Opt::new(pages, &trace.accesses)),
        }
    }

    /// Hits on a trace with a cache of so many pages, but for those of the first accesses.
    pub(super) fn hits(self, pages: u64, trace: &Trace, warm_up: usize) -> u64 {
        let (mut directory, mut out, mut hits) = (self.directory(pages, trace), Vec::new(), 0);
        for (at, slot) in trace.accesses.iter().enumerate() {
            out.clear();
            let hit = directory.access(*slot, 1, &mut out);
            hits += u64::from(hit && at >= warm_up);
        }
        hits
    }
}
