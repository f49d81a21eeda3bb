//! A client process for tests to kill: `test-client ROLE SOCKET ARGUMENTS`. It says `ready` on standard output once it
//! is in the middle of what its role is about, and goes on with that until it is killed.

use std::io::Write;
use std::path::Path;

use lapis_proto::ids::AllocationId;
use lapis_proto::message::{Access, Allocate, Allocated, Map, PageRange, Stat, Stats};
use lapis_tests::peer::Peer;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, socket, rest @ ..] = arguments.as_slice() else {
        panic!("usage: test-client ROLE SOCKET ARGUMENTS");
    };
    let socket = Path::new(socket);
    let number = |index: usize| rest[index].parse::<u32>().expect("a number");
    match role.as_str() {
        "deaf" => deaf(socket, number(0), number(1)),
        _ => panic!("no such role: {role}"),
    }
}

fn ready() {
    println!("ready");
    std::io::stdout().flush().expect("the test listens");
}

/// Until the test kills us.
fn for_ever() -> ! {
    loop {
        std::thread::park();
    }
}

fn map(allocation: AllocationId, count: u32, access: Access) -> Map {
    Map { ranges: vec![PageRange { allocation, first: 0, count }], access, wait_us: 60_000_000 }
}

fn allocate(peer: &mut Peer, pages: u32, page_size: u64) -> AllocationId {
    let size = u64::from(pages) * page_size;
    let allocated: Allocated = peer.call(&Allocate { size }).expect("there is room");
    allocated.allocation
}

/// Asks for so many mappings that must wait, each of so many pages, and reads none of the replies.
fn deaf(socket: &Path, pages: u32, maps: u32) -> ! {
    let mut peer = Peer::greeted(socket);
    let allocation = allocate(&mut peer, pages, 64 << 10);
    for _ in 0..maps {
        peer.ask(&map(allocation, pages, Access::Read), None);
    }
    // The daemon has seen them all, and granted none.
    let stats: Stats = peer.call(&Stat {}).expect("answered at once");
    assert_eq!(stats.session.maps, 0);
    ready();
    for_ever();
}
