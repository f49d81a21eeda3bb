//! The one owner of everything: engine, transfers, connections. Tasks borrow it between awaits, never across one.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Instant;

use lapis_proto::code::Code;
use lapis_proto::fds::FDS_PER_MESSAGE_MAX;
use lapis_proto::ids::{RequestId, SessionId, VramFrame};
use lapis_proto::message as wire;
use lapis_proto::message::Refused;
use tokio::sync::Notify;

use super::outgoing::{Flushed, Outgoing};
use super::requests::Parsed;
use crate::device::Device;
use crate::engine::Engine;
use crate::engine::event::{Command, Event, Outbox, Reply, Request};
use crate::engine::ids::{Domain, FileId};
use crate::engine::refusal::plain;
use crate::store::AnyStore;
use crate::sys::descriptors;
use crate::transfer::Transfer;

/// One client's sending side, and how to wake the task that serves it.
#[derive(Debug)]
pub struct Connection {
    socket: Rc<tokio::net::UnixStream>,
    events: Option<OwnedFd>,
    outgoing: Outgoing,
    /// Wakes the task: the socket is full, or the session is to end.
    pub wake: Rc<Notify>,
    /// The task must end the session.
    pub broken: bool,
    touched: bool,
}

/// Who a client is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its user.
    pub domain: Domain,
    /// Its primary group.
    pub gid: u32,
    /// May change tiers and quotas.
    pub admin: bool,
}

/// All state of the running daemon.
pub struct Core {
    engine: Engine,
    transfer: Transfer<AnyStore, Box<dyn Device>>,
    connections: BTreeMap<SessionId, Connection>,
    admin_gid: Option<u32>,
    started: Instant,
    last_session: u64,
    last_file: u64,
    outbox: Outbox,
    events: Vec<Event>,
    /// Connections with something new to send.
    touched: Vec<SessionId>,
    /// Wakes the timer task when the next deadline may have changed.
    pub timer: Rc<Notify>,
    deadline: Option<u64>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("connections", &self.connections.len()).finish_non_exhaustive()
    }
}

impl Core {
    /// A daemon without clients, administered by root and the members of a group.
    #[must_use]
    pub fn new(
        engine: Engine,
        transfer: Transfer<AnyStore, Box<dyn Device>>,
        admin_gid: Option<u32>,
    ) -> Self {
        Self {
            engine,
            transfer,
            connections: BTreeMap::new(),
            admin_gid,
            started: Instant::now(),
            last_session: 0,
            last_file: 0,
            outbox: Outbox::new(),
            events: Vec::new(),
            touched: Vec::new(),
            timer: Rc::new(Notify::new()),
            deadline: None,
        }
    }

    /// Microseconds since the daemon started.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// When the engine next needs a tick.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        self.engine.next_deadline()
    }

    /// Whether the device failed for good.
    #[must_use]
    pub fn device_lost(&self) -> bool {
        self.engine.device_lost()
    }

    /// Whether hops are under way.
    #[must_use]
    pub fn is_moving(&self) -> bool {
        self.transfer.in_flight() > 0
    }

    /// Whether a user, or a member of these groups, may change tiers and quotas.
    #[must_use]
    pub fn is_admin(&self, uid: u32, mut gids: impl Iterator<Item = u32>) -> bool {
        uid == 0 || self.admin_gid.is_some_and(|admin| gids.any(|gid| gid == admin))
    }

    /// Opens a session, or says why not.
    ///
    /// # Errors
    /// `TooMany` sessions.
    pub fn open(
        &mut self,
        peer: Peer,
        socket: Rc<tokio::net::UnixStream>,
        events: Option<OwnedFd>,
    ) -> Result<(SessionId, Rc<Notify>), Refused> {
        let limit = self.engine.limits().sessions_max;
        let count = self.engine.sessions_count();
        if count >= limit as usize {
            return Err(Refused {
                asked: 1,
                in_use: count as u64,
                limit: u64::from(limit),
                ..plain(Code::TooMany, &format!("{limit} sessions are open: that is the limit"))
            });
        }
        self.last_session += 1;
        let session = SessionId(self.last_session);
        let wake = Rc::new(Notify::new());
        let connection = Connection {
            socket,
            events,
            outgoing: Outgoing::default(),
            wake: Rc::clone(&wake),
            broken: false,
            touched: false,
        };
        self.connections.insert(session, connection);
        let Peer { domain, gid, admin } = peer;
        self.apply(Event::SessionOpened { session, domain, gid, admin });
        Ok((session, wake))
    }

    /// The answer to a hello that was accepted.
    #[must_use]
    pub fn welcome(&mut self, session: SessionId, version: u16, features: u64) -> wire::Welcome {
        let limits = self.engine.limits().clone();
        let device = self.transfer.device().info();
        wire::Welcome {
            version,
            features,
            session,
            page_size: limits.page_size,
            vram_frames: limits.vram_frames,
            mapped_pages_max: self.engine.mapped_pages_max(),
            device: device.kind,
            device_uuid: device.uuid,
            unified: device.unified,
            daemon_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Handles one request of a session.
    pub fn request(&mut self, session: SessionId, request: RequestId, parsed: Parsed) {
        let body = match parsed {
            Parsed::Request(body) => body,
            Parsed::OpenFile(fd, _) if descriptors::are_scarce_with(&fd) => {
                drop(fd);
                let message = "few descriptors are left, and each open file takes one: free some files, or raise LimitNOFILE";
                return self.refuse(session, request, &plain(Code::TooMany, message));
            }
            Parsed::OpenFile(fd, body) => {
                self.last_file += 1;
                let file = FileId(self.last_file);
                match self.transfer.store().open_file(file, fd) {
                    Ok(identity) => Request::OpenFile {
                        file,
                        identity,
                        offset: body.offset,
                        length: body.length,
                    },
                    Err(error) => {
                        let refused = plain(Code::NotAFile, &error.to_string());
                        return self.refuse(session, request, &refused);
                    }
                }
            }
        };
        self.apply(Event::Request { session, request, body });
    }

    /// Answers a request without the engine.
    pub fn refuse(&mut self, session: SessionId, request: RequestId, refused: &Refused) {
        self.push(session, request, refused, Vec::new());
    }

    /// The connection is gone. Answers whether the process must be watched until it is gone too.
    pub fn closed(&mut self, session: SessionId) -> bool {
        self.connections.remove(&session);
        self.apply(Event::SessionClosed { session });
        self.engine.has_session(session)
    }

    /// The process is gone.
    pub fn died(&mut self, session: SessionId) {
        self.apply(Event::ProcessDied { session });
    }

    /// Time has passed.
    pub fn tick(&mut self) {
        self.apply(Event::Tick);
    }

    /// The daemon ends: VRAM frames that are not made yet never are.
    pub fn stop_growing(&mut self) {
        self.engine.stop_growing();
    }

    /// Handles all completions.
    pub fn completions(&mut self) {
        loop {
            let mut events = std::mem::take(&mut self.events);
            self.transfer.poll(&mut events);
            if events.is_empty() {
                self.events = events;
                break;
            }
            for event in events.drain(..) {
                self.apply(event);
            }
            self.events = events;
            self.settle();
        }
    }

    fn apply(&mut self, event: Event) {
        let now = self.now_us();
        let mut outbox = std::mem::take(&mut self.outbox);
        self.engine.apply(event, now, &mut outbox);
        for command in outbox.drain(..) {
            self.obey(command);
        }
        self.outbox = outbox;
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Transfer { tag, hop } => self.transfer.start(tag, hop),
            Command::CloseFile(file) => self.transfer.close_file(file),
            Command::Export { session, request, frames } => {
                self.export(session, request, &frames);
            }
            Command::Revoke { session, frames } => self.revoke(session, frames),
            Command::Reply { session, request, reply } => match reply {
                Reply::Allocated { allocation, pages } => {
                    let message = wire::Allocated { allocation, pages };
                    self.push(session, request, &message, Vec::new());
                }
                Reply::Done => self.push(session, request, &wire::Done {}, Vec::new()),
                Reply::Mapped(mapped) => self.push(session, request, &mapped, Vec::new()),
                Reply::Quotas(quotas) => {
                    self.push(session, request, &wire::Quotas { quotas }, Vec::new());
                }
                Reply::WorkingSets(sets) => self.push(session, request, &*sets, Vec::new()),
                Reply::Stats(stats) => self.push(session, request, &*stats, Vec::new()),
                Reply::Refused(refused) => self.push(session, request, &*refused, Vec::new()),
            },
        }
    }

    fn export(&mut self, session: SessionId, request: RequestId, frames: &[VramFrame]) {
        for frames in frames.chunks(usize::from(FDS_PER_MESSAGE_MAX)) {
            let device = self.transfer.device();
            let fds: Result<Vec<_>, _> = frames.iter().map(|frame| device.export(*frame)).collect();
            match fds {
                Ok(fds) => {
                    let message = wire::Frames { frames: frames.to_vec() };
                    self.push(session, request, &message, fds);
                }
                Err(error) => {
                    tracing::error!(session = session.0, "cannot export frames: {error}");
                    return self.break_off(session);
                }
            }
        }
    }

    fn revoke(&mut self, session: SessionId, frames: Vec<VramFrame>) {
        let Some(connection) = self.connections.get_mut(&session) else { return };
        let Some(events) = &connection.events else { return };
        let mut outgoing = Outgoing::default();
        let message = wire::Revoke { frames };
        let sent = outgoing
            .push(RequestId(0), &message, Vec::new())
            .is_ok_and(|()| matches!(outgoing.flush(events), Ok(Flushed::All)));
        if !sent {
            // Half an event is of no use, and a client that lets events pile up handles none.
            tracing::warn!(session = session.0, "the client does not read its events");
            connection.events = None;
        }
    }

    /// Appends a message to a connection.
    pub fn push<M: wire::Message>(
        &mut self,
        session: SessionId,
        request: RequestId,
        message: &M,
        fds: Vec<OwnedFd>,
    ) {
        let Some(connection) = self.connections.get_mut(&session) else { return };
        if connection.broken {
            // What was to come before this is missing: the client would misread it.
            return;
        }
        if let Err(error) = connection.outgoing.push(request, message, fds) {
            tracing::error!(session = session.0, "cannot send: {error}");
            return self.break_off(session);
        }
        if !connection.touched {
            connection.touched = true;
            self.touched.push(session);
        }
    }

    fn break_off(&mut self, session: SessionId) {
        if let Some(connection) = self.connections.get_mut(&session) {
            connection.broken = true;
            connection.wake.notify_one();
        }
    }

    /// After a batch of events: starts what they commanded, sends what they answered.
    pub fn settle(&mut self) {
        self.transfer.submit();
        for session in std::mem::take(&mut self.touched) {
            if self.flush(session) == Flushed::Blocked
                && let Some(connection) = self.connections.get(&session)
            {
                // Its task waits for the socket to take more.
                connection.wake.notify_one();
            }
        }
        let deadline = self.engine.next_deadline();
        if deadline != self.deadline {
            self.deadline = deadline;
            self.timer.notify_one();
        }
    }

    /// Sends what the session's socket takes. A session that can't go on is marked broken.
    pub fn flush(&mut self, session: SessionId) -> Flushed {
        let Some(connection) = self.connections.get_mut(&session) else { return Flushed::All };
        connection.touched = false;
        let result = connection.outgoing.flush(&*connection.socket);
        match result {
            Ok(Flushed::Blocked) if connection.outgoing.is_over_limit() => {
                tracing::warn!(session = session.0, "the client does not read: disconnected");
                self.break_off(session);
                Flushed::All
            }
            Ok(flushed) => flushed,
            Err(error) => {
                tracing::debug!(session = session.0, "cannot send: {error}");
                self.break_off(session);
                Flushed::All
            }
        }
    }

    /// Whether the session must end, and whether it has something to send.
    #[must_use]
    pub fn state_of(&self, session: SessionId) -> (bool, bool) {
        self.connections.get(&session).map_or((true, false), |c| (c.broken, !c.outgoing.is_empty()))
    }
}
