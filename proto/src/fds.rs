//! Bytes and descriptors over a Unix socket, with `SCM_RIGHTS`.
//!
//! Every read of a connection must go through here: a plain read would drop descriptors. Received descriptors are
//! close-on-exec and owned from the moment they exist in this process, on error paths too.

#![expect(
    unsafe_code,
    reason = "control messages have no safe interface that keeps truncated descriptors"
)]

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::libc;

/// Most descriptors of one message; the kernel's own limit.
pub const FDS_PER_MESSAGE_MAX: u16 = 253;

const FD_BYTES: usize = size_of::<RawFd>();
const FDS_BYTES_MAX: usize = FDS_PER_MESSAGE_MAX as usize * FD_BYTES;
/// Room for a full `SCM_RIGHTS` message and, should the socket be set up to pass them, the peer's credentials.
const CONTROL_BYTES: usize = 1024 + 128;

/// A control buffer, aligned as its headers must be.
#[repr(C, align(8))]
struct Control([MaybeUninit<u8>; CONTROL_BYTES]);

const _: () = assert!(align_of::<Control>() >= align_of::<libc::cmsghdr>());
const _: () = assert!(FDS_BYTES_MAX + 2 * size_of::<libc::cmsghdr>() + 16 <= CONTROL_BYTES);
const _: () = assert!(FD_BYTES == 4);

/// Sends bytes, and descriptors with the first of them. Blocks as the socket does. Returns how many bytes were
/// taken; if that is at least 1, all descriptors were, and what is left must be sent without them.
///
/// # Errors
/// Those of `sendmsg`; `InvalidInput` for more than [`FDS_PER_MESSAGE_MAX`] descriptors, or descriptors without a
/// byte. A closed peer is `BrokenPipe`, without a signal.
pub fn send(socket: impl AsFd, bytes: &[IoSlice<'_>], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    send_flags(socket.as_fd(), bytes, fds, 0)
}

/// Like [`send`], but never blocks.
///
/// # Errors
/// `WouldBlock` when the socket's buffer is full; else as [`send`].
pub fn try_send(
    socket: impl AsFd,
    bytes: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    send_flags(socket.as_fd(), bytes, fds, libc::MSG_DONTWAIT)
}

/// Sends all of `bytes`, and the descriptors with the first of them. For blocking sockets.
///
/// # Errors
/// As [`send`]; part of the bytes may have been sent.
pub fn send_all(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let socket = socket.as_fd();
    let mut sent = send(socket, &[IoSlice::new(bytes)], fds)?;
    while sent < bytes.len() {
        sent += send(socket, &[IoSlice::new(&bytes[sent..])], &[])?;
    }
    Ok(())
}

/// Receives bytes into `buffer` and appends descriptors to `fds`. Blocks as the socket does. Returns how many bytes
/// came, 0 at the end of the stream.
///
/// # Errors
/// Those of `recvmsg`. When the kernel dropped descriptors (this process may have no more open), those that did
/// come are closed and the error says so: the stream can't be used any further.
pub fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    receive_flags(socket.as_fd(), buffer, fds, 0)
}

/// Like [`receive`], but never blocks.
///
/// # Errors
/// `WouldBlock` when nothing is there; else as [`receive`].
pub fn try_receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    fds: &mut VecDeque<OwnedFd>,
) -> io::Result<usize> {
    receive_flags(socket.as_fd(), buffer, fds, libc::MSG_DONTWAIT)
}

fn send_flags(
    socket: BorrowedFd<'_>,
    bytes: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
    flags: libc::c_int,
) -> io::Result<usize> {
    let fds_bytes = fds.len() * FD_BYTES;
    if fds_bytes > FDS_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "more than 253 descriptors"));
    }
    if !fds.is_empty() && bytes.iter().all(|slice| slice.is_empty()) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "descriptors without a byte"));
    }
    let mut control = Control([MaybeUninit::new(0); CONTROL_BYTES]);
    let mut header = empty_header();
    // IoSlice is ABI-compatible with iovec; the kernel only reads through it.
    header.msg_iov = bytes.as_ptr().cast_mut().cast();
    header.msg_iovlen = bytes.len();
    if let Ok(data_bytes @ 1..) = u32::try_from(fds_bytes) {
        header.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: CMSG_SPACE and CMSG_LEN only compute; the sum was checked against CONTROL_BYTES above.
        let (space, length) = unsafe { (libc::CMSG_SPACE(data_bytes), libc::CMSG_LEN(data_bytes)) };
        header.msg_controllen = space as usize;
        // SAFETY: msg_control points at CONTROL_BYTES zeroed, aligned bytes, at least `space` of them (asserted
        // above for the most descriptors), so the first header and `fds_bytes` of data behind it are inside.
        // The copy reads `fds.len()` descriptors: BorrowedFd is a transparent, non-null RawFd.
        unsafe {
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = length as usize;
            fds.as_ptr().cast::<u8>().copy_to_nonoverlapping(libc::CMSG_DATA(first), fds_bytes);
        }
    }
    retry(|| {
        // SAFETY: `header` points at live slices and a live control buffer of the lengths it says; the kernel
        // writes to none of them, and the borrowed descriptors are open for the call.
        unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const header, flags | libc::MSG_NOSIGNAL) }
    })
}

fn receive_flags(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut VecDeque<OwnedFd>,
    flags: libc::c_int,
) -> io::Result<usize> {
    let mut control = Control([MaybeUninit::uninit(); CONTROL_BYTES]);
    let mut slice = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut header = empty_header();
    let count = retry(|| {
        header.msg_iov = &raw mut slice;
        header.msg_iovlen = 1;
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = CONTROL_BYTES;
        // SAFETY: `header` points at a buffer and a control buffer that we borrow mutably and that have the lengths
        // it says; the kernel writes within those.
        unsafe {
            libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags | libc::MSG_CMSG_CLOEXEC)
        }
    })?;
    let first_new = fds.len();
    // SAFETY: the kernel filled in `header` and `control` just now, and nothing has taken the descriptors yet.
    unsafe { take_fds(&header, fds) };
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        fds.truncate(first_new);
        return Err(io::Error::other(
            "descriptors were lost on receipt: raise this process's limit of open files",
        ));
    }
    Ok(count)
}

/// Moves the descriptors of every `SCM_RIGHTS` message to `fds`.
///
/// # Safety
/// `header` must be as a successful `recvmsg` left it, its control buffer alive, and the descriptors in it owned by
/// nobody yet: this may be called once per `recvmsg`.
unsafe fn take_fds(header: &libc::msghdr, fds: &mut VecDeque<OwnedFd>) {
    // SAFETY: by this function's contract the control buffer holds msg_controllen bytes written by the kernel, and
    // FIRSTHDR and NXTHDR stay inside them.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !message.is_null() {
        // SAFETY: non-null results of FIRSTHDR and NXTHDR point at a whole header; CMSG_LEN(0) only computes.
        let (level, kind, length, head) = unsafe {
            let cmsg = message.read();
            (cmsg.cmsg_level, cmsg.cmsg_type, cmsg.cmsg_len, libc::CMSG_LEN(0) as usize)
        };
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            for index in 0..length.saturating_sub(head) / FD_BYTES {
                // SAFETY: the kernel put (cmsg_len - CMSG_LEN(0)) bytes of descriptors behind the header, and
                // `index` counts only whole ones; each is open, in this process, and ours alone.
                let fd = unsafe {
                    let raw = libc::CMSG_DATA(message).cast::<RawFd>().add(index).read_unaligned();
                    OwnedFd::from_raw_fd(raw)
                };
                fds.push_back(fd);
            }
        }
        // SAFETY: as for FIRSTHDR; `message` came from it or from NXTHDR.
        message = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
}

/// A message header that names nothing.
fn empty_header() -> libc::msghdr {
    // SAFETY: msghdr is plain integers and pointers, for which zero is a value: no name, no slices, no control.
    unsafe { MaybeUninit::<libc::msghdr>::zeroed().assume_init() }
}

/// Calls again when a signal interrupts; turns -1 into the error.
fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(count);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests;
