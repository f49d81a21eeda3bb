//! Requests and replies over one socket, from any number of threads.
//!
//! There is no reader thread: whichever waiting thread finds nobody reading becomes the *leader*, receives, and puts
//! other threads' replies into their slots; once it has its own it wakes another waiter to lead. So one call on its
//! own costs one send and one receive.
//!
//! A slot's life: `Waiting` or `Unread` when the request is sent; `Waiting` becomes `Answered` when another thread
//! reads the reply, and is removed by its owner; `Unread` is removed by whoever reads the reply. When the connection
//! closes every waiter wakes, and finds it closed.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use lapis_proto::codec;
use lapis_proto::fds;
use lapis_proto::frame::{Frame, FrameReader};
use lapis_proto::ids::RequestId;
use lapis_proto::kind::{Kind, Message};
use lapis_proto::message::{Bye, Done, Frames, Refused};

use crate::error::{Error, ProtocolError};
use crate::frames::FrameTable;
use crate::lock;

/// Replies that may be left unread in the socket, so that the daemon never finds it full.
const UNREAD_MAX: usize = 32;
/// How long a closing client waits for the daemon to say goodbye.
const GOODBYE_WAIT: Duration = Duration::from_secs(1);

/// A connection after its handshake.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: UnixStream,
    /// The frame being written; its lock keeps frames whole.
    writer: Mutex<Vec<u8>>,
    state: Mutex<State>,
    next_request: AtomicU64,
    process: u32,
    frames: FrameTable,
}

#[derive(Debug)]
struct State {
    slots: HashMap<u64, Slot>,
    /// `None` while a thread leads.
    reader: Option<FrameReader>,
    /// Slots that are `Unread`.
    unread: usize,
    closed: bool,
    /// The first refusal of a request whose caller didn't wait.
    refused_unread: Option<Refused>,
}

#[derive(Debug)]
enum Slot {
    /// A thread waits: on the condition variable if it has set one, else it leads or is about to look.
    Waiting(Option<Arc<Condvar>>),
    /// Nobody waits; the reply is `Done` and is dropped.
    Unread,
    /// Here is the reply.
    Answered(Answer),
}

/// A reply's kind and body.
#[derive(Debug)]
struct Answer {
    kind: Kind,
    body: Vec<u8>,
}

impl Connection {
    /// `reader` may hold bytes that came after the handshake.
    pub(crate) fn new(socket: UnixStream, reader: FrameReader, frames: FrameTable) -> Connection {
        Connection {
            socket,
            writer: Mutex::default(),
            state: Mutex::new(State {
                slots: HashMap::new(),
                reader: Some(reader),
                unread: 0,
                closed: false,
                refused_unread: None,
            }),
            next_request: AtomicU64::new(FIRST_REQUEST),
            process: std::process::id(),
            frames,
        }
    }

    /// The frames that came over this connection.
    pub(crate) fn frames(&self) -> &FrameTable {
        &self.frames
    }

    /// Whether this process is a fork of the one that connected. Then nothing here may be locked or sent.
    pub(crate) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Sends a request and waits for its reply.
    pub(crate) fn call<Q: Message, R: Message>(
        &self,
        request: &Q,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<R, Error> {
        let id = self.send(request, fd, Slot::Waiting(None))?;
        let answer = self.wait(id)?;
        if answer.kind == Kind::Refused {
            return Err(Error::Refused(self.read_answer(&answer)?));
        }
        if answer.kind != R::KIND {
            return Err(
                self.fail(codec::CodecError::Unexpected { expected: R::KIND, found: answer.kind })
            );
        }
        self.read_answer(&answer)
    }

    /// Sends a request whose reply is `Done` and doesn't wait for it, except when too many are unread.
    /// A refusal is kept for [`Self::take_refused_unread`].
    pub(crate) fn post<Q: Message>(&self, request: &Q) -> Result<(), Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        if lock(&self.state).unread >= UNREAD_MAX {
            return match self.call::<Q, Done>(request, None) {
                Ok(Done {}) => Ok(()),
                Err(Error::Refused(refused)) => {
                    lock(&self.state).refused_unread.get_or_insert(refused);
                    Ok(())
                }
                Err(error) => Err(error),
            };
        }
        self.send(request, None, Slot::Unread).map(drop)
    }

    /// The first refusal of a posted request, once.
    pub(crate) fn take_refused_unread(&self) -> Option<Refused> {
        lock(&self.state).refused_unread.take()
    }

    /// Ends the session in order, if the daemon answers soon. To be called once nothing else uses the connection.
    pub(crate) fn goodbye(&self) {
        self.frames.close_all();
        let limited = self.socket.set_read_timeout(Some(GOODBYE_WAIT)).is_ok()
            && self.socket.set_write_timeout(Some(GOODBYE_WAIT)).is_ok();
        if limited {
            // Nothing is lost if the daemon is gone or slow: the socket closes next, with the same effect.
            let _: Result<Done, Error> = self.call(&Bye {}, None);
        }
    }

    /// Closes the connection because the daemon broke the protocol, and says so.
    pub(crate) fn fail(&self, error: impl Into<ProtocolError>) -> Error {
        self.close();
        Error::Protocol(error.into())
    }

    fn read_answer<R: Message>(&self, answer: &Answer) -> Result<R, Error> {
        codec::decode(&answer.body).map_err(|error| self.fail(error))
    }

    /// Registers the slot, then sends.
    fn send<Q: Message>(
        &self,
        request: &Q,
        fd: Option<BorrowedFd<'_>>,
        slot: Slot,
    ) -> Result<u64, Error> {
        if self.is_forked() {
            return Err(Error::Forked);
        }
        let id = self.next_request.fetch_add(1, Ordering::Relaxed);
        {
            let mut state = lock(&self.state);
            if state.closed {
                return Err(Error::Disconnected);
            }
            state.insert(id, slot);
        }
        let mut bytes = lock(&self.writer);
        bytes.clear();
        let encoded = codec::encode(RequestId(id), request, u16::from(fd.is_some()), &mut bytes);
        if let Err(error) = encoded {
            lock(&self.state).remove(id);
            return Err(Error::Protocol(error.into()));
        }
        if fds::send_all(&self.socket, &bytes, fd.as_slice()).is_err() {
            drop(bytes);
            lock(&self.state).remove(id);
            self.close();
            return Err(Error::Disconnected);
        }
        Ok(id)
    }

    /// Waits for the reply, leading if nobody else does.
    fn wait(&self, id: u64) -> Result<Answer, Error> {
        let mut state = lock(&self.state);
        loop {
            if let Some(Slot::Answered(_)) = state.slots.get(&id)
                && let Some(Slot::Answered(answer)) = state.remove(id)
            {
                return Ok(answer);
            }
            if state.closed {
                state.remove(id);
                return Err(Error::Disconnected);
            }
            if let Some(mut reader) = state.reader.take() {
                drop(state);
                let result = self.lead(&mut reader, id);
                let mut state = lock(&self.state);
                state.reader = Some(reader);
                state.remove(id);
                if result.is_ok() {
                    state.wake_one();
                } else {
                    drop(state);
                    self.close();
                }
                return result;
            }
            let condvar = Arc::new(Condvar::new());
            state.slots.insert(id, Slot::Waiting(Some(Arc::clone(&condvar))));
            state = condvar.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Receives until the reply to `id` comes; delivers all others.
    fn lead(&self, reader: &mut FrameReader, id: u64) -> Result<Answer, Error> {
        let mut own = None;
        loop {
            while let Some(frame) = reader.next_frame().map_err(ProtocolError::from)? {
                match frame.header.kind {
                    Kind::Frames => self.import(frame)?,
                    kind if frame.header.request.0 == id && own.is_none() => {
                        own = Some(Answer { kind, body: frame.body.to_vec() });
                    }
                    _ => lock(&self.state).deliver(&frame)?,
                }
            }
            if let Some(answer) = own {
                return Ok(answer);
            }
            match reader.receive(&self.socket) {
                Ok(0) => return Err(Error::Disconnected),
                Ok(_) => {}
                Err(source) if source.kind() == io::ErrorKind::Other => {
                    return Err(Error::Io { call: "recvmsg", source });
                }
                Err(_) => return Err(Error::Disconnected),
            }
        }
    }

    fn import(&self, mut frame: Frame<'_>) -> Result<(), ProtocolError> {
        let fds = std::mem::take(&mut frame.fds);
        let frames: Frames = frame.decode()?;
        self.frames.import(&frames.frames, fds)
    }

    /// From here on every call fails; every waiter wakes to see that.
    fn close(&self) {
        // Fails only if the peer has closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
        let mut state = lock(&self.state);
        state.closed = true;
        for slot in state.slots.values() {
            if let Slot::Waiting(Some(condvar)) = slot {
                condvar.notify_one();
            }
        }
    }
}

/// Request 0 marks events, 1 was `Hello`.
const FIRST_REQUEST: u64 = 2;

impl State {
    fn insert(&mut self, id: u64, slot: Slot) {
        if matches!(slot, Slot::Unread) {
            self.unread += 1;
        }
        self.slots.insert(id, slot);
    }

    fn remove(&mut self, id: u64) -> Option<Slot> {
        let slot = self.slots.remove(&id);
        if matches!(slot, Some(Slot::Unread)) {
            self.unread -= 1;
        }
        slot
    }

    /// Puts a reply where its request waits for it.
    fn deliver(&mut self, frame: &Frame<'_>) -> Result<(), ProtocolError> {
        let (kind, request) = (frame.header.kind, frame.header.request.0);
        match self.slots.get_mut(&request) {
            Some(slot @ Slot::Waiting(_)) => {
                let answer = Answer { kind, body: frame.body.to_vec() };
                if let Slot::Waiting(Some(condvar)) =
                    std::mem::replace(slot, Slot::Answered(answer))
                {
                    condvar.notify_one();
                }
                Ok(())
            }
            Some(Slot::Unread) => {
                self.remove(request);
                if kind == Kind::Refused {
                    self.refused_unread.get_or_insert(frame.decode()?);
                } else {
                    frame.decode::<Done>()?;
                }
                Ok(())
            }
            Some(Slot::Answered(_)) | None => Err(ProtocolError::Unsolicited { kind, request }),
        }
    }

    /// Wakes one thread that still waits, to lead.
    fn wake_one(&self) {
        let condvar = self.slots.values().find_map(|slot| match slot {
            Slot::Waiting(condvar) => condvar.as_ref(),
            Slot::Unread | Slot::Answered(_) => None,
        });
        if let Some(condvar) = condvar {
            condvar.notify_one();
        }
    }
}
