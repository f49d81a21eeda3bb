//! A peer that speaks the protocol by the byte, to say what no client library would.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use lapis_proto::code::Code;
use lapis_proto::frame::FrameReader;
use lapis_proto::handshake;
use lapis_proto::header::{HEADER_BYTES, MAGIC};
use lapis_proto::ids::RequestId;
use lapis_proto::kind::{Kind, Message};
use lapis_proto::message::{Refused, Welcome};
use lapis_proto::{codec, fds};

use crate::wait::WAIT;

/// A header as raw numbers, right or wrong.
#[derive(Debug, Clone, Copy)]
pub struct RawHeader {
    /// Protocol version.
    pub version: u16,
    /// Number of the kind.
    pub kind: u16,
    /// Bytes of the body.
    pub body_len: u32,
    /// Descriptors.
    pub fd_count: u16,
    /// Zero in all that is right.
    pub reserved: u16,
    /// Request id.
    pub request: u64,
}

impl RawHeader {
    /// A right header for a message of this kind.
    #[must_use]
    pub fn of(kind: Kind, body_len: u32) -> Self {
        Self { version: 1, kind: kind.number(), body_len, fd_count: 0, reserved: 0, request: 77 }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.fd_count.to_le_bytes());
        bytes[14..16].copy_from_slice(&self.reserved.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.request.to_le_bytes());
        bytes
    }

    /// Its bytes with a body behind them.
    #[must_use]
    pub fn with(&self, body: &[u8]) -> Vec<u8> {
        [&self.bytes()[..], body].concat()
    }
}

/// The bytes of a whole message.
///
/// # Panics
/// When it fits no frame.
#[must_use]
pub fn frame<M: Message>(request: u64, message: &M, fd_count: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec::encode(RequestId(request), message, fd_count, &mut bytes).expect("it fits");
    bytes
}

/// A message that came.
#[derive(Debug)]
pub struct Answer {
    /// Its kind.
    pub kind: Kind,
    /// The request it answers.
    pub request: u64,
    /// Its body.
    pub body: Vec<u8>,
    /// Its descriptors.
    pub fds: Vec<OwnedFd>,
}

impl Answer {
    /// Reads the body.
    ///
    /// # Panics
    /// When it is another message.
    #[must_use]
    pub fn read<M: Message>(&self) -> M {
        assert_eq!(self.kind, M::KIND, "{self:?}{}", self.refusal());
        codec::decode(&self.body).expect("a message of its kind")
    }

    fn refusal(&self) -> String {
        let refused = (self.kind == Kind::Refused).then(|| codec::decode::<Refused>(&self.body));
        refused.map(|refused| format!(": {refused:?}")).unwrap_or_default()
    }
}

/// One connection.
#[derive(Debug)]
pub struct Peer {
    socket: UnixStream,
    reader: FrameReader,
    last_request: u64,
}

impl Peer {
    /// Connects and says nothing.
    ///
    /// # Panics
    /// When nobody listens.
    #[must_use]
    pub fn connect(path: &Path) -> Self {
        let socket = UnixStream::connect(path).expect("the daemon listens");
        // Longer than a daemon waits for a hello, so that its goodbye is seen.
        socket.set_read_timeout(Some(2 * WAIT)).expect("not zero");
        socket.set_write_timeout(Some(2 * WAIT)).expect("not zero");
        Self { socket, reader: FrameReader::new(), last_request: 100 }
    }

    /// Connects, says hello and is welcomed.
    ///
    /// # Panics
    /// When it is not.
    #[must_use]
    pub fn greeted(path: &Path) -> Self {
        let mut peer = Self::connect(path);
        let _: Welcome = peer.call(&handshake::hello("peer")).expect("the hello is right");
        peer
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends bytes as they are. The daemon may have hung up already.
    ///
    /// # Errors
    /// The socket's.
    pub fn send(&self, bytes: &[u8]) -> io::Result<()> {
        fds::send_all(&self.socket, bytes, &[])
    }

    /// Sends bytes, and descriptors with the first of them.
    ///
    /// # Errors
    /// The socket's.
    pub fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        fds::send_all(&self.socket, bytes, fds)
    }

    /// Sends a request, with a descriptor or without.
    ///
    /// # Panics
    /// When the daemon has hung up.
    pub fn ask<M: Message>(&mut self, message: &M, fd: Option<BorrowedFd<'_>>) -> u64 {
        self.last_request += 1;
        let bytes = frame(self.last_request, message, u16::from(fd.is_some()));
        self.send_with(&bytes, fd.as_slice()).expect("the daemon listens to whole requests");
        self.last_request
    }

    /// Sends a request and reads its reply; messages with frames before it are passed over.
    ///
    /// # Errors
    /// The refusal.
    ///
    /// # Panics
    /// When anything else comes.
    pub fn call<Q: Message, R: Message>(&mut self, message: &Q) -> Result<R, Refused> {
        let request = self.ask(message, None);
        self.reply(request)
    }

    /// Like [`Self::call`], with a descriptor.
    ///
    /// # Errors
    /// The refusal.
    ///
    /// # Panics
    /// When anything else comes.
    pub fn call_with<Q: Message, R: Message>(
        &mut self,
        message: &Q,
        fd: impl AsFd,
    ) -> Result<R, Refused> {
        let request = self.ask(message, Some(fd.as_fd()));
        self.reply(request)
    }

    /// The reply to a request, which must be the next one; messages with frames before it are passed over.
    ///
    /// # Errors
    /// The refusal.
    ///
    /// # Panics
    /// When anything else comes.
    pub fn reply<R: Message>(&mut self, request: u64) -> Result<R, Refused> {
        loop {
            let answer = self.receive().expect("one reply to each request");
            assert_eq!(answer.request, request, "{answer:?}");
            match answer.kind {
                Kind::Frames => {}
                Kind::Refused => return Err(answer.read()),
                _ => return Ok(answer.read()),
            }
        }
    }

    /// The next message; `None` when the daemon has hung up.
    ///
    /// # Panics
    /// When neither comes in time.
    pub fn receive(&mut self) -> Option<Answer> {
        loop {
            if let Some(frame) = self.reader.next_frame().expect("the daemon speaks the protocol") {
                let (kind, request) = (frame.header.kind, frame.header.request.0);
                return Some(Answer { kind, request, body: frame.body.to_vec(), fds: frame.fds });
            }
            match self.reader.receive(&self.socket) {
                Ok(0) => return None,
                Ok(_) => {}
                // What we sent and the daemon did not read resets the connection.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("neither an answer nor the end: {error}"),
            }
        }
    }

    /// Expects the daemon to refuse with this code and to hang up.
    ///
    /// # Panics
    /// When it does not.
    pub fn is_thrown_out(&mut self, code: Code) -> Refused {
        let answer = self.receive().expect("the daemon says why it hangs up");
        let refused: Refused = answer.read();
        assert_eq!(refused.code, code, "{refused:?}");
        assert!(!refused.message.is_empty());
        self.is_hung_up();
        refused
    }

    /// Expects the daemon to hang up without another word.
    ///
    /// # Panics
    /// When it does not.
    pub fn is_hung_up(&mut self) {
        let answer = self.receive();
        assert!(answer.is_none(), "{answer:?}");
    }
}
