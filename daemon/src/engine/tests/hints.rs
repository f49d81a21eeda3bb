//! Prefetches: a wrong one costs nobody anything, and one that is over leaves nothing.

use lapis_proto::message::{Access, Advice, Advise, Prefetch};

use super::super::event::{Hop, Request};
use super::bench::{Bench, range};
use super::*;

fn prefetch(bench: &mut Bench, allocation: AllocationId, count: u32, within_us: u64) {
    let ranges = vec![range(allocation, 0..count)];
    let request = bench.ask(Request::Prefetch(Prefetch { ranges, within_us, priority: 0 }));
    bench.done(request);
}

fn reads(bench: &Bench) -> usize {
    bench.hops.iter().filter(|(_, hop)| matches!(hop, Hop::ReadFile { .. })).count()
}

#[test]
fn pages_fetched_ahead_leave_the_frame_that_mapped_pages_leave() {
    let mut bench = Bench::new(4, 16, 0);
    let file = bench.open_file(10);
    prefetch(&mut bench, file, 10, 0);
    bench.run(|_| None);
    let stats = bench.stats();
    assert_eq!((stats.total.file_to_ram.pages, stats.vram.used), (3, 3 * 4096));
}

#[test]
fn a_page_that_is_needed_sooner_stays() {
    let mut bench = Bench::new(4, 16, 0);
    let used = bench.open_file(3);
    let request = bench.map(used, 0..3, Access::Read);
    bench.run(|_| None);
    let mapped = bench.mapped(request);
    bench.unmap(&mapped);
    // One goes to the free frame, and one in place of the page that is needed after three more.
    let file = bench.open_file(10);
    prefetch(&mut bench, file, 10, 0);
    bench.run(|_| None);
    assert_eq!(bench.stats().total.file_to_ram.pages, 3 + 2);
}

#[test]
fn a_prefetch_that_comes_too_late_is_not_begun() {
    let mut bench = Bench::new(4, 16, 0);
    let held = bench.allocate(3);
    let request = bench.map(held, 0..3, Access::Write);
    bench.run(|_| None);
    let mapped = bench.mapped(request);
    let file = bench.open_file(10);
    prefetch(&mut bench, file, 10, 1000);
    assert_eq!(reads(&bench), 0, "there is no room");
    bench.pass(999);
    bench.pass(1);
    bench.unmap(&mapped);
    assert_eq!(reads(&bench), 0);
    assert!(bench.engine.fill_prefetch.is_empty());
}

#[test]
fn prefetches_that_are_cancelled_are_not_begun_and_leave_nothing_in_line() {
    let mut bench = Bench::new(4, 16, 0);
    let held = bench.allocate(3);
    let request = bench.map(held, 0..3, Access::Write);
    bench.run(|_| None);
    let mapped = bench.mapped(request);
    let file = bench.open_file(10);
    for _ in 0..3 {
        prefetch(&mut bench, file, 10, 0);
        assert_eq!(bench.engine.fill_prefetch.len(), 10);
        let request = bench.ask(Request::CancelPrefetch(vec![range(file, 0..10)]));
        bench.done(request);
        assert!(bench.engine.fill_prefetch.is_empty());
    }
    bench.unmap(&mapped);
    assert_eq!(reads(&bench), 0);
}

/// Maps pages one at a time, each once.
fn walk(bench: &mut Bench, file: AllocationId, pages: std::ops::Range<u32>) {
    for index in pages {
        let request = bench.map(file, index..index + 1, Access::Read);
        bench.run(|_| None);
        let mapped = bench.mapped(request);
        bench.unmap(&mapped);
    }
}

#[test]
fn a_chain_is_evicted_from_its_end() {
    let mut bench = Bench::new(16, 64, 0);
    let chain = bench.open_file(8);
    let request = bench
        .ask(Request::Advise(Advise { ranges: vec![range(chain, 0..8)], advice: Advice::Chain }));
    bench.done(request);
    let other = bench.open_file(40);
    for _ in 0..3 {
        let request = bench.map(chain, 0..8, Access::Read);
        bench.run(|_| None);
        let mapped = bench.mapped(request);
        bench.unmap(&mapped);
    }
    // What comes in its place is never one without one behind it.
    let mut lengths = std::collections::BTreeSet::new();
    for index in 0..40 {
        walk(&mut bench, other, index..index + 1);
        let backing = bench.engine.allocations[&chain].backing;
        let held: Vec<bool> = (0..8)
            .map(|index| bench.engine.table.page(PageRef { backing, index }).vram.is_some())
            .collect();
        let length = held.iter().take_while(|held| **held).count();
        assert!(held[length..].iter().all(|held| !held), "{held:?}");
        lengths.insert(length);
    }
    assert!(lengths.len() > 1, "nothing of it went: {lengths:?}");
}
