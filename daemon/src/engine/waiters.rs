//! Who waits: told when a page settles, when it can't be had, or when their time is up.

use lapis_proto::message::{Access, Refused};

use super::Engine;
use super::event::{Command, Outbox, Reply, TransferFault};
use super::ids::PageRef;
use super::maps::{PendingId, PendingMap, distinct_pages};
use super::page::Motion;
use super::refusal;

impl Engine {
    /// Ends a map that waits, without a reply.
    pub(super) fn abandon(&mut self, id: PendingId, outbox: &mut Outbox) -> PendingMap {
        let pending = self.pending.remove(&id).expect("the caller looked it up");
        self.deadlines.remove(&(pending.deadline_us, id));
        if let Some(session) = self.sessions.get_mut(&pending.session) {
            session.waiting -= 1;
        }
        if !pending.admitted {
            self.queue.retain(|queued| *queued != id);
            self.let_go(&pending.spans, outbox);
            return pending;
        }
        for at in pending.spans.iter().flat_map(|span| span.pages()) {
            if let Some(waiters) = self.page_waiters.get_mut(&at) {
                waiters.retain(|waiter| *waiter != id);
                if waiters.is_empty() {
                    self.page_waiters.remove(&at);
                }
            }
        }
        if pending.access == Access::Overwrite {
            for at in pending.spans.iter().flat_map(|span| span.pages()) {
                self.give_up_overwriting(at);
            }
        }
        self.unpin(&pending.spans, pending.access, outbox);
        pending
    }

    /// One overwriter less; if it was the last, a provisional copy goes and the page's bytes are as before.
    fn give_up_overwriting(&mut self, at: PageRef) {
        let frame = self.table.update(at, |page| {
            page.overwriters -= 1;
            if page.overwriters > 0 || !std::mem::take(&mut page.provisional) {
                return None;
            }
            page.vram.take()
        });
        if let Some(frame) = frame {
            self.vram.put(self.table.backing(at.backing).domain, frame);
            if self.page_waiters.contains_key(&at) {
                self.want(at);
            }
        }
    }

    pub(super) fn refuse_pending(&mut self, id: PendingId, refused: Refused, outbox: &mut Outbox) {
        let pending = self.abandon(id, outbox);
        let (session, request) = (pending.session, pending.request);
        let reply = Reply::Refused(Box::new(refused));
        outbox.push(Command::Reply { session, request, reply });
    }

    /// Refuses maps in the queue that the quotas and tiers of now can never admit.
    pub(super) fn refuse_impossible(&mut self, outbox: &mut Outbox) {
        let cap = self.mapped_pages_max();
        for id in self.queue.iter().copied().collect::<Vec<_>>() {
            let PendingMap { spans, .. } = &self.pending[&id];
            let asked = distinct_pages(spans);
            let possible = if asked > u64::from(cap) {
                Err(refusal::over_capacity(asked, cap))
            } else {
                self.check_mapped(spans, asked)
            };
            if let Err(refused) = possible {
                self.refuse_pending(id, refused, outbox);
            }
        }
    }

    /// Refuses maps whose time is up.
    pub(super) fn expire(&mut self, now: u64, outbox: &mut Outbox) {
        while let Some((deadline, id)) = self.deadlines.first().copied() {
            if deadline > now {
                break;
            }
            let Some(pending) = self.pending.get(&id) else {
                if self.flushes.contains_key(&id) {
                    self.expire_flush(id, outbox);
                } else {
                    self.expire_resize(id, outbox);
                }
                continue;
            };
            let waited_for = if pending.admitted { "the bytes" } else { "room" };
            let asked = distinct_pages(&pending.spans);
            let cap = self.mapped_pages_max();
            let refused = refusal::timed_out(asked, self.table.pinned, cap, waited_for);
            self.refuse_pending(id, refused, outbox);
        }
        self.expire_revocations(now);
    }

    /// A page's motion ended: tell who waited for it, and move it on.
    pub(super) fn page_settled(&mut self, at: PageRef, outbox: &mut Outbox) {
        if self.table.page(at).motion != Motion::Still {
            return;
        }
        self.tell_waiters(at);
        let page = self.table.page(at);
        if page.needs_fill() && page.pins > 0 {
            self.fill_demand.push_back(at);
        } else if page.needs_fill() {
            self.queue_prefetch(at, u64::MAX);
        }
        self.flush_settled(at, outbox);
        if self.table.backing(at.backing).references == 0 {
            self.empty_if_idle(at);
            self.remove_if_idle(at.backing, outbox);
        }
    }

    pub(super) fn tell_waiters(&mut self, at: PageRef) {
        let Some(waiters) = self.page_waiters.remove(&at) else { return };
        let mut rest = Vec::new();
        for id in waiters {
            let pending = self.pending.get_mut(&id).expect("waiters are pending");
            if self.table.page(at).ready(pending.access) {
                pending.missing -= 1;
                if pending.missing == 0 {
                    self.complete.push(id);
                }
            } else {
                rest.push(id);
            }
        }
        if !rest.is_empty() {
            self.page_waiters.insert(at, rest);
        }
    }

    /// A page can't be filled: whoever waits for it is told why.
    pub(super) fn fail_waiters(&mut self, at: PageRef, fault: &TransferFault, outbox: &mut Outbox) {
        while let Some(id) = self.page_waiters.get(&at).and_then(|ids| ids.first().copied()) {
            self.refuse_pending(id, refusal::fault(at.index, fault), outbox);
        }
    }
}
