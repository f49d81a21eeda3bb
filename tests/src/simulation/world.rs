//! One run: virtual time, the engine in the middle, and the server's part around it.

use std::collections::BTreeMap;

use lapis_proto::message::Stats;
use lapisd::engine::Engine;
use lapisd::engine::event::{Command, Event, Outbox, Reply, Request};
use lapisd::engine::ids::{
    AllocationId, Domain, FileId, MappingId, RequestId, SessionId, VramFrame,
};
use lapisd::transfer::Transfer;

use super::Options;
use super::client::{Ask, Client, Message};
use super::device::VirtualDevice;
use super::faults::Fault;
use super::ledger::Ledger;
use super::machine::{Machine, Shared};
use super::mutant::Mutant;
use super::random::Random;
use super::report::Report;
use super::scenario::Scenario;
use super::store::VirtualStore;
use super::trace::Trace;
use super::truth::{FilePart, Truth};

/// Requests that the server makes up, by planted bug, are numbered from here.
pub(super) const MADE_UP: u64 = 1 << 40;
/// Instants in one run, far above what any needs: a run that reaches it never ends.
const INSTANTS_MAX: u64 = 200_000;

/// Something that will happen.
#[derive(Debug)]
pub(super) enum What {
    /// A client's turn.
    Turn { seat: usize },
    /// A request reaches the daemon.
    Arrival { session: SessionId, request: RequestId, ask: Ask },
    /// The daemon sees a connection close.
    Hangup { session: SessionId },
    /// A process ends.
    End { session: SessionId },
    /// The daemon sees it.
    Death { session: SessionId },
    /// A message reaches a client.
    Delivery { session: SessionId, message: Message },
    /// A client is asked for frames.
    AskedBack { session: SessionId, frames: Vec<VramFrame> },
    /// A client gives frames back.
    GiveBack { session: SessionId, frames: Vec<VramFrame> },
    /// A client is done with a mapping.
    Release { session: SessionId, mapping: MappingId },
    /// A process without a connection uses what it has mapped.
    Haunt { session: SessionId },
    /// The disk or the device may get worse.
    Mischief,
}

/// Everything.
#[derive(Debug)]
pub(super) struct World {
    pub(super) scenario: Scenario,
    pub(super) now: u64,
    pub(super) random: Random,
    pub(super) machine: Shared,
    pub(super) truth: Truth,
    pub(super) ledger: Ledger,
    pub(super) clients: BTreeMap<SessionId, Client>,
    /// Who sits where.
    pub(super) seats: Vec<Option<SessionId>>,
    /// Actions left to the clients; when none are, all comes to rest.
    pub(super) steps_left: u64,
    /// A run that is ending lets nobody live on.
    pub(super) ending: bool,
    pub(super) engine: Engine,
    transfer: Transfer<VirtualStore, VirtualDevice>,
    heap: BTreeMap<(u64, u64), What>,
    sequence: u64,
    opening: BTreeMap<(SessionId, RequestId), FilePart>,
    /// What to forget once nobody can see it.
    pub(super) owned: BTreeMap<SessionId, Vec<AllocationId>>,
    /// When the engine wants a tick, and when it gets it.
    tick: Option<(u64, u64)>,
    last_session: u64,
    last_file: u64,
    last_stats: Option<Box<Stats>>,
    instants: u64,
    trace: Trace,
    pub(super) report: Report,
}

impl World {
    pub(super) fn new(scenario: Scenario, options: Options) -> Self {
        let seed = scenario.seed;
        let machine = Machine::new(&scenario, options.mutant);
        let page_size = machine.page_size;
        let machine = Shared::new(machine.into());
        let store = VirtualStore::new(machine.clone(), &scenario);
        let device = VirtualDevice::new(machine.clone(), &scenario);
        let calm = scenario.calm;
        let mut world = Self {
            now: 1,
            random: Random::new(seed, 0xC1),
            truth: Truth::new(seed, page_size),
            ledger: Ledger::new(scenario.limits.clone(), scenario.frames_ready, calm),
            clients: BTreeMap::new(),
            seats: vec![None; scenario.seats.len()],
            steps_left: options.steps,
            ending: false,
            engine: Engine::new(scenario.limits.clone()),
            transfer: Transfer::new(store, device),
            heap: BTreeMap::new(),
            sequence: 0,
            opening: BTreeMap::new(),
            owned: BTreeMap::new(),
            tick: None,
            last_session: 0,
            last_file: 0,
            last_stats: None,
            instants: 0,
            trace: Trace::new(options.print),
            report: Report { seeds: 1, calm_seeds: u64::from(calm), ..Report::default() },
            machine,
            scenario,
        };
        world.engine.begin_with(world.scenario.frames_ready);
        for seat in 0..world.seats.len() {
            world.after(u64::try_from(seat).expect("few"), What::Turn { seat });
        }
        world.after(100, What::Mischief);
        world
    }

    /// Its sums.
    pub(super) fn report(&self) -> Report {
        let mut report = self.report.clone();
        report.virtual_us = self.now;
        report.faults = self.machine.borrow().faults.counts().to_vec();
        report.hops = self.ledger.counts.hops().map(|(name, stats)| (name, stats.pages)).collect();
        report
    }

    /// A number for all that happened.
    pub(super) fn trace(&self) -> u64 {
        self.trace.hash()
    }

    /// Lets it happen.
    pub(super) fn run(&mut self) {
        while self.steps_left > 0 && self.step() {}
        self.come_to_rest();
        self.end();
    }

    /// Something will happen this many microseconds from now.
    pub(super) fn after(&mut self, delay: u64, what: What) {
        self.at(self.now + delay, what);
    }

    /// Something will happen at this time.
    pub(super) fn at(&mut self, time: u64, what: What) {
        self.sequence += 1;
        self.heap.insert((time, self.sequence), what);
    }

    /// Goes to the next instant at which something happens. Answers whether there was one.
    fn step(&mut self) -> bool {
        let heap = self.heap.keys().next().map(|(time, _)| *time);
        let tick = self.tick.map(|(_, at)| at);
        let (store, device) = (self.transfer.store().next_end(), self.transfer.device().next_end());
        let Some(next) = [heap, tick, store, device].into_iter().flatten().min() else {
            return false;
        };
        self.instants += 1;
        assert!(self.instants < INSTANTS_MAX, "the run does not end");
        self.now = self.now.max(next);
        self.machine.borrow_mut().now = self.now;
        self.transfer.store().run();
        self.transfer.device().run();
        self.complete();
        while let Some(entry) = self.heap.first_entry()
            && entry.key().0 <= self.now
        {
            let what = entry.remove();
            self.happen(what);
        }
        if self.tick.is_some_and(|(_, at)| at <= self.now) {
            self.apply(Event::Tick);
        }
        self.settle();
        true
    }

    /// Tells the engine what has completed, as the server does.
    fn complete(&mut self) {
        loop {
            let mut events = Vec::new();
            self.transfer.poll(&mut events);
            if events.is_empty() {
                break;
            }
            let codes = self.machine.borrow().faults.codes();
            self.ledger.counts.expect_faults(&codes);
            for event in events {
                self.deliver_completion(event);
            }
            self.settle();
        }
    }

    fn deliver_completion(&mut self, event: Event) {
        let Event::TransferDone { tag, mut result } = event else {
            panic!("{event:?} is no completion");
        };
        let errs = |mutant| self.machine.borrow_mut().errs(mutant);
        if errs(Mutant::CompletionLost) {
            return;
        }
        if self.machine.borrow().has(Mutant::FailureTakenAsDone) {
            result = Ok(result.unwrap_or(0));
        }
        let again = errs(Mutant::CompletionTwice).then(|| result.clone());
        self.apply(Event::TransferDone { tag, result });
        if let Some(result) = again {
            self.apply(Event::TransferDone { tag, result });
        }
    }

    /// After a batch of events: starts what they commanded, and sets the timer.
    fn settle(&mut self) {
        self.transfer.submit();
        let deadline = self.engine.next_deadline();
        if self.tick.map(|(deadline, _)| deadline) != deadline {
            let machine = &mut *self.machine.borrow_mut();
            let late = machine.faults.strikes(Fault::TickLate);
            let most = self.random.pick(&[1000, 100_000, 5_000_000]);
            let lateness = if late { self.random.between(1, most) } else { 0 };
            let lost = machine.has(Mutant::TickLost);
            self.tick = deadline.filter(|_| !lost).map(|deadline| (deadline, deadline + lateness));
        }
    }

    /// Gives the engine an event, under the eyes of the ledger.
    pub(super) fn apply(&mut self, event: Event) {
        self.trace.note(self.now, &event);
        self.report.events += 1;
        self.report.operations += u64::from(matches!(event, Event::Request { .. }));
        self.ledger.before(&event, self.now, self.engine.device_lost());
        let event = self.taken_for_administrator(event);
        let mut outbox = Outbox::new();
        self.engine.apply(event, self.now, &mut outbox);
        self.engine.verify_invariants();
        for command in outbox {
            self.trace.note(self.now, &command);
            self.ledger.obeyed(&command, self.now);
            self.obey(command);
        }
        self.ledger.after(self.now, self.engine.next_deadline());
    }

    /// By planted bug everybody may do everything, and only we know who may not.
    fn taken_for_administrator(&self, event: Event) -> Event {
        match event {
            Event::SessionOpened { session, domain, gid, admin } => {
                let everybody = self.machine.borrow().has(Mutant::EverybodyAdministers);
                Event::SessionOpened { session, domain, gid, admin: admin || everybody }
            }
            event => event,
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Transfer { tag, hop } => self.transfer.start(tag, hop),
            Command::CloseFile(file) => self.transfer.close_file(file),
            Command::Export { session, frames, .. } => self.export(session, frames),
            Command::Revoke { session, frames } => self.revoke(session, frames),
            Command::Reply { session, request, reply } => {
                self.count_reply(&reply);
                self.look_for_flushed();
                match &reply {
                    Reply::Allocated { allocation, .. } => {
                        self.owned.entry(session).or_default().push(*allocation);
                        if let Some(part) = self.opening.remove(&(session, request)) {
                            self.truth.opened(*allocation, part);
                        }
                    }
                    Reply::Stats(stats) => self.last_stats = Some(stats.clone()),
                    Reply::Done
                    | Reply::Mapped(_)
                    | Reply::Quotas(_)
                    | Reply::WorkingSets(_)
                    | Reply::Refused(_) => {}
                }
                self.reply(session, request, reply);
            }
        }
    }

    /// Pages that a flush was just answered for are in the spill.
    fn look_for_flushed(&mut self) {
        let machine = self.machine.borrow();
        let harmed = [Fault::TornWrite, Fault::BitFlip];
        let harmed = harmed.iter().any(|fault| machine.faults.happened(*fault) > 0);
        for (session, place) in std::mem::take(&mut self.ledger.flushed) {
            let honest = self.clients.get(&session).is_some_and(Client::is_honest);
            let bytes = self.truth.written(place).filter(|_| honest && !harmed);
            let found = bytes.is_none_or(|bytes| machine.disk.holds(bytes));
            assert!(found, "{place:?} is flushed, and nowhere in the spill");
        }
    }

    fn count_reply(&mut self, reply: &Reply) {
        let name = match reply {
            Reply::Allocated { .. } => "Allocated",
            Reply::Done => "Done",
            Reply::Mapped(_) => "Mapped",
            Reply::Stats(_) => "Stats",
            Reply::Quotas(_) => "Quotas",
            Reply::WorkingSets(_) => "WorkingSets",
            Reply::Refused(refused) => {
                return *self.report.refusals.entry(refused.code.number()).or_default() += 1;
            }
        };
        *self.report.replies.entry(name).or_default() += 1;
    }

    /// A request reached the daemon: a file that comes with it goes to the store first.
    pub(super) fn arrived(&mut self, session: SessionId, request: RequestId, ask: Ask) {
        let body = match ask {
            Ask::Plain(body) => body,
            Ask::Open { file: index, offset, length } => {
                self.last_file += 1;
                let file = FileId(self.last_file);
                let version = self.machine.borrow_mut().disk.open(file, index);
                let number = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
                let (first, bytes) = (number(offset), number(length));
                let part = FilePart { bytes: version.bytes, offset: first, length: bytes };
                self.opening.insert((session, request), part);
                Request::OpenFile { file, identity: version.identity, offset, length }
            }
        };
        self.apply(Event::Request { session, request, body });
        self.opening.remove(&(session, request));
    }

    /// Opens a session, unless there are too many.
    pub(super) fn open_session(&mut self, domain: u32, gid: u32, admin: bool) -> Option<SessionId> {
        if self.engine.sessions_count() >= self.scenario.limits.sessions_max as usize {
            return None;
        }
        self.last_session += 1;
        let session = SessionId(self.last_session);
        self.apply(Event::SessionOpened { session, domain: Domain(domain), gid, admin });
        Some(session)
    }

    /// Disk and device get worse.
    pub(super) fn mischief(&mut self) {
        let machine = &mut *self.machine.borrow_mut();
        let now = self.now;
        if machine.faults.strikes(Fault::BitFlip) && !machine.disk.flip_bit() {
            machine.faults.take_back(Fault::BitFlip);
        }
        if machine.faults.strikes(Fault::FileChanged) {
            machine.disk.change_file(false);
        }
        if machine.faults.strikes(Fault::FileTruncated) {
            machine.disk.change_file(true);
        }
        if machine.faults.strikes(Fault::DiskFull) {
            machine.disk.full_until = now + self.random.between(100, 100_000);
        }
        if !machine.device_lost && machine.faults.strikes(Fault::DeviceLost) {
            machine.device_lost = true;
        }
    }

    /// Clients do nothing new; what they wait for comes, or its time is up.
    fn come_to_rest(&mut self) {
        let until = self.now + self.scenario.limits.map_wait_us_max + 20_000_000;
        let ahead = |world: &Self| world.heap.keys().next().is_some_and(|(time, _)| *time <= until);
        while (ahead(self) || self.now <= until) && self.step() {}
        for (session, client) in &self.clients {
            let waits = client.connected && !client.asked.is_empty();
            assert!(!waits, "{session:?} waits for ever: {:?}", client.asked);
        }
    }

    /// Everybody leaves, and everything is given back.
    fn end(&mut self) {
        self.ending = true;
        let sessions: Vec<_> = self.clients.keys().copied().collect();
        for session in sessions {
            self.leave(session);
        }
        while self.step() {}
        assert_eq!(self.transfer.in_flight(), 0, "transfers that never end");
        let idle = self.transfer.store().is_idle() && self.transfer.device().is_idle();
        assert!(idle, "operations that are in flight and don't end");
        self.check_empty();
    }

    fn check_empty(&mut self) {
        assert!(self.clients.is_empty(), "clients are left");
        let observer = self.open_session(1, 1, false).expect("all others are gone");
        self.apply(Event::Request {
            session: observer,
            request: RequestId(1),
            body: Request::Stat,
        });
        let stats = self.last_stats.take().expect("stat is answered at once");
        let used = (stats.vram.used, stats.ram.used, stats.nvme.used);
        assert_eq!(used, (0, 0, 0), "bytes in use by nobody");
        assert_eq!(stats.quarantined_frames, 0, "frames that nobody has");
        assert_eq!(stats.metadata_bytes, 0, "pages of nobody");
        self.apply(Event::SessionClosed { session: observer });
        assert_eq!(self.engine.sessions_count(), 0, "sessions are left");
        assert_eq!(self.ledger.sessions_count(), 0, "sessions are left in the ledger");
        let machine = self.machine.borrow();
        assert_eq!(machine.disk.open_count(), 0, "files that are never closed");
        assert!(machine.held.iter().all(|count| *count == 0), "frames that nobody holds are held");
    }
}
