//! Of the process at the other end of a Unix socket: a pidfd, readable once it is dead, and its groups.
#![expect(unsafe_code, reason = "nix wraps neither SO_PEERPIDFD, SO_PEERGROUPS nor pidfd_open")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const SO_PEERPIDFD: libc::c_int = 77;
const SO_PEERGROUPS: libc::c_int = 59;
/// Groups of a process, as the kernel bounds them (`NGROUPS_MAX`).
const GROUPS_MAX: usize = 65_536;

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

/// The supplementary groups that the peer had when it connected.
///
/// # Errors
/// What the kernel says.
pub fn groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let fd = socket.as_fd().as_raw_fd();
    let mut gids: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let bytes = size_of_val(gids.as_slice());
        let mut length = libc::socklen_t::try_from(bytes).expect("at most GROUPS_MAX numbers");
        // SAFETY: the buffer and its length are live and writable, and the length is the buffer's.
        let result = unsafe {
            libc::getsockopt(
                fd,
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                gids.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        // The kernel says how long the list is, also when it does not fit.
        let count = length as usize / size_of::<libc::gid_t>();
        if result == 0 {
            gids.truncate(count);
            return Ok(gids);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || !(gids.len()..=GROUPS_MAX).contains(&count)
        {
            return Err(error);
        }
        gids.resize(count, 0);
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
    fn own_groups_are_known() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut expected: Vec<u32> =
            nix::unistd::getgroups().unwrap().iter().map(|gid| gid.as_raw()).collect();
        let mut found = groups(&ours).unwrap();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
    }

    #[test]
    fn own_process_is_alive() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let fd = pidfd(&ours, pid).unwrap();
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, PollTimeout::ZERO).unwrap(), 0);
    }
}
