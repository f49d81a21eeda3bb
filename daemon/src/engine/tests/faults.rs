//! Transfers that fail, one at a time: what is counted, what is kept, and who is told.

use lapis_proto::message::{Access, Flush, Map, Prefetch, Quota, QuotaSubject, SetTier, Tier};
use nix::errno::Errno;

use super::super::event::{Hop, Reply, Request, TransferFault};
use super::super::page::Page;
use super::bench::{Bench, PAGE, WAIT_US, range};
use super::*;
use crate::device::DeviceFault;
use crate::store::StoreFault;

const BROKEN_DISK: TransferFault =
    TransferFault::Store(StoreFault::Io { offset: 8192, errno: Errno::EIO });
const LOST_DEVICE: TransferFault =
    TransferFault::Device(DeviceFault::Lost { reason: std::borrow::Cow::Borrowed("it said") });

fn is_read_of(page: u64) -> impl Fn(&Hop) -> Option<TransferFault> {
    move |hop| {
        let hit = matches!(hop, Hop::ReadFile { offset, .. } if *offset == page * PAGE);
        hit.then_some(BROKEN_DISK)
    }
}

fn is_write_to_spill(hop: &Hop) -> Option<TransferFault> {
    matches!(hop, Hop::WriteSpill { .. }).then_some(BROKEN_DISK)
}

fn is_read_of_spill(hop: &Hop) -> Option<TransferFault> {
    matches!(hop, Hop::ReadSpill { .. }).then_some(BROKEN_DISK)
}

#[test]
fn a_page_that_can_not_be_read_refuses_the_whole_map_and_nothing_of_it_stays_pinned() {
    let mut bench = Bench::new(8, 16, 0);
    let file = bench.open_file(5);
    let request = bench.map(file, 0..5, Access::Read);
    assert_eq!(bench.run(is_read_of(3)), 3, "a read is tried three times");
    let refused = bench.refusal(request);
    assert_eq!((refused.code, refused.object, refused.asked), (Code::Io, 8192, 5));
    assert!(refused.message.contains("page 3: I/O failed at byte 8192"), "{}", refused.message);
    let stats = bench.stats();
    assert_eq!((stats.mappings, stats.vram.pinned, stats.total.maps), (0, 0, 0));
    assert_eq!((stats.total.file_to_ram.errors, stats.total.read_retries), (3, 2));
    // The others are there and are no worse for it; the one is read when it can be.
    let request = bench.map(file, 0..3, Access::Read);
    assert!(bench.hops.is_empty(), "{:?}", bench.hops);
    bench.mapped(request);
    let request = bench.map(file, 3..4, Access::Read);
    assert_eq!(bench.run(|_| None), 0);
    bench.mapped(request);
}

#[test]
fn a_read_that_failed_once_is_tried_again_and_nobody_is_told() {
    let mut bench = Bench::new(8, 16, 0);
    let file = bench.open_file(1);
    let request = bench.map(file, 0..1, Access::Read);
    let first = std::cell::Cell::new(true);
    let once = |hop: &Hop| is_read_of(0)(hop).filter(|_| first.replace(false));
    assert_eq!(bench.run(once), 1);
    bench.mapped(request);
    let total = bench.stats().total;
    assert_eq!((total.read_retries, total.file_to_ram.errors, total.file_to_ram.pages), (1, 1, 1));
}

#[test]
fn a_frame_that_was_not_filled_is_zeroed_before_it_is_overwritten() {
    let mut bench = Bench::new(4, 8, 0);
    let file = bench.open_file(1);
    let request = bench.map(file, 0..1, Access::Read);
    bench.run(is_read_of(0));
    assert_eq!(bench.refusal(request).code, Code::Io);
    // Whatever another domain left in the frame is there still.
    let memory = bench.allocate(1);
    let request = bench.map(memory, 0..1, Access::Overwrite);
    let hops: Vec<_> = bench.hops.iter().map(|(_, hop)| *hop).collect();
    assert!(matches!(hops[..], [Hop::Zero { .. }]), "{hops:?}");
    bench.run(|_| None);
    let mapped = bench.mapped(request);
    bench.unmap(&mapped);
    // What its own domain left there may stay.
    let request = bench.ask(Request::Free(memory));
    bench.done(request);
    let memory = bench.allocate(1);
    let request = bench.map(memory, 0..1, Access::Overwrite);
    assert!(bench.hops.is_empty(), "{:?}", bench.hops);
    bench.mapped(request);
}

/// An allocation, and one of its pages that is in the spill only.
fn spilled(bench: &mut Bench) -> (AllocationId, u32) {
    let allocation = bench.allocate(20);
    for page in 0..20 {
        bench.write(allocation, page..page + 1);
    }
    let only = |page: &Page| page.slot.is_some() && page.ram.is_none() && page.vram.is_none();
    (allocation, bench.page_where(allocation, only))
}

#[test]
fn a_page_that_can_not_be_read_back_is_not_lost() {
    let mut bench = Bench::new(4, 8, 16);
    let (memory, page) = spilled(&mut bench);
    let used = bench.stats().nvme.used;
    for _ in 0..2 {
        let request = bench.map(memory, page..page + 1, Access::Read);
        assert_eq!(bench.run(is_read_of_spill), 3);
        let refused = bench.refusal(request);
        assert_eq!(refused.code, Code::Io, "{refused:?}");
        assert!(bench.stats().nvme.used >= used, "its slot is gone");
    }
    let request = bench.map(memory, page..page + 1, Access::Read);
    bench.run(|_| None);
    bench.mapped(request);
}

#[test]
fn a_spilled_page_that_came_back_different_is_named() {
    let mut bench = Bench::new(4, 8, 16);
    let (memory, page) = spilled(&mut bench);
    let request = bench.map(memory, page..page + 1, Access::Read);
    let different = |hop: &Hop| match hop {
        Hop::ReadSpill { slot, .. } => {
            let offset = u64::from(slot.0) * PAGE;
            Some(TransferFault::Store(StoreFault::Checksum { offset }))
        }
        _ => None,
    };
    assert_eq!(bench.run(different), 3);
    let refused = bench.refusal(request);
    assert_eq!((refused.code, refused.object), (Code::DataLost, u64::from(page)), "{refused:?}");
    let stats = bench.stats();
    assert_eq!((stats.total.checksum_errors, stats.mappings), (3, 0));
    // Whoever gives the bytes up can use the page again.
    let request = bench.map(memory, page..page + 1, Access::Overwrite);
    bench.run(|_| None);
    bench.mapped(request);
}

#[test]
fn a_copy_that_failed_is_neither_a_hit_nor_a_map() {
    let mut bench = Bench::new(4, 16, 0);
    let file = bench.open_file(8);
    for page in 0..8 {
        let request = bench.map(file, page..page + 1, Access::Read);
        bench.run(|_| None);
        let mapped = bench.mapped(request);
        bench.unmap(&mapped);
    }
    let before = bench.stats().total;
    assert_eq!((before.maps, before.misses, before.hits_ram), (8, 8, 0));
    // It would be a hit in RAM, if it came.
    let page = bench.page_where(file, |page| page.ram.is_some() && page.vram.is_none());
    let request = bench.map(file, page..page + 1, Access::Read);
    assert_eq!(bench.run(|hop| matches!(hop, Hop::Up { .. }).then_some(LOST_DEVICE)), 1);
    assert_eq!(bench.refusal(request).code, Code::DeviceLost);
    let after = bench.stats();
    assert_eq!((after.total.hits_ram, after.total.maps), (0, 8));
    assert_eq!((after.session.hits_ram, after.session.maps), (0, 8));
    assert_eq!(after.total.ram_to_vram.pages, before.ram_to_vram.pages);
    assert_eq!(after.total.ram_to_vram.errors, 1);
}

#[test]
fn a_map_that_timed_out_is_no_hit() {
    let mut bench = Bench::new(4, 16, 0);
    let file = bench.open_file(4);
    let request = bench.map(file, 0..1, Access::Read);
    bench.pass(WAIT_US);
    assert_eq!(bench.refusal(request).code, Code::TimedOut);
    bench.run(|_| None);
    let total = bench.stats().total;
    assert_eq!((total.misses, total.maps, total.file_to_ram.pages), (0, 0, 1));
}

#[test]
fn a_lost_device_is_told_to_all_who_wait_and_to_all_who_come() {
    let mut bench = Bench::new(4, 8, 8);
    let (memory, other) = (bench.allocate(3), bench.allocate(3));
    bench.write(memory, 0..1);
    let held = bench.map(memory, 0..1, Access::Read);
    let held = bench.mapped(held);
    let map = bench.map(memory, 1..3, Access::Write);
    let queued = bench.map(other, 0..1, Access::Write);
    let flush = Flush { ranges: vec![range(memory, 0..1)], wait_us: WAIT_US };
    let flush = bench.ask(Request::Flush(flush));
    let shrink = SetTier { tier: Tier::Vram, size: 2 * PAGE, wait_us: WAIT_US };
    let shrink = bench.ask(Request::SetTier(shrink));
    let (tag, _) = bench.hops.pop_front().expect("the map's pages are being zeroed");
    bench.apply(Event::TransferDone { tag, result: Err(LOST_DEVICE) });
    for request in [map, queued, flush, shrink] {
        let refused = bench.refusal(request);
        assert_eq!(refused.code, Code::DeviceLost, "{refused:?}");
    }
    let later = [
        Request::Allocate { size: 1 },
        Request::Map(Map {
            ranges: vec![range(memory, 0..1)],
            access: Access::Read,
            wait_us: WAIT_US,
        }),
        Request::Prefetch(Prefetch {
            ranges: vec![range(memory, 0..1)],
            priority: 0,
            within_us: 0,
        }),
        Request::Flush(Flush { ranges: vec![range(memory, 0..1)], wait_us: WAIT_US }),
        Request::SetTier(SetTier { tier: Tier::Vram, size: 4 * PAGE, wait_us: WAIT_US }),
    ];
    for body in later {
        let request = bench.ask(body);
        assert_eq!(bench.refusal(request).code, Code::DeviceLost);
    }
    // What needs no device is done.
    bench.stats();
    bench.unmap(&held);
    let free = bench.ask(Request::Free(other));
    bench.done(free);
    assert!(bench.engine.device_lost());
}

#[test]
fn a_spill_that_fails_keeps_the_page_rests_and_is_tried_again() {
    let mut bench = Bench::new(8, 16, 16);
    let memory = bench.allocate(3);
    bench.write(memory, 0..3);
    let flush = |bench: &mut Bench| {
        let flush = Flush { ranges: vec![range(memory, 0..3)], wait_us: WAIT_US };
        bench.ask(Request::Flush(flush))
    };
    let request = flush(&mut bench);
    let failed = bench.run(is_write_to_spill);
    assert!((1..=3).contains(&failed), "{failed} writes");
    let refused = bench.refusal(request);
    assert_eq!((refused.code, refused.object), (Code::Io, 8192), "{refused:?}");
    let stats = bench.stats();
    assert!(stats.nvme.degraded, "{stats:?}");
    assert_eq!((stats.nvme.used, stats.total.ram_to_spill.pages), (0, 0));
    assert_eq!(stats.total.ram_to_spill.errors, u64::from(failed));
    // While it rests nothing is tried.
    let request = flush(&mut bench);
    assert_eq!(bench.run(is_write_to_spill), 0);
    assert!(bench.reply(request).is_none());
    let due = bench.engine.next_deadline().expect("the rest ends");
    bench.pass(due - bench.now);
    assert_eq!(bench.run(|_| None), 0);
    bench.done(request);
    let stats = bench.stats();
    assert!(!stats.nvme.degraded);
    assert_eq!((stats.nvme.used, stats.total.ram_to_spill.pages), (3 * PAGE, 3));
    let request = bench.map(memory, 0..3, Access::Read);
    bench.run(|_| None);
    bench.mapped(request);
}

#[test]
fn a_map_that_only_a_broken_spill_could_make_room_for_ends_in_time_and_tries_little() {
    // RAM and spill are full of anonymous pages; the last one can come only if another goes to the spill.
    let mut bench = Bench::new(4, 8, 16);
    let memory = bench.allocate(20);
    for page in 0..10 {
        bench.write(memory, page..page + 1);
    }
    let mut failed = 0;
    let mut timed_out = 0;
    for page in 10..20 {
        let request = bench.map(memory, page..page + 1, Access::Write);
        let end = bench.now + WAIT_US;
        failed += bench.run(is_write_to_spill);
        while bench.now < end && !bench.replies.contains_key(&request) {
            let due = bench.engine.next_deadline().expect("a map waits");
            bench.pass(due - bench.now);
            failed += bench.run(is_write_to_spill);
        }
        match bench.reply(request) {
            Some(Reply::Mapped(mapped)) => bench.unmap(&mapped),
            Some(Reply::Refused(refused)) => {
                assert_eq!(refused.code, Code::TimedOut, "{refused:?}");
                timed_out += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(timed_out > 0, "there was room without the spill");
    // Writes in flight at once, at most, for each second of rest.
    let rests = u32::try_from(WAIT_US / 1_000_000).expect("few") * timed_out;
    assert!(failed <= 4 * (rests + 10), "{failed} writes in {rests} rests");
    let request = bench.map(memory, 0..1, Access::Read);
    bench.pass(2_000_000);
    bench.run(|_| None);
    bench.mapped(request);
}

#[test]
fn quotas_refuse_at_once_with_limit_use_and_what_was_asked() {
    let mut bench = Bench::new(16, 16, 16);
    let quota = Quota {
        vram_max: Some(4 * PAGE),
        anonymous_max: Some(10 * PAGE),
        ..Quota::none(QuotaSubject::EachSession)
    };
    let request = bench.ask(Request::SetQuota(quota));
    bench.done(request);
    let memory = bench.allocate(8);
    let request = bench.ask(Request::Allocate { size: 3 * PAGE });
    let refused = bench.refusal(request);
    let numbers = (refused.asked / PAGE, refused.in_use / PAGE, refused.limit / PAGE);
    assert_eq!((refused.code, numbers), (Code::OverQuota, (3, 8, 10)));
    let request = bench.map(memory, 0..5, Access::Write);
    let refused = bench.refusal(request);
    let numbers = (refused.asked / PAGE, refused.limit / PAGE);
    assert_eq!((refused.code, numbers), (Code::OverQuota, (5, 4)));
    let stats = bench.stats();
    assert_eq!((stats.allocations, stats.mappings, stats.vram.pinned), (1, 0, 0));
    // What its quota has no room for now waits for its own mappings.
    let first = bench.map(memory, 0..3, Access::Write);
    let second = bench.map(memory, 3..6, Access::Write);
    bench.run(|_| None);
    assert!(bench.reply(second).is_none());
    let first = bench.mapped(first);
    bench.unmap(&first);
    bench.run(|_| None);
    bench.mapped(second);
}

#[test]
fn a_flush_of_more_than_the_spill_takes_writes_what_it_takes_and_then_moves_nothing() {
    // The last number: pages that are written at once, and so lie together in VRAM or below it.
    for (vram, ram, slots, pages, together) in [
        (16, 15, 16, 26, 13),
        (16, 15, 16, 27, 1),
        (16, 15, 3, 14, 7),
        (8, 32, 4, 27, 3),
        (4, 8, 40, 44, 2),
    ] {
        let mut bench = Bench::new(vram, ram, slots);
        let memory = bench.allocate(u64::from(pages));
        for first in (0..pages).step_by(together) {
            let end = pages.min(first + u32::try_from(together).expect("few"));
            bench.write(memory, first..end);
        }
        let copied = bench.stats().total.vram_to_ram.pages;
        let flush = Flush { ranges: vec![range(memory, 0..pages)], wait_us: WAIT_US };
        let request = bench.ask(Request::Flush(flush));
        bench.run(|_| None);
        let stats = bench.stats();
        let copied = stats.total.vram_to_ram.pages - copied;
        assert!(copied <= slots.into(), "{copied} pages are copied, {slots} can be written");
        assert_eq!(stats.nvme.used / PAGE, u64::from(slots.min(pages)), "{vram} {ram} {slots}");
        bench.pass(WAIT_US);
        assert_eq!(bench.refusal(request).code, Code::TimedOut);
        bench.run(|_| None);
        // Others are served all the time.
        bench.write(memory, 0..2);
    }
}
