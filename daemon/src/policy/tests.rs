//! Every directory against what holds for all of them, and some against naive ones.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::arc::Arc;
use super::duel::{Duel, Leader};
use super::gap::Gap;
use super::lirs::Lirs;
use super::lru::Lru;
use super::opt::Opt;
use super::s3fifo::S3Fifo;
use super::{Directory, Slot};

mod shares;

#[derive(Debug, Clone)]
enum Op {
    Access(Slot, u32),
    Forget(Slot),
    Resize(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        20 => (0..24u32, prop_oneof![6 => Just(1u32), 3 => 0..17u32, 1 => any::<u32>()])
            .prop_map(|(slot, weight)| Op::Access(slot, weight)),
        2 => (0..30u32).prop_map(Op::Forget),
        1 => prop_oneof![3 => 0..40u64, 1 => any::<u64>()].prop_map(Op::Resize),
    ]
}

/// What is held follows from what was reported, and fits.
fn check_reports(directory: &mut dyn Directory, capacity: u64, ops: &[Op]) {
    let (mut capacity, mut held, mut out) = (capacity, BTreeMap::new(), Vec::new());
    for op in ops {
        out.clear();
        match *op {
            Op::Access(slot, weight) => {
                let hit = directory.access(slot, weight, &mut out);
                let weight = u64::from(weight.max(1));
                assert_eq!(hit, held.insert(slot, weight).is_some(), "{op:?}");
                assert_eq!(out.contains(&slot), weight > capacity, "{op:?}");
            }
            Op::Forget(slot) => {
                directory.forget(slot);
                held.remove(&slot);
            }
            Op::Resize(pages) => {
                directory.resize(pages, &mut out);
                capacity = pages;
            }
        }
        for slot in &out {
            assert!(held.remove(slot).is_some(), "{op:?}: {slot} was not held");
        }
        let used: u64 = held.values().sum();
        assert!(used <= capacity, "{op:?}: {used} pages in {capacity}");
        assert_eq!(directory.used(), used, "{op:?}");
        for slot in 0..30 {
            assert_eq!(directory.contains(slot), held.contains_key(&slot), "{op:?}: {slot}");
        }
    }
}

proptest! {
    #[test]
    fn directories_hold_what_they_report_and_it_fits(
        capacity in 0..40u64,
        ops in proptest::collection::vec(op(), 0..300),
    ) {
        check_reports(&mut Lru::new(capacity), capacity, &ops);
        check_reports(&mut S3Fifo::new(capacity), capacity, &ops);
        check_reports(&mut Arc::new(capacity), capacity, &ops);
        check_reports(&mut Lirs::new(capacity), capacity, &ops);
        check_reports(&mut Gap::new(capacity), capacity, &ops);
        check_reports(&mut Gap::index_only(capacity), capacity, &ops);
        check_reports(&mut Duel::new(capacity, Leader::Lirs), capacity, &ops);
        let accesses = |op: &Op| if let Op::Access(slot, _) = op { Some(*slot) } else { None };
        let trace: Vec<Slot> = ops.iter().filter_map(accesses).collect();
        check_reports(&mut Opt::new(capacity, &trace), capacity, &ops);
    }

    #[test]
    fn lru_lets_go_what_a_plain_list_lets_go(
        capacity in 1..40u64,
        ops in proptest::collection::vec(op(), 0..300),
    ) {
        let (mut lru, mut out) = (Lru::new(capacity), Vec::new());
        let (mut list, mut capacity): (Vec<(Slot, u64)>, u64) = (Vec::new(), capacity);
        for op in ops {
            out.clear();
            match op {
                Op::Access(slot, weight) => {
                    lru.access(slot, weight, &mut out);
                    list.retain(|entry| entry.0 != slot);
                    list.push((slot, u64::from(weight.max(1))));
                    if u64::from(weight) > capacity {
                        list.pop();
                        prop_assert_eq!(&out, &[slot]);
                        continue;
                    }
                }
                Op::Forget(slot) => {
                    lru.forget(slot);
                    list.retain(|entry| entry.0 != slot);
                }
                Op::Resize(pages) => {
                    lru.resize(pages, &mut out);
                    capacity = pages;
                }
            }
            let mut gone = Vec::new();
            while list.iter().map(|entry| entry.1).sum::<u64>() > capacity {
                gone.push(list.remove(0).0);
            }
            prop_assert_eq!(&out, &gone);
        }
    }

    #[test]
    fn opt_has_the_most_hits_that_can_be_had(
        capacity in 1..4usize,
        trace in proptest::collection::vec(0..6u32, 0..14),
    ) {
        let mut opt = Opt::new(capacity as u64, &trace);
        let hits = trace.iter().filter(|slot| opt.access(**slot, 1, &mut Vec::new())).count();
        prop_assert_eq!(hits, most_hits(&trace, &mut Vec::new(), capacity));
    }
}

/// Tries every victim.
fn most_hits(trace: &[Slot], held: &mut Vec<Slot>, capacity: usize) -> usize {
    let Some((slot, rest)) = trace.split_first() else { return 0 };
    if held.contains(slot) {
        return 1 + most_hits(rest, held, capacity);
    }
    if held.len() < capacity {
        held.push(*slot);
        let most = most_hits(rest, held, capacity);
        held.pop();
        return most;
    }
    let choices = 0..held.len();
    let with = |at: usize| {
        let mut held = held.clone();
        held[at] = *slot;
        most_hits(rest, &mut held, capacity)
    };
    choices.map(with).max().unwrap_or(0)
}

/// Hits of a directory over a trace of single pages.
fn hits(directory: &mut dyn Directory, trace: impl Iterator<Item = Slot>) -> usize {
    let mut out = Vec::new();
    trace.filter(|slot| directory.access(*slot, 1, &mut out)).count()
}

#[test]
fn a_cycle_larger_than_the_cache_is_what_tells_them_apart() {
    let trace = || (0..10_000u32).map(|at| at % 100);
    let all: Vec<Slot> = trace().collect();
    assert_eq!(hits(&mut Lru::new(50), trace()), 0);
    assert_eq!(hits(&mut Arc::new(50), trace()), 0);
    assert_eq!(hits(&mut Opt::new(50, &all), trace()), 4900);
    assert!(hits(&mut Lirs::new(50), trace()) >= 4850);
    assert!(hits(&mut S3Fifo::new(50), trace()) >= 4000);
}
