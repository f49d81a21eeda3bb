//! Watches the engine from outside: what goes in, what comes out, and whether the one may follow from the other.
//!
//! It keeps the few facts that the rules are about (who has which allocations, mappings and frames) and nothing of how
//! the engine works. What a request may be answered with is decided by [`super::rules`] when it comes.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::code::Code;
use lapis_proto::message::{Access, PageRange, Quota, Tier};
use lapisd::engine::event::{Event, Hop, Request};
use lapisd::engine::ids::{AllocationId, Domain, MappingId, RequestId, SessionId, VramFrame};
use lapisd::engine::limits::Limits;

use super::counts::Counts;
use super::rules::{self, Verdict};
use super::shares::{Owner, Shares};
use super::tiers::Tiers;

mod replies;

/// A page, told apart from every other that ever was: which backing, which page.
pub(super) type PageId = (u64, u32);

/// A file range that all who open it share.
pub(super) type SharedRange = (Domain, lapisd::store::FileIdentity, u64, u64);

/// One allocation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Allocated {
    /// Pages.
    pub(super) pages: u32,
    /// Whether it is of a file.
    pub(super) file: bool,
    /// Which pages: equal for those who share a file.
    pub(super) backing: u64,
}

/// One granted mapping.
#[derive(Debug)]
pub(super) struct Granted {
    /// What it holds.
    pub(super) ranges: Vec<PageRange>,
    /// Where, page by page.
    pub(super) frames: Vec<VramFrame>,
    /// For what.
    pub(super) access: Access,
    pages: Vec<PageId>,
}

/// One session.
#[derive(Debug)]
pub(super) struct Session {
    /// Its trust domain.
    pub(super) domain: Domain,
    /// Its group.
    gid: u32,
    /// It may change tiers and quotas.
    pub(super) admin: bool,
    /// Its connection stands.
    pub(super) open: bool,
    /// It said bye, and that was accepted.
    pub(super) said_bye: bool,
    /// Its allocations.
    pub(super) allocations: BTreeMap<AllocationId, Allocated>,
    /// Its mappings.
    pub(super) mappings: BTreeMap<MappingId, Granted>,
    /// Frames that it was sent and has not given back.
    pub(super) imported: BTreeSet<VramFrame>,
    maps: u64,
    stalled_us: u64,
}

/// A reply that is due.
#[derive(Debug)]
struct Owed {
    verdict: Verdict,
    what: Asked,
    since: u64,
}

/// What of a request its reply is checked against.
#[derive(Debug)]
enum Asked {
    Allocate {
        pages: u64,
    },
    OpenFile {
        pages: u64,
        range: SharedRange,
    },
    Free(AllocationId),
    Map {
        ranges: Vec<PageRange>,
        access: Access,
        deadline: u64,
        wait_us: u64,
    },
    Flush {
        ranges: Vec<PageRange>,
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
    /// What is answered at once, with nothing to check.
    Hint,
}

impl Asked {
    /// When it is refused at the latest, if it may have to wait.
    fn deadline(&self) -> Option<u64> {
        match self {
            Asked::Map { deadline, .. }
            | Asked::Flush { deadline, .. }
            | Asked::SetTier { deadline, .. } => Some(*deadline),
            _ => None,
        }
    }
}

/// The engine's account, kept by somebody else.
#[derive(Debug)]
pub(super) struct Ledger {
    /// The bounds that were set.
    pub(super) limits: Limits,
    calm: bool,
    sessions: BTreeMap<SessionId, Session>,
    owed: BTreeMap<(SessionId, RequestId), Owed>,
    deadlines: BTreeSet<(u64, SessionId, RequestId)>,
    /// Quotas.
    pub(super) shares: Shares,
    /// What was mapped kept within the quotas, at some time since they changed last.
    quotas_were_kept: bool,
    /// Sizes.
    pub(super) tiers: Tiers,
    /// Live file ranges: backing and allocations.
    shared: BTreeMap<SharedRange, (u64, u32)>,
    /// Mapped pages: frame and mappings.
    mapped: BTreeMap<PageId, (VramFrame, u32)>,
    last_backing: u64,
    /// What the transfer failed with that the present event is about.
    fault: Option<Code>,
    /// Transfers and maps, counted.
    pub(super) counts: Counts,
}

impl Ledger {
    /// Of an engine with nothing in it.
    #[must_use]
    pub(super) fn new(limits: Limits, frames_ready: u32, calm: bool) -> Self {
        Self {
            counts: Counts::new(limits.page_size),
            shares: Shares::new(limits.page_size),
            tiers: Tiers::new(&limits, frames_ready),
            quotas_were_kept: true,
            limits,
            calm,
            sessions: BTreeMap::new(),
            owed: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            shared: BTreeMap::new(),
            mapped: BTreeMap::new(),
            last_backing: 0,
            fault: None,
        }
    }

    /// Sessions that are open or linger.
    #[must_use]
    pub(super) fn sessions_count(&self) -> usize {
        self.sessions.len()
    }

    /// One of them.
    #[must_use]
    pub(super) fn session(&self, session: SessionId) -> Option<&Session> {
        self.sessions.get(&session)
    }

    /// Maps that a session waits for.
    #[must_use]
    pub(super) fn maps_waiting(&self, session: SessionId) -> usize {
        let from = (session, RequestId(0));
        let of_session = self.owed.range(from..).take_while(|(key, _)| key.0 == session);
        let map = |owed: &Owed| matches!(owed.what, Asked::Map { .. });
        of_session.filter(|(_, owed)| map(owed) && owed.verdict.may_be_granted()).count()
    }

    /// Mappings of live sessions.
    #[must_use]
    pub(super) fn mappings_count(&self) -> usize {
        self.sessions.values().map(|session| session.mappings.len()).sum()
    }

    /// Whom a session's own pages are charged to.
    #[must_use]
    pub(super) fn owner(&self, id: SessionId) -> Owner {
        let session = &self.sessions[&id];
        Owner { domain: session.domain, gid: session.gid, session: Some(id) }
    }

    /// Whether a session waits for anything.
    #[must_use]
    pub(super) fn waits(&self, session: SessionId) -> bool {
        let from = (session, RequestId(0));
        let mut of_session = self.owed.range(from..).take_while(|(key, _)| key.0 == session);
        of_session.any(|(_, owed)| owed.what.deadline().is_some() && owed.verdict.may_be_granted())
    }

    /// Anonymous backings, each with its pages.
    #[must_use]
    pub(super) fn anonymous(&self) -> Vec<(u64, u32)> {
        let all = self.sessions.values().flat_map(|session| session.allocations.values());
        all.filter(|allocation| !allocation.file).map(|a| (a.backing, a.pages)).collect()
    }

    /// The distinct pages of ranges of a session's allocations.
    #[must_use]
    pub(super) fn pages_of(session: &Session, ranges: &[PageRange]) -> Vec<PageId> {
        let pages = ranges.iter().flat_map(|range| {
            let backing = session.allocations[&range.allocation].backing;
            (range.first..range.first + range.count).map(move |page| (backing, page))
        });
        let pages: BTreeSet<_> = pages.collect();
        pages.into_iter().collect()
    }

    /// Ranges of maps and flushes that a session waits for.
    pub(super) fn waiting(&self, session: SessionId) -> impl Iterator<Item = &[PageRange]> {
        let from = (session, RequestId(0));
        let of_session = self.owed.range(from..).take_while(move |(key, _)| key.0 == session);
        of_session.filter_map(|(_, owed)| match &owed.what {
            Asked::Map { ranges, .. } | Asked::Flush { ranges, .. }
                if owed.verdict.may_be_granted() =>
            {
                Some(&ranges[..])
            }
            _ => None,
        })
    }

    /// An event is about to be handled.
    pub(super) fn before(&mut self, event: &Event, now: u64, device_lost: bool) {
        self.fault = None;
        match event {
            Event::SessionOpened { session, domain, gid, admin } => {
                let new = Session {
                    domain: *domain,
                    gid: *gid,
                    admin: *admin,
                    open: true,
                    said_bye: false,
                    allocations: BTreeMap::new(),
                    mappings: BTreeMap::new(),
                    imported: BTreeSet::new(),
                    maps: 0,
                    stalled_us: 0,
                };
                self.sessions.insert(*session, new);
            }
            Event::Request { session, request, body } => {
                self.asked(*session, *request, body, now, device_lost);
            }
            Event::SessionClosed { session } => self.closed(*session),
            Event::ProcessDied { session } => {
                self.closed(*session);
                self.died(*session);
            }
            Event::TransferDone { tag, result } => {
                self.fault = result.as_ref().err().map(|fault| fault.wire().0);
                let hop = self.counts.completed(*tag, result);
                if let Hop::Restore { target } = hop {
                    self.tiers.restored(target, result.is_ok());
                }
            }
            Event::Tick => {}
        }
    }

    fn asked(
        &mut self,
        session: SessionId,
        request: RequestId,
        body: &Request,
        now: u64,
        device_lost: bool,
    ) {
        let Some(state) = self.sessions.get(&session).filter(|state| state.open) else { return };
        let domain = state.domain;
        let verdict = rules::judge(self, session, body, device_lost);
        let (page_size, longest) = (self.limits.page_size, self.limits.map_wait_us_max);
        let what = match body {
            Request::Allocate { size } => Asked::Allocate { pages: size.div_ceil(page_size) },
            Request::OpenFile { identity, offset, length, .. } => Asked::OpenFile {
                pages: length.div_ceil(page_size),
                range: (domain, *identity, *offset, *length),
            },
            Request::Free(id) => Asked::Free(*id),
            Request::Map(map) => {
                let wait = if map.wait_us == 0 { longest } else { map.wait_us.min(longest) };
                let (ranges, access) = (map.ranges.clone(), map.access);
                let deadline = now.saturating_add(wait);
                Asked::Map { ranges, access, deadline, wait_us: map.wait_us }
            }
            Request::Unmap(ids) => Asked::Unmap(ids.clone()),
            Request::Prefetch(_)
            | Request::CancelPrefetch(_)
            | Request::Advise(_)
            | Request::SetPlan(_) => Asked::Hint,
            Request::Flush(flush) => {
                let deadline = now.saturating_add(flush.wait_us.clamp(1, longest));
                Asked::Flush { ranges: flush.ranges.clone(), deadline }
            }
            Request::SetQuota(quota) => Asked::SetQuota(*quota),
            Request::ListQuotas => Asked::ListQuotas,
            Request::SetTier(set) => {
                self.tiers.consider(set);
                let deadline = now.saturating_add(set.wait_us.clamp(1, longest));
                Asked::SetTier { tier: set.tier, deadline, wait_us: set.wait_us }
            }
            Request::Stat => Asked::Stat,
            Request::Bye => Asked::Bye,
            Request::Revoked(frames) => Asked::Revoked(frames.clone()),
        };
        if let Some(deadline) = what.deadline() {
            self.deadlines.insert((deadline, session, request));
        }
        let owed = Owed { verdict, what, since: now };
        let old = self.owed.insert((session, request), owed);
        assert!(old.is_none(), "the simulation uses {request:?} of {session:?} twice");
    }

    fn closed(&mut self, id: SessionId) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if !session.open {
            return;
        }
        session.open = false;
        for allocation in std::mem::take(&mut session.allocations).into_values() {
            self.released(allocation);
        }
        self.owed.retain(|(session, _), _| *session != id);
        self.deadlines.retain(|(_, session, _)| *session != id);
        let session = &self.sessions[&id];
        if session.mappings.is_empty() && session.imported.is_empty() {
            self.sessions.remove(&id);
        }
    }

    fn died(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        session.mappings.into_values().for_each(|mapping| self.unmapped(&mapping));
    }

    fn released(&mut self, allocation: Allocated) {
        self.shared.retain(|_, (backing, references)| {
            if *backing == allocation.backing {
                *references -= 1;
            }
            *references > 0
        });
    }

    fn unmapped(&mut self, mapping: &Granted) {
        for page in &mapping.pages {
            let entry = self.mapped.get_mut(page).expect("mappings are entered");
            entry.1 -= 1;
            if entry.1 == 0 {
                self.mapped.remove(page);
            }
        }
    }
}
