//! What clients do: one row of the table and one arm of [`World::perform`] per operation.

use lapis_proto::message::{Access, Map, PageRange};
use lapisd::engine::event::Request;
use lapisd::engine::ids::{AllocationId, MappingId, SessionId, VramFrame};
use lapisd::engine::limits::Limits;

use super::client::{Ask, Asked, Kind, pages_of};
use super::faults::Fault;
use super::world::World;

/// Something that a client can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    Allocate,
    OpenFile,
    Free,
    Map,
    Unmap,
    Touch,
    Prefetch,
    Cancel,
    Advise,
    Plan,
    Flush,
    SetQuota,
    ListQuotas,
    SetTier,
    Stat,
    WorkingSet,
    Bye,
    Hangup,
    Kill,
    Scribble,
    Garbage,
}

use Operation::{
    Advise, Allocate, Bye, Cancel, Flush, Free, Garbage, Hangup, Kill, ListQuotas, Map as MapPages,
    OpenFile, Plan, Prefetch, Scribble, SetQuota, SetTier, Stat, Touch, Unmap, WorkingSet,
};

/// How often each kind of client does it. A new operation is a row here and an arm below.
///
/// Columns: steady, greedy, slow, outlaw, dying, fickle.
const TABLE: &[(Operation, [u64; 6])] = &[
    (Allocate, [6, 8, 6, 4, 8, 6]),
    (OpenFile, [6, 6, 6, 4, 8, 8]),
    (Free, [3, 1, 3, 2, 2, 3]),
    (MapPages, [30, 40, 20, 10, 30, 30]),
    (Unmap, [15, 3, 4, 4, 10, 10]),
    (Touch, [12, 8, 8, 0, 8, 8]),
    (Prefetch, [8, 8, 6, 3, 8, 8]),
    (Cancel, [2, 2, 2, 1, 2, 2]),
    (Advise, [3, 3, 3, 1, 3, 3]),
    (Plan, [3, 3, 2, 2, 3, 3]),
    (Flush, [4, 3, 4, 1, 4, 4]),
    (SetQuota, [2, 2, 2, 1, 2, 2]),
    (ListQuotas, [2, 2, 2, 1, 2, 2]),
    (SetTier, [2, 2, 2, 1, 2, 2]),
    (Stat, [2, 2, 2, 1, 2, 2]),
    (WorkingSet, [2, 2, 2, 1, 2, 2]),
    (Bye, [1, 1, 1, 0, 1, 1]),
    (Hangup, [0, 0, 0, 0, 1, 3]),
    (Kill, [0, 0, 0, 1, 3, 0]),
    (Scribble, [0, 0, 0, 8, 0, 0]),
    (Garbage, [0, 0, 0, 40, 0, 0]),
];

/// Requests that a client has under way at most.
const ASKED_MAX: usize = 12;

fn column(kind: Kind) -> usize {
    match kind {
        Kind::Steady => 0,
        Kind::Greedy => 1,
        Kind::Slow => 2,
        Kind::Outlaw => 3,
        Kind::Dying => 4,
        Kind::Fickle => 5,
    }
}

impl World {
    /// A client does what it does.
    pub(super) fn act(&mut self, session: SessionId) {
        let client = &self.clients[&session];
        if client.asked.len() >= ASKED_MAX {
            return;
        }
        let column = column(client.kind);
        let total = TABLE.iter().map(|(_, weights)| weights[column]).sum();
        let mut choice = self.random.below(total);
        for (operation, weights) in TABLE {
            if choice < weights[column] {
                return self.perform(*operation, session);
            }
            choice -= weights[column];
        }
    }

    fn perform(&mut self, operation: Operation, session: SessionId) {
        match operation {
            Allocate => self.allocate(session),
            OpenFile => self.open_file(session),
            Free => self.free(session),
            MapPages => self.map(session),
            Unmap => self.unmap_some(session),
            Touch => self.touch_one(session),
            Prefetch | Cancel | Advise | Flush => {
                let ranges = self.some_ranges(session, false);
                if !ranges.is_empty() {
                    self.say(operation, session, ranges);
                }
            }
            Plan => self.plan(session),
            SetQuota | SetTier if !self.scenario.administered => {}
            SetQuota => self.set_quota(session),
            SetTier => self.set_tier(session),
            ListQuotas => self.send(session, Ask::Plain(Request::ListQuotas), Asked::Other),
            Stat => self.send(session, Ask::Plain(Request::Stat), Asked::Other),
            WorkingSet => {
                let of = self.random.one_in(2).then(|| SessionId(1 + self.random.below(8)));
                self.send(session, Ask::Plain(Request::WorkingSet(of)), Asked::Other);
            }
            Bye => {
                let client = &self.clients[&session];
                let waits = client.asked.values().any(Asked::waits);
                if client.mappings.is_empty() && !waits {
                    self.say_bye(session);
                }
            }
            Hangup => self.hang_up(session),
            Kill => self.kill(session),
            Scribble => self.scribble(session),
            Garbage => self.garbage(session),
        }
    }

    /// Whether one more allocation is worth asking for: at the limit a client seldom tries.
    fn wants_allocation(&mut self, session: SessionId) -> bool {
        let client = &self.clients[&session];
        let asked = client.asked.values().filter(|a| matches!(a, Asked::Allocate { .. })).count();
        let most = self.scenario.limits.allocations_per_session_max as usize;
        client.allocations.len() + asked < most || self.random.one_in(20)
    }

    fn allocate(&mut self, session: SessionId) {
        if !self.wants_allocation(session) {
            return;
        }
        let page = self.scenario.limits.page_size;
        let greedy = self.clients[&session].kind == Kind::Greedy;
        let most = if greedy { 16 * page } else { 8 * page };
        let size = self.random.between(1, most);
        let asked = Asked::Allocate { file: false };
        self.send(session, Ask::Plain(Request::Allocate { size }), asked);
    }

    fn open_file(&mut self, session: SessionId) {
        if !self.wants_allocation(session) {
            return;
        }
        let (file, size) = {
            let machine = self.machine.borrow();
            let file = self.random.index(machine.disk.files_count());
            (file, machine.disk.present(file).identity.size)
        };
        if size == 0 {
            return;
        }
        // Few different ranges, so that clients share them.
        let starts = [0, 8, 4095, 4096, 11_416, size / 2, self.random.below(size)];
        let mut offset = self.random.pick(&starts) % size;
        if self.scenario.limits.unified {
            offset -= offset % 4096;
        }
        let rest = size - offset;
        let length = if self.random.one_in(3) { self.random.between(1, rest) } else { rest };
        self.send(session, Ask::Open { file, offset, length }, Asked::Allocate { file: true });
    }

    fn free(&mut self, session: SessionId) {
        let client = &self.clients[&session];
        let unused = client.allocations.keys().copied().filter(|id| !client.uses(*id));
        let unused: Vec<_> = unused.collect();
        if let Some(id) = self.random.pick_any(unused.iter().copied()) {
            self.send_free(session, id);
        }
    }

    fn send_free(&mut self, session: SessionId, id: AllocationId) {
        self.client_mut(session).allocations.remove(&id);
        self.send(session, Ask::Plain(Request::Free(id)), Asked::Free(id));
    }

    fn map(&mut self, session: SessionId) {
        let client = &self.clients[&session];
        let held = client.mappings.len() + client.waiting().count();
        let most = self.scenario.limits.mappings_per_session_max as usize;
        if held >= most && !self.random.one_in(20) {
            return;
        }
        let access = match self.random.below(8) {
            0..=3 => Access::Read,
            4..=6 => Access::Write,
            _ => Access::Overwrite,
        };
        let ranges = self.some_ranges(session, access != Access::Read);
        if !ranges.is_empty() {
            let wait_us = self.wait_us();
            self.send_map(session, Map { ranges, access, wait_us });
        }
    }

    pub(super) fn wait_us(&mut self) -> u64 {
        if self.random.one_in(6) {
            0
        } else if self.scenario.calm {
            600_000_000
        } else {
            self.random.pick(&[1, 500, 20_000, 500_000, 3_000_000, 100_000_000])
        }
    }

    fn send_map(&mut self, session: SessionId, map: Map) {
        if map.access == Access::Overwrite {
            let known = &self.clients[&session].allocations;
            let real = pages_of(&map.ranges)
                .take(64)
                .filter(|(id, page)| known.get(id).is_some_and(|known| *page < known.pages));
            real.for_each(|place| self.truth.begin_overwrite(place));
        }
        let asked = Asked::Map(map.ranges.clone(), map.access);
        self.send(session, Ask::Plain(Request::Map(map)), asked);
    }

    /// Up to four ranges of the client's allocations; all of them, as long as they fit, for a greedy one.
    pub(super) fn some_ranges(&mut self, session: SessionId, writable: bool) -> Vec<PageRange> {
        let client = &self.clients[&session];
        let usable = client.allocations.iter().filter(|(_, known)| !(writable && known.file));
        let mut usable: Vec<_> = usable.map(|(id, known)| (*id, known.pages)).collect();
        let mut ranges = Vec::new();
        if usable.is_empty() {
            return ranges;
        }
        if client.kind == Kind::Greedy && self.random.one_in(2) {
            let mut room = Limits::mapped_pages_of(self.scenario.limits.vram_frames);
            let begin = self.random.index(usable.len());
            usable.rotate_left(begin);
            for (allocation, pages) in usable {
                let count = pages.min(room);
                if count > 0 {
                    ranges.push(PageRange { allocation, first: 0, count });
                }
                room -= count;
            }
            return ranges;
        }
        for _ in 0..self.random.between(1, 4) {
            let (allocation, pages) = self.random.pick(&usable);
            let first = self.random.between_u32(0, pages - 1);
            let count = self.random.between_u32(1, (pages - first).min(4));
            ranges.push(PageRange { allocation, first, count });
            if self.random.one_in(2) {
                break;
            }
        }
        ranges
    }

    fn unmap_some(&mut self, session: SessionId) {
        let mappings = &self.clients[&session].mappings;
        let many = self.random.one_in(4);
        let ids: Vec<MappingId> = if many {
            mappings.keys().copied().collect()
        } else {
            self.random.pick_any(mappings.keys().copied()).into_iter().collect()
        };
        if !ids.is_empty() {
            self.send_unmap(session, ids);
        }
    }

    /// Gives mappings up, after a last look.
    pub(super) fn send_unmap(&mut self, session: SessionId, ids: Vec<MappingId>) {
        let known = |id: &MappingId| self.clients[&session].mappings.contains_key(id);
        let twice = (1..ids.len()).any(|index| ids[..index].contains(&ids[index]));
        // What is refused ends nothing.
        if ids.iter().all(known) && !twice {
            for id in &ids {
                let held = self.clients[&session].mappings[id].clone();
                self.look(session, &held);
                self.client_mut(session).mappings.remove(id);
                self.count_held(&held, false);
            }
        }
        if !twice {
            self.client_mut(session).ended.extend(&ids);
        }
        self.send(session, Ask::Plain(Request::Unmap(ids)), Asked::Other);
    }

    /// Looks at a mapping and writes to it if it may.
    pub(super) fn touch_one(&mut self, session: SessionId) {
        let mappings = &self.clients[&session].mappings;
        let Some(id) = self.random.pick_any(mappings.keys().copied()) else { return };
        let held = mappings[&id].clone();
        self.look(session, &held);
        if held.access != Access::Read {
            self.write_some(&held);
        }
    }

    /// It has unmapped and closed all it had, and says so.
    fn say_bye(&mut self, session: SessionId) {
        let client = self.client_mut(session);
        client.imported.clear();
        client.said_bye = true;
        self.send(session, Ask::Plain(Request::Bye), Asked::Bye);
    }

    /// It writes to whatever it has, mapped or not.
    fn scribble(&mut self, session: SessionId) {
        let frames: Vec<_> = self.clients[&session].imported.iter().copied().collect();
        for frame in frames {
            if self.random.one_in(2) {
                let mut machine = self.machine.borrow_mut();
                self.random.fill(machine.vram.bytes_mut(frame.0));
            }
        }
    }

    fn garbage(&mut self, session: SessionId) {
        let page = self.scenario.limits.page_size;
        let foreign = self.any_allocation();
        let own = self.clients[&session].allocations.keys().next().copied();
        let id = own.unwrap_or(foreign);
        let mapping = self.any_mapping();
        let range = |allocation, first, count| PageRange { allocation, first, count };
        let ranges = match self.random.below(16) {
            0 => vec![range(AllocationId(self.random.next()), 0, 1)],
            1 => vec![range(foreign, 0, 1)],
            2 => vec![range(id, 0, 0)],
            3 => vec![range(id, u32::MAX, u32::MAX)],
            4 => Vec::new(),
            5 => vec![range(id, 0, 1); 1025],
            6 => vec![range(id, 0, 2), range(id, 1, 1), range(id, 0, 1), range(id, 0, 2)],
            7 => vec![range(id, 0, 65_537)],
            8 => vec![range(id, 0, 1), range(foreign, 0, 1)],
            9 => return self.send_unmap(session, vec![mapping]),
            10 => {
                let own = self.clients[&session].mappings.keys().next().copied();
                let id = own.unwrap_or(mapping);
                return self.send_unmap(session, vec![id, id]);
            }
            11 => {
                let unknown = AllocationId(self.random.next());
                let id = self.random.pick(&[id, foreign, unknown]);
                return self.send_free(session, id);
            }
            12 => {
                let size = self.random.pick(&[0, u64::MAX, 1 << 40, page * 200]);
                let ask = Ask::Plain(Request::Allocate { size });
                return self.send(session, ask, Asked::Allocate { file: false });
            }
            13 => {
                let numbers = [0, 1, 1 << 20, u64::MAX];
                let (offset, length) = (self.random.pick(&numbers), self.random.pick(&numbers));
                let ask = Ask::Open { file: 0, offset, length };
                return self.send(session, ask, Asked::Allocate { file: true });
            }
            14 => return self.false_revoked(session),
            _ => {
                if self.random.one_in(8) {
                    self.say_bye(session);
                }
                return;
            }
        };
        if self.random.one_in(4) {
            return self.plan_of(session, &[ranges]);
        }
        if self.random.one_in(2) {
            let operation = self.random.pick(&[Prefetch, Cancel, Advise, Flush]);
            return self.say(operation, session, ranges);
        }
        let access = self.random.pick(&[Access::Read, Access::Write, Access::Overwrite]);
        let wait_us = self.wait_us();
        self.send_map(session, Map { ranges, access, wait_us });
    }

    /// Says that it gave back what it never had, or has mapped.
    pub(super) fn false_revoked(&mut self, session: SessionId) {
        let most = self.scenario.limits.vram_frames + 2;
        let mut frames: Vec<_> = (0..self.random.between(0, 3))
            .map(|_| VramFrame(self.random.between_u32(0, most)))
            .collect();
        if self.random.one_in(3) {
            frames.push(VramFrame(u32::MAX));
        }
        let client = self.client_mut(session);
        if client.is_honest() {
            // It lies about frames that it maps, or never had: what it says must change nothing.
            frames.retain(|frame| client.holds(*frame) || !client.imported.contains(frame));
        }
        self.say_revoked(session, frames);
    }

    /// Gives frames back, or says so.
    pub(super) fn say_revoked(&mut self, session: SessionId, frames: Vec<VramFrame>) {
        let client = self.client_mut(session);
        if !client.is_honest() || !frames.iter().any(|frame| client.holds(*frame)) {
            client.imported.retain(|frame| !frames.contains(frame));
        }
        self.send(session, Ask::Plain(Request::Revoked(frames)), Asked::Other);
    }

    fn any_allocation(&mut self) -> AllocationId {
        let all = self.clients.values().flat_map(|client| client.allocations.keys().copied());
        self.random.pick_any(all).unwrap_or(AllocationId(3))
    }

    fn any_mapping(&mut self) -> MappingId {
        let all = self.clients.values().flat_map(|client| client.mappings.keys().copied());
        self.random.pick_any(all).unwrap_or(MappingId(3))
    }

    /// How long a client holds a mapping, microseconds; `None`: for ever.
    pub(super) fn hold_us(&mut self, client_kind: Kind) -> Option<u64> {
        if self.machine.borrow_mut().faults.strikes(Fault::Leak) {
            return None;
        }
        let (low, high) = match client_kind {
            Kind::Steady | Kind::Dying | Kind::Fickle => (20, 3000),
            Kind::Greedy => (1000, 20_000),
            Kind::Slow => (3000, 100_000),
            Kind::Outlaw => (20, 10_000),
        };
        Some(self.random.between(low, high))
    }
}
