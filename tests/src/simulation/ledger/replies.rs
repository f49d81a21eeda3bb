//! What the engine answers and commands, held against what is owed and known.

use std::collections::BTreeSet;

use lapis_proto::code::Code;
use lapis_proto::message::{
    Access, CURVE_POINTS_MAX, Mapped, PageRange, Refused, Tier, WorkingSets,
};
use lapisd::engine::event::{Command, Hop, Reply};
use lapisd::engine::ids::{RequestId, SessionId, VramFrame};

use super::{Allocated, Asked, Granted, Ledger, Owed, PageId, Session};
use crate::simulation::client::pages_of;
use crate::simulation::rules::{self, Verdict};
use crate::simulation::shares::Owner;

impl Ledger {
    /// The engine gave a command.
    pub(in crate::simulation) fn obeyed(&mut self, command: &Command, now: u64) {
        match command {
            Command::Reply { session, request, reply } => {
                self.retries.replied();
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
                    // A smaller tier asks for all there are.
                    let keeps = |frame: &&VramFrame| self.alarms.is_overdue(**frame, now);
                    let kept = state.imported.iter().find(keeps);
                    let kept = kept.filter(|_| self.tiers.vram_was_always_full());
                    assert!(
                        kept.is_none(),
                        "{session:?} is asked for {frame:?}, and keeps {kept:?}"
                    );
                    self.alarms.asked_back(*frame, now);
                }
            }
            Command::Transfer { tag, hop } => {
                if let Hop::Release { target } = hop {
                    let has = |session: &Session| session.imported.contains(target);
                    assert!(
                        !self.sessions.values().any(has),
                        "{target:?} is released under a client"
                    );
                }
                self.retries.started(*hop);
                self.tiers.started(*hop);
                self.counts.started(*tag, *hop);
            }
            Command::CloseFile(_) => {}
        }
    }

    fn exported(&mut self, id: SessionId, frames: &[VramFrame]) {
        let domain = self.sessions[&id].domain;
        for frame in frames {
            self.tiers.assert_in_use(*frame);
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
        if let Some(deadline) = what.deadline() {
            self.deadlines.remove(&(deadline, id, request));
        }
        match (reply, what) {
            (Reply::Refused(refused), what) => {
                self.order.gone(|key| key == (id, request));
                self.check_refusal(id, refused, &verdict, &what, now.saturating_sub(since));
                if since == now && matches!(what, Asked::SetTier { .. }) {
                    self.tiers.forget();
                }
            }
            (reply, what) => {
                assert!(verdict.may_be_granted(), "{reply:?} should be one of {verdict:?}");
                self.order.granted((id, request), !self.shares.limit_vram());
                self.granted(id, reply, what, (since, now));
            }
        }
    }

    fn check_refusal(
        &self,
        id: SessionId,
        refused: &Refused,
        verdict: &Verdict,
        what: &Asked,
        waited: u64,
    ) {
        let may_fail = what.deadline().is_some() && verdict.may_be_granted();
        let failed = may_fail && self.fault == Some(refused.code);
        // A map in the queue may have become impossible.
        let impossible = match what {
            Asked::Map { ranges, .. } if may_fail => {
                let session = &self.sessions[&id];
                rules::impossible(self, &Self::pages_of(session, ranges)).contains(&refused.code)
            }
            _ => false,
        };
        let allowed = failed || impossible || verdict.allows(refused.code);
        assert!(allowed, "{refused} is none of {verdict:?}");
        let at_once = match what {
            Asked::Map { wait_us, .. } => *wait_us == 0 && waited == 0,
            // RAM copies that nothing can take may have to stay for a while, and the spill can't be emptied.
            Asked::SetTier { tier: Tier::Vram, wait_us, .. } => *wait_us <= waited,
            _ => true,
        };
        let late = refused.code == Code::TimedOut && !at_once;
        assert!(!self.calm || !late, "{refused}, after {waited} us of a calm run");
    }

    fn granted(&mut self, id: SessionId, reply: &Reply, what: Asked, (since, now): (u64, u64)) {
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
            (Reply::Done, Asked::Hint) => {}
            (Reply::Done, Asked::Flush { places, .. }) => {
                self.flushed.extend(places.into_iter().map(|place| (id, place)));
            }
            (Reply::Done, Asked::SetQuota(quota)) => {
                self.shares.set(quota);
                self.order.reordered();
                self.quotas_were_kept = false;
            }
            (Reply::Done, Asked::SetTier { tier, .. }) => {
                self.tiers.reached(tier, self.mapped.len());
            }
            (Reply::Quotas(list), Asked::ListQuotas) => {
                let mapped: Vec<_> = self.mapped.keys().copied().collect();
                let wanted = self.mapped_or_wanted();
                self.shares.check_list(self.owner(id), list, [&mapped, &wanted], &self.anonymous());
            }
            (Reply::WorkingSets(sets), Asked::WorkingSet(of)) => self.check_sets(id, of, sets),
            (Reply::Stats(stats), Asked::Stat) => {
                self.counts.check(stats, &session.served);
                self.check_stats(stats);
            }
            (Reply::Allocated { allocation, pages }, Asked::Allocate { pages: asked }) => {
                assert!(u64::from(*pages) == asked, "{pages} pages instead of {asked}");
                self.last_backing += 1;
                let backing = self.last_backing;
                let new = Allocated { pages: *pages, file: false, backing };
                session.allocations.insert(*allocation, new);
                self.shares.charge(backing, self.owner(id));
            }
            (
                Reply::Allocated { allocation, pages },
                Asked::OpenFile { file, pages: asked, range },
            ) => {
                assert!(u64::from(*pages) == asked, "{pages} pages instead of {asked}");
                self.last_backing += 1;
                let first = Owner { domain: session.domain, gid: session.gid, session: None };
                let new = self.last_backing;
                let entry = self.shared.entry(range).or_insert_with(|| {
                    self.shares.charge(new, first);
                    self.files.insert(file, (new, range.2));
                    (new, 0)
                });
                entry.1 += 1;
                let new = Allocated { pages: *pages, file: true, backing: entry.0 };
                session.allocations.insert(*allocation, new);
            }
            (
                Reply::Mapped(mapped),
                Asked::Map { ranges, access, wait_us, least_hits, no_room, event, .. },
            ) => {
                assert!(wait_us > 0 || !no_room, "there was no room: {mapped:?}");
                let waited = now - since;
                session.served.add(mapped);
                self.counts.map_granted(mapped);
                assert!(mapped.waited_us == waited, "waited {waited} us: {mapped:?}");
                if wait_us == 0 {
                    self.check_hits(mapped, least_hits, event);
                }
                self.enter_mapping(id, mapped, ranges, access);
                self.check_quotas_kept(id);
            }
            (reply, what) => panic!("{reply:?} answers {what:?}"),
        }
    }

    fn enter_mapping(
        &mut self,
        id: SessionId,
        mapped: &Mapped,
        ranges: Vec<PageRange>,
        access: Access,
    ) {
        let session = &self.sessions[&id];
        let pages: Vec<PageId> = ranges.iter().flat_map(|range| session.pages(range)).collect();
        assert!(mapped.frames.len() == pages.len(), "a frame a page: {mapped:?}");
        let hits = mapped.hits_vram as usize + mapped.hits_ram as usize;
        assert!(hits <= pages.len(), "more hits than pages: {mapped:?}");
        for (page, frame) in pages.iter().zip(&mapped.frames) {
            assert!(session.imported.contains(frame), "{frame:?} was never sent to {id:?}");
            let entry = self.mapped.entry(*page).or_insert((*frame, 0));
            assert!(entry.0 == *frame, "{page:?} is in {frame:?} and in {:?}", entry.0);
            entry.1 += 1;
            self.frames.mapped(*frame, session.domain);
        }
        let cap = self.mapped_most() as usize;
        assert!(self.mapped.len() <= cap, "{} pages mapped, {cap} at most", self.mapped.len());
        let frames: BTreeSet<_> = self.mapped.values().map(|(frame, _)| *frame).collect();
        assert!(frames.len() == self.mapped.len(), "a frame is mapped as two pages");
        if access != Access::Read {
            self.rewritten(id, &ranges);
        }
        let granted = Granted { ranges, frames: mapped.frames.clone(), access, pages };
        let session = self.sessions.get_mut(&id).expect("looked up above");
        let old = session.mappings.insert(mapped.mapping, granted);
        assert!(old.is_none(), "{:?} is given twice", mapped.mapping);
    }

    /// What a session maps for writing no flush of before need have written.
    fn rewritten(&mut self, id: SessionId, ranges: &[PageRange]) {
        let own = self.owed.iter_mut().filter(|((session, _), _)| *session == id);
        for (_, owed) in own {
            if let Asked::Flush { places, .. } = &mut owed.what {
                let rewritten: BTreeSet<_> = pages_of(ranges).collect();
                places.retain(|place| !rewritten.contains(place));
            }
        }
    }

    /// A map that was admitted when it came found in VRAM what others had mapped, and nothing that came later.
    fn check_hits(&self, mapped: &Mapped, least: usize, event: u64) {
        let most = mapped.frames.iter().filter(|frame| self.frames.filled_before(**frame, event));
        let hits = least..=most.count();
        assert!(hits.contains(&(mapped.hits_vram as usize)), "{hits:?} hits: {mapped:?}");
    }

    /// Pages that are mapped, and those that maps wait for.
    fn mapped_or_wanted(&self) -> Vec<PageId> {
        let wanted = self.owed.iter().flat_map(|((session, _), owed)| match &owed.what {
            Asked::Map { ranges, .. } if owed.verdict.may_be_granted() => {
                Self::pages_of(&self.sessions[session], ranges)
            }
            _ => Vec::new(),
        });
        let all: BTreeSet<_> = self.mapped.keys().copied().chain(wanted).collect();
        all.into_iter().collect()
    }

    /// Whether what is mapped keeps within the quotas, and nothing is under way that was admitted before they were
    /// set, or for pages that are pinned by what was.
    fn quotas_are_kept(&self) -> bool {
        let waits = |owed: &Owed| matches!(owed.what, Asked::Map { .. });
        let mapped: Vec<_> = self.mapped.keys().copied().collect();
        !self.owed.values().any(waits) && self.shares.allow_mapped(&mapped)
    }

    /// Whether there is a frame for every page that is mapped or asked for, and for every one that is reserved.
    fn reserves_are_kept(&self) -> bool {
        let mapped: Vec<_> = self.mapped.keys().copied().collect();
        let promised = self.shares.promised(&self.mapped_or_wanted(), &mapped);
        promised <= u64::from(self.tiers.mapped_max())
    }

    /// Quotas that were kept once are kept from then on, until they change.
    fn check_quotas_kept(&self, id: SessionId) {
        if self.shares.were_never_set() {
            return;
        }
        let mapped: Vec<_> = self.mapped.keys().copied().collect();
        let kept = !self.quotas_were_kept || self.shares.allow_mapped(&mapped);
        assert!(kept, "a map of {id:?} takes more VRAM than a quota allows: {mapped:?}");
        let promised = self.shares.promised(&mapped, &self.mapped_or_wanted());
        let kept = !self.reserves_were_kept || promised <= u64::from(self.tiers.mapped_max());
        assert!(kept, "a map of {id:?} takes what is reserved: {promised} frames are promised");
    }

    /// A page of a file could not be read: no map waits for it that was admitted when it came.
    fn check_told_of_loss(&self) {
        let Some(Hop::ReadFile { file, offset, .. }) = self.retries.lost else { return };
        let (backing, first) = self.files[&file];
        let index = u32::try_from((offset - first) / self.limits.page_size).expect("few pages");
        let waits = |(id, _): &(SessionId, RequestId), owed: &Owed| match &owed.what {
            Asked::Map { ranges, wait_us: 0, .. } if owed.verdict.may_be_granted() => {
                Self::pages_of(&self.sessions[id], ranges).contains(&(backing, index))
            }
            _ => false,
        };
        let untold = self.owed.iter().find(|(key, owed)| waits(key, owed));
        assert!(untold.is_none(), "{untold:?} waits for a page that could not be read");
    }

    /// Nothing moves, and there is a slot for every page: so no flush waits but for mappings.
    fn check_flushes_go_on(&self) {
        let pages: u64 = self.anonymous().iter().map(|(_, pages)| u64::from(*pages)).sum();
        if pages > u64::from(self.tiers.below().1) {
            return;
        }
        let mut written = BTreeSet::new();
        for mapping in self.sessions.values().flat_map(|session| session.mappings.values()) {
            if mapping.access != Access::Read {
                written.extend(mapping.pages.iter().copied());
            }
        }
        for ((id, _), owed) in &self.owed {
            match &owed.what {
                Asked::Map { ranges, access, .. }
                    if *access != Access::Read && owed.verdict.may_be_granted() =>
                {
                    written.extend(Self::pages_of(&self.sessions[id], ranges));
                }
                _ => {}
            }
        }
        let waits = |(id, _): &(SessionId, RequestId), owed: &Owed| match &owed.what {
            Asked::Flush { ranges, .. } if owed.verdict.may_be_granted() => {
                let pages = Self::pages_of(&self.sessions[id], ranges);
                !pages.iter().any(|page| written.contains(page))
            }
            _ => false,
        };
        let stuck = self.owed.iter().find(|(key, owed)| waits(key, owed));
        assert!(stuck.is_none(), "a flush waits for nothing: {stuck:?}");
    }

    /// Those that the session may see, with what they have.
    fn check_sets(&self, asking: SessionId, of: Option<SessionId>, sets: &WorkingSets) {
        let asker = &self.sessions[&asking];
        let seen = self.sessions.iter().filter(|(id, session)| {
            let may = asker.admin || session.domain == asker.domain;
            may && session.open && of.is_none_or(|of| of == **id)
        });
        let pages = |session: &Session| {
            session.allocations.values().map(|allocation| u64::from(allocation.pages)).sum::<u64>()
        };
        let expected: Vec<_> = seen.map(|(id, session)| (*id, pages(session))).collect();
        let found: Vec<_> = sets.sessions.iter().map(|set| (set.session, set.pages)).collect();
        assert!(found == expected, "{asking:?} sees {found:?}, not {expected:?}");
        for set in &sets.sessions {
            let [short, middle, long] = set.windows;
            assert!(short <= middle && middle <= long, "{set:?}");
            assert!(long <= set.pages, "it uses more than it has: {set:?}");
            assert!(set.curve.len() <= CURVE_POINTS_MAX, "{set:?}");
            let sorted = set.curve.is_sorted_by_key(|point| (point.pages, point.hits_per_million));
            assert!(sorted, "{set:?}");
            assert!(set.curve.iter().all(|point| point.hits_per_million <= 1_000_000), "{set:?}");
        }
    }

    fn check_stats(&self, stats: &lapis_proto::message::Stats) {
        let found = (stats.sessions, stats.allocations, stats.mappings);
        let count = |n: usize| u32::try_from(n).expect("few");
        let expected = (
            count(self.sessions.len()),
            count(self.sessions.values().map(|session| session.allocations.len()).sum()),
            count(self.mappings_count()),
        );
        assert!(found == expected, "sessions, allocations, mappings: {found:?}, {expected:?}");
        self.tiers.check(stats);
    }

    /// An event was handled: every reply that is due by now has been given.
    pub(in crate::simulation) fn after(&mut self, now: u64, next_deadline: Option<u64>) {
        self.retries.check();
        self.check_told_of_loss();
        let waits = |owed: &Owed| matches!(owed.what, Asked::Map { wait_us: 0, no_room: true, .. });
        let waits = self.owed.iter().find(|(_, owed)| waits(owed));
        assert!(waits.is_none(), "there was no room, and it waits: {waits:?}");
        self.tiers.decide();
        self.quotas_were_kept = self.quotas_were_kept || self.quotas_are_kept();
        self.reserves_were_kept = self.reserves_were_kept || self.reserves_are_kept();
        if let Some(((session, request), owed)) =
            self.owed.iter().find(|(_, owed)| owed.what.deadline().is_none())
        {
            panic!("no reply to {request:?} of {session:?}: {:?}", owed.what);
        }
        let first = self.deadlines.first().map(|(deadline, _, _)| *deadline);
        assert!(first.is_none_or(|first| first > now), "a request waits beyond its deadline");
        assert!(
            first.is_none_or(|first| next_deadline.is_some_and(|next| next <= first)),
            "no tick is asked for at {first:?}, but at {next_deadline:?}"
        );
        let sessions = &self.sessions;
        let held = |frame| sessions.values().any(|session| session.imported.contains(&frame));
        self.alarms.check(now, next_deadline, held);
        let all_open = self.sessions.values().all(|session| session.open);
        let silent = self.counts.nothing_moves() && self.alarms.are_silent(now);
        if silent && all_open && self.shares.were_never_set() {
            let mapped = self.mapped.keys().copied().collect();
            self.order.nothing_moves(&mapped, self.tiers.mapped_max());
            self.check_flushes_go_on();
        }
        let in_future = next_deadline.is_none_or(|next| next > now);
        assert!(in_future, "a tick is asked for in the past: {next_deadline:?} at {now}");
    }
}
