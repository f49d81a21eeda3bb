//! The engine against a naive model: random clients, random order of completions, random faults. A page's content is
//! one number, so a frame used by two pages, a stale copy or a lost write shows as a wrong number.

mod bench;
mod faults;
mod hints;

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::{
    Access, Advice, Advise, Flush, Map, PageRange, Prefetch, Quota, QuotaSubject, SetTier, Tier,
};

use super::event::{Command, Event, Hop, Reply, Request, TransferFault};
use super::ids::*;
use super::*;
use crate::store::{FileIdentity, StoreFault};

/// xorshift64*: enough to choose among operations.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Debug, Default)]
struct Client {
    domain: u32,
    open: bool,
    /// Pages of each allocation; a file's inode if it has one.
    allocations: BTreeMap<AllocationId, (u32, Option<u64>)>,
    waiting: BTreeMap<RequestId, (Vec<PageRange>, Access)>,
    mapped: BTreeMap<MappingId, (Vec<PageRange>, Access, Vec<VramFrame>)>,
    imported: BTreeSet<VramFrame>,
    asked: BTreeMap<RequestId, Option<u64>>,
}

struct World {
    engine: Engine,
    now: u64,
    random: Random,
    vram: Vec<u64>,
    ram: Vec<u64>,
    slots: Vec<u64>,
    hops: Vec<(Tag, Hop)>,
    commands: VecDeque<Command>,
    obeying: bool,
    files: BTreeMap<FileId, u64>,
    clients: BTreeMap<SessionId, Client>,
    bytes: BTreeMap<(AllocationId, u32), u64>,
    next: u64,
    fault_one_in: u64,
    granted: u64,
    refused: BTreeMap<String, u64>,
}

const GARBAGE: u64 = 0xDEAD;
const PAGE: u64 = 4096;

fn file_bytes(inode: u64, offset: u64) -> u64 {
    inode * 1_000_003 + offset + 17
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed * 2 + 1);
        let vram = 4 + random.below(28);
        let ram = 8 + random.below(16);
        let slots = if random.one_in(3) { 0 } else { random.below(32) };
        let n = |x: u64| u32::try_from(x).unwrap();
        let limits = Limits::small(n(vram), n(ram), n(slots));
        let fill = |n: u64| vec![GARBAGE; usize::try_from(n).unwrap()];
        Self {
            engine: Engine::new(limits),
            now: 1,
            fault_one_in: if random.one_in(2) { 0 } else { 5 + random.below(50) },
            random,
            vram: fill(vram),
            ram: fill(ram),
            slots: fill(slots),
            hops: Vec::new(),
            commands: VecDeque::new(),
            obeying: false,
            files: BTreeMap::new(),
            clients: BTreeMap::new(),
            bytes: BTreeMap::new(),
            next: 1,
            granted: 0,
            refused: BTreeMap::new(),
        }
    }

    fn apply(&mut self, event: Event) {
        let mut outbox = Outbox::new();
        self.engine.apply(event, self.now, &mut outbox);
        self.engine.verify_invariants();
        self.commands.extend(outbox);
        // Obeying one may make the engine command more: those come after, as on a socket.
        if !std::mem::replace(&mut self.obeying, true) {
            while let Some(command) = self.commands.pop_front() {
                self.obey(command);
            }
            self.obeying = false;
        }
    }

    fn request(&mut self, session: SessionId, body: Request) -> RequestId {
        self.next += 1;
        let request = RequestId(self.next);
        let inode = match &body {
            Request::OpenFile { identity, .. } => Some(identity.inode),
            _ => None,
        };
        if let Request::Map(map) = &body {
            let entry = (map.ranges.clone(), map.access);
            self.clients.get_mut(&session).unwrap().waiting.insert(request, entry);
        }
        self.clients.get_mut(&session).unwrap().asked.insert(request, inode);
        self.apply(Event::Request { session, request, body });
        request
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Transfer { tag, hop } => self.hops.push((tag, hop)),
            Command::CloseFile(file) => {
                assert!(self.files.remove(&file).is_some(), "{file:?} is closed twice");
            }
            Command::Export { session, frames, .. } => {
                let domain = self.clients[&session].domain;
                for frame in frames {
                    let seen_by = |client: &Client| {
                        client.domain != domain && client.imported.contains(&frame)
                    };
                    assert!(!self.clients.values().any(seen_by), "{frame:?} crosses domains");
                    let new = self.clients.get_mut(&session).unwrap().imported.insert(frame);
                    assert!(new, "{frame:?} is sent twice");
                }
            }
            Command::Revoke { session, frames } => {
                if !self.random.one_in(10) {
                    let client = self.clients.get_mut(&session).unwrap();
                    for frame in &frames {
                        assert!(client.imported.remove(frame), "{frame:?} was never sent");
                    }
                    self.request(session, Request::Revoked(frames));
                }
            }
            Command::Reply { session, request, reply } => self.replied(session, request, reply),
        }
    }

    fn replied(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        let client = self.clients.get_mut(&session).unwrap();
        let inode = client.asked.remove(&request).expect("one reply per request");
        match reply {
            Reply::Allocated { allocation, pages } => {
                client.allocations.insert(allocation, (pages, inode));
            }
            Reply::Mapped(mapped) => {
                self.granted += 1;
                let (ranges, access) = client.waiting.remove(&request).unwrap();
                assert!(mapped.frames.iter().all(|frame| client.imported.contains(frame)));
                let entry = (ranges, access, mapped.frames);
                client.mapped.insert(mapped.mapping, entry);
                self.check(session, mapped.mapping);
            }
            Reply::Refused(refused) => {
                client.waiting.remove(&request);
                *self.refused.entry(format!("{:?}", refused.code)).or_default() += 1;
            }
            Reply::Done | Reply::Stats(_) | Reply::Quotas(_) | Reply::WorkingSets(_) => {}
        }
    }

    /// Every page of a mapping reads as the model says; a writer then writes.
    fn check(&mut self, session: SessionId, mapping: MappingId) {
        let client = &self.clients[&session];
        let (ranges, access, frames) = &client.mapped[&mapping];
        let pages =
            ranges.iter().flat_map(|r| (r.first..r.first + r.count).map(|p| (r.allocation, p)));
        for ((allocation, page), frame) in pages.zip(frames) {
            let expected = match client.allocations[&allocation].1 {
                Some(inode) => file_bytes(inode, 100 + u64::from(page) * PAGE),
                None => self.bytes.get(&(allocation, page)).copied().unwrap_or(0),
            };
            let found = &mut self.vram[frame.0 as usize];
            if *access == Access::Overwrite {
                *found = expected;
            }
            assert_eq!(*found, expected, "page {page} of {allocation:?} in {frame:?}");
            if *access != Access::Read {
                self.next += 1;
                *found = self.next;
                self.bytes.insert((allocation, page), self.next);
            }
        }
    }

    fn finish_one_hop(&mut self) {
        if self.hops.is_empty() {
            return;
        }
        let index = self.random.below(self.hops.len() as u64);
        let (tag, hop) = self.hops.swap_remove(usize::try_from(index).unwrap());
        let fails = self.fault_one_in > 0 && self.random.one_in(self.fault_one_in);
        let io = TransferFault::Store(StoreFault::Io { offset: 7, errno: nix::errno::Errno::EIO });
        let result = match hop {
            Hop::ReadFile { target, .. } | Hop::ReadSpill { target, .. } if fails => {
                self.ram[target.0 as usize] = GARBAGE;
                Err(io)
            }
            Hop::WriteSpill { slot, .. } if fails => {
                self.slots[slot.0 as usize] = GARBAGE;
                Err(io)
            }
            Hop::ReadFile { file, offset, target, .. } => {
                self.ram[target.0 as usize] = file_bytes(self.files[&file], offset);
                Ok(0)
            }
            Hop::ReadSpill { slot, target, checksum } => {
                self.ram[target.0 as usize] = self.slots[slot.0 as usize];
                assert_eq!(checksum, self.slots[slot.0 as usize] + 1, "checksum of {slot:?}");
                Ok(0)
            }
            Hop::WriteSpill { source, slot } => {
                self.slots[slot.0 as usize] = self.ram[source.0 as usize];
                Ok(self.ram[source.0 as usize] + 1)
            }
            Hop::Up { source, target, .. } => {
                self.vram[target.0 as usize] = self.ram[source.0 as usize];
                Ok(0)
            }
            Hop::Down { source, target } => {
                self.ram[target.0 as usize] = self.vram[source.0 as usize];
                Ok(0)
            }
            Hop::Zero { target } | Hop::Restore { target } => {
                self.vram[target.0 as usize] = 0;
                Ok(0)
            }
            Hop::Release { target } => {
                let has = |client: &Client| client.imported.contains(&target);
                assert!(!self.clients.values().any(has), "{target:?} is released under a client");
                self.vram[target.0 as usize] = GARBAGE;
                Ok(0)
            }
        };
        self.apply(Event::TransferDone { tag, result });
    }

    fn any_client(&mut self) -> Option<SessionId> {
        let open: Vec<_> = self.clients.iter().filter(|(_, c)| c.open).map(|(id, _)| *id).collect();
        if open.is_empty() {
            return None;
        }
        let index = self.random.below(open.len() as u64);
        Some(open[usize::try_from(index).unwrap()])
    }

    fn any_ranges(&mut self, session: SessionId, anonymous: bool) -> Vec<PageRange> {
        let all = self.clients[&session].allocations.clone();
        let usable: Vec<_> =
            all.iter().filter(|(_, (_, ino))| !anonymous || ino.is_none()).collect();
        let mut ranges = Vec::new();
        for _ in 0..=self.random.below(3) {
            if usable.is_empty() {
                break;
            }
            let index = self.random.below(usable.len() as u64);
            let (id, (pages, _)) = usable[usize::try_from(index).unwrap()];
            let first = u32::try_from(self.random.below(u64::from(*pages))).unwrap();
            let most = u64::from((*pages - first).min(4));
            let count = u32::try_from(1 + self.random.below(most)).unwrap();
            ranges.push(PageRange { allocation: *id, first, count });
        }
        ranges
    }

    fn step(&mut self) {
        self.now += self.random.below(1000);
        let lingering = self.clients.iter().find(|(_, client)| !client.open).map(|(id, _)| *id);
        if let (Some(session), true) = (lingering, self.random.one_in(30)) {
            self.die(session);
        }
        match self.random.below(20) {
            0 if self.clients.values().filter(|c| c.open).count() < 6 => self.connect(),
            1 => self.allocate(),
            2..=4 => self.map(),
            5..=9 => self.unmap_one(),
            10 => {
                let Some(session) = self.any_client() else { return };
                let ranges = self.any_ranges(session, false);
                if !ranges.is_empty() {
                    let prefetch = Prefetch {
                        ranges: ranges.clone(),
                        priority: u8::try_from(self.random.below(3)).unwrap(),
                        within_us: self.random.below(2) * 500,
                    };
                    self.request(session, Request::Prefetch(prefetch));
                    match self.random.below(8) {
                        0 => drop(self.request(session, Request::CancelPrefetch(ranges))),
                        1 => self.advise(session, ranges),
                        2 | 3 => {
                            let flush = Flush { ranges, wait_us: 200_000 };
                            self.request(session, Request::Flush(flush));
                        }
                        _ => {}
                    }
                }
            }
            11 if self.random.one_in(3) => {
                let Some(session) = self.any_client() else { return };
                let Some(id) = self.clients[&session].allocations.keys().next().copied() else {
                    return;
                };
                let used = |ranges: &[PageRange]| ranges.iter().any(|r| r.allocation == id);
                let client = &self.clients[&session];
                let busy = client.mapped.values().any(|(ranges, ..)| used(ranges))
                    || client.waiting.values().any(|(ranges, _)| used(ranges));
                self.request(session, Request::Free(id));
                if !busy {
                    self.clients.get_mut(&session).unwrap().allocations.remove(&id);
                }
            }
            11 => self.set_quota(),
            12 if self.random.one_in(5) => self.disconnect(),
            13 if self.random.one_in(20) => {
                self.now += 3_000_000;
                self.apply(Event::Tick);
            }
            _ => self.finish_one_hop(),
        }
    }

    fn advise(&mut self, session: SessionId, ranges: Vec<PageRange>) {
        let advice = match self.random.below(5) {
            0 => Advice::Normal,
            1 => Advice::Sequential,
            2 => Advice::Random,
            3 => Advice::Keep,
            _ => Advice::DontNeed,
        };
        self.request(session, Request::Advise(Advise { ranges, advice }));
    }

    fn set_quota(&mut self) {
        let Some(session) = self.any_client() else { return };
        let subject = match self.random.below(4) {
            0 => QuotaSubject::EachSession,
            1 => QuotaSubject::EachUid,
            2 => QuotaSubject::Uid(u32::try_from(self.random.below(2)).unwrap()),
            _ => QuotaSubject::Gid(100),
        };
        let quota = Quota {
            subject,
            vram_max: self.random.one_in(2).then(|| (1 + self.random.below(12)) * PAGE),
            vram_reserved: self.random.below(3) * PAGE,
            anonymous_max: self.random.one_in(2).then(|| (4 + self.random.below(40)) * PAGE),
            priority: u8::try_from(self.random.below(3)).unwrap(),
        };
        self.request(session, Request::SetQuota(quota));
        if self.random.one_in(2) {
            let tier = [Tier::Vram, Tier::Ram, Tier::Nvme];
            let tier = tier[usize::try_from(self.random.below(3)).unwrap()];
            let size = self.random.below(34) * PAGE;
            self.request(session, Request::SetTier(SetTier { tier, size, wait_us: 100_000 }));
        }
        self.request(session, Request::ListQuotas);
    }

    fn connect(&mut self) {
        self.next += 1;
        let session = SessionId(self.next);
        let domain = u32::try_from(self.random.below(2)).unwrap();
        self.clients.insert(session, Client { domain, open: true, ..Client::default() });
        self.apply(Event::SessionOpened { session, domain: Domain(domain), gid: 100, admin: true });
    }

    fn allocate(&mut self) {
        let Some(session) = self.any_client() else { return };
        if self.random.one_in(2) {
            let size = 1 + self.random.below(16 * PAGE);
            self.request(session, Request::Allocate { size });
            return;
        }
        let inode = 1 + self.random.below(3);
        self.next += 1;
        let file = FileId(self.next);
        self.files.insert(file, inode);
        let length = inode * 7 * PAGE + 5;
        let identity =
            FileIdentity { device: 1, inode, size: 100 + length, mtime_ns: 0, ctime_ns: 0 };
        self.request(session, Request::OpenFile { file, identity, offset: 100, length });
    }

    fn map(&mut self) {
        let Some(session) = self.any_client() else { return };
        let access = match self.random.below(4) {
            0 | 1 => Access::Read,
            2 => Access::Write,
            _ => Access::Overwrite,
        };
        let ranges = self.any_ranges(session, access != Access::Read);
        // Two ranges of one request must not write the same page twice in this model.
        let mut pages: Vec<_> = ranges
            .iter()
            .flat_map(|r| (r.first..r.first + r.count).map(|p| (r.allocation, p)))
            .collect();
        pages.sort_unstable();
        let overlaps = pages.windows(2).any(|pair| pair[0] == pair[1]);
        if ranges.is_empty() || (overlaps && access != Access::Read) {
            return;
        }
        let wait_us = if self.random.one_in(5) { 0 } else { 100_000 };
        self.request(session, Request::Map(Map { ranges, access, wait_us }));
    }

    fn unmap_one(&mut self) {
        let Some(session) = self.any_client() else { return };
        let client = &self.clients[&session];
        let Some((id, (ranges, access, frames))) = client.mapped.iter().next() else { return };
        let id = *id;
        let pages =
            ranges.iter().flat_map(|r| (r.first..r.first + r.count).map(|p| (r.allocation, p)));
        for ((allocation, page), frame) in pages.zip(frames) {
            // Other mappings of this client may have written since; the bytes are the latest all the same.
            if client.allocations[&allocation].1.is_none() {
                let expected = self.bytes.get(&(allocation, page)).copied().unwrap_or(0);
                assert_eq!(self.vram[frame.0 as usize], expected, "{access:?} of page {page}");
            }
        }
        self.clients.get_mut(&session).unwrap().mapped.remove(&id);
        self.request(session, Request::Unmap(vec![id]));
    }

    fn disconnect(&mut self) {
        let Some(session) = self.any_client() else { return };
        self.close(session);
        if self.random.one_in(2) {
            self.die(session);
        }
    }

    fn close(&mut self, session: SessionId) {
        self.clients.get_mut(&session).unwrap().open = false;
        self.apply(Event::SessionClosed { session });
    }

    fn die(&mut self, session: SessionId) {
        self.clients.remove(&session);
        self.apply(Event::ProcessDied { session });
    }

    /// Everything is given back once all clients are gone.
    fn finish(&mut self) {
        for session in self.clients.keys().copied().collect::<Vec<_>>() {
            if self.clients[&session].open {
                self.close(session);
            }
            self.die(session);
        }
        while !self.hops.is_empty() {
            self.finish_one_hop();
        }
        let engine = &self.engine;
        let aside = |n: usize| u32::try_from(n).unwrap();
        let parked = aside(engine.sizes.parked.len());
        assert_eq!(engine.vram.free() + parked, engine.vram.capacity(), "VRAM leaks");
        assert_eq!(parked, engine.vram.capacity() - engine.sizes.vram_target);
        let ram_aside = aside(engine.sizes.ram_aside.len());
        assert_eq!(engine.ram.free() + ram_aside, engine.ram.capacity(), "RAM leaks");
        assert_eq!(ram_aside, engine.ram.capacity() - engine.sizes.ram_target);
        let slots_aside = aside(engine.sizes.slots_aside.len());
        assert_eq!(engine.slots.free() + slots_aside, engine.slots.capacity(), "the spill leaks");
        assert_eq!(engine.table.pages, 0);
        assert!(self.files.is_empty(), "a file is never closed");
        assert!(engine.sessions.is_empty() && engine.allocations.is_empty());
    }
}

#[test]
fn random_clients_always_read_what_they_wrote() {
    let (mut granted, mut refused) = (0, BTreeMap::<String, u64>::new());
    let seeds = std::env::var("LAPIS_SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(150);
    for seed in 0..seeds {
        eprintln!("seed {seed}");
        let mut world = World::new(seed);
        world.connect();
        for _ in 0..1500 {
            world.step();
        }
        world.finish();
        granted += world.granted;
        for (code, count) in world.refused {
            *refused.entry(code).or_default() += count;
        }
    }
    eprintln!("granted {granted}, refused {refused:?}");
    assert!(granted > seeds * 25, "{granted} maps granted: the test tests little");
}
