//! Cuts the bytes and descriptors that a stream socket delivers into frames.
//!
//! The kernel delivers descriptors with the first byte they were sent with, and one read never takes those of two
//! sends; but a read may begin with the tail of an earlier frame. So descriptors wait in a queue, and each frame
//! takes as many as its header says. Descriptors that no header claims end the connection, and are closed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::codec::{self, CodecError};
use crate::fds::{self, FDS_PER_MESSAGE_MAX};
use crate::header::{FRAME_BYTES_MAX, HEADER_BYTES, Header, HeaderError};
use crate::message::Message;

/// Bytes of the buffer until a longer frame comes: hundreds of small frames a read, and little for an idle peer.
const BUFFER_BYTES: usize = 16 * 1024;

/// The stream can't be cut into frames. The connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes aren't a header.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The frame is whole but its descriptors didn't come with it.
    #[error("{header:?} came with {found} descriptors")]
    FdsMissing {
        /// Of this frame.
        header: Header,
        /// Descriptors that came.
        found: usize,
    },
    /// Descriptors that no message claims.
    #[error("{found} descriptors came where at most {expected} belong")]
    FdsUnclaimed {
        /// Descriptors in the queue.
        found: usize,
        /// Descriptors that the frame being read may claim.
        expected: usize,
    },
}

/// One message, its body still in the reader's buffer.
#[derive(Debug)]
pub struct Frame<'a> {
    /// Its checked header.
    pub header: Header,
    /// Its body.
    pub body: &'a [u8],
    /// Its descriptors, as many as the header says.
    pub fds: Vec<OwnedFd>,
}

impl Frame<'_> {
    /// Reads the body as an `M`.
    ///
    /// # Errors
    /// [`CodecError::Unexpected`] if the header names another kind; else as [`codec::decode`].
    pub fn decode<M: Message>(&self) -> Result<M, CodecError> {
        if self.header.kind != M::KIND {
            return Err(CodecError::Unexpected { expected: M::KIND, found: self.header.kind });
        }
        codec::decode(self.body)
    }
}

/// Incremental reader. Getter: [`Self::buffered`]. In: [`Self::receive`], [`Self::try_receive`], [`Self::push`].
/// Out: [`Self::next_frame`], to be called until `None` after each read. Memory is bounded by one longest frame.
#[derive(Debug, Default)]
pub struct FrameReader {
    /// Received bytes are at `start..end`.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    fds: VecDeque<OwnedFd>,
}

impl FrameReader {
    /// An empty reader; it allocates at the first read.
    #[must_use]
    pub fn new() -> FrameReader {
        FrameReader::default()
    }

    /// Bytes received and not yet handed out.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Reads once from the socket, blocking as the socket does. Returns the bytes read, 0 at the end of the stream.
    ///
    /// # Errors
    /// Those of `recvmsg`, and lost descriptors.
    pub fn receive(&mut self, socket: impl AsFd) -> io::Result<usize> {
        self.make_room(1);
        let count = fds::receive(socket, &mut self.buffer[self.end..], &mut self.fds)?;
        self.end += count;
        Ok(count)
    }

    /// Like [`Self::receive`], but never blocks.
    ///
    /// # Errors
    /// `WouldBlock` when nothing is there; else as [`Self::receive`].
    pub fn try_receive(&mut self, socket: impl AsFd) -> io::Result<usize> {
        self.make_room(1);
        let count = fds::try_receive(socket, &mut self.buffer[self.end..], &mut self.fds)?;
        self.end += count;
        Ok(count)
    }

    /// Takes bytes and descriptors received elsewhere, at most as many bytes as one longest frame has room for.
    /// Returns the bytes taken.
    pub fn push(&mut self, bytes: &[u8], fds: impl IntoIterator<Item = OwnedFd>) -> usize {
        self.make_room(bytes.len());
        let count = bytes.len().min(self.buffer.len() - self.end);
        self.buffer[self.end..self.end + count].copy_from_slice(&bytes[..count]);
        self.end += count;
        self.fds.extend(fds);
        count
    }

    /// The next whole frame, or `None` when more bytes are needed.
    ///
    /// # Errors
    /// [`FrameError`]: the stream is unusable from here on.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        let received = &self.buffer[self.start..self.end];
        let Some((head, rest)) = received.split_first_chunk::<HEADER_BYTES>() else {
            let expected = if received.is_empty() { 0 } else { usize::from(FDS_PER_MESSAGE_MAX) };
            self.check_unclaimed(expected)?;
            if received.is_empty() {
                (self.start, self.end) = (0, 0);
                if self.buffer.len() > BUFFER_BYTES {
                    // A rare long frame made it grow; thousands of peers may each have sent one.
                    self.buffer = Vec::new();
                }
            }
            return Ok(None);
        };
        let header = Header::decode(head)?;
        let fd_count = usize::from(header.fd_count);
        if rest.len() < header.body_bytes() {
            self.check_unclaimed(fd_count)?;
            return Ok(None);
        }
        if self.fds.len() < fd_count {
            return Err(FrameError::FdsMissing { header, found: self.fds.len() });
        }
        let body_start = self.start + HEADER_BYTES;
        self.start = body_start + header.body_bytes();
        let body = &self.buffer[body_start..self.start];
        Ok(Some(Frame { header, body, fds: self.fds.drain(..fd_count).collect() }))
    }

    /// What is in the queue once all whole frames are taken can only belong to the frame being read.
    fn check_unclaimed(&self, expected: usize) -> Result<(), FrameError> {
        let found = self.fds.len();
        if found > expected { Err(FrameError::FdsUnclaimed { found, expected }) } else { Ok(()) }
    }

    /// Makes room behind `end` for `wanted` bytes and for the rest of the frame being read, as far as one longest
    /// frame goes.
    fn make_room(&mut self, wanted: usize) {
        let frame_bytes = self.buffer[self.start..self.end]
            .first_chunk::<HEADER_BYTES>()
            .and_then(|head| Header::decode(head).ok())
            .map_or(HEADER_BYTES, |header| HEADER_BYTES + header.body_bytes());
        let needed = frame_bytes.max(self.buffered() + wanted).min(FRAME_BYTES_MAX);
        let cramped = self.buffer.len() - self.end < self.buffer.len() / 4;
        if self.start > 0 && (cramped || self.start + needed > self.buffer.len()) {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if needed > self.buffer.len() {
            let size = needed.next_power_of_two().clamp(BUFFER_BYTES, FRAME_BYTES_MAX);
            self.buffer.resize(size, 0);
        }
    }
}

#[cfg(test)]
mod tests;
