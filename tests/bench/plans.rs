//! What the engine does for a page of a planned map, all of it: the map, the pages fetched and evicted, the unmap. No
//! link, no bytes, no clock that counts: transfers end at once.

use std::collections::VecDeque;
use std::time::Instant;

use lapis_proto::message::{Access, Map, PageRange, PlanStep, PlanUse, SetPlan};
use lapisd::engine::Engine;
use lapisd::engine::event::{Command, Event, Outbox, Reply, Request};
use lapisd::engine::ids::{AllocationId, Domain, FileId, RequestId, SessionId};
use lapisd::engine::limits::Limits;
use lapisd::store::FileIdentity;

const STEP_PAGES: u32 = 256;

struct Bench {
    engine: Engine,
    now: u64,
    last: u64,
}

impl Bench {
    fn ask(&mut self, session: SessionId, body: Request) -> Option<Reply> {
        self.last += 1;
        let asked = RequestId(self.last);
        let mut events = VecDeque::from([Event::Request { session, request: asked, body }]);
        let mut answer = None;
        while let Some(event) = events.pop_front() {
            let mut outbox = Outbox::new();
            self.now += 1;
            self.engine.apply(event, self.now, &mut outbox);
            for command in outbox {
                match command {
                    Command::Transfer { tag, .. } => {
                        events.push_back(Event::TransferDone { tag, result: Ok(0) });
                    }
                    Command::Reply { request, reply, .. } if request == asked => {
                        answer = Some(reply);
                    }
                    Command::Reply { .. }
                    | Command::Export { .. }
                    | Command::Revoke { .. }
                    | Command::CloseFile(_) => {}
                }
            }
        }
        answer
    }

    /// A session with the file open, and a plan of all of it.
    fn join(&mut self, number: u64, pages: u32) -> (SessionId, AllocationId) {
        let session = SessionId(number);
        let opened = Event::SessionOpened { session, domain: Domain(1), gid: 1, admin: false };
        self.engine.apply(opened, self.now, &mut Outbox::new());
        let length = u64::from(pages) * 4096;
        let identity = FileIdentity { device: 1, inode: 1, size: length, mtime_ns: 0, ctime_ns: 0 };
        let open = Request::OpenFile { file: FileId(number), identity, offset: 0, length };
        let Some(Reply::Allocated { allocation, .. }) = self.ask(session, open) else {
            panic!("the file is not opened");
        };
        (session, allocation)
    }
}

fn range(allocation: AllocationId, step: u32) -> PageRange {
    PageRange { allocation, first: step * STEP_PAGES, count: STEP_PAGES }
}

/// Microseconds for a page of a map, and for one of a plan that is set, where so many sessions go through one file one
/// after the other, each by its plan, and four in ten pages fit.
pub(crate) fn page_us(sessions: u64, pages: u32) -> (f64, f64) {
    let steps = pages / STEP_PAGES;
    let pages = steps * STEP_PAGES;
    let limits = Limits {
        depth: 16,
        sessions_max: 1024,
        pages_max: 1 << 24,
        ..Limits::small(pages / 5 * 2, 2 * pages, 0)
    };
    let mut bench = Bench { engine: Engine::new(limits), now: 1, last: 0 };
    let joined: Vec<_> = (1..=sessions).map(|number| bench.join(number, pages)).collect();
    let start = Instant::now();
    for (session, allocation) in &joined {
        let used = |step| PlanUse { range: range(*allocation, step), access: Access::Read };
        let step = |step| PlanStep { uses: vec![used(step)] };
        let plan = SetPlan { plan: 1, cyclic: true, steps: (0..steps).map(step).collect() };
        let reply = bench.ask(*session, Request::SetPlan(plan));
        assert_eq!(reply, Some(Reply::Done));
    }
    let each = |start: Instant, pages: u64| start.elapsed().as_secs_f64() * 1e6 / pages as f64;
    let set = each(start, sessions * u64::from(pages));
    let mut mapped = 0;
    let mut started = Instant::now();
    for round in 0..2 * steps {
        if round == steps {
            (started, mapped) = (Instant::now(), 0);
        }
        for (session, allocation) in &joined {
            let ranges = vec![range(*allocation, round % steps)];
            let map = Map { ranges, access: Access::Read, wait_us: 1_000_000 };
            let Some(Reply::Mapped(granted)) = bench.ask(*session, Request::Map(map)) else {
                panic!("a map is not granted");
            };
            bench.ask(*session, Request::Unmap(vec![granted.mapping]));
            mapped += u64::from(STEP_PAGES);
        }
    }
    (each(started, mapped), set)
}
