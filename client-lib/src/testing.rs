//! A daemon for the tests: the protocol over a real socket, frames that are memory files or on the fake CUDA driver, the
//! simplest paging.

pub(crate) mod cuda;

use std::collections::HashMap;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use lapis_proto::code::Code;
use lapis_proto::codec;
use lapis_proto::fds;
use lapis_proto::frame::FrameReader;
use lapis_proto::ids::{AllocationId, MappingId, RequestId, SessionId, VramFrame};
use lapis_proto::kind::{Kind, Message};
use lapis_proto::message::{
    Allocate, Allocated, DeviceKind, Done, Frames, Free, Map, Mapped, OpenFile, PageRange, Refused,
    Revoke, Revoked, Stats, Unmap, Welcome,
};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::ftruncate;
use tempfile::TempDir;

use crate::Client;

/// Bytes of a page in these tests.
pub(crate) const PAGE: u64 = 65536;
const PAGE_BYTES: usize = 65536;

/// A memory file as frames must be.
pub(crate) fn sealed_memfd(size: i64) -> OwnedFd {
    named_memfd("frame", size)
}

fn named_memfd(name: &str, size: i64) -> OwnedFd {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let fd = memfd_create(name, flags).expect("a memfd");
    ftruncate(&fd, size).expect("sized");
    fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("sealed");
    fd
}

/// Open descriptors of memory files with this name, in this process.
pub(crate) fn open_memfds(name: &str) -> usize {
    let target = format!("/memfd:{name} (deleted)");
    std::fs::read_dir("/proc/self/fd")
        .expect("procfs")
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|link| link.to_string_lossy() == target)
        .count()
}

/// A welcome to a tier of `vram_frames` frames.
pub(crate) fn welcome(vram_frames: u32) -> Welcome {
    Welcome {
        version: 1,
        features: 0,
        session: SessionId(1),
        page_size: PAGE,
        vram_frames,
        mapped_pages_max: vram_frames,
        device: DeviceKind::Sim,
        device_uuid: [0; 16],
        unified: false,
        daemon_version: "test".to_owned(),
    }
}

/// A message as received.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) kind: Kind,
    pub(crate) request: RequestId,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Received {
    pub(crate) fn decode<M: Message>(&self) -> M {
        assert_eq!(self.kind, M::KIND);
        codec::decode(&self.body).expect("the client encodes well")
    }
}

/// The daemon's end of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) socket: UnixStream,
    reader: FrameReader,
}

impl Peer {
    pub(crate) fn new(socket: UnixStream) -> Peer {
        Peer { socket, reader: FrameReader::new() }
    }

    /// The next message; `None` when the client has hung up.
    pub(crate) fn receive(&mut self) -> Option<Received> {
        loop {
            if let Some(frame) = self.reader.next_frame().expect("the client frames well") {
                return Some(Received {
                    kind: frame.header.kind,
                    request: frame.header.request,
                    body: frame.body.to_vec(),
                    fds: frame.fds,
                });
            }
            if !matches!(self.reader.receive(&self.socket), Ok(1..)) {
                return None;
            }
        }
    }

    /// Replies; a client that has hung up doesn't matter.
    pub(crate) fn reply<M: Message>(&mut self, request: RequestId, message: &M) {
        self.reply_with(request, message, &[]);
    }

    /// As the real daemon: never blocks on a client that doesn't read.
    pub(crate) fn reply_with<M: Message>(
        &mut self,
        request: RequestId,
        message: &M,
        fds: &[BorrowedFd<'_>],
    ) {
        let mut bytes = Vec::new();
        let count = u16::try_from(fds.len()).expect("few");
        codec::encode(request, message, count, &mut bytes).expect("encodes");
        match fds::try_send(&self.socket, &[IoSlice::new(&bytes)], fds) {
            Ok(sent) => assert_eq!(sent, bytes.len(), "the client left replies unread"),
            Err(error) => {
                assert_eq!(
                    error.kind(),
                    std::io::ErrorKind::BrokenPipe,
                    "the client left replies unread"
                );
            }
        }
    }

    /// Answers the handshake; returns the event socket.
    pub(crate) fn handshake(&mut self, welcome: &Welcome) -> UnixStream {
        let mut hello = self.receive().expect("a hello");
        assert_eq!(hello.kind, Kind::Hello);
        self.reply(hello.request, welcome);
        hello.fds.pop().expect("an event socket").into()
    }
}

/// Starts `act` as the daemon for one client.
pub(crate) fn scripted<T: Send + 'static>(
    vram_frames: u32,
    act: impl FnOnce(Peer, UnixStream) -> T + Send + 'static,
) -> (Client, JoinHandle<T>) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("s");
    let thread = listening(&path, welcome(vram_frames), act);
    (Client::connect(path).expect("connected"), thread)
}

/// Starts `act` as the daemon for the one client that will connect to `path`.
pub(crate) fn listening<T: Send + 'static>(
    path: &Path,
    welcome: Welcome,
    act: impl FnOnce(Peer, UnixStream) -> T + Send + 'static,
) -> JoinHandle<T> {
    let listener = UnixListener::bind(path).expect("bound");
    std::thread::spawn(move || {
        let mut peer = Peer::new(listener.accept().expect("a client").0);
        let events = peer.handshake(&welcome);
        act(peer, events)
    })
}

/// A daemon that says yes to everything and returns what it was told, up to the goodbye.
pub(crate) fn recording() -> (Client, JoinHandle<Vec<Received>>) {
    scripted(4, |mut peer, _events| {
        let mut told = Vec::new();
        while let Some(received) = peer.receive() {
            if received.kind == Kind::Allocate {
                let pages = received.decode::<Allocate>().size.div_ceil(PAGE);
                let pages = u32::try_from(pages).expect("small");
                let allocation = AllocationId(u64::from(pages));
                peer.reply(received.request, &Allocated { allocation, pages });
                continue;
            }
            peer.reply(received.request, &Done {});
            if !matches!(received.kind, Kind::Free | Kind::Bye) {
                told.push(received);
            }
        }
        told
    })
}

/// What a paging daemon saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) maps: Vec<Map>,
    pub(crate) unmapped: usize,
    pub(crate) freed: usize,
    pub(crate) bye: bool,
}

/// A daemon that pages: for each test one, with one client.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) client: Client,
    /// Frames given back after each `Revoke`, which a `Prefetch` brings about.
    pub(crate) revoked: Receiver<Vec<VramFrame>>,
    thread: JoinHandle<Seen>,
}

impl Daemon {
    pub(crate) fn start(frames: u32, name: &'static str) -> Daemon {
        let (sender, revoked) = sync_channel(16);
        let (client, thread) = scripted(frames, move |peer, events| {
            let memory = |_| Box::new(File::from(named_memfd(name, 65536))) as Box<dyn FrameMemory>;
            Paging::new((0..frames).map(memory).collect(), sender).serve(peer, &events)
        });
        Daemon { client, revoked, thread }
    }

    /// Drops the client, and returns what the daemon saw.
    pub(crate) fn finish(self) -> Seen {
        drop(self.client);
        self.thread.join().expect("the daemon found nothing wrong")
    }
}

struct Page {
    frame: Option<usize>,
    pins: u32,
    saved: Vec<u8>,
}

/// What a frame is made of.
trait FrameMemory {
    fn save(&self, bytes: &mut [u8]);
    fn load(&self, bytes: &[u8]);
    /// A descriptor for the client.
    fn export(&self) -> OwnedFd;
}

impl FrameMemory for File {
    fn save(&self, bytes: &mut [u8]) {
        self.read_exact_at(bytes, 0).expect("saved");
    }

    fn load(&self, bytes: &[u8]) {
        self.write_all_at(bytes, 0).expect("loaded");
    }

    fn export(&self) -> OwnedFd {
        self.as_fd().try_clone_to_owned().expect("there are descriptors")
    }
}

struct Slot {
    memory: Box<dyn FrameMemory>,
    page: Option<(u64, usize)>,
    sent: bool,
}

struct Paging {
    allocations: HashMap<u64, Vec<Page>>,
    mappings: HashMap<u64, Vec<PageRange>>,
    slots: Vec<Slot>,
    next_victim: usize,
    next_id: u64,
    revoked: SyncSender<Vec<VramFrame>>,
    seen: Seen,
}

impl Paging {
    fn new(frames: Vec<Box<dyn FrameMemory>>, revoked: SyncSender<Vec<VramFrame>>) -> Paging {
        let slot = |memory| Slot { memory, page: None, sent: false };
        Paging {
            allocations: HashMap::new(),
            mappings: HashMap::new(),
            slots: frames.into_iter().map(slot).collect(),
            next_victim: 0,
            next_id: 100,
            revoked,
            seen: Seen::default(),
        }
    }

    fn serve(mut self, mut peer: Peer, events: &UnixStream) -> Seen {
        while let Some(received) = peer.receive() {
            let request = received.request;
            match received.kind {
                Kind::Allocate => {
                    let bytes = vec![
                        0;
                        usize::try_from(received.decode::<Allocate>().size)
                            .expect("small")
                    ];
                    self.allocate(&mut peer, request, &bytes);
                }
                Kind::OpenFile => {
                    let OpenFile { offset, length } = received.decode();
                    let mut bytes = vec![0; usize::try_from(length).expect("small")];
                    let file = File::from(received.fds.into_iter().next().expect("a file"));
                    // The client may have opened it with O_DIRECT: read it through a descriptor of our own.
                    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
                    let file = File::open(path).expect("reopened");
                    file.read_exact_at(&mut bytes, offset).expect("read");
                    self.allocate(&mut peer, request, &bytes);
                }
                Kind::Map => self.map(&mut peer, request, received.decode()),
                Kind::Unmap => {
                    for MappingId(id) in received.decode::<Unmap>().mappings {
                        let ranges = self.mappings.remove(&id).expect("a live mapping");
                        self.pin(&ranges, false);
                        self.seen.unmapped += 1;
                    }
                    peer.reply(request, &Done {});
                }
                Kind::Free => {
                    let Free { allocation } = received.decode();
                    let pages = self.allocations.remove(&allocation.0).expect("a live allocation");
                    assert!(pages.iter().all(|page| page.pins == 0), "freed while mapped");
                    for frame in pages.into_iter().filter_map(|page| page.frame) {
                        self.slots[frame].page = None;
                    }
                    self.seen.freed += 1;
                    peer.reply(request, &Done {});
                }
                Kind::Prefetch => {
                    peer.reply(request, &Done {});
                    let frames = (0..self.slots.len()).filter(|index| self.slots[*index].sent);
                    let frames =
                        frames.map(|index| VramFrame(u32::try_from(index).expect("few"))).collect();
                    let mut bytes = Vec::new();
                    codec::encode(RequestId(0), &Revoke { frames }, 0, &mut bytes)
                        .expect("encodes");
                    (&*events).write_all(&bytes).expect("the client takes events");
                }
                Kind::Revoked => {
                    let Revoked { frames } = received.decode();
                    for VramFrame(frame) in &frames {
                        let slot = &mut self.slots[usize::try_from(*frame).expect("small")];
                        if let Some((allocation, page)) = slot.page {
                            let pins = self.allocations[&allocation][page].pins;
                            assert_eq!(pins, 0, "frame {frame} given back while mapped");
                        }
                        slot.sent = false;
                    }
                    peer.reply(request, &Done {});
                    self.revoked.send(frames).expect("the test listens");
                }
                Kind::Stat => peer.reply(request, &stats()),
                Kind::Bye => {
                    self.seen.bye = true;
                    peer.reply(request, &Done {});
                }
                other => panic!("{other:?} from a client"),
            }
        }
        self.seen
    }

    fn allocate(&mut self, peer: &mut Peer, request: RequestId, bytes: &[u8]) {
        self.next_id += 1;
        let page = |chunk: &[u8]| {
            let mut saved = chunk.to_vec();
            saved.resize(PAGE_BYTES, 0);
            Page { frame: None, pins: 0, saved }
        };
        let pages: Vec<Page> = bytes.chunks(PAGE_BYTES).map(page).collect();
        let allocated = Allocated {
            allocation: AllocationId(self.next_id),
            pages: u32::try_from(pages.len()).expect("small"),
        };
        self.allocations.insert(self.next_id, pages);
        peer.reply(request, &allocated);
    }

    fn map(&mut self, peer: &mut Peer, request: RequestId, map: Map) {
        self.pin(&map.ranges, true);
        let pages: Vec<(u64, usize)> = map.ranges.iter().flat_map(pages_of).collect();
        let mut frames = Vec::new();
        for (allocation, page) in pages {
            match self.place(allocation, page) {
                Some(frame) => frames.push(frame),
                None => {
                    self.pin(&map.ranges, false);
                    self.seen.maps.push(map);
                    peer.reply(request, &refused(Code::TimedOut));
                    return;
                }
            }
        }
        let mut new: Vec<usize> =
            frames.iter().copied().filter(|frame| !self.slots[*frame].sent).collect();
        new.sort_unstable();
        new.dedup();
        for part in new.chunks(100) {
            let fds: Vec<OwnedFd> =
                part.iter().map(|frame| self.slots[*frame].memory.export()).collect();
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            peer.reply_with(request, &Frames { frames: wire(part) }, &fds);
        }
        for frame in new {
            self.slots[frame].sent = true;
        }
        self.next_id += 1;
        self.mappings.insert(self.next_id, map.ranges.clone());
        self.seen.maps.push(map);
        let mapped = Mapped {
            mapping: MappingId(self.next_id),
            frames: wire(&frames),
            hits_vram: 1,
            hits_ram: 2,
            waited_us: 3,
        };
        peer.reply(request, &mapped);
    }

    /// Puts a page into some frame whose page nobody holds.
    fn place(&mut self, allocation: u64, page: usize) -> Option<usize> {
        let state = &self.allocations[&allocation][page];
        if let Some(frame) = state.frame {
            return Some(frame);
        }
        let count = self.slots.len();
        let free = (0..count).map(|step| (self.next_victim + step) % count).find(|slot| {
            self.slots[*slot].page.is_none_or(|(id, page)| self.allocations[&id][page].pins == 0)
        })?;
        self.next_victim = free + 1;
        let slot = &mut self.slots[free];
        if let Some((id, page)) = slot.page.replace((allocation, page)) {
            let old = &mut self.allocations.get_mut(&id).expect("live")[page];
            slot.memory.save(&mut old.saved);
            old.frame = None;
        }
        let new = &mut self.allocations.get_mut(&allocation).expect("live")[page];
        slot.memory.load(&new.saved);
        new.frame = Some(free);
        Some(free)
    }

    fn pin(&mut self, ranges: &[PageRange], add: bool) {
        for (allocation, page) in ranges.iter().flat_map(pages_of) {
            let page = &mut self.allocations.get_mut(&allocation).expect("live")[page];
            page.pins = if add { page.pins + 1 } else { page.pins.checked_sub(1).expect("held") };
        }
    }
}

fn pages_of(range: &PageRange) -> impl Iterator<Item = (u64, usize)> + use<> {
    let id = range.allocation.0;
    (range.first..range.first + range.count)
        .map(move |page| (id, usize::try_from(page).expect("small")))
}

fn wire(frames: &[usize]) -> Vec<VramFrame> {
    frames.iter().map(|frame| VramFrame(u32::try_from(*frame).expect("small"))).collect()
}

/// A refusal with numbers.
pub(crate) fn refused(code: Code) -> Refused {
    Refused { code, object: 1, asked: 2, in_use: 3, limit: 4, message: "no".to_owned() }
}

/// Counters of nothing.
pub(crate) fn stats() -> Stats {
    Stats {
        vram: Default::default(),
        ram: Default::default(),
        nvme: Default::default(),
        total: Default::default(),
        session: Default::default(),
        sessions: 1,
        allocations: 0,
        mappings: 0,
        quarantined_frames: 0,
        metadata_bytes: 0,
    }
}

/// A directory and a file of `length` bytes in it, byte `i` being `i % 251`.
pub(crate) fn patterned_file(length: usize) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("file");
    let bytes: Vec<u8> =
        (0..length).map(|index| u8::try_from(index % 251).expect("small")).collect();
    std::fs::write(&path, bytes).expect("written");
    (directory, path)
}

/// The kernel's view of an address of this process: `r--s`, `---p`, ...; `None` if nothing is there.
pub(crate) fn access_at(address: *const u8) -> Option<String> {
    let address = address.addr();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let bounds = usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
        bounds.contains(&address).then(|| rest[..4].to_owned())
    })
}
