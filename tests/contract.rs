//! What each request is answered when it can't be granted, by a real daemon, and that nothing of it was done then. With
//! `docs/failure-contract.md`, which says for each request and failure what shows it.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::fs::{File, OpenOptions};

use lapis::Code;
use lapis_proto::ids::{AllocationId, SessionId};
use lapis_proto::kind::Kind;
use lapis_proto::message::{
    Access, Advice, Advise, Allocate, Allocated, Bye, CancelPrefetch, Done, Flush, Free,
    ListQuotas, Map, Mapped, Message, OpenFile, PageRange, PlanStep, PlanUse, Prefetch, QUOTAS_MAX,
    Quota, QuotaSubject, Quotas, Refused, SetPlan, SetQuota, SetTier, Stat, Stats, Tier, Unmap,
    WorkingSet, WorkingSets,
};
use lapis_tests::daemon::Daemon;
use lapis_tests::good::{Sample, still_serves};
use lapis_tests::peer::Peer;

const PAGE: u64 = 64 << 10;
/// 16 frames of VRAM, of which 15 can be mapped, 15 of RAM, 16 slots: 27 anonymous pages.
const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "1MiB", "--nvme", "1MiB"];
const LONG_US: u64 = 30_000_000;
const SHORT_US: u64 = 20_000;

/// A daemon and a session.
struct Bench {
    daemon: Daemon,
    peer: Peer,
}

impl Bench {
    fn new(flags: &[&str]) -> Self {
        let daemon = Daemon::start(&[SMALL, flags].concat());
        let peer = Peer::greeted(daemon.socket());
        Self { daemon, peer }
    }

    fn allocate(&mut self, pages: u64) -> AllocationId {
        let allocated: Allocated = self.peer.call(&Allocate { size: pages * PAGE }).unwrap();
        allocated.allocation
    }

    fn open(&mut self, sample: &Sample) -> AllocationId {
        let open = OpenFile { offset: 0, length: sample.content().len() as u64 };
        let file = File::open(sample.path()).unwrap();
        let allocated: Allocated = self.peer.call_with(&open, file).unwrap();
        allocated.allocation
    }

    fn map(&mut self, ranges: Vec<PageRange>, access: Access) -> Result<Mapped, Refused> {
        self.peer.call(&Map { ranges, access, wait_us: LONG_US })
    }

    /// Maps for writing, and unmaps.
    fn write(&mut self, allocation: AllocationId, first: u32, count: u32) {
        let mapped = self.map(vec![range(allocation, first, count)], Access::Write).unwrap();
        self.unmap(&mapped);
    }

    fn unmap(&mut self, mapped: &Mapped) {
        let _: Done = self.peer.call(&Unmap { mappings: vec![mapped.mapping] }).unwrap();
    }

    /// What a request could have changed.
    fn state(&mut self) -> impl PartialEq + std::fmt::Debug + use<> {
        let stats: Stats = self.peer.call(&Stat {}).unwrap();
        let quotas: Quotas = self.peer.call(&ListQuotas {}).unwrap();
        let tiers = [stats.vram, stats.ram, stats.nvme];
        // What moves in RAM and to the spill moves for others too.
        let tiers = (tiers.map(|tier| tier.capacity), stats.vram.pinned);
        (tiers, stats.sessions, stats.allocations, stats.mappings, quotas)
    }

    /// A request is refused with this code and a message, and has changed nothing.
    #[track_caller]
    fn refuses<Q: Message>(&mut self, request: &Q, code: Code) -> Refused {
        let before = self.state();
        let refused = self.peer.call::<Q, Done>(request).unwrap_err();
        assert_eq!(refused.code, code, "{refused:?}");
        assert!(refused.message.len() > 20, "{refused:?}");
        assert_eq!(self.state(), before, "{refused:?} changed something");
        refused
    }

    fn end(mut self) {
        let _: Done = self.peer.call(&Bye {}).unwrap();
        drop(self.peer);
        still_serves(&self.daemon);
        self.daemon.stop_well();
    }
}

fn range(allocation: AllocationId, first: u32, count: u32) -> PageRange {
    PageRange { allocation, first, count }
}

fn read(ranges: Vec<PageRange>, wait_us: u64) -> Map {
    Map { ranges, access: Access::Read, wait_us }
}

fn numbers(refused: &Refused) -> (u64, u64, u64) {
    (refused.asked, refused.in_use, refused.limit)
}

#[test]
fn allocations_are_bounded_in_number_memory_and_by_quotas() {
    let mut bench = Bench::new(&["--allocations-max", "3"]);
    let refused = bench.refuses(&Allocate { size: 28 * PAGE }, Code::OutOfMemory);
    assert_eq!(numbers(&refused), (28 * PAGE, 0, 27 * PAGE));
    let subject = QuotaSubject::EachSession;
    let quota = Quota { anonymous_max: Some(4 * PAGE), ..Quota::none(subject) };
    let set: Result<Done, _> = bench.peer.call(&SetQuota { quota });
    let is_admin = set.is_ok();
    if is_admin {
        let first = bench.allocate(2);
        let refused = bench.refuses(&Allocate { size: 3 * PAGE }, Code::OverQuota);
        assert_eq!(numbers(&refused), (3 * PAGE, 2 * PAGE, 4 * PAGE));
        let _: Done = bench.peer.call(&Free { allocation: first }).unwrap();
        let quota = Quota::none(subject);
        let _: Done = bench.peer.call(&SetQuota { quota }).unwrap();
    } else {
        eprintln!("SKIPPED: only root can set quotas");
    }
    for _ in 0..3 {
        bench.allocate(1);
    }
    let refused = bench.refuses(&Allocate { size: 1 }, Code::TooMany);
    assert_eq!(numbers(&refused), (1, 3, 3));
    let sample = Sample::new(1, 1000);
    let open = OpenFile { offset: 0, length: 1000 };
    let file = File::open(sample.path()).unwrap();
    let refused = bench.peer.call_with::<_, Allocated>(&open, file).unwrap_err();
    assert_eq!((refused.code, numbers(&refused)), (Code::TooMany, (1, 3, 3)));
    bench.end();
}

#[test]
fn maps_are_bounded_in_number() {
    let mut bench = Bench::new(&["--mappings-max", "3", "--requests-max", "2"]);
    let memory = bench.allocate(20);
    let mut one = |page| bench.map(vec![range(memory, page, 1)], Access::Read).unwrap();
    let (first, second) = (one(0), one(1));
    // One that waits counts as well. It waits for both mappings to end.
    let waits = read(vec![range(memory, 2, 15)], LONG_US);
    let waiting = bench.peer.ask(&waits, None);
    let refused = bench.refuses(&read(vec![range(memory, 0, 1)], 0), Code::TooMany);
    assert_eq!(numbers(&refused), (1, 3, 3));
    bench.unmap(&second);
    // Of those that wait there may be two, whatever they wait for.
    let also_waiting = bench.peer.ask(&waits, None);
    let flush = Flush { ranges: vec![range(memory, 0, 1)], wait_us: LONG_US };
    let refused = bench.refuses(&flush, Code::TooMany);
    assert_eq!(numbers(&refused), (1, 2, 2));
    let unmapping = bench.peer.ask(&Unmap { mappings: vec![first.mapping] }, None);
    let mut answered: Vec<_> = Vec::new();
    while answered.len() < 3 {
        let answer = bench.peer.receive().unwrap();
        if answer.kind == Kind::Mapped {
            let mapped: Mapped = answer.read();
            answered.push(answer.request);
            bench.peer.ask(&Unmap { mappings: vec![mapped.mapping] }, None);
        } else if answer.request == unmapping {
            answered.push(answer.request);
        }
    }
    answered.sort_unstable();
    assert_eq!(answered, [waiting, also_waiting, unmapping]);
    let leaving = bench.peer.ask(&Bye {}, None);
    while bench.peer.receive().unwrap().request != leaving {}
    drop(bench.peer);
    still_serves(&bench.daemon);
    bench.daemon.stop_well();
}

#[test]
fn a_map_that_may_not_wait_is_granted_at_once_or_refused() {
    let mut bench = Bench::new(&[]);
    let memory = bench.allocate(20);
    let held = bench.map(vec![range(memory, 0, 10)], Access::Write).unwrap();
    for wait_us in [0, SHORT_US] {
        let request = read(vec![range(memory, 10, 6)], wait_us);
        let refused = bench.refuses(&request, Code::TimedOut);
        assert_eq!(numbers(&refused), (6, 10, 15));
    }
    // Pages that are mapped already, and pages that there is room for, need no wait for others.
    for ranges in [vec![range(memory, 0, 10)], vec![range(memory, 10, 5)]] {
        let mapped: Mapped = bench.peer.call(&read(ranges, 0)).unwrap();
        bench.unmap(&mapped);
    }
    bench.unmap(&held);
    bench.end();
}

#[test]
fn hints_of_what_is_not_there_are_refused_whole() {
    let mut bench = Bench::new(&[]);
    let mut other = Peer::greeted(bench.daemon.socket());
    let foreign: Allocated = other.call(&Allocate { size: PAGE }).unwrap();
    let own = bench.allocate(4);
    let good = range(own, 0, 1);
    let cases = [
        (vec![], Code::BadRequest),
        (vec![good; 1025], Code::BadRequest),
        (vec![good, range(foreign.allocation, 0, 1)], Code::UnknownAllocation),
        (vec![good, range(AllocationId(u64::MAX), 0, 1)], Code::UnknownAllocation),
        (vec![good, range(own, 0, 0)], Code::OutOfRange),
        (vec![good, range(own, 3, 2)], Code::OutOfRange),
        (vec![range(own, u32::MAX, 1)], Code::OutOfRange),
        (vec![range(own, 0, 70_000)], Code::OverCapacity),
    ];
    for (ranges, code) in cases {
        let prefetch = Prefetch { ranges: ranges.clone(), priority: 0, within_us: 0 };
        bench.refuses(&prefetch, code);
        bench.refuses(&CancelPrefetch { ranges: ranges.clone() }, code);
        bench.refuses(&Advise { ranges: ranges.clone(), advice: Advice::Keep }, code);
        bench.refuses(&Flush { ranges, wait_us: LONG_US }, code);
    }
    let _: Done = other.call(&Bye {}).unwrap();
    drop(other);
    bench.end();
}

#[test]
fn plans_are_bounded_and_refused_whole() {
    let mut bench = Bench::new(&[]);
    let own = bench.allocate(20);
    let used = |range| PlanUse { range, access: Access::Read };
    let step = |ranges: Vec<PageRange>| PlanStep { uses: ranges.into_iter().map(used).collect() };
    let plan = |plan, steps| SetPlan { plan, cyclic: true, steps };
    let good = || step(vec![range(own, 0, 1)]);
    let cases = [
        (vec![good(), step(vec![])], Code::BadRequest),
        (vec![good(), step(vec![range(AllocationId(u64::MAX), 0, 1)])], Code::UnknownAllocation),
        (vec![good(), step(vec![range(own, 0, 0)])], Code::OutOfRange),
        (vec![good(), step(vec![range(own, 19, 2)])], Code::OutOfRange),
        (vec![good(), step(vec![range(own, u32::MAX, u32::MAX)])], Code::OutOfRange),
        (vec![good(); 16_385], Code::TooMany),
        (vec![step(vec![range(own, 0, 20); 3277])], Code::TooMany),
    ];
    for (steps, code) in cases {
        bench.refuses(&plan(9, steps), code);
    }
    // As much as there may be.
    let full = vec![step(vec![range(own, 0, 1); 2]); 16_384];
    let _: Done = bench.peer.call(&plan(9, full)).unwrap();
    let _: Done = bench.peer.call(&plan(9, vec![])).unwrap();
    let singles = (0..20).map(|page| step(vec![range(own, page, 1)]));
    let cut = singles.chain((0..7000).map(|_| step(vec![range(own, 0, 20)])));
    bench.refuses(&plan(9, cut.collect()), Code::TooMany);
    for number in 0..4 {
        let _: Done = bench.peer.call(&plan(number, vec![good()])).unwrap();
    }
    bench.refuses(&plan(4, vec![good()]), Code::TooMany);
    // Replaced, and ended; to end what is not there is no error.
    let _: Done = bench.peer.call(&plan(3, vec![good(), good()])).unwrap();
    let _: Done = bench.peer.call(&plan(3, vec![])).unwrap();
    let _: Done = bench.peer.call(&plan(3, vec![])).unwrap();
    let _: Done = bench.peer.call(&plan(4, vec![good()])).unwrap();
    bench.end();
}

#[test]
fn working_sets_are_told_of_own_sessions() {
    let mut bench = Bench::new(&[]);
    let mut other = Peer::greeted(bench.daemon.socket());
    let memory = bench.allocate(4);
    bench.write(memory, 0, 3);
    let told: WorkingSets = other.call(&WorkingSet { session: None }).unwrap();
    let [first, second] = told.sessions.as_slice() else { panic!("{told:?}") };
    assert_eq!((first.pages, first.windows, first.counters.maps), (4, [3; 3], 1));
    assert_eq!((second.pages, second.windows, second.curve.len()), (0, [0; 3], 0));
    assert!(first.session < second.session && first.uid == second.uid);
    let one: WorkingSets = other.call(&WorkingSet { session: Some(first.session) }).unwrap();
    assert_eq!(one.sessions, told.sessions[..1]);
    let none: WorkingSets = other.call(&WorkingSet { session: Some(SessionId(u64::MAX)) }).unwrap();
    assert_eq!(none.sessions, []);
    let _: Done = other.call(&Bye {}).unwrap();
    drop(other);
    bench.end();
}

#[test]
fn a_prefetch_that_fails_is_told_to_whoever_maps_the_page() {
    let mut bench = Bench::new(&[]);
    let sample = Sample::new(2, 500_000);
    let file = bench.open(&sample);
    OpenOptions::new().write(true).open(sample.path()).unwrap().set_len(1).unwrap();
    let ranges = vec![range(file, 3, 2)];
    let prefetch = Prefetch { ranges: ranges.clone(), priority: 0, within_us: 0 };
    let _: Done = bench.peer.call(&prefetch).unwrap();
    let refused = bench.refuses(&read(ranges, LONG_US), Code::FileTruncated);
    assert!([3, 4].map(|page| page * PAGE).contains(&refused.object), "{refused:?}");
    bench.end();
}

#[test]
fn a_file_changed_in_place_is_told_to_whoever_maps_what_is_not_loaded() {
    let mut bench = Bench::new(&[]);
    let sample = Sample::new(3, 500_000);
    let file = bench.open(&sample);
    let held = bench.map(vec![range(file, 0, 1)], Access::Read).unwrap();
    let writer = OpenOptions::new().write(true).open(sample.path()).unwrap();
    // A file system may keep times in steps of some milliseconds: set one that differs for certain.
    writer.set_modified(std::time::UNIX_EPOCH).unwrap();
    let refused = bench.refuses(&read(vec![range(file, 3, 1)], LONG_US), Code::FileChanged);
    assert_eq!(refused.object, 3 * PAGE);
    // What is loaded stays, mapped or not.
    let again = bench.map(vec![range(file, 0, 1)], Access::Read).unwrap();
    assert_eq!(again.frames, held.frames);
    bench.unmap(&again);
    bench.unmap(&held);
    bench.end();
}

#[test]
fn a_flush_needs_a_spill_with_room_and_nobody_who_writes() {
    let mut bench = Bench::new(&[]);
    let memory = bench.allocate(26);
    let flush =
        |first, count, wait_us| Flush { ranges: vec![range(memory, first, count)], wait_us };
    let writing = bench.map(vec![range(memory, 3, 1)], Access::Write).unwrap();
    let refused = bench.refuses(&flush(2, 4, LONG_US), Code::InUse);
    assert_eq!(refused.object, 3);
    bench.unmap(&writing);
    for first in [0, 13] {
        bench.write(memory, first, 13);
    }
    // Ten more pages than the spill has slots: what is written stays written, the rest is waited for.
    let refused = bench.peer.call::<_, Done>(&flush(0, 26, 1_000_000)).unwrap_err();
    assert_eq!(refused.code, Code::TimedOut, "{refused:?}");
    let stats: Stats = bench.peer.call(&Stat {}).unwrap();
    assert_eq!(stats.nvme.used, 16 * PAGE);
    // A page of a file has its bytes on disk already; one never written has none.
    let sample = Sample::new(4, 1000);
    let file = bench.open(&sample);
    let nothing = Flush { ranges: vec![range(file, 0, 1)], wait_us: 0 };
    let _: Done = bench.peer.call(&nothing).unwrap();
    bench.end();
    let daemon = Daemon::start(&["--page-size", "64KiB", "--vram", "1MiB", "--ram", "4MiB"]);
    let peer = Peer::greeted(daemon.socket());
    let mut bench = Bench { daemon, peer };
    let memory = bench.allocate(2);
    bench.write(memory, 0, 1);
    let flush = Flush { ranges: vec![range(memory, 0, 1)], wait_us: LONG_US };
    bench.refuses(&flush, Code::Unsupported);
    bench.end();
}

#[test]
fn an_allocation_is_in_use_while_a_flush_of_it_waits() {
    let mut bench = Bench::new(&[]);
    let memory = bench.allocate(27);
    bench.write(memory, 0, 14);
    bench.write(memory, 14, 13);
    // More than the spill takes: it waits for its time.
    let flush = Flush { ranges: vec![range(memory, 0, 27)], wait_us: 1_000_000 };
    let flushing = bench.peer.ask(&flush, None);
    bench.refuses(&Free { allocation: memory }, Code::InUse);
    bench.refuses(&Bye {}, Code::InUse);
    let refused = bench.peer.reply::<Done>(flushing).unwrap_err();
    assert_eq!(refused.code, Code::TimedOut, "{refused:?}");
    let _: Done = bench.peer.call(&Free { allocation: memory }).unwrap();
    bench.end();
}

/// For requests that only root may make here; says so when it can't.
fn as_root() -> Option<Bench> {
    if nix::unistd::geteuid().is_root() {
        return Some(Bench::new(&[]));
    }
    eprintln!("SKIPPED: only root administers the daemon of a test");
    None
}

#[test]
fn a_tier_is_set_within_its_bounds_and_never_below_what_it_holds() {
    let Some(mut bench) = as_root() else { return };
    let set = |tier, pages: u64, wait_us| SetTier { tier, size: pages * PAGE, wait_us };
    for (tier, pages) in [
        (Tier::Vram, 1),
        (Tier::Vram, 17),
        (Tier::Ram, 7),
        (Tier::Ram, 16),
        (Tier::Nvme, 17),
        (Tier::Nvme, u64::MAX / PAGE),
    ] {
        bench.refuses(&set(tier, pages, LONG_US), Code::BadRequest);
    }
    let memory = bench.allocate(27);
    let refused = bench.refuses(&set(Tier::Nvme, 15, LONG_US), Code::OutOfMemory);
    assert_eq!((refused.asked, refused.limit), (27, 26));
    let quota = Quota { vram_reserved: 8 * PAGE, ..Quota::none(QuotaSubject::Uid(7)) };
    let _: Done = bench.peer.call(&SetQuota { quota }).unwrap();
    let refused = bench.refuses(&set(Tier::Vram, 8, LONG_US), Code::OverCapacity);
    assert_eq!((refused.asked, refused.limit), (8, 7), "a frame moves pages");
    assert!(refused.message.starts_with("8 pages of VRAM would be reserved"), "{refused:?}");
    let quota = Quota::none(QuotaSubject::Uid(7));
    let _: Done = bench.peer.call(&SetQuota { quota }).unwrap();
    // A mapping is in the way: the tier has not its size in time, and goes on shrinking.
    let held = bench.map(vec![range(memory, 0, 10)], Access::Read).unwrap();
    let shrink = set(Tier::Vram, 4, SHORT_US);
    let refused = bench.peer.call::<_, Done>(&shrink).unwrap_err();
    assert_eq!(refused.code, Code::TimedOut, "{refused:?}");
    bench.unmap(&held);
    let _: Done = bench.peer.call(&set(Tier::Vram, 16, LONG_US)).unwrap();
    bench.end();
}

#[test]
fn quotas_reserve_what_there_is_for_whom_there_is_and_are_bounded_in_number() {
    let Some(mut bench) = as_root() else { return };
    let reserve = |subject, pages: u64| SetQuota {
        quota: Quota { vram_reserved: pages * PAGE, ..Quota::none(subject) },
    };
    for subject in [QuotaSubject::EachSession, QuotaSubject::EachUid] {
        bench.refuses(&reserve(subject, 1), Code::BadRequest);
    }
    let _: Done = bench.peer.call(&reserve(QuotaSubject::Uid(1), 10)).unwrap();
    let refused = bench.refuses(&reserve(QuotaSubject::Gid(1), 6), Code::OverCapacity);
    assert_eq!((refused.asked, refused.limit), (16, 15));
    assert!(refused.message.starts_with("16 pages of VRAM would be reserved"), "{refused:?}");
    let memory = bench.allocate(6);
    let refused = bench.map(vec![range(memory, 0, 6)], Access::Read).unwrap_err();
    assert_eq!((refused.code, refused.asked, refused.limit), (Code::OverCapacity, 6, 5));
    assert!(refused.message.contains("not reserved for others"), "{refused:?}");
    for uid in 2..=u32::try_from(QUOTAS_MAX).unwrap() {
        let _: Done = bench.peer.call(&reserve(QuotaSubject::Uid(uid), 0).with_priority()).unwrap();
    }
    let refused = bench.refuses(&reserve(QuotaSubject::Gid(9), 0).with_priority(), Code::TooMany);
    assert_eq!(numbers(&refused), (1, 1024, 1024));
    // One that exists may still be changed, and all can be listed.
    let _: Done = bench.peer.call(&reserve(QuotaSubject::Uid(1), 3)).unwrap();
    let listed: Quotas = bench.peer.call(&ListQuotas {}).unwrap();
    assert_eq!(listed.quotas.len(), 1024);
    drop(bench.peer);
    bench.daemon.stop_well();
}

/// So that a quota is one without reserving anything.
trait WithPriority {
    fn with_priority(self) -> Self;
}

impl WithPriority for SetQuota {
    fn with_priority(mut self) -> Self {
        self.quota.priority = 1;
        self
    }
}
