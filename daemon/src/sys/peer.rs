//! A pidfd of the process at the other end of a Unix socket: readable once it is dead.
#![expect(unsafe_code, reason = "nix wraps neither SO_PEERPIDFD nor pidfd_open")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const SO_PEERPIDFD: libc::c_int = 77;

/// The peer's pidfd. On kernels before 6.5 it is looked up by pid, which could in theory name another process if the
/// peer died in this very moment.
///
/// # Errors
/// `NotFound` if the process is dead already; else what the kernel says.
pub fn pidfd(socket: impl AsFd, pid: i32) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of_val(&fd)).expect("4 fits");
    // SAFETY: the value and its length are live and writable, and the length is the value's.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        // SAFETY: on success the kernel has put a new descriptor here that nobody else owns.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::ENOPROTOOPT) {
        return Err(dead_is_not_found(error));
    }
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    match i32::try_from(fd) {
        // SAFETY: as above: a new descriptor that nobody else owns.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(dead_is_not_found(io::Error::last_os_error())),
    }
}

fn dead_is_not_found(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::ESRCH) => io::Error::from(io::ErrorKind::NotFound),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use std::os::unix::net::UnixStream;

    #[test]
    fn own_process_is_alive() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let fd = pidfd(&ours, pid).unwrap();
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, PollTimeout::ZERO).unwrap(), 0);
    }
}
