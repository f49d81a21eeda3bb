//! Watches the engine from outside: what goes in, what comes out, and whether the one may follow from the other.
//!
//! It keeps the few facts that the rules are about (who has which allocations, mappings and frames) and nothing of how
//! the engine works. What a request may be answered with is decided by [`super::rules`] when it comes.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::code::Code;
use lapis_proto::message::{Mapped, PageRange, Refused};
use lapisd::engine::event::{Command, Event, Reply, Request};
use lapisd::engine::ids::{AllocationId, Domain, MappingId, RequestId, SessionId, VramFrame};
use lapisd::engine::limits::Limits;

use super::counts::Counts;
use super::rules::{self, Verdict};

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
    pages: Vec<PageId>,
}

/// One session.
#[derive(Debug)]
pub(super) struct Session {
    /// Its trust domain.
    pub(super) domain: Domain,
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
    Allocate { pages: u64 },
    OpenFile { pages: u64, range: SharedRange },
    Free(AllocationId),
    Map { ranges: Vec<PageRange>, deadline: u64, wait_us: u64 },
    Unmap(Vec<MappingId>),
    Revoked(Vec<VramFrame>),
    Bye,
    Stat,
    Prefetch,
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
    pub(super) fn new(limits: Limits, calm: bool) -> Self {
        Self {
            counts: Counts::new(limits.page_size),
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

    /// Live allocations.
    pub(super) fn allocations(&self) -> impl Iterator<Item = &Allocated> {
        self.sessions.values().flat_map(|session| session.allocations.values())
    }

    /// Mappings of live sessions.
    #[must_use]
    pub(super) fn mappings_count(&self) -> usize {
        self.sessions.values().map(|session| session.mappings.len()).sum()
    }

    /// Ranges of maps that a session waits for.
    pub(super) fn waiting(&self, session: SessionId) -> impl Iterator<Item = &[PageRange]> {
        let from = (session, RequestId(0));
        let of_session = self.owed.range(from..).take_while(move |(key, _)| key.0 == session);
        of_session.filter_map(|(_, owed)| match &owed.what {
            Asked::Map { ranges, .. } if owed.verdict.may_be_granted() => Some(&ranges[..]),
            _ => None,
        })
    }

    /// An event is about to be handled.
    pub(super) fn before(&mut self, event: &Event, now: u64, device_lost: bool) {
        self.fault = None;
        match event {
            Event::SessionOpened { session, domain, .. } => {
                let new = Session {
                    domain: *domain,
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
                self.counts.completed(*tag, result);
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
        let page_size = self.limits.page_size;
        let what = match body {
            Request::Allocate { size } => Asked::Allocate { pages: size.div_ceil(page_size) },
            Request::OpenFile { identity, offset, length, .. } => Asked::OpenFile {
                pages: length.div_ceil(page_size),
                range: (domain, *identity, *offset, *length),
            },
            Request::Free(id) => Asked::Free(*id),
            Request::Map(map) => {
                let longest = self.limits.map_wait_us_max;
                let wait = if map.wait_us == 0 { longest } else { map.wait_us.min(longest) };
                let deadline = now.saturating_add(wait);
                self.deadlines.insert((deadline, session, request));
                Asked::Map { ranges: map.ranges.clone(), deadline, wait_us: map.wait_us }
            }
            Request::Unmap(ids) => Asked::Unmap(ids.clone()),
            Request::Prefetch(_) => Asked::Prefetch,
            Request::CancelPrefetch(_)
            | Request::Advise(_)
            | Request::Flush(_)
            | Request::SetQuota(_)
            | Request::ListQuotas
            | Request::SetTier(_) => unreachable!("no client of the simulation asks for this"),
            Request::Stat => Asked::Stat,
            Request::Bye => Asked::Bye,
            Request::Revoked(frames) => Asked::Revoked(frames.clone()),
        };
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

    /// The engine gave a command.
    pub(super) fn obeyed(&mut self, command: &Command, now: u64) {
        match command {
            Command::Reply { session, request, reply } => {
                self.replied(*session, *request, reply, now);
            }
            Command::Export { session, request, frames } => {
                assert!(
                    self.owed.contains_key(&(*session, *request)),
                    "frames are sent for {request:?} of {session:?}, to which no reply is due"
                );
                self.exported(*session, frames);
            }
            Command::Revoke { session, frames } => {
                let state = self.sessions.get(session).filter(|state| state.open);
                let state = state.expect("only open sessions are asked");
                for frame in frames {
                    assert!(state.imported.contains(frame), "{session:?} has no {frame:?}");
                    assert!(
                        !self.mapped.values().any(|(mapped, _)| mapped == frame),
                        "{frame:?} is asked back while mapped"
                    );
                }
            }
            Command::Transfer { tag, hop } => self.counts.started(*tag, *hop),
            Command::CloseFile(_) => {}
        }
    }

    fn exported(&mut self, id: SessionId, frames: &[VramFrame]) {
        let domain = self.sessions[&id].domain;
        for frame in frames {
            let foreign = self
                .sessions
                .iter()
                .find(|(_, session)| session.domain != domain && session.imported.contains(frame));
            assert!(foreign.is_none(), "{frame:?} goes to {id:?}, and others have it");
            let session = self.sessions.get_mut(&id).expect("looked up above");
            assert!(session.open, "{frame:?} goes to {id:?}, which is closed");
            assert!(session.imported.insert(*frame), "{frame:?} is sent to {id:?} twice");
        }
    }

    fn replied(&mut self, id: SessionId, request: RequestId, reply: &Reply, now: u64) {
        let owed = self.owed.remove(&(id, request));
        let Some(Owed { verdict, what, since }) = owed else {
            panic!("{reply:?} answers {request:?} of {id:?}, to which no reply is due");
        };
        if let Asked::Map { deadline, .. } = &what {
            self.deadlines.remove(&(*deadline, id, request));
        }
        match (reply, what) {
            (Reply::Refused(refused), what) => {
                self.check_refusal(refused, &verdict, &what, now.saturating_sub(since));
            }
            (reply, what) => {
                assert!(verdict.may_be_granted(), "{reply:?} should be one of {verdict:?}");
                self.granted(id, reply, what, now - since);
            }
        }
    }

    fn check_refusal(&self, refused: &Refused, verdict: &Verdict, what: &Asked, waited: u64) {
        let is_map = matches!(what, Asked::Map { .. });
        let failed = is_map && verdict.may_be_granted() && self.fault == Some(refused.code);
        assert!(failed || verdict.allows(refused.code), "{refused} is none of {verdict:?}");
        if let (Asked::Map { wait_us, .. }, Code::TimedOut) = (what, refused.code) {
            let at_once = *wait_us == 0 && waited == 0;
            assert!(!self.calm || at_once, "{refused}, after {waited} us of a calm run");
        }
    }

    fn granted(&mut self, id: SessionId, reply: &Reply, what: Asked, waited: u64) {
        let session = self.sessions.get_mut(&id).expect("replies are due to open sessions");
        match (reply, what) {
            (Reply::Done, Asked::Free(allocation)) => {
                let freed = session.allocations.remove(&allocation).expect("judged to be there");
                self.released(freed);
            }
            (Reply::Done, Asked::Unmap(ids)) => {
                for mapping in ids {
                    let session = self.sessions.get_mut(&id).expect("looked up above");
                    let ended = session.mappings.remove(&mapping).expect("judged to be there");
                    self.unmapped(&ended);
                }
            }
            (Reply::Done, Asked::Revoked(frames)) => {
                session.imported.retain(|frame| !frames.contains(frame));
            }
            (Reply::Done, Asked::Bye) => {
                session.said_bye = true;
                session.imported.clear();
            }
            (Reply::Done, Asked::Prefetch) => {}
            (Reply::Stats(stats), Asked::Stat) => {
                let own = (session.maps, session.stalled_us);
                self.counts.check(stats, own);
                self.check_stats(stats);
            }
            (Reply::Allocated { allocation, pages }, Asked::Allocate { pages: asked }) => {
                assert!(u64::from(*pages) == asked, "{pages} pages instead of {asked}");
                self.last_backing += 1;
                let backing = self.last_backing;
                let new = Allocated { pages: *pages, file: false, backing };
                session.allocations.insert(*allocation, new);
            }
            (Reply::Allocated { allocation, pages }, Asked::OpenFile { pages: asked, range }) => {
                assert!(u64::from(*pages) == asked, "{pages} pages instead of {asked}");
                self.last_backing += 1;
                let entry = self.shared.entry(range).or_insert((self.last_backing, 0));
                entry.1 += 1;
                let new = Allocated { pages: *pages, file: true, backing: entry.0 };
                session.allocations.insert(*allocation, new);
            }
            (Reply::Mapped(mapped), Asked::Map { ranges, .. }) => {
                session.maps += 1;
                session.stalled_us += waited;
                self.counts.map_granted(waited);
                self.enter_mapping(id, mapped, ranges, waited);
            }
            (reply, what) => panic!("{reply:?} answers {what:?}"),
        }
    }

    fn enter_mapping(
        &mut self,
        id: SessionId,
        mapped: &Mapped,
        ranges: Vec<PageRange>,
        waited: u64,
    ) {
        let session = &self.sessions[&id];
        let pages: Vec<PageId> = ranges
            .iter()
            .flat_map(|range| {
                let backing = session.allocations[&range.allocation].backing;
                (range.first..range.first + range.count).map(move |page| (backing, page))
            })
            .collect();
        assert!(mapped.frames.len() == pages.len(), "a frame a page: {mapped:?}");
        assert!(mapped.waited_us == waited, "waited {waited} us: {mapped:?}");
        let hits = mapped.hits_vram as usize + mapped.hits_ram as usize;
        assert!(hits <= pages.len(), "more hits than pages: {mapped:?}");
        for (page, frame) in pages.iter().zip(&mapped.frames) {
            assert!(session.imported.contains(frame), "{frame:?} was never sent to {id:?}");
            let entry = self.mapped.entry(*page).or_insert((*frame, 0));
            assert!(entry.0 == *frame, "{page:?} is in {frame:?} and in {:?}", entry.0);
            entry.1 += 1;
        }
        let cap = Limits::mapped_pages_of(self.limits.vram_frames) as usize;
        assert!(self.mapped.len() <= cap, "{} pages mapped, {cap} at most", self.mapped.len());
        let frames: BTreeSet<_> = self.mapped.values().map(|(frame, _)| *frame).collect();
        assert!(frames.len() == self.mapped.len(), "a frame is mapped as two pages");
        let granted = Granted { ranges, frames: mapped.frames.clone(), pages };
        let session = self.sessions.get_mut(&id).expect("looked up above");
        let old = session.mappings.insert(mapped.mapping, granted);
        assert!(old.is_none(), "{:?} is given twice", mapped.mapping);
    }

    fn check_stats(&self, stats: &lapis_proto::message::Stats) {
        let found = (stats.sessions, stats.allocations, stats.mappings);
        let count = |n: usize| u32::try_from(n).expect("few");
        let expected = (
            count(self.sessions.len()),
            count(self.allocations().count()),
            count(self.mappings_count()),
        );
        assert!(found == expected, "sessions, allocations, mappings: {found:?}, {expected:?}");
        for (tier, frames) in [
            (&stats.vram, self.limits.vram_frames),
            (&stats.ram, self.limits.ram_frames),
            (&stats.nvme, self.limits.spill_slots),
        ] {
            let capacity = u64::from(frames) * self.limits.page_size;
            assert!(tier.capacity == capacity && tier.used <= capacity, "{tier:?}");
            // Pages that maps are admitted for are pinned before they have a frame.
            assert!(tier.pinned <= capacity, "{tier:?}: more pinned than there is");
        }
    }

    /// An event was handled: every reply that is due by now has been given.
    pub(super) fn after(&self, now: u64, next_deadline: Option<u64>) {
        if let Some(((session, request), owed)) =
            self.owed.iter().find(|(_, owed)| !matches!(owed.what, Asked::Map { .. }))
        {
            panic!("no reply to {request:?} of {session:?}: {:?}", owed.what);
        }
        let first = self.deadlines.first().map(|(deadline, _, _)| *deadline);
        assert!(first.is_none_or(|first| first > now), "a map waits beyond its deadline");
        assert!(
            first.is_none_or(|first| next_deadline.is_some_and(|next| next <= first)),
            "no tick is asked for at {first:?}, but at {next_deadline:?}"
        );
        let in_future = next_deadline.is_none_or(|next| next > now);
        assert!(in_future, "a tick is asked for in the past: {next_deadline:?} at {now}");
    }
}
