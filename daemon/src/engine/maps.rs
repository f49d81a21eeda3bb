//! Mappings: from a request that waits to a range pinned in VRAM and back.
//!
//! A map is all-or-nothing and first come, first served. *Admission* pins all its pages, under a cap below the tier's
//! size: so the pages of all admitted maps fit in VRAM together and each of them will be filled, whoever else waits.
//! Then its missing pages are filled in any order; when the last one is there it is *granted*.

use lapis_proto::code::Code;
use lapis_proto::message::{
    Access, Advice, Map, Mapped, PAGES_PER_MAP_MAX, PageRange, RANGES_PER_REQUEST_MAX, Refused,
};

use super::Engine;
use super::allocator::Span;
use super::event::{Command, Outbox, Reply};
use super::found::Found;
use super::ids::{MappingId, PageRef, RequestId, SessionId, VramFrame};
use super::page::Motion;
use super::policy::next_use::{NEVER, predict};
use super::policy::plan::NO_PLAN;
use super::quota::Room;
use super::refusal;

/// A map that waits; ids are given in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PendingId(pub u64);

/// A map that waits.
#[derive(Debug)]
pub struct PendingMap {
    /// Whose.
    pub session: SessionId,
    /// Which reply it is owed.
    pub request: RequestId,
    /// What it asks for.
    pub spans: Vec<Span>,
    /// For what.
    pub access: Access,
    /// When it came, microseconds.
    pub arrived_us: u64,
    /// When it is refused, microseconds.
    pub deadline_us: u64,
    /// Its pages are pinned.
    pub admitted: bool,
    /// Pages that are not ready, each as often as it is asked for.
    pub missing: u32,
    found: Found,
}

/// A granted map.
#[derive(Debug)]
pub struct Mapping {
    /// Whose.
    pub session: SessionId,
    /// For what.
    pub access: Access,
    /// What it holds.
    pub spans: Vec<Span>,
}

fn writes(access: Access) -> bool {
    match access {
        Access::Read => false,
        Access::Write | Access::Overwrite => true,
    }
}

/// Pages asked for, counting one that is asked for twice once.
pub(super) fn distinct_pages(spans: &[Span]) -> u64 {
    let mut sorted: Vec<_> =
        spans.iter().map(|s| (s.backing, s.first, s.first + s.count)).collect();
    sorted.sort_unstable();
    let mut reached = None;
    let mut distinct = 0;
    for (backing, first, end) in sorted {
        let from = match reached {
            Some((last, to)) if last == backing => first.max(to),
            _ => first,
        };
        let to = end.max(from);
        distinct += u64::from(to - from);
        reached = Some((backing, to));
    }
    distinct
}

impl Engine {
    pub(super) fn map(
        &mut self,
        session: SessionId,
        request: RequestId,
        map: &Map,
        now: u64,
    ) -> Result<(), Refused> {
        check_ranges(&map.ranges)?;
        let spans = self.resolve(session, &map.ranges)?;
        let access = map.access;
        let read_only = spans.iter().find(|span| self.table.backing(span.backing).file_backed());
        if let (true, Some(span)) = (writes(access), read_only) {
            let message = "a file-backed allocation can be mapped for reading only";
            return Err(Refused {
                object: span.allocation.0,
                ..refusal::plain(Code::ReadOnly, message)
            });
        }
        let state = self.session(session);
        let held = state.mappings.len() as u64 + u64::from(state.waiting);
        let limit = u64::from(self.limits.mappings_per_session_max);
        if held >= limit {
            return Err(refusal::too_many("this session's mapping", held, limit));
        }
        self.check_waiting(session)?;
        let asked = distinct_pages(&spans);
        let cap = self.mapped_pages_max();
        if asked > u64::from(cap) {
            return Err(refusal::over_capacity(asked, cap));
        }
        self.check_mapped(&spans, asked)?;
        let new_pins = self.new_pins(&spans);
        self.follow_plans(session, &spans, access, now);
        let fits = new_pins == 0
            || (self.queue.is_empty() && self.room_for(&spans, new_pins) == Room::Enough);
        if map.wait_us == 0 && !fits {
            return Err(refusal::timed_out(asked, self.table.pinned, cap, "room, with no wait"));
        }
        self.wait_for(session, request, spans, access, now, map.wait_us, fits);
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of the request, used once")]
    fn wait_for(
        &mut self,
        session: SessionId,
        request: RequestId,
        spans: Vec<Span>,
        access: Access,
        now: u64,
        wait_us: u64,
        fits: bool,
    ) {
        for span in &spans {
            self.allocations.get_mut(&span.allocation).expect("resolved").mapped += 1;
        }
        self.session_mut(session).waiting += 1;
        self.last_id += 1;
        let id = PendingId(self.last_id);
        // With no wait for room granted there is still the wait for the bytes.
        let longest = self.limits.map_wait_us_max;
        let wait = if wait_us == 0 { longest } else { wait_us.min(longest) };
        let deadline_us = now.saturating_add(wait);
        self.deadlines.insert((deadline_us, id));
        let pending = PendingMap {
            session,
            request,
            spans,
            access,
            arrived_us: now,
            deadline_us,
            admitted: false,
            missing: 0,
            found: Found::default(),
        };
        self.pending.insert(id, pending);
        if fits {
            self.admit(id);
        } else {
            self.enqueue(session, id);
        }
    }

    /// Behind those of the same or a higher priority.
    fn enqueue(&mut self, session: SessionId, id: PendingId) {
        let priority = self.priority_of(session);
        let behind = |queued: &PendingId| {
            priority > 0 && self.priority_of(self.pending[queued].session) < priority
        };
        let place = self.queue.iter().position(behind).unwrap_or(self.queue.len());
        self.queue.insert(place, id);
    }

    /// How many more pages would be pinned.
    pub(super) fn new_pins(&self, spans: &[Span]) -> u32 {
        let unpinned = |page: &PageRef| self.table.page(*page).pins == 0;
        if let [span] = spans {
            let count = span.pages().filter(unpinned).count();
            return u32::try_from(count).expect("bounded by PAGES_PER_MAP_MAX");
        }
        let mut pages: Vec<_> = spans.iter().flat_map(|s| s.pages()).filter(unpinned).collect();
        pages.sort_unstable();
        pages.dedup();
        u32::try_from(pages.len()).expect("bounded by PAGES_PER_MAP_MAX")
    }

    /// Admits from the head of the queue while there is room. One whose own quota is used up lets others pass.
    pub(super) fn admit_queued(&mut self) {
        let mut index = 0;
        while let Some(id) = self.queue.get(index).copied() {
            let pending = &self.pending[&id];
            let new_pins = self.new_pins(&pending.spans);
            match self.room_for(&pending.spans, new_pins) {
                Room::Enough => {
                    self.queue.remove(index);
                    self.admit(id);
                }
                Room::QuotaFull => index += 1,
                Room::TierFull => break,
            }
        }
    }

    fn admit(&mut self, id: PendingId) {
        let mut pending = self.pending.remove(&id).expect("queued maps are pending");
        pending.admitted = true;
        let (access, session) = (pending.access, pending.session);
        let spans = std::mem::take(&mut pending.spans);
        self.count_accesses(&spans);
        for at in spans.iter().flat_map(|span| span.pages()) {
            let file_backed = self.table.backing(at.backing).file_backed();
            pending.found.note(self.table.page(at), file_backed);
            self.pin_for_use(at, access, session);
            if !self.table.page(at).ready(access) {
                pending.missing += 1;
                self.page_waiters.entry(at).or_default().push(id);
                self.want(at);
            }
        }
        self.recommend(&spans);
        self.observe(session, &spans);
        if pending.missing == 0 {
            self.complete.push(id);
        }
        pending.spans = spans;
        self.pending.insert(id, pending);
    }

    fn pin_for_use(&mut self, at: PageRef, access: Access, session: SessionId) {
        self.clock += 1;
        let clock = self.clock;
        let pages = self.table.backing(at.backing).pages_count();
        let planned = self.planned_use(at, Some(session));
        self.table.update(at, |page| {
            page.pins += 1;
            page.writers += u32::from(writes(access));
            page.overwriters += u32::from(access == Access::Overwrite);
            page.retained = page.vram.is_some() && !page.fetched;
            page.fetched = false;
            page.prefetched = false;
            (page.plan, page.next_use) = match (page.advice, planned) {
                (_, Some(planned)) => planned,
                (Advice::Normal | Advice::DontNeed | Advice::Keep, None) => {
                    (NO_PLAN, predict(page.last_use, clock, pages))
                }
                // Of two that were used, the one used last is the farther: it is over and done with.
                (Advice::Sequential, None) => (NO_PLAN, clock + NEVER),
                // As far in the future as in the past: the one used longest ago is the farthest.
                (Advice::Random, None) => (NO_PLAN, clock),
            };
            page.last_use = clock;
        });
    }

    /// Puts a page in line to be filled, unless something is filling it.
    pub(super) fn want(&mut self, at: PageRef) {
        let page = self.table.page(at);
        if page.needs_fill() {
            self.fill_demand.push_back(at);
        } else if let Motion::NeedRam { .. } = page.motion {
            self.read_demand.push_back(at);
        }
    }

    /// Grants what has become complete.
    pub(super) fn grant_complete(&mut self, now: u64, outbox: &mut Outbox) {
        // A grant may complete others.
        while let Some(id) = self.complete.pop() {
            if self.pending.get(&id).is_some_and(|pending| pending.missing == 0)
                && self.is_ready_still(id)
            {
                self.grant(id, now, outbox);
            }
        }
    }

    /// Old bytes of a page that will be overwritten may have had to leave RAM since it was ready: the map waits for
    /// that too.
    fn is_ready_still(&mut self, id: PendingId) -> bool {
        let pending = self.pending.get_mut(&id).expect("complete maps are pending");
        if pending.access != Access::Overwrite {
            return true;
        }
        for at in pending.spans.iter().flat_map(|span| span.pages()) {
            if !self.table.page(at).ready(pending.access) {
                pending.missing += 1;
                self.page_waiters.entry(at).or_default().push(id);
            }
        }
        pending.missing == 0
    }

    fn grant(&mut self, id: PendingId, now: u64, outbox: &mut Outbox) {
        let pending = self.pending.remove(&id).expect("complete maps are pending");
        self.deadlines.remove(&(pending.deadline_us, id));
        let mut frames = Vec::with_capacity(pending.spans.iter().map(|s| s.count as usize).sum());
        for at in pending.spans.iter().flat_map(|span| span.pages()) {
            if writes(pending.access) {
                self.make_sole(at, pending.access);
            }
            frames.push(self.table.page(at).vram.expect("a complete map's pages are in VRAM"));
        }
        let waited_us = now.saturating_sub(pending.arrived_us);
        let mapping = MappingId(id.0);
        let session = self.sessions.get_mut(&pending.session).expect("abandoned with its session");
        session.waiting -= 1;
        session.mappings.insert(mapping);
        for counters in [&mut session.counters, &mut self.counters] {
            counters.maps += 1;
            counters.stalled_us += waited_us;
            pending.found.count(counters);
        }
        let mut new_frames: Vec<VramFrame> = Vec::new();
        for frame in &frames {
            if !session.has_imported(*frame) {
                session.import(*frame);
                new_frames.push(*frame);
            }
        }
        let (session, request) = (pending.session, pending.request);
        self.plans_granted(session, waited_us);
        if !new_frames.is_empty() {
            outbox.push(Command::Export { session, request, frames: new_frames });
        }
        let (hits_vram, hits_ram) = (pending.found.vram, pending.found.ram);
        let reply = Reply::Mapped(Mapped { mapping, frames, hits_vram, hits_ram, waited_us });
        outbox.push(Command::Reply { session, request, reply });
        if pending.access == Access::Overwrite {
            // Whoever waits for the bytes of a page that was provisional can have them now.
            for at in pending.spans.iter().flat_map(|span| span.pages()) {
                self.tell_waiters(at);
            }
        }
        let access = pending.access;
        self.mappings.insert(mapping, Mapping { session, access, spans: pending.spans });
    }

    /// The VRAM copy is about to be written: the others would be stale.
    fn make_sole(&mut self, at: PageRef, access: Access) {
        let (ram, slot) = self.table.update(at, |page| {
            debug_assert!(page.ready(access), "{at:?} is not ready: {page:?}");
            page.overwriters -= u32::from(access == Access::Overwrite);
            page.zeros = false;
            page.provisional = false;
            (page.ram.take(), page.slot.take())
        });
        if let Some(frame) = ram {
            self.ram.put(frame.0);
        }
        if let Some(slot) = slot {
            self.slots.put(slot.0);
        }
    }

    pub(super) fn unmap(
        &mut self,
        session: SessionId,
        ids: &[MappingId],
        outbox: &mut Outbox,
    ) -> Result<Reply, Refused> {
        let own = &self.session(session).mappings;
        let mut seen = std::collections::BTreeSet::new();
        if let Some(id) = ids.iter().find(|id| !own.contains(id) || !seen.insert(**id)) {
            return Err(refusal::unknown_mapping(*id));
        }
        for id in ids {
            self.end_mapping(*id, outbox);
        }
        Ok(Reply::Done)
    }

    pub(super) fn end_mapping(&mut self, id: MappingId, outbox: &mut Outbox) {
        let mapping = self.mappings.remove(&id).expect("listed in its session");
        if let Some(session) = self.sessions.get_mut(&mapping.session) {
            session.mappings.remove(&id);
        }
        self.unpin(&mapping.spans, mapping.access, outbox);
    }

    pub(super) fn unpin(&mut self, spans: &[Span], access: Access, outbox: &mut Outbox) {
        for at in spans.iter().flat_map(|span| span.pages()) {
            let flushing = self.table.update(at, |page| {
                page.pins -= 1;
                page.writers -= u32::from(writes(access));
                page.flushing && page.writers == 0
            });
            if flushing {
                self.queue_flush(at);
            }
        }
        self.let_go(spans, outbox);
    }

    /// Spans are no longer waited for or mapped.
    pub(super) fn let_go(&mut self, spans: &[Span], outbox: &mut Outbox) {
        for span in spans {
            if let Some(allocation) = self.allocations.get_mut(&span.allocation) {
                allocation.mapped -= 1;
            }
        }
        let mut backings: Vec<_> = spans.iter().map(|span| span.backing).collect();
        backings.dedup();
        for (index, backing) in backings.iter().enumerate() {
            if backings[..index].contains(backing) || self.table.backing(*backing).references > 0 {
                continue;
            }
            let own = |span: &&Span| span.backing == *backing;
            for at in spans.iter().filter(own).flat_map(|span| span.pages()) {
                self.empty_if_idle(at);
            }
            self.remove_if_idle(*backing, outbox);
        }
    }
}

pub(super) fn check_ranges(ranges: &[PageRange]) -> Result<(), Refused> {
    let pages: u64 = ranges.iter().map(|range| u64::from(range.count)).sum();
    if ranges.is_empty() || ranges.len() > RANGES_PER_REQUEST_MAX {
        let message = format!(
            "a request names 1 to {RANGES_PER_REQUEST_MAX} ranges, this one names {}",
            ranges.len()
        );
        return Err(refusal::plain(Code::BadRequest, &message));
    }
    if pages > u64::from(PAGES_PER_MAP_MAX) {
        return Err(refusal::over_capacity(pages, PAGES_PER_MAP_MAX));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ids::{AllocationId, BackingId};

    #[test]
    fn a_page_asked_for_twice_counts_once() {
        let span = |backing, first, count| Span {
            backing: BackingId(backing),
            first,
            count,
            allocation: AllocationId(1),
        };
        assert_eq!(distinct_pages(&[span(0, 0, 4), span(0, 2, 4), span(1, 2, 1)]), 7);
        assert_eq!(distinct_pages(&[span(0, 0, 10), span(0, 2, 1), span(0, 5, 1)]), 10);
        assert_eq!(distinct_pages(&[span(0, 4, 1), span(0, 0, 1)]), 2);
    }
}
