use std::io::ErrorKind;
use std::time::Duration;

use lapis_proto::code::Code;
use lapis_proto::ids::{AllocationId, MappingId, VramFrame};
use lapis_proto::kind::Kind;
use lapis_proto::message::{Allocated, DeviceKind, Done, Frames, Revoked};

use super::*;
use crate::cuda::driver::DriverError;
use crate::cuda::error::CudaError;
use crate::testing::{
    Daemon, PAGE, access_at, open_memfds, patterned_file, refused, scripted, sealed_memfd, stats,
};
use lapis_proto::ids::RequestId;

const NO_WAIT: Duration = Duration::ZERO;

#[test]
fn bytes_come_back_at_the_same_addresses() {
    let daemon = Daemon::start(4, "stable");
    let allocation = daemon.client.allocate(10 * PAGE - 5).expect("allocated");
    assert_eq!((allocation.size(), allocation.pages()), (655_355, 10));
    let mut addresses = Vec::new();
    for page in 0..10_u8 {
        let start = u64::from(page) * PAGE;
        let end = (start + PAGE).min(allocation.size());
        let mut mapping = allocation.map(start..end, Access::Overwrite).expect("mapped");
        addresses.push(mapping.as_ptr(0).addr());
        mapping.bytes_mut(0).fill(page + 1);
        mapping.unmap().expect("unmapped");
    }
    for (index, address) in addresses.iter().enumerate() {
        assert_eq!(*address, addresses[0] + index * 65536);
        assert_eq!(address % 65536, 0);
    }
    for _ in 0..3 {
        for page in (0..9_u8).rev() {
            let start = u64::from(page) * PAGE;
            let mapping =
                allocation.map(start + 7..start + PAGE + 3, Access::Read).expect("mapped");
            assert_eq!(mapping.as_ptr(0).addr(), addresses[usize::from(page)] + 7);
            let (own, next) = mapping.bytes(0).split_at(65529);
            assert!(own.iter().all(|byte| *byte == page + 1));
            assert_eq!(next, [page + 2; 3]);
            let stats = mapping.stats();
            assert_eq!((stats.hits_vram, stats.hits_ram, stats.pages), (1, 2, 2));
            assert_eq!(stats.waited, Duration::from_micros(3));
        }
    }
    drop(allocation);
    let seen = daemon.finish();
    assert_eq!((seen.unmapped, seen.freed, seen.bye), (37, 1, true));
}

#[test]
fn one_mapping_of_several_ranges_merges_their_pages() {
    let daemon = Daemon::start(8, "several");
    let (_directory, path) = patterned_file(400_000);
    let file = daemon.client.open_path(&path, 11_416, 300_000).expect("opened");
    let memory = daemon.client.allocate(3 * PAGE).expect("allocated");
    let mapping = daemon
        .client
        .map(
            &[
                (&file, 65_000..66_000),
                (&memory, 10..20),
                (&file, 0..10),
                (&file, 5..5),
                (&file, 262_140..262_150),
            ],
            Access::Read,
            Duration::from_millis(5),
        )
        .expect("mapped");
    assert_eq!(mapping.len(), 5);
    let expected: Vec<u8> =
        (76_416..77_416).map(|index| u8::try_from(index % 251).expect("small")).collect();
    assert_eq!(mapping.bytes(0), expected);
    assert_eq!(mapping.bytes(1), [0; 10]);
    assert_eq!(mapping.bytes(2), [121, 122, 123, 124, 125, 126, 127, 128, 129, 130]);
    assert_eq!(mapping.bytes(3), [0; 0]);
    assert_eq!(mapping.bytes(4)[..2], [217, 218]);
    drop((mapping, file, memory));
    let seen = daemon.finish();
    let request = &seen.maps[0];
    let ranges: Vec<_> =
        request.ranges.iter().map(|r| (r.allocation.0, r.first, r.count)).collect();
    assert_eq!(ranges, [(101, 0, 2), (101, 3, 2), (102, 0, 1)]);
    assert_eq!((request.access, request.wait_us), (Access::Read, 5000));
    assert_eq!((seen.unmapped, seen.freed), (1, 2));
}

#[test]
fn overwriting_part_of_a_page_keeps_the_rest_of_it() {
    let daemon = Daemon::start(4, "partial");
    let allocation = daemon.client.allocate(2 * PAGE + 100).expect("allocated");
    for bytes in [0..PAGE, PAGE..allocation.size(), 0..PAGE + 1, 1..PAGE] {
        drop(allocation.map(bytes, Access::Overwrite).expect("mapped"));
    }
    drop(allocation);
    let accesses: Vec<_> = daemon.finish().maps.iter().map(|map| map.access).collect();
    assert_eq!(accesses, [Access::Overwrite, Access::Overwrite, Access::Write, Access::Write]);
}

#[test]
fn nothing_is_asked_for_no_bytes() {
    let daemon = Daemon::start(4, "empty");
    let allocation = daemon.client.allocate(PAGE).expect("allocated");
    let mapping = allocation.map(PAGE..PAGE, Access::Read).expect("mapped");
    assert_eq!(mapping.bytes(0), [0; 0]);
    assert!(!mapping.is_empty());
    assert!(daemon.client.map(&[], Access::Read, NO_WAIT).expect("mapped").is_empty());
    daemon.client.prefetch(&[]).expect("nothing to do");
    mapping.unmap().expect("unmapped");
    drop(allocation);
    assert!(daemon.finish().maps.is_empty());
}

#[test]
fn requests_that_make_no_sense_are_refused_here() {
    let daemon = Daemon::start(4, "senseless");
    let other = Daemon::start(4, "senseless");
    let allocation = daemon.client.allocate(100).expect("allocated");
    let foreign = other.client.allocate(100).expect("allocated");
    let map = |bytes| allocation.map(bytes, Access::Read).map(drop);
    assert!(matches!(map(0..101), Err(Error::OutOfRange { start: 0, end: 101, size: 100 })));
    assert!(matches!(map(0..u64::MAX), Err(Error::OutOfRange { .. })));
    #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
    let reversed = map(50..40);
    assert!(matches!(reversed, Err(Error::OutOfRange { start: 50, end: 40, size: 100 })));
    assert!(matches!(allocation.prefetch(90..110), Err(Error::OutOfRange { .. })));
    let error = daemon.client.map(&[(&foreign, 0..1)], Access::Read, NO_WAIT).map(drop);
    assert!(matches!(error, Err(Error::Foreign { allocation: 101 })));
    let missing = daemon.client.open_path("/nowhere/at/all", 0, 1).map(drop);
    assert!(
        matches!(missing, Err(Error::Open { source, .. }) if source.kind() == ErrorKind::NotFound)
    );
    drop((allocation, foreign));
    other.finish();
    assert!(daemon.finish().maps.is_empty());
}

#[test]
fn more_than_a_request_can_carry_is_refused_here() {
    let (client, daemon) = scripted(4, |mut peer, _events| {
        let request = peer.receive().expect("an allocation");
        let allocation = AllocationId(1);
        peer.reply(request.request, &Allocated { allocation, pages: 70_000 });
        while peer.receive().is_some() {}
    });
    let allocation = client.allocate(70_000 * PAGE).expect("allocated");
    let error = allocation.map(0..65_537 * PAGE, Access::Read).map(drop).expect_err("too large");
    assert_eq!(
        error.to_string(),
        "65537 pages in one mapping; at most 65536 are possible: map fewer at a time"
    );
    let scattered: Vec<_> =
        (0..1025).map(|n| (&allocation, 2 * n * PAGE..2 * n * PAGE + 1)).collect();
    let error = client.map(&scattered, Access::Read, NO_WAIT).map(drop).expect_err("too large");
    assert!(matches!(error, Error::TooLarge { asked: 1025, limit: 1024, .. }));
    drop(client);
    // Nobody says goodbye back.
    drop(allocation);
    daemon.join().expect("no panic");
}

#[test]
fn refusals_leave_the_connection_usable() {
    let daemon = Daemon::start(2, "refused");
    let allocation = daemon.client.allocate(4 * PAGE).expect("allocated");
    let error = allocation.map(0..3 * PAGE, Access::Write).map(drop).expect_err("two frames only");
    assert_eq!(error.code(), Some(Code::TimedOut));
    assert!(error.is_retryable());
    // The bytes it claimed are free again.
    drop(allocation.map(0..2 * PAGE, Access::Write).expect("mapped"));
    assert_eq!(daemon.client.stats().expect("stats"), stats());
    assert_eq!(daemon.client.take_refusal(), None);
    drop(allocation);
    daemon.finish();
}

#[test]
fn pages_are_open_only_while_a_mapping_holds_them() {
    let daemon = Daemon::start(8, "closed");
    let allocation = daemon.client.allocate(4 * PAGE).expect("allocated");
    let first = allocation.map(0..2 * PAGE, Access::Read).expect("mapped");
    let base = first.as_ptr(0).cast_const();
    let access = || {
        let at = |page: usize| access_at(base.wrapping_add(page * 65536)).unwrap_or_default();
        [at(0), at(1), at(2), at(3)]
    };
    assert_eq!(access(), ["r--s", "r--s", "---p", "---p"]);
    let second = allocation.map(PAGE..3 * PAGE, Access::Read).expect("mapped");
    drop(first);
    assert_eq!(access(), ["---s", "r--s", "r--s", "---p"]);
    drop(second);
    assert_eq!(access(), ["---s", "---s", "---s", "---p"]);

    let reader = allocation.map(PAGE..PAGE + 10, Access::Read).expect("mapped");
    let mut writer = allocation.map(PAGE + 10..4 * PAGE, Access::Write).expect("mapped");
    assert_eq!(access(), ["---s", "rw-s", "rw-s", "rw-s"]);
    writer.bytes_mut(0)[0] = 9;
    assert_eq!(reader.bytes(0), [0; 10]);
    drop(writer);
    assert_eq!(access(), ["---s", "r--s", "---s", "---s"]);
    reader.unmap().expect("unmapped");
    assert_eq!(access(), ["---s", "---s", "---s", "---s"]);
    drop(allocation);
    assert_eq!(access(), ["", "", "", ""]);
    daemon.finish();
}

#[test]
fn a_byte_has_many_readers_or_one_writer() {
    let daemon = Daemon::start(8, "conflict");
    let allocation = daemon.client.allocate(2 * PAGE).expect("allocated");
    let reader = allocation.map(0..100, Access::Read).expect("mapped");
    let same = allocation.map(50..150, Access::Read).expect("mapped");
    let conflict = |bytes, access| {
        let result = allocation.map(bytes, access).map(drop);
        matches!(result, Err(Error::Conflict { allocation: 101, .. }))
    };
    assert!(conflict(99..200, Access::Write));
    assert!(conflict(149..200, Access::Overwrite));
    let writer = allocation.map(150..200, Access::Write).expect("mapped");
    assert!(conflict(199..300, Access::Read));
    assert!(conflict(150..151, Access::Write));
    assert!(!conflict(200..300, Access::Read));
    drop(reader);
    assert!(conflict(60..70, Access::Write));
    drop((same, writer));
    assert!(!conflict(0..PAGE, Access::Write));
    drop(allocation);
    daemon.finish();
}

#[test]
#[should_panic(expected = "Access::Read")]
fn a_mapping_for_reading_is_not_written() {
    let daemon = Daemon::start(2, "readonly");
    let allocation = daemon.client.allocate(1).expect("allocated");
    let mut mapping = allocation.map_all(Access::Read).expect("mapped");
    let _ = mapping.bytes_mut(0);
}

#[test]
fn mappings_and_allocations_keep_what_they_need() {
    let daemon = Daemon::start(2, "keep");
    let allocation = daemon.client.allocate(10).expect("allocated");
    let mut mapping = allocation.map_all(Access::Write).expect("mapped");
    drop(allocation);
    mapping.bytes_mut(0).copy_from_slice(b"0123456789");
    let Daemon { client, .. } = &daemon;
    client.stats().expect("still connected");
    assert_eq!(mapping.bytes(0), b"0123456789");
    drop(mapping);
    let seen = daemon.finish();
    assert_eq!((seen.unmapped, seen.freed, seen.bye), (1, 1, true));
}

#[test]
fn threads_share_a_connection_with_replies_in_any_order() {
    const THREADS: u64 = 8;
    const ROUNDS: u64 = 200;
    let (client, daemon) = scripted(4, |mut peer, _events| {
        let mut waiting = Vec::new();
        while let Some(received) = peer.receive() {
            if received.kind != Kind::Allocate {
                peer.reply(received.request, &Done {});
                continue;
            }
            waiting.push((received.request, received.decode::<Allocate>().size));
            // Every thread waits now: answer the last first.
            if waiting.len() == 8 {
                for (request, size) in waiting.drain(..).rev() {
                    peer.reply(request, &Allocated { allocation: AllocationId(size), pages: 1 });
                }
            }
        }
    });
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let client = client.clone();
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let size = 1 + thread * ROUNDS + round;
                    let allocation = client.allocate(size).expect("allocated");
                    assert_eq!(allocation.id(), AllocationId(size));
                }
            });
        }
    });
    drop(client);
    daemon.join().expect("no panic");
}

#[test]
fn paging_from_many_threads_gives_each_its_bytes() {
    let daemon = Daemon::start(12, "threads");
    std::thread::scope(|scope| {
        for thread in 0..6_u8 {
            let client = &daemon.client;
            scope.spawn(move || {
                let allocation = client.allocate(5 * PAGE).expect("allocated");
                for round in 0..100_u8 {
                    let page = u64::from(round) % 4;
                    let range = page * PAGE..(page + 2) * PAGE;
                    let mut mapping = allocation.map(range, Access::Write).expect("mapped");
                    if round > 4 {
                        assert_eq!(mapping.bytes(0)[0], thread);
                        assert_eq!(mapping.bytes(0)[131_071], thread);
                    }
                    mapping.bytes_mut(0).fill(thread);
                }
            });
        }
    });
    assert_eq!(daemon.client.take_refusal(), None);
    let seen = daemon.finish();
    assert_eq!((seen.maps.len(), seen.unmapped, seen.freed), (600, 600, 6));
}

#[test]
fn a_daemon_that_goes_away_wakes_everyone() {
    let (client, daemon) = scripted(4, |mut peer, _events| {
        let request = peer.receive().expect("an allocation");
        peer.reply(request.request, &Allocated { allocation: AllocationId(1), pages: 1 });
        let request = peer.receive().expect("a map");
        let fd = sealed_memfd(65536);
        let frames = vec![VramFrame(2)];
        peer.reply_with(request.request, &Frames { frames: frames.clone() }, &[fd.as_fd()]);
        let mapping = MappingId(1);
        peer.reply(
            request.request,
            &Mapped { mapping, frames, hits_vram: 0, hits_ram: 0, waited_us: 0 },
        );
        for _ in 0..4 {
            assert_eq!(peer.receive().expect("a request").kind, Kind::Stat);
        }
    });
    let allocation = client.allocate(PAGE).expect("allocated");
    let mapping = allocation.map_all(Access::Read).expect("mapped");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert!(matches!(client.stats(), Err(Error::Disconnected))));
        }
    });
    daemon.join().expect("no panic");
    assert!(matches!(client.stats(), Err(Error::Disconnected)));
    assert!(matches!(client.allocate(1), Err(Error::Disconnected)));
    assert!(mapping.bytes(0).iter().all(|byte| *byte == 0));
    assert!(matches!(mapping.unmap(), Err(Error::Disconnected)));
}

#[test]
fn a_daemon_that_breaks_the_protocol_is_left() {
    fn after_stat(
        act: impl FnOnce(&mut crate::testing::Peer, lapis_proto::ids::RequestId) + Send + 'static,
    ) -> Error {
        let (client, daemon) = scripted(4, move |mut peer, _events| {
            let request = peer.receive().expect("a request").request;
            act(&mut peer, request);
            while peer.receive().is_some() {}
        });
        let error = client.stats().expect_err("nonsense");
        assert!(matches!(client.stats(), Err(Error::Disconnected)));
        daemon.join().expect("no panic");
        error
    }
    let error = after_stat(|peer, request| peer.reply(request, &Done {}));
    assert_eq!(
        error.to_string(),
        "the daemon broke the protocol: expected Stats, got Done; install the same release of client and daemon"
    );
    let error = after_stat(|peer, _| peer.reply(RequestId(99), &Done {}));
    assert!(matches!(
        error,
        Error::Protocol(ProtocolError::Unsolicited { kind: Kind::Done, request: 99 })
    ));
    let error = after_stat(|peer, request| {
        let fd = sealed_memfd(4096);
        peer.reply_with(request, &Frames { frames: vec![VramFrame(0)] }, &[fd.as_fd()]);
    });
    assert!(matches!(error, Error::Protocol(ProtocolError::Frames { frame: 0, .. })));
}

#[test]
fn a_map_reply_that_cannot_be_is_refused_and_closes_the_connection() {
    fn mapped(frames: &[u32]) -> Error {
        let frames: Vec<VramFrame> = frames.iter().copied().map(VramFrame).collect();
        let (client, daemon) = scripted(4, move |mut peer, _events| {
            let request = peer.receive().expect("an allocation");
            peer.reply(request.request, &Allocated { allocation: AllocationId(1), pages: 2 });
            let request = peer.receive().expect("a map").request;
            let fd = sealed_memfd(65536);
            peer.reply_with(request, &Frames { frames: vec![VramFrame(0)] }, &[fd.as_fd()]);
            let mapping = MappingId(1);
            peer.reply(
                request,
                &Mapped { mapping, frames, hits_vram: 0, hits_ram: 0, waited_us: 0 },
            );
            while peer.receive().is_some() {}
        });
        let allocation = client.allocate(2 * PAGE).expect("allocated");
        let error = allocation.map_all(Access::Read).map(drop).expect_err("nonsense");
        assert!(matches!(client.stats(), Err(Error::Disconnected)));
        drop((allocation, client));
        daemon.join().expect("no panic");
        error
    }
    let text = |error: Error| match error {
        Error::Protocol(error) => error.to_string(),
        other => panic!("{other}"),
    };
    assert_eq!(text(mapped(&[0])), "1 frames where 2 belong");
    assert_eq!(text(mapped(&[0, 1])), "frame 1 was never sent");
    assert_eq!(text(mapped(&[0, 0, 0])), "3 frames where 2 belong");
}

#[test]
fn ten_thousand_maps_leak_nothing() {
    let daemon = Daemon::start(3, "leak");
    let allocation = daemon.client.allocate(7 * PAGE).expect("allocated");
    for round in 0..10_000_u64 {
        let start = round % 7 * PAGE;
        let mut mapping = allocation.map(start..start + 8, Access::Write).expect("mapped");
        assert_eq!(mapping.bytes(0), (round / 7).to_le_bytes());
        mapping.bytes_mut(0).copy_from_slice(&(round / 7 + 1).to_le_bytes());
    }
    // One each in the daemon and the client.
    assert_eq!(open_memfds("leak"), 6);
    drop(allocation);
    let seen = daemon.finish();
    assert_eq!((seen.maps.len(), seen.unmapped), (10_000, 10_000));
    assert_eq!(open_memfds("leak"), 0);
}

#[test]
fn replies_that_nobody_waits_for_do_not_pile_up() {
    let daemon = Daemon::start(1, "pile");
    let allocation = daemon.client.allocate(PAGE).expect("allocated");
    let mappings: Vec<Mapping> = (0..2000)
        .map(|index| allocation.map(index..index + 1, Access::Read).expect("mapped"))
        .collect();
    // The daemon never blocks: it fails the test if it finds the socket full.
    drop(mappings);
    drop(allocation);
    assert_eq!(daemon.finish().unmapped, 2000);
}

#[test]
fn a_refusal_of_something_dropped_is_kept() {
    let (client, daemon) = scripted(4, |mut peer, _events| {
        let request = peer.receive().expect("an allocation");
        peer.reply(request.request, &Allocated { allocation: AllocationId(1), pages: 1 });
        let request = peer.receive().expect("a free");
        assert_eq!(request.kind, Kind::Free);
        peer.reply(request.request, &refused(Code::UnknownAllocation));
        let request = peer.receive().expect("a stat");
        peer.reply(request.request, &stats());
        while peer.receive().is_some() {}
    });
    drop(client.allocate(1).expect("allocated"));
    client.stats().expect("stats");
    assert_eq!(client.take_refusal().map(|refused| refused.code), Some(Code::UnknownAllocation));
    assert_eq!(client.take_refusal(), None);
    drop(client);
    daemon.join().expect("no panic");
}

#[test]
fn revoked_frames_are_given_back_unless_a_mapping_holds_them() {
    let daemon = Daemon::start(4, "revoke");
    let allocation = daemon.client.allocate(4 * PAGE).expect("allocated");
    let mut all = allocation.map_all(Access::Write).expect("mapped");
    all.bytes_mut(0).fill(5);
    drop(all);
    let held = allocation.map(PAGE..PAGE + 1, Access::Read).expect("mapped");
    assert_eq!(open_memfds("revoke"), 8);

    // The test's daemon asks for every frame when it is told to prefetch.
    allocation.prefetch(0..1).expect("prefetched");
    let frames = daemon.revoked.recv().expect("an answer");
    assert_eq!(frames, [VramFrame(0), VramFrame(2), VramFrame(3)]);
    assert_eq!(open_memfds("revoke"), 5);
    assert_eq!(held.bytes(0), [5]);
    let base = held.as_ptr(0).cast_const().wrapping_sub(65536);
    assert_eq!(access_at(base).as_deref(), Some("---p"));
    // What was held then is given back when the mapping ends, as soon as the daemon knows that.
    let also = allocation.map(PAGE..PAGE + 1, Access::Read).expect("mapped");
    held.unmap().expect("unmapped");
    assert_eq!(open_memfds("revoke"), 5);
    assert_eq!(also.bytes(0), [5]);
    drop(also);
    assert_eq!(daemon.revoked.recv().expect("an answer"), [VramFrame(1)]);
    assert_eq!(open_memfds("revoke"), 4);
    assert_eq!(access_at(base.wrapping_add(65536)).as_deref(), Some("---p"));

    let all = allocation.map_all(Access::Read).expect("mapped again");
    assert_eq!(open_memfds("revoke"), 8);
    assert!(all.bytes(0).iter().all(|byte| *byte == 5));
    drop(all);
    let held = allocation.map(3 * PAGE..4 * PAGE, Access::Write).expect("mapped");
    allocation.prefetch(0..1).expect("prefetched");
    let frames = daemon.revoked.recv().expect("an answer");
    assert_eq!(frames, [VramFrame(0), VramFrame(1), VramFrame(2)]);
    held.unmap().expect("unmapped");
    assert_eq!(daemon.revoked.recv().expect("an answer"), [VramFrame(3)]);
    drop(allocation);
    assert_eq!(daemon.client.take_refusal(), None);
    daemon.finish();
}

#[test]
fn a_closing_client_gives_everything_back_before_it_says_goodbye() {
    let (client, daemon) = scripted(4, |mut peer, mut events| {
        let request = peer.receive().expect("goodbye");
        assert_eq!(request.kind, Kind::Bye);
        let ended = std::io::Read::read(&mut events, &mut [0]).expect("the end");
        assert_eq!(ended, 0, "the event socket closes first");
        peer.reply(request.request, &Done {});
        assert!(peer.receive().is_none());
    });
    let clone = client.clone();
    drop(client);
    drop(clone);
    daemon.join().expect("no panic");
}

#[test]
fn an_event_that_is_none_closes_the_event_socket_only() {
    let (client, daemon) = scripted(4, |mut peer, mut events| {
        let mut bytes = Vec::new();
        lapis_proto::codec::encode(RequestId(0), &Revoked { frames: vec![] }, 0, &mut bytes)
            .expect("encodes");
        std::io::Write::write_all(&mut events, &bytes).expect("sent");
        assert_eq!(std::io::Read::read(&mut events, &mut [0]).expect("the end"), 0);
        let request = peer.receive().expect("a stat");
        peer.reply(request.request, &stats());
        while peer.receive().is_some() {}
    });
    client.stats().expect("still there");
    drop(client);
    daemon.join().expect("no panic");
}

#[test]
fn without_a_driver_a_cuda_daemon_gives_numbers_and_no_memory() {
    use crate::testing::{Peer, welcome};
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let (events, _events) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let daemon = std::thread::spawn(move || {
        let mut peer = Peer::new(theirs);
        let mut kinds = Vec::new();
        while let Some(request) = peer.receive() {
            kinds.push(request.kind);
            peer.reply(request.request, &stats());
        }
        kinds
    });
    let cuda = Welcome { device: DeviceKind::Cuda, ..welcome(4) };
    let reader = lapis_proto::frame::FrameReader::new();
    let session = Session::start((ours, reader), events, cuda, Some("/nowhere/libcuda.so".into()));
    let client = Client::of(Arc::new(session.expect("started")));
    client.stats().expect("numbers");
    let (_directory, path) = patterned_file(10);
    for refused in [client.allocate(1), client.open_path(path, 0, 1)] {
        let error = refused.map(drop).expect_err("no driver");
        assert!(
            matches!(&error, Error::Cuda(CudaError::Driver(DriverError::Load { .. }))),
            "{error}"
        );
        let text = error.to_string();
        assert!(text.contains("CUDA") && text.contains("/nowhere/libcuda.so"), "{text}");
        assert!(!error.is_retryable());
    }
    drop(client);
    assert_eq!(daemon.join().expect("no panic"), [Kind::Stat, Kind::Bye], "nothing was asked for");
}

#[test]
#[expect(unsafe_code, reason = "fork is the subject")]
fn a_forked_child_can_neither_use_nor_end_the_connection() {
    let daemon = Daemon::start(2, "fork");
    let allocation = daemon.client.allocate(PAGE).expect("allocated");
    let mapping = allocation.map_all(Access::Read).expect("mapped");
    let address = mapping.as_ptr(0).cast_const();
    // SAFETY: the child only makes calls that take none of the locks other threads may have held at the fork, apart
    // from the C library's allocator, which fork leaves usable; then it exits at once.
    match unsafe { nix::unistd::fork() }.expect("forked") {
        nix::unistd::ForkResult::Child => {
            let refused = matches!(daemon.client.stats(), Err(Error::Forked))
                && matches!(allocation.map_all(Access::Read), Err(Error::Forked))
                && matches!(allocation.prefetch(0..1), Err(Error::Forked))
                && matches!(daemon.client.allocate(1), Err(Error::Forked))
                && access_at(address).is_none()
                && matches!(mapping.unmap(), Err(Error::Forked));
            drop(allocation);
            drop(daemon.client);
            // SAFETY: ends the process; nothing else is to run in it.
            unsafe { libc::_exit(if refused { 0 } else { 1 }) };
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).expect("waited");
            assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
        }
    }
    assert_eq!(mapping.bytes(0).len(), 65536);
    drop((mapping, allocation));
    let seen = daemon.finish();
    assert_eq!((seen.maps.len(), seen.unmapped, seen.freed, seen.bye), (1, 1, 1, true));
}
