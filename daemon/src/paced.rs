//! The engine in virtual time, on links that move one page after the other at their own pace, with clients that compute
//! between their maps: how much of the transfers is hidden. Nothing here has a clock, so figures are exact and repeat.
//!
//! `lapisctl plan` predicts with it, and tests hold the engine's policy to its figures.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use lapis_proto::message::{
    Access, Map, PageRange, PlanStep, PlanUse, Quota, QuotaSubject, Refused, SetPlan,
};

use crate::engine::Engine;
use crate::engine::event::{Command, Event, Hop, Outbox, Reply, Request};
use crate::engine::ids::{AllocationId, Domain, FileId, MappingId, RequestId, SessionId, Tag};
use crate::engine::limits::Limits;
use crate::store::FileIdentity;

/// However slow a link is, a map is waited for: a year.
const WAIT_US: u64 = 31_536_000_000_000;

/// A machine.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// VRAM frames.
    pub vram: u32,
    /// RAM frames.
    pub ram: u32,
    /// Nanoseconds per page from RAM to VRAM.
    pub up_ns: u64,
    /// Nanoseconds per page from the file to RAM.
    pub read_ns: u64,
    /// Nanoseconds from asking for a map to the request's arrival, and back: what is lost per map at best.
    pub map_ns: u64,
}

/// What a client maps in one step, and for how long it computes then.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Pages of its file: ranges in ascending order that don't overlap.
    pub pages: Vec<std::ops::Range<u32>>,
    /// Nanoseconds.
    pub compute_ns: u64,
}

/// A client: a cycle of layers over a file of its own.
#[derive(Debug, Clone)]
pub struct Workload {
    /// In order.
    pub layers: Vec<Layer>,
    /// Whether it declares them as a plan.
    pub plan: bool,
    /// When it starts, nanoseconds.
    pub start_ns: u64,
    /// Each compute varies by up to so many percent, up and down.
    pub jitter_percent: u64,
    /// Its quota's priority.
    pub priority: u8,
    /// Cycles after which it ends; the run ends with the last client's.
    pub passes: usize,
}

/// What came of a client.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Nanoseconds of each pass.
    pub passes_ns: Vec<u64>,
    /// Pages copied to VRAM, by all clients, during each pass.
    pub moved: Vec<u64>,
    /// Pages read from files, likewise.
    pub read: Vec<u64>,
    /// Nanoseconds that it waited for maps.
    pub stalled_ns: Vec<u64>,
}

impl Outcome {
    /// Mean time of the passes from this one on, nanoseconds.
    #[must_use]
    pub fn mean_ns(&self, from: usize) -> f64 {
        mean(&self.passes_ns[from..])
    }

    /// Mean of the pages moved in the passes from this one on.
    #[must_use]
    pub fn mean_moved(&self, from: usize) -> f64 {
        mean(&self.moved[from..])
    }

    /// Mean of the pages read in the passes from this one on.
    #[must_use]
    pub fn mean_read(&self, from: usize) -> f64 {
        mean(&self.read[from..])
    }
}

fn mean(numbers: &[u64]) -> f64 {
    numbers.iter().sum::<u64>() as f64 / numbers.len() as f64
}

#[derive(Debug)]
struct Client {
    work: Workload,
    session: SessionId,
    allocation: Option<AllocationId>,
    at: usize,
    mapping: Option<MappingId>,
    pass_began_ns: u64,
    moved_before: u64,
    read_before: u64,
    asked_ns: u64,
    stalled_ns: u64,
    outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Start(usize),
    Ask(usize),
    Done(Tag),
    Computed(usize),
    Tick,
}

/// A link: one transfer after the other.
#[derive(Debug, Default)]
struct Line {
    free_at_ns: u64,
}

impl Line {
    fn take(&mut self, now: u64, ns: u64) -> u64 {
        self.free_at_ns = self.free_at_ns.max(now) + ns;
        self.free_at_ns
    }
}

#[derive(Debug)]
struct Run {
    engine: Engine,
    machine: Machine,
    now_ns: u64,
    events: BinaryHeap<Reverse<(u64, u64, What)>>,
    sequence: u64,
    clients: Vec<Client>,
    up: Line,
    read: Line,
    last_request: u64,
    waiting: BTreeMap<RequestId, usize>,
    random: Random,
    moved: u64,
    reads: u64,
    /// What the engine refused: the run ends.
    refused: Option<Refused>,
    ticks_at: Option<u64>,
}

/// Runs clients on a machine until each has done its passes.
///
/// # Errors
/// What the engine refuses: a layer that is larger than VRAM, or files too large for its metadata.
pub fn run(machine: Machine, workloads: &[Workload]) -> Result<Vec<Outcome>, Refused> {
    let small = Limits::small(machine.vram, machine.ram, 0);
    let limits = Limits { depth: 16, map_wait_us_max: WAIT_US, ..small };
    let mut run = Run {
        engine: Engine::new(limits),
        machine,
        now_ns: 0,
        events: BinaryHeap::new(),
        sequence: 0,
        clients: Vec::new(),
        up: Line::default(),
        read: Line::default(),
        last_request: 0,
        waiting: BTreeMap::new(),
        random: Random(7_u64.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
        moved: 0,
        reads: 0,
        refused: None,
        ticks_at: None,
    };
    for (index, work) in workloads.iter().enumerate() {
        let session = SessionId(index as u64 + 1);
        run.at(work.start_ns, What::Start(index));
        run.clients.push(Client {
            work: work.clone(),
            session,
            allocation: None,
            at: 0,
            mapping: None,
            pass_began_ns: 0,
            moved_before: 0,
            read_before: 0,
            asked_ns: 0,
            stalled_ns: 0,
            outcome: Outcome::default(),
        });
    }
    while let Some(Reverse((at, _, what))) = run.events.pop() {
        run.now_ns = run.now_ns.max(at);
        run.handle(what);
        if let Some(refused) = run.refused {
            return Err(refused);
        }
        if run.clients.iter().all(|client| client.outcome.passes_ns.len() >= client.work.passes) {
            break;
        }
    }
    run.engine.verify_invariants();
    Ok(run.clients.into_iter().map(|client| client.outcome).collect())
}

impl Run {
    fn at(&mut self, ns: u64, what: What) {
        self.sequence += 1;
        self.events.push(Reverse((ns, self.sequence, what)));
    }

    fn handle(&mut self, what: What) {
        match what {
            What::Start(index) => self.start(index),
            What::Ask(index) => self.map(index),
            What::Done(tag) => self.apply(Event::TransferDone { tag, result: Ok(0) }),
            What::Computed(index) => self.computed(index),
            What::Tick => {
                self.ticks_at = None;
                self.apply(Event::Tick);
            }
        }
    }

    fn start(&mut self, index: usize) {
        let (session, priority) = (self.clients[index].session, self.clients[index].work.priority);
        let uid = u32::try_from(index).expect("few clients") + 1;
        let domain = Domain(uid);
        self.apply(Event::SessionOpened { session, domain, gid: 1, admin: true });
        if priority > 0 {
            let quota = Quota { priority, ..Quota::none(QuotaSubject::Uid(uid)) };
            self.ask(index, Request::SetQuota(quota));
        }
        let ends = self.clients[index].work.layers.iter().flat_map(|layer| layer.pages.last());
        let pages = ends.map(|range| range.end).max().unwrap_or(0);
        let length = u64::from(pages) * 4096;
        let inode = u64::from(uid);
        let identity = FileIdentity { device: 1, inode, size: length, mtime_ns: 0, ctime_ns: 0 };
        self.ask(index, Request::OpenFile { file: FileId(inode), identity, offset: 0, length });
        if self.refused.is_some() {
            return;
        }
        if self.clients[index].work.plan {
            let plan = self.plan(index);
            self.ask(index, Request::SetPlan(plan));
        }
        self.clients[index].pass_began_ns = self.now_ns;
        self.map(index);
    }

    fn plan(&self, index: usize) -> SetPlan {
        let client = &self.clients[index];
        let step = |layer: &Layer| {
            let used = |range| PlanUse { range, access: Access::Read };
            PlanStep { uses: self.ranges(index, layer).into_iter().map(used).collect() }
        };
        SetPlan { plan: 1, cyclic: true, steps: client.work.layers.iter().map(step).collect() }
    }

    fn ranges(&self, index: usize, layer: &Layer) -> Vec<PageRange> {
        let allocation = self.clients[index].allocation.expect("opened, or the run is over");
        let range = |pages: &std::ops::Range<u32>| PageRange {
            allocation,
            first: pages.start,
            count: pages.end - pages.start,
        };
        layer.pages.iter().map(range).collect()
    }

    fn map(&mut self, index: usize) {
        let client = &self.clients[index];
        let ranges = self.ranges(index, &client.work.layers[client.at]);
        self.clients[index].asked_ns = self.now_ns;
        let map = Map { ranges, access: Access::Read, wait_us: WAIT_US };
        self.ask(index, Request::Map(map));
    }

    fn computed(&mut self, index: usize) {
        let (moved, reads, now) = (self.moved, self.reads, self.now_ns);
        let client = &mut self.clients[index];
        let mapping = client.mapping.take().expect("it was mapped");
        client.at += 1;
        if client.at == client.work.layers.len() {
            client.at = 0;
            client.outcome.passes_ns.push(now - client.pass_began_ns);
            client.outcome.moved.push(moved - client.moved_before);
            client.outcome.read.push(reads - client.read_before);
            client.outcome.stalled_ns.push(std::mem::take(&mut client.stalled_ns));
            (client.pass_began_ns, client.moved_before, client.read_before) = (now, moved, reads);
        }
        self.ask(index, Request::Unmap(vec![mapping]));
        match self.machine.map_ns {
            0 => self.map(index),
            lost => self.at(now + lost, What::Ask(index)),
        }
    }

    fn ask(&mut self, index: usize, body: Request) {
        self.last_request += 1;
        let request = RequestId(self.last_request);
        self.waiting.insert(request, index);
        let session = self.clients[index].session;
        self.apply(Event::Request { session, request, body });
    }

    fn apply(&mut self, event: Event) {
        let mut outbox = Outbox::new();
        self.engine.apply(event, self.now_ns / 1000, &mut outbox);
        for command in outbox {
            match command {
                Command::Transfer { tag, hop } => self.transfer(tag, hop),
                Command::Reply { request, reply, .. } => self.reply(request, reply),
                Command::Export { .. } | Command::CloseFile(_) => {}
                Command::Revoke { session, frames } => {
                    // Its own frames come back at once.
                    let index = usize::try_from(session.0).expect("few clients") - 1;
                    self.ask(index, Request::Revoked(frames));
                }
            }
        }
        if let Some(due) = self.engine.next_deadline()
            && self.ticks_at.is_none_or(|at| at > due)
        {
            self.ticks_at = Some(due);
            self.at((due * 1000).max(self.now_ns + 1000), What::Tick);
        }
    }

    fn transfer(&mut self, tag: Tag, hop: Hop) {
        let done = match hop {
            Hop::ReadFile { .. } | Hop::ReadSpill { .. } => {
                self.reads += 1;
                self.read.take(self.now_ns, self.machine.read_ns)
            }
            Hop::Up { .. } => {
                self.moved += 1;
                self.up.take(self.now_ns, self.machine.up_ns)
            }
            Hop::Zero { .. }
            | Hop::Release { .. }
            | Hop::Restore { .. }
            | Hop::Down { .. }
            | Hop::WriteSpill { .. } => self.now_ns,
        };
        self.at(done, What::Done(tag));
    }

    fn reply(&mut self, request: RequestId, reply: Reply) {
        let index = self.waiting.remove(&request).expect("each request is answered once");
        match reply {
            Reply::Allocated { allocation, .. } => {
                self.clients[index].allocation = Some(allocation);
            }
            Reply::Mapped(mapped) => {
                let client = &mut self.clients[index];
                client.mapping = Some(mapped.mapping);
                client.stalled_ns += self.now_ns - client.asked_ns;
                let compute = client.work.layers[client.at].compute_ns;
                let jitter = compute * client.work.jitter_percent / 100;
                let compute = compute - jitter + self.random.below(2 * jitter + 1);
                self.at(self.now_ns + compute, What::Computed(index));
            }
            Reply::Done => {}
            Reply::Refused(refused) => self.refused = Some(*refused),
            Reply::Stats(_) | Reply::Quotas(_) | Reply::WorkingSets(_) => {
                unreachable!("nobody asks for them")
            }
        }
    }
}

/// Layers of so many pages each, all with the same compute.
#[must_use]
pub fn uniform(layers: u32, pages: u32, compute_ns: u64) -> Vec<Layer> {
    (0..layers)
        .map(|layer| Layer {
            pages: std::iter::once(layer * pages..(layer + 1) * pages).collect(),
            compute_ns,
        })
        .collect()
}

/// Varies what clients compute: xorshift64*, from a fixed seed.
#[derive(Debug)]
struct Random(u64);

impl Random {
    /// One of `0..count`.
    fn below(&mut self, count: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16) % count
    }
}
