//! Watches the engine from outside: what goes in, what comes out, and whether the one may follow from the other.
//!
//! It keeps the few facts that the rules are about (who has which allocations, mappings and frames) and nothing of how
//! the engine works. What a request may be answered with is decided by [`super::rules`] when it comes.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::code::Code;
use lapis_proto::message::PageRange;
use lapisd::engine::event::{Event, Hop, Request};
use lapisd::engine::ids::{AllocationId, Domain, FileId, RequestId, SessionId, VramFrame};
use lapisd::engine::limits::Limits;

use super::alarms::Alarms;
use super::client::pages_of;
use super::counts::Counts;
use super::frames::Frames;
use super::order::Order;
use super::retries::Retries;
use super::rules;
use super::served::Served;
use super::shares::{Owner, Shares};
use super::tiers::{Tiers, mapped_of};
use known::{Allocated, Asked, Granted, Owed};

pub(super) use known::Session;

mod known;
mod replies;

/// A page, told apart from every other that ever was: which backing, which page.
pub(super) type PageId = (u64, u32);

/// A page, as its client names it.
pub(super) type Place = (AllocationId, u32);

/// A file range that all who open it share.
pub(super) type SharedRange = (Domain, lapisd::store::FileIdentity, u64, u64);

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
    /// There was a frame for every page mapped or asked for and for every one reserved, at some time since either
    /// changed last.
    reserves_were_kept: bool,
    /// Sizes.
    pub(super) tiers: Tiers,
    /// Live file ranges: backing and allocations.
    shared: BTreeMap<SharedRange, (u64, u32)>,
    /// Files in the store that backings read, each from which byte on.
    files: BTreeMap<FileId, (u64, u64)>,
    /// Mapped pages: frame and mappings.
    mapped: BTreeMap<PageId, (VramFrame, u32)>,
    last_backing: u64,
    /// What the transfer failed with that the present event is about.
    fault: Option<Code>,
    /// Transfers and maps, counted.
    pub(super) counts: Counts,
    /// Who waits behind whom.
    order: Order,
    frames: Frames,
    alarms: Alarms,
    retries: Retries,
    /// Pages of flushes that are done, to be looked for in the spill.
    pub(super) flushed: Vec<(SessionId, Place)>,
}

impl Ledger {
    /// Of an engine with nothing in it.
    #[must_use]
    pub(super) fn new(limits: Limits, frames_ready: u32, calm: bool) -> Self {
        Self {
            counts: Counts::new(limits.page_size, limits.depth),
            order: Order::default(),
            frames: Frames::new(limits.unified),
            alarms: Alarms::default(),
            retries: Retries::default(),
            flushed: Vec::new(),
            shares: Shares::new(limits.page_size),
            tiers: Tiers::new(&limits, frames_ready),
            quotas_were_kept: true,
            reserves_were_kept: true,
            limits,
            calm,
            sessions: BTreeMap::new(),
            owed: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            shared: BTreeMap::new(),
            files: BTreeMap::new(),
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
        let pages: BTreeSet<_> = ranges.iter().flat_map(|range| session.pages(range)).collect();
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
        self.frames.next_event();
        self.retries.next_event();
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
                    served: Served::default(),
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
                match (hop, result) {
                    (hop, Ok(_)) => self.frames.moved(hop),
                    (Hop::WriteSpill { .. }, Err(_)) => self.alarms.write_failed(now),
                    (_, Err(_)) => {}
                }
                self.retries.completed(hop, result);
                match hop {
                    Hop::Restore { target } => {
                        self.tiers.restored(target, result.is_ok());
                        self.reserves_were_kept &= result.is_ok();
                    }
                    Hop::Release { target } => self.tiers.released(target),
                    _ => {}
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
            Request::OpenFile { file, identity, offset, length } => Asked::OpenFile {
                file: *file,
                pages: length.div_ceil(page_size),
                range: (domain, *identity, *offset, *length),
            },
            Request::Free(id) => Asked::Free(*id),
            Request::Map(map) => {
                let wait = if map.wait_us == 0 { longest } else { map.wait_us.min(longest) };
                let (ranges, access) = (map.ranges.clone(), map.access);
                let deadline = now.saturating_add(wait);
                let (event, wait_us) = (self.frames.event(), map.wait_us);
                let (least_hits, no_room) = if verdict.may_be_granted() {
                    self.map_comes((session, request), &ranges)
                } else {
                    (0, false)
                };
                Asked::Map { ranges, access, deadline, wait_us, least_hits, no_room, event }
            }
            Request::Unmap(ids) => Asked::Unmap(ids.clone()),
            Request::Prefetch(_)
            | Request::CancelPrefetch(_)
            | Request::Advise(_)
            | Request::SetPlan(_) => Asked::Hint,
            Request::Flush(flush) => {
                let deadline = now.saturating_add(flush.wait_us.clamp(1, longest));
                let ranges = flush.ranges.clone();
                let places = if verdict.may_be_granted() {
                    pages_of(&ranges).filter(|(id, _)| !state.allocations[id].file).collect()
                } else {
                    BTreeSet::new()
                };
                Asked::Flush { ranges, places, deadline }
            }
            Request::SetQuota(quota) => {
                self.reserves_were_kept = false;
                Asked::SetQuota(*quota)
            }
            Request::ListQuotas => Asked::ListQuotas,
            Request::SetTier(set) => {
                self.tiers.consider(set);
                self.reserves_were_kept = false;
                let deadline = now.saturating_add(set.wait_us.clamp(1, longest));
                Asked::SetTier { tier: set.tier, deadline, wait_us: set.wait_us }
            }
            Request::Stat => Asked::Stat,
            Request::WorkingSet(of) => Asked::WorkingSet(*of),
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
        self.order.gone(|(session, _)| session == id);
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
        self.order.unmapped(&self.mapped.keys().copied().collect(), self.mapped_most());
    }

    /// Pages that may be mapped at once, if VRAM has its full size.
    fn mapped_most(&self) -> u32 {
        mapped_of(self.limits.vram_frames)
    }

    /// A map comes that may be granted: how many of its pages are mapped, and whether there is no room for the others.
    fn map_comes(&mut self, key: (SessionId, RequestId), ranges: &[PageRange]) -> (usize, bool) {
        let session = &self.sessions[&key.0];
        let pages: Vec<_> = ranges.iter().flat_map(|range| session.pages(range)).collect();
        let mapped: BTreeSet<_> = self.mapped.keys().copied().collect();
        let priority = self.shares.priority(self.owner(key.0));
        let needs_room = self.order.came((key, priority), &pages, &mapped, self.mapped_most());
        let taken = mapped.iter().chain(&pages).collect::<BTreeSet<_>>().len();
        let taken = taken + self.frames_lost_to(session.domain);
        let no_room = needs_room && taken > self.tiers.mapped_max() as usize;
        (pages.iter().filter(|page| mapped.contains(page)).count(), no_room)
    }

    /// Frames that nobody has mapped and a domain can't have: they are asked back, or those who have them have not given
    /// back others.
    fn frames_lost_to(&self, domain: Domain) -> usize {
        let mut lost: BTreeSet<_> = self.alarms.frames().collect();
        let overdue = |session: &&Session| {
            let keeps = |frame: &VramFrame| self.alarms.is_overdue(*frame, 0);
            session.domain != domain && session.imported.iter().any(keeps)
        };
        for session in self.sessions.values().filter(overdue) {
            lost.extend(&session.imported);
        }
        let mapped: BTreeSet<_> = self.mapped.values().map(|(frame, _)| *frame).collect();
        lost.difference(&mapped).count()
    }
}
