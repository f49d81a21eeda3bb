//! The page table against plain copies of its pages: the orders and counts that it keeps are made anew from them after
//! each change.

use lapis_proto::message::Advice;
use proptest::prelude::*;

use super::super::cases::{check, pick};
use super::super::ids::{RamFrame, SpillSlot, VramFrame};
use super::super::page::Motion;
use super::super::policy::order::{Candidate, Moment};
use super::super::policy::plan::NO_PLAN;
use super::*;

/// A change of one field of a page, likely or not.
#[derive(Debug, Clone)]
enum Change {
    Vram(bool),
    Ram(bool),
    Slot(bool),
    Motion(Motion),
    Pins(u32),
    NextUse(u64),
    PrefetchedAt(u64),
    Prefetched(bool),
    Retained(bool),
    Provisional(bool),
    Advice(Advice),
}

impl Change {
    fn make(&self, page: &mut Page) {
        match *self {
            Change::Vram(there) => page.vram = there.then_some(VramFrame(1)),
            Change::Ram(there) => page.ram = there.then_some(RamFrame(2)),
            Change::Slot(there) => page.slot = there.then_some(SpillSlot(3)),
            Change::Motion(motion) => page.motion = motion,
            Change::Pins(pins) => page.pins = pins,
            Change::NextUse(next) => page.next_use = next,
            Change::PrefetchedAt(at) => page.prefetched_at = at,
            Change::Prefetched(prefetched) => page.prefetched = prefetched,
            Change::Retained(retained) => page.retained = retained,
            Change::Provisional(provisional) => page.provisional = provisional,
            Change::Advice(advice) => page.advice = advice,
        }
    }
}

fn change() -> impl Strategy<Value = Change> {
    let (target, ram, slot) = (VramFrame(1), RamFrame(2), SpillSlot(3));
    let motions = prop::sample::select(vec![
        Motion::Still,
        Motion::NeedRam { target },
        Motion::Reading { target, ram },
        Motion::Up { target },
        Motion::Zero { target },
        Motion::Down { ram },
        Motion::Out { slot },
    ]);
    let advice = prop::sample::select(vec![Advice::Normal, Advice::Keep, Advice::Random]);
    // Few clocks, so that pages share them.
    prop_oneof![
        2 => any::<bool>().prop_map(Change::Vram),
        2 => any::<bool>().prop_map(Change::Ram),
        1 => any::<bool>().prop_map(Change::Slot),
        2 => prop_oneof![2 => Just(Motion::Still), 1 => motions].prop_map(Change::Motion),
        1 => (0_u32..3).prop_map(Change::Pins),
        1 => (0_u64..20).prop_map(Change::NextUse),
        1 => (0_u64..20).prop_map(Change::PrefetchedAt),
        1 => any::<bool>().prop_map(Change::Prefetched),
        1 => any::<bool>().prop_map(Change::Retained),
        1 => any::<bool>().prop_map(Change::Provisional),
        1 => advice.prop_map(Change::Advice),
    ]
}

#[derive(Debug, Clone)]
enum Op {
    Add { file_backed: bool, pages: u32 },
    Remove(usize),
    Update { page: usize, changes: Vec<Change> },
}

fn op() -> impl Strategy<Value = Op> {
    let add =
        (any::<bool>(), 0_u32..5).prop_map(|(file_backed, pages)| Op::Add { file_backed, pages });
    let update = (any::<usize>(), prop::collection::vec(change(), 1..5))
        .prop_map(|(page, changes)| Op::Update { page, changes });
    prop_oneof![2 => add, 1 => any::<usize>().prop_map(Op::Remove), 12 => update]
}

fn source(file_backed: bool) -> Source {
    if !file_backed {
        return Source::Anonymous(AllocationId(7));
    }
    let identity = FileIdentity { device: 1, inode: 2, size: 3, mtime_ns: 4, ctime_ns: 5 };
    let key = FileKey { domain: Domain(1), identity, offset: 0, length: 3 };
    Source::File { file: FileId(9), key }
}

struct NaiveBacking {
    file_backed: bool,
    pages: Vec<Page>,
}

/// One backing a number; `None` where one was removed.
type Naive = Vec<Option<NaiveBacking>>;

fn live(naive: &Naive) -> impl Iterator<Item = (BackingId, &NaiveBacking)> {
    let numbered = (0_u32..).map(BackingId).zip(naive);
    numbered.filter_map(|(id, backing)| Some((id, backing.as_ref()?)))
}

fn pages(naive: &Naive) -> impl Iterator<Item = (PageRef, &Page, bool)> {
    live(naive).flat_map(|(id, backing)| {
        let numbered = (0_u32..).zip(&backing.pages);
        numbered
            .map(move |(index, page)| (PageRef { backing: id, index }, page, backing.file_backed))
    })
}

fn run(table: &mut PageTable, naive: &mut Naive, op: Op) -> Result<(), TestCaseError> {
    match op {
        Op::Add { file_backed, pages } => {
            let owner = Owner { domain: Domain(1), gid: 1, session: None };
            let id = table.add(source(file_backed), owner, pages);
            let vacant = naive.iter().position(Option::is_none).unwrap_or(naive.len());
            prop_assert_eq!(id.0 as usize, vacant, "the lowest number that is free");
            let pages = (0..pages).map(|_| Page::new()).collect();
            naive.resize_with(naive.len().max(vacant + 1), || None);
            naive[vacant] = Some(NaiveBacking { file_backed, pages });
        }
        Op::Remove(number) => {
            let Some(id) = pick(live(naive).map(|(id, _)| id), number) else { return Ok(()) };
            let backing = naive[id.0 as usize].take().expect("picked among the live");
            for index in 0..table.backing(id).pages_count() {
                table.update(PageRef { backing: id, index }, |page| *page = Page::new());
            }
            prop_assert_eq!(table.remove(id).pages.len(), backing.pages.len());
        }
        Op::Update { page, changes } => {
            let Some(at) = pick(pages(naive).map(|(at, ..)| at), page) else { return Ok(()) };
            let change = |page: &mut Page| {
                changes.iter().for_each(|change| change.make(page));
                page.pins
            };
            let backing = naive[at.backing.0 as usize].as_mut().expect("picked among the live");
            let expected = change(&mut backing.pages[at.index as usize]);
            prop_assert_eq!(table.update(at, change), expected);
        }
    }
    Ok(())
}

/// Where a page stands among VRAM's victims: which order, and at which clock.
fn place_in_vram(page: &Page) -> Option<(usize, u64)> {
    let free_to_go = page.vram.is_some() && page.pins == 0 && page.motion == Motion::Still;
    let place = match (page.prefetched, page.advice == Advice::Keep) {
        (false, false) => (0, page.next_use),
        (true, _) => (1, page.prefetched_at),
        (false, true) => (2, page.next_use),
    };
    free_to_go.then_some(place)
}

/// Where a page stands among RAM's victims.
fn place_in_ram(page: &Page, file_backed: bool) -> Option<(usize, u64)> {
    let in_vram = page.vram.is_some() && !page.provisional;
    let elsewhere = in_vram || file_backed || page.slot.is_some();
    let awaited = page.pins > 0 && !in_vram;
    let order = match (elsewhere, awaited) {
        (true, false) if in_vram && page.retained => 3,
        (true, false) => 4,
        (false, false) => 5,
        (true, true) => 6,
        (false, true) => 7,
    };
    let there = page.ram.is_some() && page.motion == Motion::Still;
    there.then_some((order, page.next_use))
}

fn compare_orders(table: &PageTable, naive: &Naive) -> Result<(), TestCaseError> {
    let orders = [
        &table.evictable,
        &table.kept,
        &table.ram_duplicate,
        &table.ram_clean,
        &table.ram_sole,
        &table.ram_wanted,
        &table.ram_wanted_sole,
    ];
    let mut expected: Vec<BTreeSet<(u64, PageRef)>> = vec![BTreeSet::new(); 8];
    for (at, page, file_backed) in pages(naive) {
        let places = [place_in_vram(page), place_in_ram(page, file_backed)];
        for (order, clock) in places.into_iter().flatten() {
            expected[order].insert((clock, at));
        }
    }
    let protected = expected.remove(1);
    prop_assert_eq!(table.protected.len(), protected.len());
    prop_assert!(protected.iter().all(|(clock, at)| table.protected.contains(*clock, *at)));
    prop_assert_eq!(table.protected.first(), protected.first().copied());
    prop_assert_eq!(table.protected.last(), protected.last().copied());
    for (number, (order, expected)) in orders.into_iter().zip(&expected).enumerate() {
        let all = expected.iter().all(|(clock, at)| order.contains(NO_PLAN, *clock, *at));
        prop_assert!(all && order.len() == expected.len(), "order {number} is not {expected:?}");
        prop_assert_eq!(order.is_empty(), expected.is_empty());
        // From before the first clock to behind the last.
        for clock in [0, 5, 10, 15, 25] {
            let moment = Moment { clock, access_ns: 1, now: 0, plans: table.plans() };
            let farthest = |may: &dyn Fn(PageRef) -> bool| {
                let allowed = expected.iter().filter(|(_, at)| may(*at));
                allowed.map(|(next, _)| next.abs_diff(clock)).max()
            };
            let is_there = |found: Candidate| {
                let same = |(next, at): &(u64, PageRef)| {
                    *at == found.at && next.abs_diff(clock) == found.eta_ns
                };
                expected.iter().any(same)
            };
            let found = order.farthest(&moment);
            prop_assert!(found.is_none_or(is_there));
            let found = found.map(|found| found.eta_ns);
            prop_assert_eq!(found, farthest(&|_| true), "order {} at {}", number, clock);
            let odd = |at: PageRef| at.index % 2 == 1;
            let found = order.farthest_where(&moment, odd);
            prop_assert!(found.is_none_or(|found| odd(found.at) && is_there(found)));
            let found = found.map(|found| found.eta_ns);
            prop_assert_eq!(found, farthest(&odd), "odd pages of order {} at {}", number, clock);
        }
    }
    Ok(())
}

fn compare_counts(table: &PageTable, naive: &Naive) -> Result<(), TestCaseError> {
    let count = |pages: &[Page], counts: fn(&Page) -> bool| {
        u32::try_from(pages.iter().filter(|page| counts(page)).count()).unwrap()
    };
    let pinned = |page: &Page| page.pins > 0;
    let busy = |page: &Page| page.pins > 0 || page.motion != Motion::Still;
    let leaving = |page: &Page| matches!(page.motion, Motion::Down { .. });
    let in_vram = |page: &Page| {
        let leaves_or_stays =
            matches!(page.motion, Motion::Still | Motion::Down { .. } | Motion::Out { .. });
        page.vram.is_some() || !leaves_or_stays
    };
    let (mut all, mut all_pinned) = (0, 0);
    let expected: Vec<_> = live(naive).collect();
    prop_assert_eq!(table.iter().count(), expected.len());
    for ((id, real), (expected_id, naive)) in table.iter().zip(expected) {
        prop_assert_eq!(id, expected_id);
        prop_assert_eq!(real.file_backed(), naive.file_backed);
        prop_assert_eq!(real.pages_count() as usize, naive.pages.len());
        prop_assert_eq!(real.pinned, count(&naive.pages, pinned));
        prop_assert_eq!(real.busy, count(&naive.pages, busy));
        prop_assert_eq!(real.in_vram, count(&naive.pages, in_vram));
        prop_assert_eq!(real.leaving, count(&naive.pages, leaving));
        all += naive.pages.len() as u64;
        all_pinned += count(&naive.pages, pinned);
    }
    prop_assert_eq!((table.pages, table.pinned), (all, all_pinned));
    Ok(())
}

fn compare_pages(table: &PageTable, naive: &Naive) -> Result<(), TestCaseError> {
    let look =
        |page: &Page| (page.vram, page.ram, page.slot, page.motion, page.pins, page.next_use);
    for (at, expected, _) in pages(naive) {
        prop_assert_eq!(look(table.page(at)), look(expected));
        prop_assert_eq!(table.find(at).map(look), Some(look(expected)));
    }
    for number in 0..=u32::try_from(naive.len()).unwrap() {
        let there = naive.get(number as usize).and_then(Option::as_ref);
        let behind = there.map_or(0, |backing| backing.pages.len());
        let index = u32::try_from(behind).unwrap();
        let at = PageRef { backing: BackingId(number), index };
        prop_assert!(table.find(at).is_none(), "{at:?} is found");
    }
    Ok(())
}

#[test]
fn orders_and_counts_are_those_of_the_pages() {
    check(400, &prop::collection::vec(op(), 0..80), |ops| {
        let (mut table, mut naive) = (PageTable::default(), Naive::new());
        for op in ops {
            run(&mut table, &mut naive, op)?;
            compare_orders(&table, &naive)?;
            compare_counts(&table, &naive)?;
            compare_pages(&table, &naive)?;
        }
        Ok(())
    });
}
