//! Frames that clients of another domain may still have mapped: asked back, acknowledged, or kept out of use until the
//! process dies.
//!
//! A session that has let the time for one run out is *overdue* until it gives that one back. It is not asked for
//! others meanwhile: each would be a wait for nothing, and the frame lost to its own domain as well.

use std::collections::BTreeSet;

use lapis_proto::message::Refused;

use super::Engine;
use super::event::{Command, Outbox, Reply};
use super::ids::{Domain, PageRef, SessionId, VramFrame};
use super::limits::REVOKE_WAIT_US;

impl Engine {
    /// Takes a free frame that only another domain's clients have seen, none of them `overdue`, and asks for it back.
    /// Answers whether there was one.
    pub(super) fn revoke_foreign(
        &mut self,
        domain: Domain,
        overdue: &[SessionId],
        now: u64,
        outbox: &mut Outbox,
    ) -> bool {
        let sessions = &self.sessions;
        let may = |frame| !overdue.iter().any(|session| sessions[session].has_imported(frame));
        match self.vram.take_foreign(domain, may) {
            Some((owner, frame)) => self.ask_back(owner, frame, now, outbox),
            None => return false,
        }
        true
    }

    /// Takes any free frame that clients may have and asks for it back. Answers whether there was one.
    pub(super) fn revoke_any(&mut self, now: u64, outbox: &mut Outbox) -> bool {
        match self.vram.take_seen() {
            Some((owner, frame)) => self.ask_back(owner, frame, now, outbox),
            None => return false,
        }
        true
    }

    fn ask_back(&mut self, owner: Domain, frame: VramFrame, now: u64, outbox: &mut Outbox) {
        let holders = self.holders(frame);
        if holders.is_empty() {
            return self.vram.unseen_again(frame);
        }
        debug_assert!(holders.iter().all(|id| self.session(*id).domain == owner), "one domain");
        self.vram.revoke(frame);
        self.tally.revocations += 1;
        self.revoking.insert(frame, now.saturating_add(REVOKE_WAIT_US));
        for session in holders {
            if !self.session(session).lingering {
                outbox.push(Command::Revoke { session, frames: vec![frame] });
            }
        }
    }

    /// Sessions whose processes may have a frame.
    pub(super) fn holders(&self, frame: VramFrame) -> Vec<SessionId> {
        let has = |(id, session): (&SessionId, &super::Session)| {
            session.has_imported(frame).then_some(*id)
        };
        self.sessions.iter().filter_map(has).collect()
    }

    /// Sessions of other domains than this one that have not given back what they were asked for in time.
    pub(super) fn overdue_beside(&self, domain: Domain) -> Vec<SessionId> {
        let lapsed = |frame: &VramFrame| !self.revoking.contains_key(frame);
        let lapsed: Vec<_> = self.vram.revoking().filter(lapsed).collect();
        if lapsed.is_empty() {
            return Vec::new();
        }
        let keeps = |session: &super::Session| {
            session.domain != domain && lapsed.iter().any(|frame| session.has_imported(*frame))
        };
        self.sessions.iter().filter(|(_, session)| keeps(session)).map(|(id, _)| *id).collect()
    }

    /// Frames that pages of this domain can't have, for sessions that are overdue may have them, beside those that are
    /// mapped or asked back already.
    pub(super) fn lost_to(&self, domain: Domain) -> u32 {
        let overdue = self.overdue_beside(domain);
        if overdue.is_empty() {
            return 0;
        }
        let admitted = self.pending.values().filter(|pending| pending.admitted);
        let spans = self.mappings.values().map(|mapping| &mapping.spans);
        let spans = spans.chain(admitted.map(|pending| &pending.spans)).flatten();
        let pinned: BTreeSet<_> =
            spans.flat_map(|span| span.pages()).filter_map(|at| self.table.page(at).vram).collect();
        let lost = |frame: &VramFrame| {
            overdue.iter().any(|id| self.session(*id).has_imported(*frame))
                && !self.vram.is_revoking(*frame)
                && !pinned.contains(frame)
        };
        let lost = (0..self.vram.capacity()).map(VramFrame).filter(lost).count();
        u32::try_from(lost).expect("bounded by the frames")
    }

    /// Whether one of these sessions may have the page's VRAM frame.
    pub(super) fn is_kept_by(&self, at: PageRef, overdue: &[SessionId]) -> bool {
        let frame = self.table.page(at).vram;
        frame.is_some_and(|frame| overdue.iter().any(|id| self.session(*id).has_imported(frame)))
    }

    /// Frames asked back that may still come in time.
    pub(super) fn revocations_awaited(&self) -> u32 {
        u32::try_from(self.revoking.len()).expect("bounded by the frames")
    }

    /// Frames that did not come back in time are quarantined: nobody waits for them any more.
    pub(super) fn expire_revocations(&mut self, now: u64) {
        self.revoking.retain(|_, deadline| *deadline > now);
    }

    pub(super) fn revoked(
        &mut self,
        session: SessionId,
        frames: &[VramFrame],
    ) -> Result<Reply, Refused> {
        let mapped = frames.iter().find(|frame| {
            self.session(session).mappings.iter().any(|mapping| {
                let spans = &self.mappings[mapping].spans;
                let mut pages = spans.iter().flat_map(|span| span.pages());
                pages.any(|at| self.table.page(at).vram == Some(**frame))
            })
        });
        if let Some(frame) = mapped {
            return Err(Refused {
                object: u64::from(frame.0),
                ..super::refusal::plain(
                    lapis_proto::code::Code::InUse,
                    &format!("frame {} is still mapped: unmap it before giving it back", frame.0),
                )
            });
        }
        for frame in frames {
            self.session_mut(session).forget(*frame);
        }
        self.recheck_revoking();
        Ok(Reply::Done)
    }

    /// Frames in revocation that nobody has any more are free.
    pub(super) fn recheck_revoking(&mut self) {
        let waiting: Vec<_> = self.vram.revoking().collect();
        for frame in waiting {
            if self.holders(frame).is_empty() {
                self.vram.revoked(frame);
                self.revoking.remove(&frame);
            }
        }
    }
}
