//! What the engine answers and commands, held against what is owed and known.

use std::collections::BTreeSet;

use lapis_proto::code::Code;
use lapis_proto::message::{Access, Mapped, PageRange, Refused, Tier};
use lapisd::engine::event::{Command, Hop, Reply};
use lapisd::engine::ids::{RequestId, SessionId, VramFrame};
use lapisd::engine::limits::Limits;

use super::{Allocated, Asked, Granted, Ledger, Owed, PageId, Session};
use crate::simulation::rules::{self, Verdict};
use crate::simulation::shares::Owner;

impl Ledger {
    /// The engine gave a command.
    pub(in crate::simulation) fn obeyed(&mut self, command: &Command, now: u64) {
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
            Command::Transfer { tag, hop } => {
                if let Hop::Release { target } = hop {
                    let has = |session: &Session| session.imported.contains(target);
                    assert!(
                        !self.sessions.values().any(has),
                        "{target:?} is released under a client"
                    );
                }
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
                self.check_refusal(id, refused, &verdict, &what, now.saturating_sub(since));
                if since == now && matches!(what, Asked::SetTier { .. }) {
                    self.tiers.forget();
                }
            }
            (reply, what) => {
                assert!(verdict.may_be_granted(), "{reply:?} should be one of {verdict:?}");
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
            (Reply::Done, Asked::Hint | Asked::Flush { .. }) => {}
            (Reply::Done, Asked::SetQuota(quota)) => {
                self.shares.set(quota);
                self.quotas_were_kept = false;
            }
            (Reply::Done, Asked::SetTier { tier, .. }) => {
                self.tiers.reached(tier, self.mapped.len());
            }
            (Reply::Quotas(list), Asked::ListQuotas) => {
                let mapped: Vec<_> = self.mapped.keys().copied().collect();
                self.shares.check_list(self.owner(id), list, &mapped, &self.anonymous());
            }
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
                self.shares.charge(backing, self.owner(id));
            }
            (Reply::Allocated { allocation, pages }, Asked::OpenFile { pages: asked, range }) => {
                assert!(u64::from(*pages) == asked, "{pages} pages instead of {asked}");
                self.last_backing += 1;
                let first = Owner { domain: session.domain, gid: session.gid, session: None };
                let new = self.last_backing;
                let entry = self.shared.entry(range).or_insert_with(|| {
                    self.shares.charge(new, first);
                    (new, 0)
                });
                entry.1 += 1;
                let new = Allocated { pages: *pages, file: true, backing: entry.0 };
                session.allocations.insert(*allocation, new);
            }
            (Reply::Mapped(mapped), Asked::Map { ranges, access, .. }) => {
                let waited = now - since;
                session.maps += 1;
                session.stalled_us += waited;
                self.counts.map_granted(waited);
                assert!(mapped.waited_us == waited, "waited {waited} us: {mapped:?}");
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
        let pages: Vec<PageId> = ranges
            .iter()
            .flat_map(|range| {
                let backing = session.allocations[&range.allocation].backing;
                (range.first..range.first + range.count).map(move |page| (backing, page))
            })
            .collect();
        assert!(mapped.frames.len() == pages.len(), "a frame a page: {mapped:?}");
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
        let granted = Granted { ranges, frames: mapped.frames.clone(), access, pages };
        let session = self.sessions.get_mut(&id).expect("looked up above");
        let old = session.mappings.insert(mapped.mapping, granted);
        assert!(old.is_none(), "{:?} is given twice", mapped.mapping);
    }

    /// Whether what is mapped keeps within the quotas, and nothing is under way that was admitted before they were
    /// set, or for pages that are pinned by what was.
    fn quotas_are_kept(&self) -> bool {
        let waits = |owed: &Owed| matches!(owed.what, Asked::Map { .. });
        let mapped: Vec<_> = self.mapped.keys().copied().collect();
        !self.owed.values().any(waits) && self.shares.allow_mapped(&mapped)
    }

    /// Quotas that were kept once are kept from then on, until they change.
    fn check_quotas_kept(&self, id: SessionId) {
        let mapped: Vec<_> = self.mapped.keys().copied().collect();
        let kept = !self.quotas_were_kept || self.shares.allow_mapped(&mapped);
        assert!(kept, "a map of {id:?} takes more VRAM than a quota allows: {mapped:?}");
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
        self.tiers.decide();
        self.quotas_were_kept = self.quotas_were_kept || self.quotas_are_kept();
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
        let in_future = next_deadline.is_none_or(|next| next > now);
        assert!(in_future, "a tick is asked for in the past: {next_deadline:?} at {now}");
    }
}
