//! What waits to be sent on one connection: bounded, and never waited for. A client that does not read is
//! disconnected, not buffered.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};

use lapis_proto::codec::{self, CodecError};
use lapis_proto::fds;
use lapis_proto::ids::RequestId;
use lapis_proto::message::Message;

/// Bytes that may wait for one client.
pub const BYTES_MAX: usize = 8 << 20;
/// Descriptors that may wait for one client.
pub const FDS_MAX: usize = 4096;

#[derive(Debug, Default)]
struct Chunk {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

/// Bytes and descriptors to be sent, in order.
#[derive(Debug, Default)]
pub struct Outgoing {
    chunks: VecDeque<Chunk>,
    bytes: usize,
    fds: usize,
}

/// How a flush ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flushed {
    /// All is sent.
    All,
    /// The socket is full: try again when it is writable.
    Blocked,
}

impl Outgoing {
    /// Appends a message.
    ///
    /// # Errors
    /// The message is too long for a frame: a bug of the caller.
    pub fn push<M: Message>(
        &mut self,
        request: RequestId,
        message: &M,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), CodecError> {
        let count = u16::try_from(descriptors.len()).unwrap_or(u16::MAX);
        // Descriptors go out with the first byte of their chunk, so a frame that carries some starts one.
        let starts_chunk = count > 0 || self.chunks.back().is_none_or(|c| !c.fds.is_empty());
        if starts_chunk {
            self.chunks.push_back(Chunk::default());
        }
        let chunk = self.chunks.back_mut().expect("pushed if there was none");
        let before = chunk.bytes.len();
        codec::encode(request, message, count, &mut chunk.bytes)?;
        self.bytes += chunk.bytes.len() - before;
        self.fds += descriptors.len();
        chunk.fds.extend(descriptors);
        Ok(())
    }

    /// Whether more waits than a client may leave unread.
    #[must_use]
    pub fn is_over_limit(&self) -> bool {
        self.bytes > BYTES_MAX || self.fds > FDS_MAX
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Sends what the socket takes, without blocking.
    ///
    /// # Errors
    /// The socket's: the connection is of no use any more.
    pub fn flush(&mut self, socket: impl AsFd) -> io::Result<Flushed> {
        while let Some(chunk) = self.chunks.front_mut() {
            if chunk.sent < chunk.bytes.len() {
                let descriptors: Vec<_> = chunk.fds.iter().map(AsFd::as_fd).collect();
                let slice = IoSlice::new(&chunk.bytes[chunk.sent..]);
                let sent = match fds::try_send(socket.as_fd(), &[slice], &descriptors) {
                    Ok(sent) => sent,
                    // Too many descriptors in flight: they are taken once the client has read some.
                    Err(error)
                        if error.kind() == io::ErrorKind::WouldBlock
                            || error.raw_os_error() == Some(nix::libc::ETOOMANYREFS) =>
                    {
                        return Ok(Flushed::Blocked);
                    }
                    Err(error) => return Err(error),
                };
                self.fds -= chunk.fds.len();
                self.bytes -= sent;
                chunk.fds.clear();
                chunk.sent += sent;
            }
            if chunk.sent == chunk.bytes.len() {
                self.chunks.pop_front();
            }
        }
        Ok(Flushed::All)
    }
}
