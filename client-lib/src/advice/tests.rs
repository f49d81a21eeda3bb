use lapis_proto::ids::AllocationId;

use super::*;
use crate::Code;
use crate::testing::{PAGE, Received, recording, refused, scripted};
use lapis_proto::message::Allocated;

fn pages(ranges: &[PageRange]) -> Vec<(u64, u32, u32)> {
    ranges.iter().map(|range| (range.allocation.0, range.first, range.count)).collect()
}

#[test]
fn prefetches_keep_their_order_priority_and_time() {
    let (client, daemon) = recording();
    let (four, two) =
        (client.allocate(4 * PAGE).expect("a"), client.allocate(2 * PAGE).expect("b"));
    let ranges =
        [(&two, PAGE..PAGE + 1), (&four, 3 * PAGE..4 * PAGE), (&four, 0..1), (&four, 9..9)];
    client.prefetch(&ranges).expect("said");
    let soon = PrefetchOptions { priority: 7, within: Some(Duration::from_millis(2)) };
    client.prefetch_with(&ranges[..2], soon).expect("said");
    let now = PrefetchOptions { within: Some(Duration::ZERO), ..PrefetchOptions::default() };
    client.prefetch_with(&ranges[..1], now).expect("said");
    four.prefetch(PAGE..2 * PAGE + 1).expect("said");
    drop((four, two, client));
    let told = daemon.join().expect("no panic");
    let told: Vec<Prefetch> = told.iter().map(Received::decode).collect();
    let told: Vec<_> = told.iter().map(|p| (pages(&p.ranges), p.priority, p.within_us)).collect();
    assert_eq!(
        told,
        [
            (vec![(2, 1, 1), (4, 3, 1), (4, 0, 1)], 0, 0),
            (vec![(2, 1, 1), (4, 3, 1)], 7, 2000),
            (vec![(2, 1, 1)], 0, 1),
            (vec![(4, 1, 2)], 0, 0),
        ]
    );
}

#[test]
fn what_has_no_order_is_sorted_and_merged() {
    let (client, daemon) = recording();
    let (four, two) =
        (client.allocate(4 * PAGE).expect("a"), client.allocate(2 * PAGE).expect("b"));
    let ranges = [(&four, PAGE..3 * PAGE), (&two, 0..2 * PAGE), (&four, 0..PAGE), (&four, 5..5)];
    client.cancel_prefetch(&ranges).expect("said");
    four.cancel_prefetch(0..1).expect("said");
    client.advise(&ranges, Advice::Keep).expect("said");
    two.advise(0..1, Advice::DontNeed).expect("said");
    drop((four, two, client));
    let told = daemon.join().expect("no panic");
    let merged = [(2, 0, 2), (4, 0, 3)];
    assert_eq!(pages(&told[0].decode::<CancelPrefetch>().ranges), merged);
    assert_eq!(pages(&told[1].decode::<CancelPrefetch>().ranges), [(4, 0, 1)]);
    let Advise { ranges, advice } = told[2].decode();
    assert_eq!((pages(&ranges), advice), (merged.to_vec(), Advice::Keep));
    let Advise { ranges, advice } = told[3].decode();
    assert_eq!((pages(&ranges), advice), (vec![(2, 0, 1)], Advice::DontNeed));
    assert_eq!(told.len(), 4);
}

#[test]
fn a_flush_of_many_ranges_shares_its_wait_among_its_requests() {
    let (client, daemon) = recording();
    let allocation = client.allocate(4100 * PAGE).expect("allocated");
    let scattered: Vec<_> =
        (0..1025).map(|n| (&allocation, 4 * n * PAGE..4 * n * PAGE + 1)).collect();
    client.flush(&scattered, Duration::from_secs(3600)).expect("flushed");
    client.flush(&scattered[..1], Duration::ZERO).expect("flushed");
    allocation.flush(PAGE..2 * PAGE).expect("flushed");
    drop(scattered);
    drop((allocation, client));
    let told = daemon.join().expect("no panic");
    let told: Vec<Flush> = told.iter().map(Received::decode).collect();
    let counts: Vec<_> = told.iter().map(|flush| flush.ranges.len()).collect();
    assert_eq!(counts, [1024, 1, 1, 1]);
    assert_eq!(pages(&told[1].ranges), [(4100, 4096, 1)]);
    let waits: Vec<_> = told.iter().map(|flush| flush.wait_us).collect();
    assert!(3_600_000_000 >= waits[0] && waits[0] >= waits[1] && waits[1] > 0, "{waits:?}");
    assert_eq!(waits[2], 0);
    assert!((1..=60_000_000).contains(&waits[3]), "{waits:?}");
}

#[test]
fn nothing_is_said_of_no_bytes_or_of_bytes_that_are_not_there() {
    let (client, daemon) = recording();
    let (other, others) = recording();
    let allocation = client.allocate(100).expect("allocated");
    let foreign = other.allocate(100).expect("allocated");
    allocation.prefetch(5..5).expect("nothing to say");
    allocation.cancel_prefetch(5..5).expect("nothing to say");
    allocation.advise(5..5, Advice::Random).expect("nothing to say");
    client.flush(&[], Duration::MAX).expect("nothing to say");
    let outside = |result| matches!(result, Err(Error::OutOfRange { end: 101, size: 100, .. }));
    assert!(outside(allocation.prefetch(0..101)));
    assert!(outside(allocation.cancel_prefetch(0..101)));
    assert!(outside(allocation.advise(0..101, Advice::Normal)));
    assert!(outside(allocation.flush(0..101)));
    let error = client.advise(&[(&foreign, 0..1)], Advice::Normal);
    assert!(matches!(error, Err(Error::Foreign { .. })));
    drop((allocation, foreign, client, other));
    assert!(daemon.join().expect("no panic").is_empty());
    others.join().expect("no panic");
}

#[test]
fn a_refusal_is_told() {
    let (client, daemon) = scripted(4, |mut peer, _events| {
        let request = peer.receive().expect("an allocation");
        peer.reply(request.request, &Allocated { allocation: AllocationId(1), pages: 1 });
        let request = peer.receive().expect("a flush");
        peer.reply(request.request, &refused(Code::InUse));
        while peer.receive().is_some() {}
    });
    let allocation = client.allocate(1).expect("allocated");
    let error = allocation.flush(0..1).expect_err("refused");
    assert_eq!(error.code(), Some(Code::InUse));
    drop((allocation, client));
    daemon.join().expect("no panic");
}
