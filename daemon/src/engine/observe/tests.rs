use lapis_proto::message::{Access, Map, PageRange, PlanStep, PlanUse, SetPlan};

use super::*;
use crate::engine::cases::Bench;
use crate::engine::event::{Event, Request};
use crate::engine::ids::{AllocationId, Domain};
use crate::engine::limits::Limits;

const PAGE: u64 = 4096;

fn connect(bench: &mut Bench, id: u64, uid: u32, admin: bool) -> SessionId {
    let session = SessionId(id);
    bench.apply(Event::SessionOpened { session, domain: Domain(uid), gid: 1, admin });
    session
}

fn allocate(bench: &mut Bench, session: SessionId, pages: u64) -> AllocationId {
    match bench.request(session, Request::Allocate { size: pages * PAGE }) {
        Some(Reply::Allocated { allocation, .. }) => allocation,
        other => panic!("{other:?}"),
    }
}

fn range(allocation: AllocationId, page: u32) -> PageRange {
    PageRange { allocation, first: page, count: 1 }
}

/// Uses a page for a second.
fn touch(bench: &mut Bench, session: SessionId, allocation: AllocationId, page: u32) {
    bench.now += 1_000_000;
    let ranges = vec![range(allocation, page)];
    let map = Request::Map(Map { ranges, access: Access::Read, wait_us: 1000 });
    match bench.request(session, map) {
        Some(Reply::Mapped(mapped)) => {
            bench.request(session, Request::Unmap(vec![mapped.mapping]));
        }
        other => panic!("{other:?}"),
    }
}

fn sets(bench: &mut Bench, asking: SessionId, of: Option<SessionId>) -> Vec<SessionSet> {
    match bench.request(asking, Request::WorkingSet(of)) {
        Some(Reply::WorkingSets(sets)) => sets.sessions,
        other => panic!("{other:?}"),
    }
}

fn hits(set: &SessionSet, pages: u64) -> u32 {
    let point = set.curve.iter().rfind(|point| point.pages <= pages);
    point.expect("sizes begin below").hits_per_million
}

#[test]
fn a_cycle_is_told_with_its_windows_and_what_would_be_hit() {
    let mut bench = Bench::new(Limits::small(20, 64, 0));
    let session = connect(&mut bench, 1, 7, false);
    assert_eq!(sets(&mut bench, session, None)[0].curve, []);
    let allocation = allocate(&mut bench, session, 40);
    (0..5).flat_map(|_| 0..40).for_each(|page| touch(&mut bench, session, allocation, page));
    let set = sets(&mut bench, session, None).remove(0);
    assert_eq!((set.session, set.uid, set.pages), (session, 7, 40));
    assert_eq!(set.pattern, AccessPattern::Cycle { steps: 40 });
    assert_eq!(set.windows, [11, 40, 40]);
    assert_eq!(set.counters.maps, 200);
    // One use in five is the first one; half of the cycle fits.
    assert_eq!((hits(&set, 20), hits(&set, 40)), (400_000, 800_000));
    assert!(set.curve.is_sorted_by_key(|point| (point.pages, point.hits_per_million)));
}

#[test]
fn with_no_order_hits_are_those_of_lru_and_a_plan_is_told() {
    let mut bench = Bench::new(Limits::small(20, 64, 0));
    let session = connect(&mut bench, 1, 7, false);
    let allocation = allocate(&mut bench, session, 15);
    // Everything fits: it is watched all the same.
    for page in [0, 1, 2, 3, 2, 1, 0] {
        touch(&mut bench, session, allocation, page);
    }
    let set = sets(&mut bench, session, None).remove(0);
    assert_eq!(set.pattern, AccessPattern::None);
    assert_eq!((hits(&set, 1), hits(&set, 4)), (0, 428_571));
    let used = PlanUse { range: range(allocation, 0), access: Access::Read };
    let steps = vec![PlanStep { uses: vec![used] }; 3];
    bench.request(session, Request::SetPlan(SetPlan { plan: 1, cyclic: true, steps }));
    let set = sets(&mut bench, session, None).remove(0);
    assert_eq!(set.pattern, AccessPattern::Planned { steps: 3 });
}

#[test]
fn users_see_their_own_sessions_and_administrators_all() {
    let mut bench = Bench::new(Limits::small(20, 64, 0));
    let own = connect(&mut bench, 1, 7, false);
    let other = connect(&mut bench, 2, 8, false);
    let same = connect(&mut bench, 3, 7, false);
    let admin = connect(&mut bench, 4, 0, true);
    let mut seen = |asking, of| -> Vec<u64> {
        sets(&mut bench, asking, of).iter().map(|set| set.session.0).collect()
    };
    assert_eq!(seen(own, None), [1, 3]);
    assert_eq!(seen(admin, None), [1, 2, 3, 4]);
    assert_eq!(seen(own, Some(same)), [3]);
    assert_eq!(seen(admin, Some(other)), [2]);
    assert_eq!((seen(own, Some(other)), seen(own, Some(SessionId(99)))), (vec![], vec![]));
}

#[test]
fn what_is_given_up_is_no_working_set() {
    let mut bench = Bench::new(Limits::small(20, 64, 0));
    let session = connect(&mut bench, 1, 7, false);
    let (gone, kept) = (allocate(&mut bench, session, 9), allocate(&mut bench, session, 3));
    (0..9).for_each(|page| touch(&mut bench, session, gone, page));
    (0..3).for_each(|page| touch(&mut bench, session, kept, page));
    assert_eq!(sets(&mut bench, session, None)[0].windows[2], 12);
    bench.request(session, Request::Free(gone));
    let set = sets(&mut bench, session, None).remove(0);
    assert_eq!((set.windows[2], set.pages), (3, 3));
}
