//! A simulated client process: what it knows, which is what it was told and no more.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::{Access, PageRange};
use lapisd::engine::event::{Reply, Request};
use lapisd::engine::ids::{AllocationId, MappingId, RequestId, VramFrame};

/// How a client behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Maps, checks, writes, unmaps, prefetches.
    Steady,
    /// Maps as much as it can and holds it long.
    Greedy,
    /// Reads replies late and holds mappings very long.
    Slow,
    /// Breaks every rule, in a trust domain of its own.
    Outlaw,
    /// Is killed in the middle of anything.
    Dying,
    /// Reconnects while its old session's mappings are still in use.
    Fickle,
}

impl Kind {
    /// Every kind.
    pub(super) const ALL: &[Kind] =
        &[Kind::Steady, Kind::Greedy, Kind::Slow, Kind::Outlaw, Kind::Dying, Kind::Fickle];
}

/// A request on its way.
#[derive(Debug)]
pub(super) enum Ask {
    /// As the engine takes it.
    Plain(Request),
    /// With an open file, which the server gives to the store first.
    Open {
        /// Which.
        file: usize,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
}

/// What a client remembers of a request until the reply comes.
#[derive(Debug)]
pub(super) enum Asked {
    /// An anonymous allocation, or one of a file.
    Allocate {
        /// Whether of a file.
        file: bool,
    },
    /// An allocation is given up.
    Free(AllocationId),
    /// A mapping.
    Map(Vec<PageRange>, Access),
    /// A flush.
    Flush(Vec<PageRange>),
    /// The size of a tier.
    SetTier,
    /// The last request.
    Bye,
    /// Anything with a reply that says nothing.
    Other,
}

impl Asked {
    /// Whether the reply may have to wait, and others may overtake it.
    #[must_use]
    pub(super) fn waits(&self) -> bool {
        matches!(self, Asked::Map(..) | Asked::Flush(_) | Asked::SetTier)
    }
}

/// What comes from the daemon, in order.
#[derive(Debug)]
pub(super) enum Message {
    /// Frames, ahead of the reply that names them.
    Frames(Vec<VramFrame>),
    /// A reply.
    Reply(RequestId, Reply),
}

/// An allocation as its client knows it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Known {
    /// Pages.
    pub(super) pages: u32,
    /// Whether of a file.
    pub(super) file: bool,
}

/// A mapping as its client knows it.
#[derive(Debug, Clone)]
pub(super) struct Held {
    /// What it holds.
    pub(super) pages: Vec<(AllocationId, u32)>,
    /// Where.
    pub(super) frames: Vec<VramFrame>,
    /// For what.
    pub(super) access: Access,
}

/// One session of a client process.
#[derive(Debug)]
pub(super) struct Client {
    /// Whose place it takes.
    pub(super) seat: usize,
    /// How it behaves.
    pub(super) kind: Kind,
    /// Its trust domain.
    pub(super) domain: u32,
    /// Its connection stands, as far as it knows.
    pub(super) connected: bool,
    /// What it sent before it lost its connection never arrives.
    pub(super) reset: bool,
    /// It said bye.
    pub(super) said_bye: bool,
    /// Its allocations.
    pub(super) allocations: BTreeMap<AllocationId, Known>,
    /// Its mappings.
    pub(super) mappings: BTreeMap<MappingId, Held>,
    /// Mappings that it ended, or tried to.
    pub(super) ended: BTreeSet<MappingId>,
    /// Frames that it has.
    pub(super) imported: BTreeSet<VramFrame>,
    /// Requests without a reply so far.
    pub(super) asked: BTreeMap<RequestId, Asked>,
    /// The last request's id.
    pub(super) last_request: u64,
    /// When its last request arrives.
    pub(super) up_until: u64,
    /// When the last message to it arrives.
    pub(super) down_until: u64,
}

impl Client {
    /// One that has just connected.
    #[must_use]
    pub(super) fn new(seat: usize, kind: Kind, domain: u32) -> Self {
        Self {
            seat,
            kind,
            domain,
            connected: true,
            reset: false,
            said_bye: false,
            allocations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            ended: BTreeSet::new(),
            imported: BTreeSet::new(),
            asked: BTreeMap::new(),
            last_request: 0,
            up_until: 0,
            down_until: 0,
        }
    }

    /// Whether what it is sent must make sense to it.
    #[must_use]
    pub(super) fn is_honest(&self) -> bool {
        self.kind != Kind::Outlaw
    }

    /// Whether one of its mappings holds a frame.
    #[must_use]
    pub(super) fn holds(&self, frame: VramFrame) -> bool {
        self.mappings.values().any(|held| held.frames.contains(&frame))
    }

    /// Ranges of the maps that it waits for.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (&[PageRange], Access)> {
        self.asked.values().filter_map(|asked| match asked {
            Asked::Map(ranges, access) => Some((&ranges[..], *access)),
            _ => None,
        })
    }

    /// Whether a mapping, there or awaited, names an allocation.
    #[must_use]
    pub(super) fn uses(&self, allocation: AllocationId) -> bool {
        let mut held = self.mappings.values().flat_map(|held| &held.pages);
        let mut waited = self.waiting().flat_map(|(ranges, _)| ranges);
        let mut flushed = self.asked.values().filter_map(|asked| match asked {
            Asked::Flush(ranges) => Some(ranges),
            _ => None,
        });
        held.any(|(id, _)| *id == allocation)
            || waited.any(|r| r.allocation == allocation)
            || flushed.any(|ranges| ranges.iter().any(|r| r.allocation == allocation))
    }
}

/// Pages of ranges, in order.
pub(super) fn pages_of(ranges: &[PageRange]) -> impl Iterator<Item = (AllocationId, u32)> {
    let pages = |r: &PageRange| {
        let allocation = r.allocation;
        (r.first..r.first.saturating_add(r.count)).map(move |page| (allocation, page))
    };
    ranges.iter().flat_map(pages)
}
