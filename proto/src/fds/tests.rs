use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;
use crate::codec::encode;
use crate::frame::{FrameError, FrameReader};
use crate::ids::{AllocationId, RequestId, VramFrame};
use crate::message::{Frames, Free};

/// Open memfds with this name: other tests' descriptors don't disturb the count.
fn open_named(name: &str) -> usize {
    let target = format!("/memfd:{name}");
    std::fs::read_dir("/proc/self/fd")
        .expect("procfs")
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|link| link.to_string_lossy().starts_with(&target))
        .count()
}

fn memfd(name: &str, content: &str) -> OwnedFd {
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC).expect("a memfd");
    File::from(fd.try_clone().expect("a clone")).write_all(content.as_bytes()).expect("written");
    fd
}

fn content(fd: OwnedFd) -> String {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; 16];
    let count = File::from(fd).read_at(&mut bytes, 0).expect("readable");
    String::from_utf8_lossy(&bytes[..count]).into_owned()
}

fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}

#[test]
fn descriptors_arrive_in_order_and_close_on_exec() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let sent: Vec<OwnedFd> = (0..253).map(|n| memfd("in-order", &n.to_string())).collect();
    assert_eq!(
        send(&ours, &[IoSlice::new(b"ab"), IoSlice::new(b"cd")], &borrowed(&sent)).expect("sent"),
        4
    );
    let mut buffer = [0; 16];
    let mut fds = VecDeque::new();
    assert_eq!(receive(&theirs, &mut buffer, &mut fds).expect("received"), 4);
    assert_eq!(&buffer[..4], b"abcd");
    assert_eq!(fds.len(), 253);
    for (n, fd) in fds.into_iter().enumerate() {
        let flags = fcntl(&fd, FcntlArg::F_GETFD).expect("flags");
        assert!(FdFlag::from_bits_retain(flags).contains(FdFlag::FD_CLOEXEC));
        assert_eq!(content(fd), n.to_string());
    }
}

#[test]
fn refuses_what_cannot_be_sent() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let many: Vec<OwnedFd> = (0..254).map(|_| memfd("many", "")).collect();
    let error = send(&ours, &[IoSlice::new(b"x")], &borrowed(&many)).expect_err("254");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let error = send(&ours, &[IoSlice::new(b"")], &borrowed(&many[..1])).expect_err("no byte");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    drop(theirs);
    let error = send(&ours, &[IoSlice::new(b"x")], &[]).expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
}

#[test]
fn never_blocks_when_asked_not_to() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let mut fds = VecDeque::new();
    let error = try_receive(&theirs, &mut [0; 8], &mut fds).expect_err("nothing there");
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    let chunk = [0; 65536];
    let error = loop {
        if let Err(error) = try_send(&ours, &[IoSlice::new(&chunk)], &[]) {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(ours);
    let mut rest = Vec::new();
    (&theirs).read_to_end(&mut rest).expect("what was sent");
    assert_eq!(receive(&theirs, &mut [0; 8], &mut fds).expect("the end"), 0);
}

#[test]
fn descriptors_where_none_belong_are_closed() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let sent = vec![memfd("stray", ""), memfd("stray", "")];
    let mut bytes = Vec::new();
    encode(RequestId(1), &Free { allocation: AllocationId(1) }, 0, &mut bytes).expect("encodes");
    send_all(&ours, &bytes, &borrowed(&sent)).expect("sent");
    drop(sent);
    let mut reader = FrameReader::new();
    reader.receive(&theirs).expect("received");
    assert_eq!(open_named("stray"), 2);
    assert!(reader.next_frame().expect("the frame itself").is_some());
    assert_eq!(
        reader.next_frame().map(|_| ()).expect_err("two too many"),
        FrameError::FdsUnclaimed { found: 2, expected: 0 }
    );
    drop(reader);
    assert_eq!(open_named("stray"), 0);
}

#[test]
fn a_read_may_begin_with_an_earlier_frame() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let mut plain = Vec::new();
    encode(RequestId(1), &Free { allocation: AllocationId(1) }, 0, &mut plain).expect("encodes");
    let mut reader = FrameReader::new();
    let mut seen = Vec::new();
    for round in 0..50_u32 {
        let count = u16::try_from(round % 3 + 1).expect("small");
        let frames: Vec<VramFrame> = (0..u32::from(count)).map(VramFrame).collect();
        let fds: Vec<OwnedFd> =
            frames.iter().map(|f| memfd("early", &format!("{round}.{}", f.0))).collect();
        let mut bytes = Vec::new();
        encode(RequestId(2), &Frames { frames }, count, &mut bytes).expect("encodes");
        send_all(&ours, &plain, &[]).expect("sent");
        send_all(&ours, &bytes, &borrowed(&fds)).expect("sent");
        send_all(&ours, &plain, &[]).expect("sent");
    }
    drop(ours);
    while reader.receive(&theirs).expect("received") > 0 {
        while let Some(frame) = reader.next_frame().expect("well-formed") {
            seen.push((
                frame.header.request.0,
                frame.fds.into_iter().map(content).collect::<Vec<_>>(),
            ));
        }
    }
    assert_eq!(seen.len(), 150);
    for (round, group) in seen.chunks(3).enumerate() {
        let expected: Vec<String> = (0..=round % 3).map(|n| format!("{round}.{n}")).collect();
        assert_eq!(group, [(1, vec![]), (2, expected), (1, vec![])]);
    }
}

#[test]
fn long_frames_cross_the_socket_whole() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let fd = memfd("long", "behind");
    let frames = vec![VramFrame(3); 200_000];
    let mut bytes = Vec::new();
    encode(RequestId(5), &Frames { frames }, 1, &mut bytes).expect("encodes");
    let writer = std::thread::spawn(move || send_all(&ours, &bytes, &[fd.as_fd()]));
    let mut reader = FrameReader::new();
    let received = loop {
        reader.receive(&theirs).expect("received");
        if let Some(frame) = reader.next_frame().expect("well-formed") {
            break (frame.body.len(), frame.fds.into_iter().map(content).collect::<Vec<_>>());
        }
    };
    assert_eq!(received, (800_008, vec!["behind".to_owned()]));
    writer.join().expect("no panic").expect("sent");
}
