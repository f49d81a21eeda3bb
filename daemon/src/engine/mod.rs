//! The engine: every decision, no I/O.
//!
//! It owns all state: sessions, allocations, pages, frames, waiting requests. [`Engine::apply`] is the only way in: it
//! handles one event, then restores what must always hold (grant what can be granted, move what must move), and
//! appends commands to an outbox. It has no clock (`now` is an argument), no randomness, no I/O and no locks, so a run
//! replays exactly. Invariants: [`Engine::verify_invariants`].
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use lapis_proto::code::Code;
use lapis_proto::message::{Counters, Quota, QuotaSubject, Refused};

use allocator::Allocation;
use event::{Command, Event, Outbox, Reply, Request, TransferFault};
use flush::PendingFlush;
use frames::{FreeSlots, VramFrames};
use ids::{AllocationId, BackingId, MappingId, PageRef, RequestId, SessionId, Tag, VramFrame};
use limits::Limits;
use maps::{Mapping, PendingId, PendingMap};
use page_table::{FileKey, PageTable};
use policy::pace::Link;
use prefetch::{PrefetchKey, Wanted};
use recommend::Recommender;
use resize::Sizes;
use session::Session;
use tally::Tally;

pub mod allocator;
#[cfg(test)]
mod cases;
pub mod event;
mod flush;
mod found;
pub mod frames;
mod hops;
pub mod ids;
mod invariants;
pub mod limits;
pub mod maps;
mod observe;
pub mod page;
pub mod page_table;
mod placement;
mod plans;
pub mod policy;
mod prefetch;
pub mod quota;
mod recommend;
pub mod refusal;
mod resize;
mod revocation;
mod room;
pub mod session;
pub mod stats;
pub mod tally;
mod waiters;

/// All state of the daemon that is not a socket, a file or a device.
#[derive(Debug)]
pub struct Engine {
    limits: Limits,
    sessions: BTreeMap<SessionId, Session>,
    allocations: BTreeMap<AllocationId, Allocation>,
    mappings: BTreeMap<MappingId, Mapping>,
    files: BTreeMap<FileKey, BackingId>,
    quotas: BTreeMap<QuotaSubject, Quota>,
    table: PageTable,
    vram: VramFrames,
    ram: FreeSlots,
    slots: FreeSlots,
    sizes: Sizes,
    /// No writes to the spill before this time: the last one failed.
    spill_rests_until: u64,
    anonymous_pages: u64,

    /// Maps that wait, by age.
    pending: BTreeMap<PendingId, PendingMap>,
    /// Those whose place in VRAM is not granted yet, in order.
    queue: VecDeque<PendingId>,
    /// Those that wait for a page.
    page_waiters: BTreeMap<PageRef, Vec<PendingId>>,
    deadlines: BTreeSet<(u64, PendingId)>,

    /// Pages wanted in VRAM, in order: first those that maps wait for, then those prefetched.
    fill_demand: VecDeque<PageRef>,
    fill_prefetch: BTreeMap<PrefetchKey, Wanted>,
    /// Pages that have a VRAM frame and wait for a RAM frame.
    read_demand: VecDeque<PageRef>,
    read_prefetch: VecDeque<PageRef>,
    /// Flushes that wait, those that wait for a page, and pages in line to be copied to RAM and to be written.
    flushes: BTreeMap<PendingId, PendingFlush>,
    flush_waiters: BTreeMap<PageRef, Vec<PendingId>>,
    flush_down: VecDeque<PageRef>,
    flush_out: VecDeque<PageRef>,
    transfers: BTreeMap<Tag, PageRef>,
    /// Frames whose memory is being released or made.
    frame_transfers: BTreeMap<Tag, VramFrame>,
    reads: u32,
    downs: u32,
    outs: u32,
    /// Frames asked back, with the time when they count as quarantined.
    revoking: BTreeMap<VramFrame, u64>,

    /// Flushes that had nothing to write.
    flushed: Vec<PendingId>,
    /// Maps whose last page has come, to be granted.
    complete: Vec<PendingId>,
    /// Fills under way for prefetches.
    prefetches_moving: u32,
    recommender: Recommender,
    /// Names plans.
    last_plan: u32,
    /// When a planned fetch is due next, microseconds.
    planned_at: Option<u64>,
    /// From files and the spill to RAM, and from RAM to VRAM.
    read_link: Link,
    up_link: Link,
    /// What a page access takes on average, nanoseconds, and when the last one was, microseconds.
    access_ns: u64,
    accessed_us: u64,
    /// The time of the event that is being handled, microseconds.
    now: u64,
    /// Orders prefetches; runs with the clock.
    prefetch_tick: u64,
    /// Page accesses so far; starts at 1 so that 0 can mean never.
    clock: u64,
    /// A quota or the size of a tier changed: maps that wait may have become impossible.
    bounds_changed: bool,
    last_id: u64,
    last_tag: u64,
    counters: Counters,
    tally: Tally,
    device_lost: bool,
}

impl Engine {
    /// An engine with nothing in it.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let vram_frames = limits.vram_frames;
        Self {
            vram: VramFrames::new(limits.vram_frames),
            ram: FreeSlots::new(limits.ram_frames),
            slots: FreeSlots::new(limits.spill_slots),
            sizes: Sizes::new(limits.vram_frames, limits.ram_frames, limits.spill_slots),
            frame_transfers: BTreeMap::new(),
            limits,
            sessions: BTreeMap::new(),
            allocations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            files: BTreeMap::new(),
            quotas: BTreeMap::new(),
            table: PageTable::default(),
            spill_rests_until: 0,
            anonymous_pages: 0,
            pending: BTreeMap::new(),
            queue: VecDeque::new(),
            page_waiters: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            fill_demand: VecDeque::new(),
            fill_prefetch: BTreeMap::new(),
            flushes: BTreeMap::new(),
            flush_waiters: BTreeMap::new(),
            flush_down: VecDeque::new(),
            flush_out: VecDeque::new(),
            read_demand: VecDeque::new(),
            read_prefetch: VecDeque::new(),
            transfers: BTreeMap::new(),
            reads: 0,
            downs: 0,
            outs: 0,
            revoking: BTreeMap::new(),
            flushed: Vec::new(),
            complete: Vec::new(),
            prefetches_moving: 0,
            recommender: Recommender::new(vram_frames),
            last_plan: 0,
            planned_at: None,
            read_link: Link::default(),
            up_link: Link::default(),
            access_ns: 1,
            accessed_us: 0,
            now: 0,
            prefetch_tick: 0,
            clock: 1,
            bounds_changed: false,
            last_id: 0,
            last_tag: 0,
            counters: Counters::default(),
            tally: Tally::default(),
            device_lost: false,
        }
    }

    /// Its bounds.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether the device failed for good: the daemon should save what it can and restart.
    #[must_use]
    pub fn device_lost(&self) -> bool {
        self.device_lost
    }

    /// When the next `Tick` is due, microseconds on the caller's clock.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let map = self.deadlines.first().map(|(deadline, _)| *deadline);
        let revocation = self.revoking.values().min().copied();
        let spill = (self.spill_rests_until > 0).then_some(self.spill_rests_until);
        [map, revocation, spill, self.planned_at].into_iter().flatten().min()
    }

    /// Whether a session is open, or lingers.
    #[must_use]
    pub fn has_session(&self, session: SessionId) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Open and lingering sessions.
    #[must_use]
    pub fn sessions_count(&self) -> usize {
        self.sessions.len()
    }

    /// Handles one event at `now` (microseconds on a clock that never goes back), then does whatever has become
    /// possible. Commands are appended to `outbox`.
    pub fn apply(&mut self, event: Event, now: u64, outbox: &mut Outbox) {
        self.now = now;
        match event {
            Event::SessionOpened { session, domain, gid, admin } => {
                let old = self.sessions.insert(session, Session::new(domain, gid, admin));
                assert!(old.is_none(), "session ids are never reused");
            }
            Event::Request { session, request, body } => {
                self.handle_request(session, request, body, now, outbox);
            }
            Event::SessionClosed { session } => self.handle_closed(session, outbox),
            Event::ProcessDied { session } => self.handle_died(session, outbox),
            Event::TransferDone { tag, result } => self.handle_transfer(tag, result, now, outbox),
            Event::Tick => {}
        }
        if self.spill_rests_until <= now {
            self.spill_rests_until = 0;
        }
        self.expire(now, outbox);
        self.advance(now, outbox);
    }

    fn session(&self, id: SessionId) -> &Session {
        self.sessions.get(&id).expect("the caller looked it up")
    }

    fn session_mut(&mut self, id: SessionId) -> &mut Session {
        self.sessions.get_mut(&id).expect("the caller looked it up")
    }

    fn handle_request(
        &mut self,
        session: SessionId,
        request: RequestId,
        body: Request,
        now: u64,
        outbox: &mut Outbox,
    ) {
        if self.sessions.get(&session).is_none_or(|session| session.lingering) {
            // Its connection is gone: nobody waits for the reply, but a file that came along must be closed.
            if let Request::OpenFile { file, .. } = body {
                outbox.push(Command::CloseFile(file));
            }
            return;
        }
        let refused_by_state = self.refuse_by_state(session, &body);
        let result = match (refused_by_state, body) {
            (Some(refused), body) => {
                if let Request::OpenFile { file, .. } = body {
                    outbox.push(Command::CloseFile(file));
                }
                Err(refused)
            }
            (None, Request::Allocate { size }) => self.allocate(session, size),
            (None, Request::OpenFile { file, identity, offset, length }) => {
                self.open_file(session, file, identity, (offset, length), outbox)
            }
            (None, Request::Free(id)) => self.free(session, id, outbox),
            (None, Request::Map(map)) => match self.map(session, request, &map, now) {
                Ok(()) => return,
                Err(refused) => Err(refused),
            },
            (None, Request::Unmap(ids)) => self.unmap(session, &ids, outbox),
            (None, Request::Prefetch(prefetch)) => self.prefetch(session, &prefetch, now),
            (None, Request::CancelPrefetch(ranges)) => self.cancel_prefetch(session, &ranges),
            (None, Request::SetPlan(plan)) => self.set_plan(session, &plan),
            (None, Request::Advise(advise)) => self.advise(session, &advise),
            (None, Request::Flush(flush)) => match self.flush(session, request, &flush, now) {
                Ok(()) => return,
                Err(refused) => Err(refused),
            },
            (None, Request::SetQuota(quota)) => self.set_quota(session, quota),
            (None, Request::SetTier(set)) => match self.set_tier(session, request, &set, now) {
                Ok(()) => return,
                Err(refused) => Err(refused),
            },
            (None, Request::ListQuotas) => Ok(self.list_quotas(session)),
            (None, Request::Stat) => Ok(Reply::Stats(Box::new(self.stats(session)))),
            (None, Request::WorkingSet(of)) => Ok(self.working_sets(session, of)),
            (None, Request::Bye) => self.bye(session),
            (None, Request::Revoked(frames)) => self.revoked(session, &frames),
        };
        let reply = result.unwrap_or_else(|refused| Reply::Refused(Box::new(refused)));
        outbox.push(Command::Reply { session, request, reply });
    }

    /// Refuses one more request that may have to wait.
    fn check_waiting(&self, session: SessionId) -> Result<(), Refused> {
        let state = self.session(session);
        let (waiting, limit) =
            (state.waiting + state.flushing, self.limits.waiting_per_session_max);
        if waiting < limit {
            return Ok(());
        }
        Err(refusal::too_many("this session's waiting request", waiting.into(), limit.into()))
    }

    fn refuse_by_state(&self, session: SessionId, body: &Request) -> Option<Refused> {
        if self.session(session).said_bye {
            return Some(refusal::plain(Code::BadRequest, "nothing may follow bye"));
        }
        let needs_device = matches!(
            body,
            Request::Allocate { .. }
                | Request::OpenFile { .. }
                | Request::Map(_)
                | Request::Prefetch(_)
                | Request::Flush(_)
                | Request::SetTier(_)
        );
        (needs_device && self.device_lost).then(refusal::device_lost)
    }

    fn bye(&mut self, session: SessionId) -> Result<Reply, Refused> {
        let state = self.session_mut(session);
        if !state.mappings.is_empty() || state.waiting + state.flushing > 0 {
            return Err(refusal::plain(
                Code::InUse,
                "the session still has mappings: unmap them before bye",
            ));
        }
        state.said_bye = true;
        state.forget_all();
        self.recheck_revoking();
        Ok(Reply::Done)
    }

    fn handle_closed(&mut self, id: SessionId, outbox: &mut Outbox) {
        if !self.sessions.contains_key(&id) {
            return;
        }
        let waiting: Vec<_> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.session == id)
            .map(|(pending, _)| *pending)
            .collect();
        for pending in waiting {
            self.abandon(pending, outbox);
        }
        let flushes = self.flushes.iter().filter(|(_, flush)| flush.session == id);
        for flush in flushes.map(|(flush, _)| *flush).collect::<Vec<_>>() {
            self.abandon_flush(flush, outbox);
        }
        let resizes = self.sizes.pending.iter().filter(|(_, resize)| resize.session == id);
        for resize in resizes.map(|(resize, _)| *resize).collect::<Vec<_>>() {
            self.abandon_resize(resize);
        }
        self.end_plans(id);
        let allocations = self.session(id).allocations.clone();
        for allocation in allocations {
            self.release_allocation(allocation, outbox);
        }
        let session = self.session_mut(id);
        session.lingering = true;
        if session.holds_nothing() {
            self.handle_died(id, outbox);
        }
    }

    fn handle_died(&mut self, id: SessionId, outbox: &mut Outbox) {
        if self.sessions.get(&id).is_some_and(|session| !session.lingering) {
            self.handle_closed(id, outbox);
        }
        let Some(session) = self.sessions.get(&id) else { return };
        for mapping in session.mappings.clone() {
            self.end_mapping(mapping, outbox);
        }
        self.sessions.remove(&id);
        self.recheck_revoking();
    }

    fn handle_transfer(
        &mut self,
        tag: Tag,
        result: Result<u64, TransferFault>,
        now: u64,
        outbox: &mut Outbox,
    ) {
        if let Some(frame) = self.frame_transfers.remove(&tag) {
            return self.frame_done(frame, &result, outbox);
        }
        let at = self.transfers.remove(&tag).expect("each transfer ends once");
        self.hop_ended(at, result.as_ref().err());
        match result {
            Ok(checksum) => self.hop_succeeded(at, checksum, outbox),
            Err(fault) => self.hop_failed(at, &fault, now, outbox),
        }
        self.page_settled(at, outbox);
    }
}

#[cfg(test)]
mod tests;
