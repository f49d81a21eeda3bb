//! An engine with one session, whose transfers end as a test says.

use std::ops::Range;

use lapis_proto::message::{Access, Map, Mapped, PageRange, Stats};

use super::super::event::{Hop, Reply, Request, TransferFault};
use super::super::page::Page;
use super::*;
use crate::store::FileIdentity;

pub(super) const PAGE: u64 = 4096;
pub(super) const WAIT_US: u64 = 30_000_000;

/// An engine with one session, whose transfers end as a test says.
pub(super) struct Bench {
    pub(super) engine: Engine,
    pub(super) now: u64,
    last: u64,
    pub(super) hops: VecDeque<(Tag, Hop)>,
    pub(super) replies: BTreeMap<RequestId, Reply>,
}

const SESSION: SessionId = SessionId(1);

impl Bench {
    pub(super) fn new(vram: u32, ram: u32, slots: u32) -> Self {
        let engine = Engine::new(Limits::small(vram, ram, slots));
        let (hops, replies) = (VecDeque::new(), BTreeMap::new());
        let mut bench = Self { engine, now: 1, last: 0, hops, replies };
        let opened =
            Event::SessionOpened { session: SESSION, domain: Domain(7), gid: 7, admin: true };
        bench.apply(opened);
        bench
    }

    pub(super) fn apply(&mut self, event: Event) {
        let mut outbox = Outbox::new();
        self.engine.apply(event, self.now, &mut outbox);
        self.engine.verify_invariants();
        for command in outbox {
            match command {
                Command::Transfer { tag, hop } => self.hops.push_back((tag, hop)),
                Command::Reply { request, reply, .. } => {
                    let old = self.replies.insert(request, reply);
                    assert!(old.is_none(), "{request:?} is answered twice");
                }
                Command::Export { .. } | Command::Revoke { .. } | Command::CloseFile(_) => {}
            }
        }
    }

    pub(super) fn ask(&mut self, body: Request) -> RequestId {
        self.last += 1;
        let request = RequestId(self.last);
        self.apply(Event::Request { session: SESSION, request, body });
        request
    }

    pub(super) fn reply(&mut self, request: RequestId) -> Option<Reply> {
        self.replies.remove(&request)
    }

    pub(super) fn refusal(&mut self, request: RequestId) -> Refused {
        match self.reply(request) {
            Some(Reply::Refused(refused)) => *refused,
            other => panic!("no refusal: {other:?}"),
        }
    }

    pub(super) fn mapped(&mut self, request: RequestId) -> Mapped {
        match self.reply(request) {
            Some(Reply::Mapped(mapped)) => mapped,
            other => panic!("not mapped: {other:?}"),
        }
    }

    pub(super) fn done(&mut self, request: RequestId) {
        let reply = self.reply(request);
        assert!(matches!(reply, Some(Reply::Done)), "{reply:?}");
    }

    pub(super) fn allocated(&mut self, body: Request) -> AllocationId {
        let request = self.ask(body);
        match self.reply(request) {
            Some(Reply::Allocated { allocation, .. }) => allocation,
            other => panic!("no allocation: {other:?}"),
        }
    }

    pub(super) fn allocate(&mut self, pages: u64) -> AllocationId {
        self.allocated(Request::Allocate { size: pages * PAGE })
    }

    pub(super) fn open_file(&mut self, pages: u64) -> AllocationId {
        let size = pages * PAGE;
        let identity = FileIdentity { device: 1, inode: 1, size, mtime_ns: 0, ctime_ns: 0 };
        let file = FileId(1);
        self.allocated(Request::OpenFile { file, identity, offset: 0, length: size })
    }

    pub(super) fn map(
        &mut self,
        allocation: AllocationId,
        pages: Range<u32>,
        access: Access,
    ) -> RequestId {
        let ranges = vec![range(allocation, pages)];
        self.ask(Request::Map(Map { ranges, access, wait_us: WAIT_US }))
    }

    pub(super) fn unmap(&mut self, mapped: &Mapped) {
        let request = self.ask(Request::Unmap(vec![mapped.mapping]));
        self.done(request);
    }

    /// Maps pages for writing, and ends that.
    pub(super) fn write(&mut self, allocation: AllocationId, pages: Range<u32>) {
        let request = self.map(allocation, pages, Access::Write);
        self.run(|_| None);
        let mapped = self.mapped(request);
        self.unmap(&mapped);
    }

    /// Ends all transfers, those that follow from them too; answers how many failed.
    pub(super) fn run(&mut self, fails: impl Fn(&Hop) -> Option<TransferFault>) -> u32 {
        let (mut failed, mut hops) = (0, 0);
        while let Some((tag, hop)) = self.hops.pop_front() {
            hops += 1;
            assert!(hops < 10_000, "{hop:?}: they go on for ever");
            let fault = fails(&hop);
            failed += u32::from(fault.is_some());
            assert!(failed < 100, "{hop:?} is tried for ever");
            self.apply(Event::TransferDone { tag, result: fault.map_or(Ok(0), Err) });
        }
        failed
    }

    /// The first page of an allocation that is like this.
    pub(super) fn page_where(&self, allocation: AllocationId, like: impl Fn(&Page) -> bool) -> u32 {
        let backing = self.engine.allocations[&allocation].backing;
        let pages = 0..self.engine.table.backing(backing).pages_count();
        let page = |index| self.engine.table.page(PageRef { backing, index });
        pages.into_iter().find(|index| like(page(*index))).expect("there is such a page")
    }

    pub(super) fn stats(&mut self) -> Stats {
        let request = self.ask(Request::Stat);
        match self.reply(request) {
            Some(Reply::Stats(stats)) => *stats,
            other => panic!("no stats: {other:?}"),
        }
    }

    pub(super) fn pass(&mut self, us: u64) {
        self.now += us;
        self.apply(Event::Tick);
    }
}

pub(super) fn range(allocation: AllocationId, pages: Range<u32>) -> PageRange {
    PageRange { allocation, first: pages.start, count: pages.end - pages.start }
}
