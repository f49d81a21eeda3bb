//! A client process for tests to kill: `test-client ROLE SOCKET ARGUMENTS`. It says `ready` on standard output once it
//! is in the middle of what its role is about, and goes on with that until it is killed.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lapis::{Access, Client, Code, Error, Quota, QuotaSubject, Tier};
use lapis_proto::handshake::hello;
use lapis_proto::ids::AllocationId;
use lapis_proto::kind::Kind;
use lapis_proto::message::{
    Allocate, Allocated, Done, Map, Mapped, PageRange, Stat, Stats, Unmap, Welcome,
};
use lapis_tests::bytes::{edit, read};
use lapis_tests::device::{Device, device};
use lapis_tests::peer::{Peer, frame};
use lapis_tests::worker::{Known, Worker};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, setrlimit};

const WAIT: Duration = Duration::from_secs(60);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, socket, rest @ ..] = arguments.as_slice() else {
        panic!("usage: test-client ROLE SOCKET ARGUMENTS");
    };
    let socket = Path::new(socket);
    let number = |index: usize| rest[index].parse::<u32>().expect("a number");
    match role.as_str() {
        "administer" => administer(socket),
        "allocate" => allocate_and_free(socket),
        "cramped" => cramped(socket, Path::new(&rest[0])),
        "deaf" => deaf(socket, number(0), number(1)),
        "greet" => greet(socket, number(0)),
        "hold" => hold(socket, number(0)),
        "hoard" => hoard(socket, number(0)),
        "shut-out" => shut_out(socket),
        "prefetch" => prefetch(socket, Path::new(&rest[0])),
        "wait" => wait(socket, number(0)),
        "work" => work(socket, number(0), &rest[1..]),
        "write" => write(socket, number(0)),
        _ => panic!("no such role: {role}"),
    }
}

fn ready() {
    println!("ready");
    std::io::stdout().flush().expect("the test listens");
}

/// Tries to change what only administrators may.
fn administer(socket: &Path) -> ! {
    let client = connect(socket);
    let own = QuotaSubject::Uid(nix::unistd::geteuid().as_raw());
    let more = Quota { vram_max: Some(1 << 40), priority: 9, ..Quota::none(own) };
    let refused = [
        client.set_quota(more),
        client.set_quota(Quota::none(own)),
        client.set_quota(Quota::none(QuotaSubject::EachSession)),
        client.set_tier(Tier::Vram, 0, WAIT),
        client.set_tier(Tier::Ram, 1 << 20, WAIT),
        client.set_tier(Tier::Nvme, 0, WAIT),
    ];
    for result in refused {
        let code = result.map_err(|error| error.code());
        assert_eq!(code, Err(Some(Code::NotPermitted)));
    }
    // It may see what limits it, and is served.
    assert_eq!(client.quotas().expect("anybody may ask").len(), 1);
    let memory = client.allocate(client.page_size()).expect("there is room");
    drop(memory.map_all(Access::Write).expect("there is room"));
    ready();
    for_ever();
}

/// Finds a socket that is not for it.
fn shut_out(socket: &Path) -> ! {
    match Client::connect(socket) {
        Err(Error::Connect { source, .. }) => {
            assert_eq!(source.kind(), std::io::ErrorKind::PermissionDenied);
        }
        other => panic!("{other:?}"),
    }
    ready();
    for_ever();
}

/// Until the test kills us.
fn for_ever() -> ! {
    loop {
        std::thread::park();
    }
}

fn connect(socket: &Path) -> Client {
    Client::connect(socket).expect("the daemon serves")
}

fn map(allocation: AllocationId, count: u32, access: Access) -> Map {
    Map { ranges: vec![PageRange { allocation, first: 0, count }], access, wait_us: 60_000_000 }
}

fn greeted(socket: &Path) -> (Peer, u64) {
    let mut peer = Peer::connect(socket);
    let welcome: Welcome = peer.call(&hello("test-client")).expect("the hello is right");
    (peer, welcome.page_size)
}

fn allocate(peer: &mut Peer, pages: u32, page_size: u64) -> AllocationId {
    let size = u64::from(pages) * page_size;
    let allocated: Allocated = peer.call(&Allocate { size }).expect("there is room");
    allocated.allocation
}

/// Says so many bytes of its hello.
fn greet(socket: &Path, bytes: u32) -> ! {
    let peer = Peer::connect(socket);
    let greeting = frame(1, &hello("half"), 0);
    peer.send(&greeting[..bytes as usize]).expect("the daemon listens");
    ready();
    for_ever();
}

/// Allocates and frees, by turns.
fn allocate_and_free(socket: &Path) -> ! {
    let client = connect(socket);
    let kept = client.allocate(3 * client.page_size()).expect("there is room");
    let mut mapping = kept.map_all(Access::Write).expect("there is room");
    edit(&mut mapping, 0, |bytes| bytes.fill(1));
    drop(mapping);
    ready();
    loop {
        drop(client.allocate(5 * client.page_size()).expect("there is room"));
    }
}

/// Opens a file that it has no addresses for.
fn cramped(socket: &Path, path: &Path) -> ! {
    let client = connect(socket);
    let length = path.metadata().expect("it is there").len();
    setrlimit(Resource::RLIMIT_AS, length, length).expect("less than before");
    match client.open_path(path, 0, length) {
        Err(Error::Io { call: "mmap", source }) => {
            assert_eq!(source.kind(), std::io::ErrorKind::OutOfMemory);
        }
        other => panic!("{other:?}"),
    }
    client.stats().expect("the session goes on");
    assert_eq!(client.take_refusal(), None);
    ready();
    for_ever();
}

/// Asks for so many mappings that must wait, each of so many pages, and reads none of the replies.
fn deaf(socket: &Path, pages: u32, maps: u32) -> ! {
    let (mut peer, page_size) = greeted(socket);
    let allocation = allocate(&mut peer, pages, page_size);
    for _ in 0..maps {
        peer.ask(&map(allocation, pages, Access::Read), None);
    }
    // The daemon has seen them all, and granted none.
    let stats: Stats = peer.call(&Stat {}).expect("answered at once");
    assert_eq!(stats.session.maps, 0);
    ready();
    for_ever();
}

/// Waits for a map that others leave no room for.
fn wait(socket: &Path, pages: u32) -> ! {
    let (mut peer, page_size) = greeted(socket);
    let allocation = allocate(&mut peer, pages, page_size);
    peer.ask(&map(allocation, pages, Access::Write), None);
    let stats: Stats = peer.call(&Stat {}).expect("answered at once");
    assert_eq!(stats.session.maps, 0);
    ready();
    for_ever();
}

/// Holds a mapping of so many pages, written once.
fn hold(socket: &Path, pages: u32) -> ! {
    let client = connect(socket);
    let allocation = client.allocate(u64::from(pages) * client.page_size()).expect("there is room");
    let mut mapping = allocation.map_all(Access::Overwrite).expect("there is room");
    edit(&mut mapping, 0, |bytes| bytes.fill(0xA5));
    ready();
    for_ever();
}

/// Keeps the frames of a mapping that has ended, goes on writing to them, and gives none back. What a card exports is no
/// file that it could write to.
fn hoard(socket: &Path, pages: u32) -> ! {
    let (mut peer, page_size) = greeted(socket);
    let allocation = allocate(&mut peer, pages, page_size);
    let request = peer.ask(&map(allocation, pages, Access::Write), None);
    let mut frames = Vec::new();
    let mapped: Mapped = loop {
        let answer = peer.receive().expect("a reply");
        assert_eq!(answer.request, request);
        if answer.kind == Kind::Frames {
            frames.extend(answer.fds.into_iter().map(File::from));
        } else {
            break answer.read();
        }
    };
    let page = vec![0xAA; usize::try_from(page_size).expect("it fits")];
    let write = || {
        for frame in frames.iter().filter(|_| device() != Device::Gpu) {
            frame.write_all_at(&page, 0).expect("the frame is ours");
        }
    };
    write();
    let _: Done = peer.call(&Unmap { mappings: vec![mapped.mapping] }).expect("it is ours");
    ready();
    loop {
        write();
    }
}

/// Does everything at random and checks every byte, with this seed, on files with the patterns that their names are the
/// seeds of, until standard input ends.
fn work(socket: &Path, seed: u32, files: &[String]) {
    let known = files.iter().map(|path| {
        let path = PathBuf::from(path);
        let name = path.file_name().and_then(|name| name.to_str());
        let seed = name.and_then(|name| name.parse().ok()).expect("a file is named by its seed");
        Known { path, seed }
    });
    let mut worker = Worker::new(socket, known.collect(), u64::from(seed));
    worker.step();
    ready();
    let stdin = std::io::stdin();
    let is_over = || {
        let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).expect("it can be polled") > 0
    };
    while !is_over() {
        worker.step();
    }
}

/// Writes so many pages over and over, one mapping after the other.
fn write(socket: &Path, pages: u32) -> ! {
    let client = connect(socket);
    let size = client.page_size();
    let allocation = client.allocate(u64::from(pages) * size).expect("there is room");
    let mut round = 0_u8;
    loop {
        for page in 0..u64::from(pages) {
            let range = [(&allocation, page * size..(page + 1) * size)];
            let mut mapping = client.map(&range, Access::Write, WAIT).expect("room is made");
            assert!(read(&mapping, 0).iter().all(|byte| *byte == round), "page {page}");
            edit(&mut mapping, 0, |bytes| bytes.fill(round.wrapping_add(1)));
        }
        if round == 0 {
            ready();
        }
        round = round.wrapping_add(1);
    }
}

/// Has a file prefetched over and over, and maps a little of it.
fn prefetch(socket: &Path, path: &Path) -> ! {
    let client = connect(socket);
    let length = path.metadata().expect("it is there").len();
    let allocation = client.open_path(path, 0, length).expect("it is a file");
    ready();
    loop {
        allocation.prefetch(0..length).expect("it is ours");
        for start in (0..length).step_by(300_000) {
            drop(allocation.map(start..start + 1, Access::Read).expect("room is made"));
        }
    }
}
