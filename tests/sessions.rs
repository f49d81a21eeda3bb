//! Clients that break every rule of a session, against a real daemon: each gets a typed answer or is let go, nothing of
//! it stays behind, and a good client still gets the right bytes.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

use std::fs::{File, OpenOptions};
use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lapis::{Access, Code, ConnectOptions};
use lapis_proto::fds;
use lapis_proto::handshake::hello;
use lapis_proto::ids::{AllocationId, MappingId, VramFrame};
use lapis_proto::kind::Kind;
use lapis_proto::message::{
    Allocate, Allocated, Bye, Done, Frames, Free, Hello, Map, Mapped, OpenFile, PageRange,
    Prefetch, Refused, Revoke, Revoked, Stat, Stats, Unmap,
};
use lapis_tests::binaries::test_client;
use lapis_tests::daemon::Daemon;
use lapis_tests::good::{Sample, nothing_is_left, still_serves, write_and_read};
use lapis_tests::peer::{Peer, RawHeader, frame};
use lapis_tests::victim::Victim;
use lapis_tests::wait::until;

const SMALL: &[&str] =
    &["--page-size", "64KiB", "--vram", "1MiB", "--ram", "1MiB", "--nvme", "2MiB"];
const PAGE: u64 = 64 << 10;
/// A mapping of more than this is never granted with [`SMALL`] tiers.
const MAPPED_MAX: u32 = 15;

/// A daemon, and how many descriptors and threads it had before anybody came.
struct Bench {
    daemon: Daemon,
    idle: (usize, usize),
}

impl Bench {
    fn new() -> Self {
        Self::with(SMALL)
    }

    fn with(flags: &[&str]) -> Self {
        let daemon = Daemon::start(flags);
        let idle = (daemon.descriptors(), daemon.threads());
        Self { daemon, idle }
    }

    fn connect(&self) -> Peer {
        Peer::connect(self.daemon.socket())
    }

    fn greeted(&self) -> Peer {
        Peer::greeted(self.daemon.socket())
    }

    /// All that others opened is closed, in the daemon too.
    fn is_idle(&self) {
        nothing_is_left(&self.daemon);
        until("descriptors and threads", || {
            let now = (self.daemon.descriptors(), self.daemon.threads());
            if now.0 <= self.idle.0 && now.1 <= self.idle.1 {
                Ok(())
            } else {
                Err((now, self.idle))
            }
        });
    }

    /// The daemon took no harm.
    fn end(self) {
        still_serves(&self.daemon);
        self.is_idle();
        let log = self.daemon.stop_well();
        assert!(!log.iter().any(|line| line.contains("ERROR")), "{log:#?}");
    }
}

fn range(allocation: AllocationId, first: u32, count: u32) -> PageRange {
    PageRange { allocation, first, count }
}

fn map(ranges: Vec<PageRange>, access: Access, wait_us: u64) -> Map {
    Map { ranges, access, wait_us }
}

fn map_read(allocation: AllocationId, first: u32, count: u32) -> Map {
    map(vec![range(allocation, first, count)], Access::Read, 30_000_000)
}

fn allocate(peer: &mut Peer, pages: u64) -> AllocationId {
    let allocated: Allocated = peer.call(&Allocate { size: pages * PAGE }).unwrap();
    assert_eq!(u64::from(allocated.pages), pages);
    allocated.allocation
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, Refused>, code: Code) -> Refused {
    let refused = result.unwrap_err();
    assert_eq!(refused.code, code, "{refused:?}");
    refused
}

/// A session goes on after it was refused something.
fn goes_on(peer: &mut Peer) {
    let _: Stats = peer.call(&Stat {}).unwrap();
}

#[test]
fn bytes_that_are_no_message_end_the_connection_with_a_reason() {
    let bench = Bench::new();
    let noise = {
        let mut noise = vec![0; 65_536];
        lapis::model::pattern(5, 0, &mut noise);
        noise
    };
    let almost = { RawHeader::of(Kind::Hello, 8).with(&[0; 8]) };
    let wrong_magic = [b"LPS2", &almost[4..]].concat();
    for garbage in [
        &b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..],
        &noise,
        &[0; 24],
        &[255; 4096],
        &wrong_magic,
    ] {
        let mut stranger = bench.connect();
        // It may hang up before it has all of it.
        let _sent = stranger.send(garbage);
        let refused = stranger.is_thrown_out(Code::BadRequest);
        assert!(refused.message.contains("not a Lapis message"), "{}", refused.message);
        let mut client = bench.greeted();
        let _sent = client.send(garbage);
        client.is_thrown_out(Code::BadRequest);
    }
    // A right message, then garbage: the message is answered first.
    let mut client = bench.greeted();
    let _sent = client.send(&[&frame(9, &Stat {}, 0)[..], &noise].concat());
    let answer = client.receive().unwrap();
    assert_eq!((answer.kind, answer.request), (Kind::Stats, 9));
    client.is_thrown_out(Code::BadRequest);
    bench.end();
}

#[test]
fn headers_out_of_bounds_end_the_connection_and_bodies_only_the_request() {
    let bench = Bench::new();
    let requests = [
        Kind::Allocate,
        Kind::Free,
        Kind::Map,
        Kind::Unmap,
        Kind::Prefetch,
        Kind::Stat,
        Kind::Bye,
        Kind::Revoked,
        Kind::CancelPrefetch,
        Kind::Advise,
        Kind::Flush,
        Kind::SetTier,
        Kind::SetQuota,
        Kind::ListQuotas,
        Kind::SetPlan,
        Kind::WorkingSet,
    ];
    for kind in requests {
        for body_len in [(1 << 20) + 1, 1 << 31, u32::MAX] {
            let mut client = bench.greeted();
            client.send(&RawHeader::of(kind, body_len).bytes()).unwrap();
            let refused = client.is_thrown_out(Code::BadRequest);
            assert!(refused.message.contains(&body_len.to_string()), "{}", refused.message);
        }
        // The longest body that is allowed, of nonsense: lengths in it claim anything.
        let mut client = bench.greeted();
        for filler in [0, 0xFF, 0x41] {
            client.send(&RawHeader::of(kind, 1 << 20).with(&vec![filler; 1 << 20])).unwrap();
            let answer = client.receive().unwrap();
            assert_eq!(answer.request, 77);
            assert_eq!(answer.read::<Refused>().code, Code::BadRequest, "{kind:?}");
            goes_on(&mut client);
        }
        // Cut short, or longer than its fields.
        let empty = [Kind::Stat, Kind::Bye, Kind::ListQuotas].contains(&kind);
        let lengths = match kind {
            _ if empty => 1..2,
            // One byte that says that there is no session is all of it.
            Kind::WorkingSet => 2..8,
            _ => 0..8,
        };
        for length in lengths {
            let body = &[0; 8][..length];
            client.send(&RawHeader::of(kind, u32::try_from(length).unwrap()).with(body)).unwrap();
            assert_eq!(client.receive().unwrap().read::<Refused>().code, Code::BadRequest);
            goes_on(&mut client);
        }
    }
    for kind in [0, 3, 15, 33, 63, 71, 95, 98, 4096, u16::MAX] {
        let mut client = bench.greeted();
        client.send(&RawHeader { kind, ..RawHeader::of(Kind::Stat, 0) }.bytes()).unwrap();
        let refused = client.is_thrown_out(Code::BadRequest);
        assert!(refused.message.contains(&format!("kind {kind}")), "{}", refused.message);
    }
    let mut client = bench.greeted();
    client.send(&RawHeader { reserved: 1, ..RawHeader::of(Kind::Stat, 0) }.bytes()).unwrap();
    client.is_thrown_out(Code::BadRequest);
    bench.end();
}

#[test]
fn claims_inside_a_body_are_not_believed() {
    let bench = Bench::new();
    let mut client = bench.greeted();
    let allocation = allocate(&mut client, 2);
    for claimed in [1_u64 << 20, 1 << 32, 1 << 60, u64::MAX] {
        for kind in [Kind::Map, Kind::Unmap, Kind::Prefetch, Kind::Revoked] {
            let body = [&claimed.to_le_bytes()[..], &[1; 64]].concat();
            client.send(&RawHeader::of(kind, 72).with(&body)).unwrap();
            let refused: Refused = client.receive().unwrap().read();
            assert_eq!(refused.code, Code::BadRequest, "{kind:?} with {claimed}");
        }
    }
    let right = frame(1, &map_read(allocation, 0, 1), 0);
    // The access is the u32 behind one range: only 0 to 2 exist.
    for access in [3_u32, 255, u32::MAX] {
        let mut wrong = right.clone();
        let at = right.len() - 12;
        wrong[at..at + 4].copy_from_slice(&access.to_le_bytes());
        client.send(&wrong).unwrap();
        assert_eq!(client.receive().unwrap().read::<Refused>().code, Code::BadRequest);
    }
    let mapped: Mapped = client.call(&map_read(allocation, 0, 1)).unwrap();
    let _: Done = client.call(&Unmap { mappings: vec![mapped.mapping] }).unwrap();
    let _: Done = client.call(&Bye {}).unwrap();
    drop(client);
    bench.end();
}

#[test]
fn a_message_cut_at_any_byte_leaves_nothing_behind() {
    let bench = Bench::new();
    let file = File::open("/etc/passwd").unwrap();
    let greeting = frame(1, &hello("cut"), 0);
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let with_events = frame(1, &hello("cut"), 1);
    for cut in 0..greeting.len() {
        bench.connect().send(&greeting[..cut]).unwrap();
        if cut > 0 {
            bench.connect().send_with(&with_events[..cut], &[theirs.as_fd()]).unwrap();
        }
    }
    let open = frame(2, &OpenFile { offset: 0, length: 1 }, 1);
    let requests = [
        frame(2, &Allocate { size: 1 }, 0),
        frame(2, &map_read(AllocationId(1), 0, 1), 0),
        frame(2, &Unmap { mappings: vec![MappingId(1); 2] }, 0),
    ];
    for cut in 1..open.len() {
        let client = bench.greeted();
        client.send_with(&open[..cut], &[file.as_fd()]).unwrap();
    }
    for request in &requests {
        for cut in 1..request.len() {
            bench.greeted().send(&request[..cut]).unwrap();
        }
    }
    bench.is_idle();
    // The same messages byte by byte are whole messages.
    let mut client = bench.connect();
    for byte in greeting.chunks(1) {
        client.send(byte).unwrap();
    }
    assert_eq!(client.receive().unwrap().kind, Kind::Welcome);
    for (index, byte) in open.chunks(1).enumerate() {
        let fd = [file.as_fd()];
        client.send_with(byte, if index == 0 { &fd } else { &[] }).unwrap();
    }
    let allocated: Allocated = client.receive().unwrap().read();
    assert_eq!(allocated.pages, 1);
    let _: Done = client.call(&Free { allocation: allocated.allocation }).unwrap();
    drop(client);
    bench.end();
}

#[test]
fn other_versions_are_told_so() {
    let bench = Bench::new();
    let asks = |version_min, version_max| {
        let mut client = bench.connect();
        let offer = Hello { version_min, version_max, ..hello("other") };
        client.send(&frame(3, &offer, 0)).unwrap();
        let refused = client.is_thrown_out(Code::VersionUnsupported);
        assert!(refused.message.contains("install the same release"), "{}", refused.message);
        (refused.asked, refused.limit)
    };
    assert_eq!(asks(7, 9), (9, 1));
    assert_eq!(asks(2, u16::MAX), (65_535, 1));
    assert_eq!(asks(0, 0), (0, 1));
    assert_eq!(asks(1, 0), (0, 1));
    // One that speaks ours among others is welcome.
    let mut client = bench.connect();
    client.send(&frame(3, &Hello { version_min: 0, version_max: 9, ..hello("wide") }, 0)).unwrap();
    assert_eq!(client.receive().unwrap().kind, Kind::Welcome);
    drop(client);
    for version in [0, 2, 7, 8, 9, u16::MAX] {
        let header = |kind| RawHeader { version, ..RawHeader::of(kind, 0) }.bytes();
        let mut stranger = bench.connect();
        stranger.send(&header(Kind::Hello)).unwrap();
        let refused = stranger.is_thrown_out(Code::VersionUnsupported);
        assert_eq!((refused.asked, refused.limit), (u64::from(version), 1));
        let mut client = bench.greeted();
        client.send(&header(Kind::Stat)).unwrap();
        client.is_thrown_out(Code::VersionUnsupported);
    }
    let mut client = bench.connect();
    client.send(&frame(3, &Hello { client_name: "n".repeat(65), ..hello("") }, 0)).unwrap();
    client.is_thrown_out(Code::BadRequest);
    bench.end();
}

#[test]
fn descriptors_where_none_belong_are_closed() {
    let bench = Bench::new();
    let file = File::open("/etc/passwd").unwrap();
    let many: Vec<OwnedFd> = (0..253).map(|_| file.try_clone().unwrap().into()).collect();
    let fds = |count: usize| many[..count].iter().map(AsFd::as_fd).collect::<Vec<_>>();
    let open = OpenFile { offset: 0, length: 1 };
    let opening = frame(5, &open, 1);
    let claiming = |fd_count| RawHeader { fd_count, ..RawHeader::of(Kind::Stat, 0) }.bytes();
    let stat = frame(5, &Stat {}, 0);
    let two_files = RawHeader { fd_count: 2, ..RawHeader::of(Kind::OpenFile, 16) }.with(&[0; 16]);
    let no_file = RawHeader::of(Kind::OpenFile, 16).with(&[0; 16]);
    let cases: [(&[u8], usize); 11] = [
        (&stat, 1),
        (&stat, 253),
        (&stat[..1], 253),
        (&claiming(1), 1),
        (&claiming(u16::MAX), 0),
        (&no_file, 0),
        (&no_file, 1),
        (&opening, 0),
        (&opening, 2),
        (&opening, 253),
        (&two_files, 2),
    ];
    for (bytes, count) in cases {
        let mut client = bench.greeted();
        client.send_with(bytes, &fds(count)).unwrap();
        if bytes.len() < 24 {
            // Their message may yet come; with the next bytes it turns out that it takes none.
            client.send(&stat[1..]).unwrap();
        }
        // A whole message in front of those that are too many is answered.
        loop {
            let answer = client.receive().unwrap();
            if answer.kind == Kind::Refused && answer.request == 0 {
                assert_eq!(answer.read::<Refused>().code, Code::BadRequest);
                break;
            }
        }
        client.is_hung_up();
    }
    for (bytes, count) in [(&frame(1, &hello("two"), 1)[..], 2), (&frame(1, &hello("two"), 0), 1)] {
        let mut client = bench.connect();
        client.send_with(bytes, &fds(count)).unwrap();
        while client.receive().is_some() {}
    }
    // In Hello, anything but a stream socket.
    let mut client = bench.connect();
    client.send_with(&frame(1, &hello("file"), 1), &fds(1)).unwrap();
    client.is_thrown_out(Code::BadRequest);
    // On replies, which are no requests.
    let mut client = bench.greeted();
    let frames = Frames { frames: vec![VramFrame(0); 253] };
    client.send_with(&frame(6, &frames, 253), &fds(253)).unwrap();
    refused(client.reply::<Done>(6), Code::BadRequest);
    bench.is_idle_with(&client);
    goes_on(&mut client);
    drop(client);
    bench.end();
}

impl Bench {
    /// Like [`Self::is_idle`], while one session is open that has the daemon hold its socket and its pidfd.
    fn is_idle_with(&self, _open: &Peer) {
        until("descriptors are closed", || {
            let now = self.daemon.descriptors();
            if now <= self.idle.0 + 2 { Ok(()) } else { Err((now, self.idle)) }
        });
    }
}

#[test]
fn what_comes_out_of_turn_is_refused() {
    let bench = Bench::new();
    let early: [Vec<u8>; 5] = [
        frame(4, &Stat {}, 0),
        frame(4, &Allocate { size: 1 }, 0),
        frame(4, &map_read(AllocationId(1), 0, 1), 0),
        frame(4, &Bye {}, 0),
        frame(4, &Done {}, 0),
    ];
    for request in early {
        let mut client = bench.connect();
        client.send(&request).unwrap();
        let refused = client.is_thrown_out(Code::BadRequest);
        assert!(refused.message.contains("before Hello"), "{}", refused.message);
    }
    let mut client = bench.greeted();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    refused(client.call::<_, Done>(&hello("again")), Code::BadRequest);
    refused(client.call_with::<_, Done>(&hello("again"), &theirs), Code::BadRequest);
    let refusal = Refused {
        code: Code::Io,
        object: 0,
        asked: 0,
        in_use: 0,
        limit: 0,
        message: "no, you".into(),
    };
    let stats: Stats = client.call(&Stat {}).unwrap();
    refused(client.call::<_, Done>(&Done {}), Code::BadRequest);
    refused(client.call::<_, Done>(&refusal), Code::BadRequest);
    refused(client.call::<_, Done>(&stats), Code::BadRequest);
    refused(client.call::<_, Done>(&Revoke { frames: vec![VramFrame(0)] }), Code::BadRequest);
    let allocated = Allocated { allocation: AllocationId(1), pages: 1 };
    refused(client.call::<_, Done>(&allocated), Code::BadRequest);
    goes_on(&mut client);
    let _: Done = client.call(&Bye {}).unwrap();
    refused(client.call::<_, Stats>(&Stat {}), Code::BadRequest);
    refused(client.call::<_, Allocated>(&Allocate { size: 1 }), Code::BadRequest);
    refused(client.call::<_, Done>(&Bye {}), Code::BadRequest);
    drop(client);
    bench.end();
}

#[test]
fn only_files_that_can_be_read_are_opened() {
    let bench = Bench::new();
    let sample = Sample::new(1, 100_000);
    let mut client = bench.greeted();
    let mut opens = |fd: BorrowedFd<'_>, length| {
        let open = OpenFile { offset: 0, length };
        let result: Result<Allocated, Refused> = client.call_with(&open, fd);
        result
    };
    let (reader, writer) = std::io::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let event = nix::sys::eventfd::EventFd::new().unwrap();
    let write_only = OpenOptions::new().write(true).open(sample.path()).unwrap();
    let path_only = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(sample.path());
    let none: [(&str, OwnedFd); 9] = [
        ("a directory", File::open("/tmp").unwrap().into()),
        ("a pipe", reader.into()),
        ("the other end of a pipe", writer.into()),
        ("a socket", socket.into()),
        ("an event", event.into()),
        ("a device", File::open("/dev/zero").unwrap().into()),
        ("/dev/null", File::open("/dev/null").unwrap().into()),
        ("a file open for writing", write_only.into()),
        ("a path", path_only.unwrap().into()),
    ];
    for (what, fd) in &none {
        let refused = refused(opens(fd.as_fd(), 1), Code::NotAFile);
        assert!(!refused.message.is_empty(), "{what}");
    }
    // A file of /proc has no size that could be mapped.
    let status = File::open("/proc/self/status").unwrap();
    refused(opens(status.as_fd(), 1), Code::OutOfRange);
    // One of /sys has a size, and fewer bytes.
    let enabled = File::open("/sys/kernel/mm/transparent_hugepage/enabled").unwrap();
    let allocated = opens(enabled.as_fd(), 4096).unwrap();
    refused(client.call::<_, Mapped>(&map_read(allocated.allocation, 0, 1)), Code::FileTruncated);
    let _: Done = client.call(&Free { allocation: allocated.allocation }).unwrap();
    drop(client);
    bench.end();
}

#[test]
fn a_memfd_is_a_file_that_may_shrink() {
    let bench = Bench::new();
    let client = bench.daemon.connect();
    let memfd = nix::sys::memfd::memfd_create("model", nix::sys::memfd::MFdFlags::empty()).unwrap();
    let mut memfd = File::from(memfd);
    let mut content = vec![0; 300_000];
    lapis::model::pattern(3, 0, &mut content);
    memfd.write_all(&content).unwrap();
    let allocation = client.open_file(&memfd, 100, 299_900).unwrap();
    {
        let mapping = allocation.map(0..200_000, Access::Read).unwrap();
        assert!(mapping.bytes(0) == &content[100..200_100]);
        memfd.set_len(150_000).unwrap();
        assert!(mapping.bytes(0) == &content[100..200_100], "what is mapped stays as it was");
        let error = allocation.map(270_000..290_000, Access::Read).unwrap_err();
        assert_eq!(error.code(), Some(Code::FileTruncated), "{error}");
    }
    drop((allocation, client));
    bench.end();
}

#[test]
fn ranges_that_overflow_are_refused() {
    let bench = Bench::new();
    let sample = Sample::new(1, 100_000);
    let file = File::open(sample.path()).unwrap();
    let mut client = bench.greeted();
    let cases = [
        (0, 0, Code::BadRequest),
        (100_000, 0, Code::BadRequest),
        (0, 100_001, Code::OutOfRange),
        (100_000, 1, Code::OutOfRange),
        (1, 100_000, Code::OutOfRange),
        (1 << 63, 1, Code::OutOfRange),
        (1 << 63, 1 << 63, Code::OutOfRange),
        (0, 1 << 63, Code::OutOfRange),
        (1, u64::MAX, Code::OutOfRange),
        (u64::MAX, 1, Code::OutOfRange),
        (u64::MAX, u64::MAX, Code::OutOfRange),
        (u64::MAX, 0, Code::OutOfRange),
    ];
    for (offset, length, code) in cases {
        let result = client.call_with::<_, Allocated>(&OpenFile { offset, length }, &file);
        refused(result, code);
    }
    // More pages than the page table has room for, in a file that takes no space.
    let sparse = sample.path().with_file_name("sparse");
    let sparse = File::create_new(sparse).unwrap();
    sparse.set_len(8 << 40).unwrap();
    let sparse = File::open(sample.path().with_file_name("sparse")).unwrap();
    let whole = OpenFile { offset: 0, length: 8 << 40 };
    refused(client.call_with::<_, Allocated>(&whole, &sparse), Code::TooMany);
    for (size, code) in [
        (0, Code::BadRequest),
        (1 << 40, Code::TooMany),
        (1 << 63, Code::TooMany),
        (u64::MAX, Code::TooMany),
        (64 << 20, Code::OutOfMemory),
    ] {
        refused(client.call::<_, Allocated>(&Allocate { size }), code);
    }
    drop(client);
    bench.end();
}

#[test]
fn maps_of_what_is_not_there_are_refused_whole() {
    let bench = Bench::new();
    let sample = Sample::new(1, 3 * 65_536 + 1);
    let mut client = bench.greeted();
    let mut other = bench.greeted();
    let own = allocate(&mut client, 20);
    let foreign = allocate(&mut other, 4);
    let open = OpenFile { offset: 1, length: 3 * PAGE };
    let file: Allocated = client.call_with(&open, File::open(sample.path()).unwrap()).unwrap();
    let file = file.allocation;
    let one = range(own, 0, 1);
    let cases = [
        (vec![], Code::BadRequest),
        (vec![one; 1025], Code::BadRequest),
        (vec![one; 5000], Code::BadRequest),
        (vec![range(foreign, 0, 1)], Code::UnknownAllocation),
        (vec![one, range(foreign, 0, 1)], Code::UnknownAllocation),
        (vec![range(AllocationId(0), 0, 1)], Code::UnknownAllocation),
        (vec![range(AllocationId(u64::MAX), 0, 1)], Code::UnknownAllocation),
        (vec![range(own, 0, 0)], Code::OutOfRange),
        (vec![one, range(own, 20, 0)], Code::OutOfRange),
        (vec![range(own, 20, 1)], Code::OutOfRange),
        (vec![range(own, 0, 21)], Code::OutOfRange),
        (vec![range(own, u32::MAX, 1)], Code::OutOfRange),
        (vec![range(own, 1, u32::MAX)], Code::OverCapacity),
        (vec![range(own, u32::MAX, u32::MAX)], Code::OverCapacity),
        (vec![range(own, 0, u32::MAX); 1024], Code::OverCapacity),
        (vec![range(file, 3, 1)], Code::OutOfRange),
    ];
    for (ranges, code) in cases {
        for access in [Access::Read, Access::Write, Access::Overwrite] {
            refused(client.call::<_, Mapped>(&map(ranges.clone(), access, 0)), code);
        }
        refused(client.call::<_, Done>(&Prefetch { ranges, priority: 0, within_us: 0 }), code);
    }
    refused(client.call::<_, Mapped>(&map_read(own, 0, MAPPED_MAX + 1)), Code::OverCapacity);
    for access in [Access::Write, Access::Overwrite] {
        let ranges = vec![one, range(file, 0, 1)];
        refused(client.call::<_, Mapped>(&map(ranges, access, 0)), Code::ReadOnly);
    }
    let stats: Stats = client.call(&Stat {}).unwrap();
    assert_eq!((stats.mappings, stats.vram.pinned), (0, 0), "a refused map left something");
    // Many ranges, each page several times, the longest wait: odd, and right.
    let ranges: Vec<_> = (0..1024).map(|index| range(own, index % 8, 1)).collect();
    let mapped: Mapped = client.call(&map(ranges, Access::Write, u64::MAX)).unwrap();
    assert_eq!(mapped.frames.len(), 1024);
    assert!(mapped.frames.chunks(8).all(|frames| frames == &mapped.frames[..8]));
    let _: Done = client.call(&Unmap { mappings: vec![mapped.mapping] }).unwrap();
    let _: Done = client.call(&Bye {}).unwrap();
    drop((client, other));
    bench.end();
}

#[test]
fn what_is_given_up_twice_or_too_early_is_refused() {
    let bench = Bench::new();
    let mut client = bench.greeted();
    let mut other = bench.greeted();
    let own = allocate(&mut client, 8);
    let foreign = allocate(&mut other, 1);
    let mapped = |peer: &mut Peer, allocation, first| -> MappingId {
        peer.call::<_, Mapped>(&map_read(allocation, first, 1)).unwrap().mapping
    };
    let (first, second) = (mapped(&mut client, own, 0), mapped(&mut client, own, 1));
    let theirs = mapped(&mut other, foreign, 0);
    let unmap = |client: &mut Peer, mappings| client.call::<_, Done>(&Unmap { mappings });
    let nobodys = [MappingId(0), MappingId(u64::MAX), theirs];
    for id in nobodys {
        let refused = refused(unmap(&mut client, vec![first, id]), Code::UnknownMapping);
        assert_eq!(refused.object, id.0);
    }
    refused(unmap(&mut client, vec![first, second, first]), Code::UnknownMapping);
    refused(unmap(&mut client, vec![first; 5000]), Code::BadRequest);
    refused(client.call::<_, Done>(&Free { allocation: own }), Code::InUse);
    refused(client.call::<_, Done>(&Free { allocation: foreign }), Code::UnknownAllocation);
    refused(client.call::<_, Done>(&Bye {}), Code::InUse);
    let stats: Stats = client.call(&Stat {}).unwrap();
    assert_eq!((stats.mappings, stats.allocations), (3, 2), "a refusal took something");
    let _: Done = unmap(&mut client, vec![first, second]).unwrap();
    refused(unmap(&mut client, vec![first]), Code::UnknownMapping);
    let _: Done = unmap(&mut client, vec![]).unwrap();
    // Frames that it has never had, and one that it has mapped.
    let never = Revoked { frames: vec![VramFrame(9), VramFrame(u32::MAX)] };
    let _: Done = client.call(&never).unwrap();
    let last: Mapped = client.call(&map_read(own, 2, 1)).unwrap();
    refused(client.call::<_, Done>(&Revoked { frames: last.frames.clone() }), Code::InUse);
    // A map that waits holds its allocation as well.
    let waiting = {
        let all: Mapped = other.call(&map_read(foreign, 0, 1)).unwrap();
        let big = allocate(&mut client, 14);
        let waiting = client.ask(&map_read(big, 0, 14), None);
        let freeing = client.ask(&Free { allocation: big }, None);
        refused(client.reply::<Done>(freeing), Code::InUse);
        let _: Done = other.call(&Unmap { mappings: vec![all.mapping, theirs] }).unwrap();
        waiting
    };
    let granted: Mapped = client.reply(waiting).unwrap();
    let _: Done = unmap(&mut client, vec![granted.mapping, last.mapping]).unwrap();
    let _: Done = client.call(&Free { allocation: own }).unwrap();
    refused(client.call::<_, Done>(&Free { allocation: own }), Code::UnknownAllocation);
    let _: Done = client.call(&Bye {}).unwrap();
    let _: Done = other.call(&Bye {}).unwrap();
    drop((client, other));
    bench.end();
}

#[test]
fn a_client_that_does_not_read_its_replies_holds_nobody_up() {
    let bench = Bench::new();
    let deaf = bench.greeted();
    deaf.socket().set_nonblocking(true).unwrap();
    let requests = frame(8, &Stat {}, 0).repeat(1000);
    // Until the daemon takes no more of them.
    let mut sent = 0;
    let end = std::time::Instant::now() + Duration::from_secs(5);
    let mut full = 0;
    while full < 50 && std::time::Instant::now() < end {
        let part = &requests[sent % requests.len()..];
        match fds::try_send(deaf.socket(), &[IoSlice::new(part)], &[]) {
            Ok(count) => (sent, full) = (sent + count, 0),
            Err(_full) => {
                full += 1;
                std::thread::park_timeout(Duration::from_millis(2));
            }
        }
    }
    assert_eq!(full, 50, "the daemon buffers for ever: it has taken {sent} bytes of requests");
    let asked = sent / 24;
    assert!(asked > 200, "{asked}");
    let client = bench.daemon.connect();
    write_and_read(&client, 24);
    drop(client);
    // Once it reads, each request it sent has its reply.
    deaf.socket().set_nonblocking(false).unwrap();
    let mut deaf = deaf;
    for _ in 0..asked {
        assert_eq!(deaf.receive().unwrap().kind, Kind::Stats);
    }
    drop(deaf);
    bench.end();
}

#[test]
fn a_client_with_too_many_unread_replies_is_disconnected() {
    let sizes = ["--page-size", "64KiB", "--vram", "16MiB", "--ram", "20MiB"];
    let bench = Bench::with(
        &[&sizes[..], &["--mappings-max", "10000", "--requests-max", "10000"]].concat(),
    );
    let holder = bench.daemon.connect();
    let held = holder.allocate(PAGE).unwrap();
    let mapping = held.map_all(Access::Read).unwrap();
    // It asks for 10,000 mappings, each of all pages but the one that is held, and reads nothing.
    let deaf =
        Victim::start(&test_client(), None, "deaf", bench.daemon.socket(), &["240", "10000"]);
    drop(mapping);
    let line = bench.daemon.wait_for_log("the client does not read: disconnected");
    assert!(line.contains("WARN"), "{line}");
    let client = bench.daemon.connect();
    let stats = client.stats().unwrap();
    assert!(stats.quarantined_frames > 0 || stats.mappings > 0, "it may still write: {stats:?}");
    drop((client, held, holder));
    drop(deaf);
    bench.end();
}

#[test]
fn silent_clients_are_let_go_and_others_served_meanwhile() {
    let bench = Bench::new();
    let silent: Vec<Peer> = (0..300).map(|_| bench.connect()).collect();
    still_serves(&bench.daemon);
    for mut peer in silent {
        peer.is_hung_up();
    }
    bench.end();
}

#[test]
fn ten_thousand_connections_leave_nothing_behind() {
    let bench = Bench::new();
    let file = File::open("/etc/passwd").unwrap();
    let open = frame(2, &OpenFile { offset: 0, length: 1 }, 1);
    for round in 0..10_000 {
        match round % 5 {
            0 => drop(bench.connect()),
            1 => bench.connect().send(b"no").unwrap(),
            2 => bench.connect().send(&[7; 100]).unwrap(),
            3 => {
                let client = bench.greeted();
                client.send_with(&open, &[file.as_fd()]).unwrap();
            }
            _ => {
                let mut client = bench.greeted();
                let _: Allocated = client.call(&Allocate { size: PAGE }).unwrap();
            }
        }
    }
    bench.end();
}

#[test]
fn sessions_beyond_the_limit_are_refused_and_there_is_room_again() {
    let bench = Bench::with(&[SMALL, &["--sessions-max", "3"]].concat());
    let sessions: Vec<Peer> = (0..3).map(|_| bench.greeted()).collect();
    let options =
        ConnectOptions { socket: Some(bench.daemon.socket().into()), ..ConnectOptions::default() };
    let error = options.connect().unwrap_err();
    assert_eq!(error.code(), Some(Code::TooMany), "{error}");
    assert!(error.to_string().contains("3 sessions are open"), "{error}");
    drop(sessions);
    until("room for a session", || options.connect().map(drop));
    bench.end();
}
