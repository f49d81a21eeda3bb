use proptest::prelude::*;

use super::*;
use crate::engine::cases::check;
use crate::engine::ids::AllocationId;

const SESSION: SessionId = SessionId(1);

fn span(backing: u32, first: u32, count: u32) -> Span {
    Span { backing: BackingId(backing), first, count, allocation: AllocationId(1) }
}

fn page(backing: u32, index: u32) -> PageRef {
    PageRef { backing: BackingId(backing), index }
}

fn plan(cyclic: bool, steps: &[Vec<(Span, Access)>]) -> Plan {
    Plan::new((SESSION, Some(1)), cyclic, steps).expect("few pieces")
}

/// One page a step.
fn cycle(steps: u32) -> Plan {
    let steps: Vec<_> = (0..steps).map(|step| vec![(span(0, step, 1), Access::Read)]).collect();
    plan(true, &steps)
}

#[test]
fn keys_are_those_of_a_walk_through_the_steps() {
    let spans = (0..3_u32, 0..20_u32, 1..8_u32, 0..3_u32);
    let step = prop::collection::vec(spans, 1..4);
    let steps = prop::collection::vec(step, 1..8);
    check(256, &(steps, any::<bool>(), 0..30_u64), |(steps, cyclic, from)| {
        let access = |number| [Access::Read, Access::Write, Access::Overwrite][number as usize];
        let steps: Vec<Vec<(Span, Access)>> = steps
            .iter()
            .map(|step| {
                let used = step
                    .iter()
                    .map(|(backing, first, count, a)| (span(*backing, *first, *count), access(*a)));
                used.collect()
            })
            .collect();
        let plan = plan(cyclic, &steps);
        let uses = |step: &Vec<(Span, Access)>, at: PageRef| {
            let inside = |span: &Span| span.pages().any(|page| page == at);
            let used: Vec<_> = step.iter().filter(|(span, _)| inside(span)).collect();
            let overwrites = used.iter().all(|(_, access)| *access == Access::Overwrite);
            (!used.is_empty()).then_some(overwrites)
        };
        let end = if cyclic { from + 2 * steps.len() as u64 } else { steps.len() as u64 };
        for at in (0..3).flat_map(|backing| (0..30).map(move |index| page(backing, index))) {
            let step_of = |step: u64| &steps[usize::try_from(step).unwrap() % steps.len()];
            let next = (from..end).find_map(|step| Some((step, uses(step_of(step), at)?)));
            let expected = match next {
                Some((step, false)) => Some(step),
                Some((step, true)) => Some(OVERWRITTEN + step),
                None => steps.iter().any(|s| uses(s, at).is_some()).then_some(NEVER_AGAIN),
            };
            prop_assert_eq!(plan.key(at, from), expected, "{:?} from {}", at, from);
        }
        let all: BTreeSet<_> = steps.iter().flatten().flat_map(|(span, _)| span.pages()).collect();
        prop_assert_eq!(plan.pages().collect::<BTreeSet<_>>(), all.clone());
        prop_assert_eq!(plan.pages().count(), all.len());
        Ok(())
    });
}

#[test]
fn ranges_that_cut_each_other_too_often_are_refused() {
    let many = 1200;
    let mut steps: Vec<_> = (0..many).map(|n| vec![(span(0, n, 1), Access::Read)]).collect();
    steps.extend((0..200).map(|_| vec![(span(0, 0, many), Access::Read)]));
    assert_eq!(Plan::new((SESSION, Some(1)), true, &steps).map(drop), Err(TooManyPieces));
}

#[test]
fn steps_that_share_the_page_where_they_meet_are_told_apart() {
    let layer = |step: u32| span(0, 7 * step, 8);
    let steps: Vec<_> = (0..10).map(|step| vec![(layer(step), Access::Read)]).collect();
    let mut plan = plan(true, &steps);
    for (layer_, expected) in [(0, 0..0), (1, 0..1), (1, 1..1), (2, 1..2), (3, 2..3)] {
        assert_eq!(plan.follow(&layer(layer_), 0), expected, "{layer_}");
    }
    (4..10).for_each(|step| assert_eq!(plan.follow(&layer(step), 0).end, u64::from(step)));
    assert_eq!(plan.follow(&layer(0), 0), 9..10);
}

#[test]
fn the_cursor_tolerates_repeats_skips_and_jumps() {
    let mut plan = cycle(20);
    let mut follow = |index, expected: Range<u64>| {
        let over = plan.follow(&span(0, index, 1), 0);
        assert_eq!((over, plan.cursor()), (expected.clone(), expected.end), "page {index}");
    };
    follow(0, 0..0);
    follow(1, 0..1);
    follow(1, 1..1);
    // Repeated, though not what is at the cursor: it stays.
    follow(0, 1..1);
    follow(2, 1..2);
    // Two skipped.
    follow(5, 2..5);
    // Far off once is nothing yet; where the next one follows, the session is there.
    follow(12, 5..5);
    follow(6, 5..6);
    follow(12, 6..6);
    follow(13, 6..13);
    // From the start again.
    follow(0, 13..13);
    follow(1, 13..21);
    // Not of this plan.
    follow(30, 21..21);
}

#[test]
fn a_plan_that_is_not_cyclic_ends() {
    let steps: Vec<_> = (0..3).map(|step| vec![(span(0, step, 1), Access::Read)]).collect();
    let mut plan = plan(false, &steps);
    plan.follow(&span(0, 0, 1), 0);
    plan.follow(&span(0, 2, 1), 0);
    assert_eq!(plan.cursor(), 2);
    assert_eq!(plan.key(page(0, 0), 2), Some(NEVER_AGAIN));
    assert_eq!(plan.key(page(0, 2), 3), Some(NEVER_AGAIN));
    assert_eq!(plan.follow(&span(0, 1, 1), 0), 2..2);
    let pace = Pace { up_ns: 1000, read_ns: 1000 };
    // The last step's own page is missing still; nothing after it.
    assert_eq!(plan.due(0, pace, 100).read.map(|fetch| fetch.step), Some(2));
    let (nowhere, there) = (Place { vram: false, ram: false }, Place { vram: true, ram: true });
    plan.count(page(0, 2), nowhere, there);
    assert_eq!(plan.due(0, pace, 100), Due::default());
}

#[test]
fn what_is_far_off_is_fetched_when_its_time_comes() {
    let mut plan = cycle(10);
    let (nowhere, there) = (Place { vram: false, ram: false }, Place { vram: true, ram: true });
    let in_ram = Place { vram: false, ram: true };
    let up = |late_ns| {
        let fetch = Fetch { late_ns, step: 27, from: From::Ram };
        Due { up: Some(fetch), ..Due::default() }
    };
    // Each step computes for 100 us; a page takes 60 us.
    let pace = Pace { up_ns: 60_000, read_ns: 0 };
    let mut now = 0;
    for _ in 0..2 {
        for step in 0..10 {
            plan.follow(&span(0, step, 1), now);
            plan.granted(0);
            now += 100;
        }
    }
    plan.follow(&span(0, 0, 1), now);
    plan.granted(0);
    (0..10)
        .filter(|index| *index != 7)
        .for_each(|index| plan.count(page(0, index), nowhere, there));
    plan.count(page(0, 7), nowhere, in_ram);
    // Seven steps until it is used: 90 us of them are for the transfer, and 610 us for nothing. Time alone brings
    // only the end of this step.
    assert_eq!(plan.due(now, pace, 100), Due::default());
    for step in 1..6 {
        plan.follow(&span(0, step, 1), now + 100 * u64::from(step));
        plan.granted(0);
    }
    // At the start of step 5 it is 200 us away.
    assert_eq!(plan.due(now + 500, pace, 100), Due::default());
    plan.follow(&span(0, 6, 1), now + 600);
    assert_eq!(plan.due(now + 600, pace, 100), up(90_000));
    plan.granted(0);
    assert_eq!(plan.due(now + 600, pace, 100), Due { at: Some(now + 611), ..Due::default() });
    assert_eq!(plan.due(now + 611, pace, 100), up(1_000));
    assert_eq!(plan.next_missing(27, |_| true), Some(page(0, 7)));
    // What the step before it uses is there.
    assert_eq!(plan.next_missing(26, |_| true), None);
}

#[test]
fn a_session_that_does_nothing_is_ever_farther_from_its_uses() {
    let mut plan = cycle(10);
    plan.follow(&span(0, 0, 1), 0);
    plan.granted(0);
    let soon = plan.eta_ns(5, 1000);
    assert_eq!(soon, plan.eta_ns(5, 2000));
    assert!(plan.eta_ns(5, 1_000_000) > soon);
    plan.weight = 2;
    assert_eq!(plan.eta_ns(5, 1000), soon / 2);
    assert!(plan.eta_ns(OVERWRITTEN + 1, 1000) > plan.eta_ns(1000, 1000));
}

#[test]
fn what_is_in_ram_waits_for_what_must_be_read_first() {
    let mut plan = cycle(10);
    let (nowhere, in_ram) = (Place { vram: false, ram: false }, Place { vram: false, ram: true });
    plan.follow(&span(0, 0, 1), 0);
    plan.granted(0);
    (0..10)
        .filter(|index| *index != 2)
        .for_each(|index| plan.count(page(0, index), nowhere, in_ram));
    // Without compute all is due that comes before page 2, and it; what is behind it has a hundred times as long.
    let pace = Pace { up_ns: 1_000, read_ns: 1_000_000 };
    let due = plan.due(0, pace, 100);
    assert_eq!(due.up.map(|fetch| (fetch.step, fetch.from)), Some((0, From::Ram)));
    assert_eq!(due.read.map(|fetch| (fetch.step, fetch.from)), Some((2, From::Below)));
    let there = Place { vram: true, ram: true };
    (0..2).for_each(|index| plan.count(page(0, index), in_ram, there));
    let due = plan.due(0, pace, 100);
    assert_eq!((due.up, due.read.map(|fetch| fetch.step)), (None, Some(2)));
}
