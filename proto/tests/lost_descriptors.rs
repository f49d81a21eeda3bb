//! A receiver at its limit of open files. Alone in its process, because the limit is the process's.

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use lapis_proto::fds::{receive, send};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

#[test]
fn lost_descriptors_are_an_error_and_leak_nothing() {
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let sent: Vec<OwnedFd> =
        (0..8).map(|_| memfd_create("lost", MFdFlags::MFD_CLOEXEC).expect("a memfd")).collect();
    let borrowed: Vec<_> = sent.iter().map(AsFd::as_fd).collect();
    send(&ours, &[IoSlice::new(b"x")], &borrowed).expect("sent");
    drop(sent);

    // Room for three of the eight.
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("a limit");
    setrlimit(Resource::RLIMIT_NOFILE, 64, hard).expect("lowered");
    let mut filler = Vec::new();
    while let Ok(fd) = theirs.try_clone() {
        filler.push(fd);
    }
    filler.truncate(filler.len() - 3);
    let mut fds = VecDeque::new();
    let result = receive(&theirs, &mut [0; 8], &mut fds);
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).expect("restored");
    drop(filler);

    assert_eq!(result.expect_err("five were lost").kind(), ErrorKind::Other);
    assert!(fds.is_empty());
    let open = std::fs::read_dir("/proc/self/fd")
        .expect("procfs")
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|link| link.to_string_lossy().starts_with("/memfd:lost"))
        .count();
    assert_eq!(open, 0);
}
