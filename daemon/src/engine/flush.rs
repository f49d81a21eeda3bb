//! Flushes: pages of anonymous allocations written to the spill at a client's request, so that a later eviction costs
//! nothing. A page goes down to RAM, keeping its place in VRAM, and from there out.

use lapis_proto::code::Code;
use lapis_proto::message::{Flush, Refused};

use super::Engine;
use super::allocator::Span;
use super::event::{Command, Outbox, Reply, TransferFault};
use super::ids::{PageRef, RequestId, SessionId, SpillSlot};
use super::maps::{PendingId, check_ranges};
use super::page::Motion;
use super::refusal;
use super::room::RamUse;

/// A flush that waits.
#[derive(Debug)]
pub(super) struct PendingFlush {
    pub(super) session: SessionId,
    request: RequestId,
    pub(super) spans: Vec<Span>,
    deadline_us: u64,
    /// Pages not written yet.
    pub(super) missing: u32,
}

impl Engine {
    pub(super) fn flush(
        &mut self,
        session: SessionId,
        request: RequestId,
        flush: &Flush,
        now: u64,
    ) -> Result<(), Refused> {
        check_ranges(&flush.ranges)?;
        self.check_waiting(session)?;
        let spans = self.resolve(session, &flush.ranges)?;
        let anonymous = |span: &&Span| !self.table.backing(span.backing).file_backed();
        let mut pages: Vec<_> =
            spans.iter().filter(anonymous).flat_map(|span| span.pages()).collect();
        pages.sort_unstable();
        pages.dedup();
        if let Some(at) = pages.iter().find(|at| self.table.page(**at).writers > 0) {
            let message = format!("page {} is mapped for writing: unmap it first", at.index);
            let object = u64::from(at.index);
            return Err(Refused { object, ..refusal::plain(Code::InUse, &message) });
        }
        pages.retain(|at| self.table.page(*at).needs_flush());
        if self.slots.capacity() == 0 && !pages.is_empty() {
            let message = "there is no spill to write to: configure nvme";
            return Err(refusal::plain(Code::Unsupported, message));
        }
        self.last_id += 1;
        let id = PendingId(self.last_id);
        // At least an instant: what needs no waiting is done even so.
        let wait = flush.wait_us.clamp(1, self.limits.map_wait_us_max);
        let deadline_us = now.saturating_add(wait);
        for at in &pages {
            self.flush_waiters.entry(*at).or_default().push(id);
            self.table.update(*at, |page| page.flushing = true);
            self.queue_flush(*at);
        }
        for span in &spans {
            self.allocations.get_mut(&span.allocation).expect("resolved").mapped += 1;
        }
        self.session_mut(session).flushing += 1;
        let missing = u32::try_from(pages.len()).expect("bounded by PAGES_PER_MAP_MAX");
        let pending = PendingFlush { session, request, spans, deadline_us, missing };
        self.flushes.insert(id, pending);
        if missing == 0 {
            // Done at once, whatever its deadline.
            self.flushed.push(id);
        } else {
            self.deadlines.insert((deadline_us, id));
        }
        Ok(())
    }

    /// Puts a page in line to be written, or to be copied to RAM first.
    pub(super) fn queue_flush(&mut self, at: PageRef) {
        if self.limits.unified || self.table.page(at).ram.is_some() {
            self.flush_out.push_back(at);
        } else {
            self.flush_down.push_back(at);
        }
    }

    /// Starts what flushes wait for.
    pub(super) fn write_flushes(&mut self, now: u64, outbox: &mut Outbox) {
        self.start_outs(now, outbox);
        self.start_flush_downs(now, outbox);
    }

    /// Whether a page in line can go on. If not, it comes back when its motion or its last writer's mapping ends.
    fn may_flush(&self, at: PageRef) -> bool {
        self.table.find(at).is_some_and(|page| {
            page.flushing && page.needs_flush() && page.motion == Motion::Still && page.writers == 0
        })
    }

    fn start_outs(&mut self, now: u64, outbox: &mut Outbox) {
        while let Some(at) = self.flush_out.front().copied() {
            if !self.may_flush(at) {
                self.flush_out.pop_front();
            } else if !self.limits.unified && self.table.page(at).ram.is_none() {
                // Somebody needed the frame more.
                self.flush_out.pop_front();
                self.flush_down.push_back(at);
            } else if self.start_out(at, now, outbox) {
                self.flush_out.pop_front();
            } else {
                return;
            }
        }
    }

    /// Starts to write a page to the spill, if there is a slot and the spill is well. Answers whether it did.
    pub(super) fn start_out(&mut self, at: PageRef, now: u64, outbox: &mut Outbox) -> bool {
        if self.outs >= self.limits.depth || self.spill_rests_until > now {
            return false;
        }
        let Some(slot) = self.slots.take().map(SpillSlot) else { return false };
        self.begin_out(at, slot, outbox);
        true
    }

    /// Copies down no more pages than can then be written: one that had to wait in RAM would be in the way there, and
    /// be copied again after it had to go.
    fn start_flush_downs(&mut self, now: u64, outbox: &mut Outbox) {
        while let Some(at) = self.flush_down.front().copied() {
            if !self.may_flush(at) {
                self.flush_down.pop_front();
                continue;
            }
            if self.table.page(at).ram.is_some() {
                // Evicted to RAM meanwhile.
                self.flush_down.pop_front();
                self.flush_out.push_back(at);
                self.start_outs(now, outbox);
                continue;
            }
            let coming = self.flush_out.len() + self.downs as usize;
            let writable = self.spill_rests_until <= now && coming < self.slots.free() as usize;
            if !writable || self.downs >= self.limits.depth {
                return;
            }
            let Some(ram) = self.ram_frame(RamUse::Flushing, now, outbox) else { return };
            self.flush_down.pop_front();
            self.start_down(at, ram, outbox);
        }
    }

    /// A page's motion ended: a flush that waits for it may go on or be done.
    pub(super) fn flush_settled(&mut self, at: PageRef, outbox: &mut Outbox) {
        let page = self.table.page(at);
        if !page.flushing {
            return;
        }
        if page.needs_flush() {
            self.queue_flush(at);
            return;
        }
        self.table.update(at, |page| page.flushing = false);
        for id in self.flush_waiters.remove(&at).unwrap_or_default() {
            let pending = self.flushes.get_mut(&id).expect("waiters are pending");
            pending.missing -= 1;
            if pending.missing == 0 {
                self.end_flush(id, Reply::Done, outbox);
            }
        }
    }

    /// Answers flushes that had nothing to write.
    pub(super) fn answer_flushed(&mut self, outbox: &mut Outbox) {
        for id in std::mem::take(&mut self.flushed) {
            if self.flushes.contains_key(&id) {
                self.end_flush(id, Reply::Done, outbox);
            }
        }
    }

    pub(super) fn end_flush(&mut self, id: PendingId, reply: Reply, outbox: &mut Outbox) {
        let (session, request) = self.abandon_flush(id, outbox);
        outbox.push(Command::Reply { session, request, reply });
    }

    /// Ends a flush without a reply.
    pub(super) fn abandon_flush(
        &mut self,
        id: PendingId,
        outbox: &mut Outbox,
    ) -> (SessionId, RequestId) {
        let pending = self.flushes.remove(&id).expect("the caller looked it up");
        self.deadlines.remove(&(pending.deadline_us, id));
        if let Some(session) = self.sessions.get_mut(&pending.session) {
            session.flushing -= 1;
        }
        for at in pending.spans.iter().flat_map(|span| span.pages()) {
            if let Some(waiters) = self.flush_waiters.get_mut(&at) {
                waiters.retain(|waiter| *waiter != id);
                if waiters.is_empty() {
                    self.flush_waiters.remove(&at);
                    self.table.update(at, |page| page.flushing = false);
                }
            }
        }
        self.let_go(&pending.spans, outbox);
        (pending.session, pending.request)
    }

    pub(super) fn expire_flush(&mut self, id: PendingId, outbox: &mut Outbox) {
        let missing = self.flushes[&id].missing;
        let message = format!(
            "the wait for {missing} pages to be written ended; the spill may be slow, failing or full"
        );
        let refused =
            Refused { asked: u64::from(missing), ..refusal::plain(Code::TimedOut, &message) };
        self.end_flush(id, Reply::Refused(Box::new(refused)), outbox);
    }

    /// A page can't be written: whoever waits for it is told why.
    pub(super) fn fail_flushes(&mut self, at: PageRef, fault: &TransferFault, outbox: &mut Outbox) {
        while let Some(id) = self.flush_waiters.get(&at).and_then(|ids| ids.first().copied()) {
            let refused = refusal::fault(at.index, fault);
            self.end_flush(id, Reply::Refused(Box::new(refused)), outbox);
        }
    }
}
