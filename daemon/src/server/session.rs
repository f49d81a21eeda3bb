//! One connection from hello to the peer's death.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use lapis_proto::code::Code;
use lapis_proto::frame::{FrameError, FrameReader};
use lapis_proto::handshake;
use lapis_proto::header::HeaderError;
use lapis_proto::ids::{RequestId, SessionId};
use lapis_proto::message::{Hello, Kind, Refused};
use lapis_proto::version::VersionUnsupported;
use nix::sys::socket::{SockType, UnixAddr, getsockname, getsockopt, sockopt};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::core::{Core, Peer};
use super::outgoing::{Flushed, Outgoing};
use super::requests::parse;
use crate::engine::ids::Domain;
use crate::engine::refusal::plain;
use crate::sys::{peer, watch};

/// A client that connects and says nothing is let go.
const HELLO_WAIT: Duration = Duration::from_secs(10);
/// Requests handled for one client before the others have a turn.
const REQUESTS_PER_TURN: usize = 256;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error("the client closed the connection")]
    Eof,
    #[error("no hello in {HELLO_WAIT:?}")]
    NoHello,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("{}", .0.message)]
    Refused(Box<Refused>),
    #[error("connection failed: {0}")]
    Io(#[from] io::Error),
    #[error("disconnected by the daemon")]
    Broken,
}

/// Serves a connection until the client is gone and holds nothing.
pub async fn serve(core: Rc<RefCell<Core>>, stream: UnixStream) {
    let stream = Rc::new(stream);
    let peer = match stream.peer_cred() {
        Ok(peer) => peer,
        Err(error) => return tracing::warn!("a client without credentials: {error}"),
    };
    let pid = peer.pid().unwrap_or(0);
    let pidfd = peer::pidfd(&*stream, pid);
    let mut reader = FrameReader::new();
    let others = peer::groups(&*stream).unwrap_or_else(|error| {
        tracing::warn!(pid, "cannot find out a client's supplementary groups: {error}");
        Vec::new()
    });
    let gids = std::iter::once(peer.gid()).chain(others);
    let admin = core.borrow().is_admin(peer.uid(), gids);
    let who = Peer { domain: Domain(peer.uid()), gid: peer.gid(), admin };
    let opened = match timeout(HELLO_WAIT, hello(&core, &stream, who, &mut reader)).await {
        Ok(opened) => opened,
        Err(_elapsed) => Err(End::NoHello),
    };
    let (session, wake) = match opened {
        Ok(opened) => {
            core.borrow_mut().connection_counts.opened += 1;
            opened
        }
        Err(end) => {
            match end {
                End::Refused(_) | End::Frame(_) => core.borrow_mut().connection_counts.refused += 1,
                End::Eof | End::NoHello | End::Io(_) | End::Broken => {
                    core.borrow_mut().connection_counts.failed += 1;
                }
            }
            say_why(&stream, &end);
            return tracing::info!(uid = peer.uid(), pid, "no session: {end}");
        }
    };
    tracing::info!(session = session.0, uid = peer.uid(), pid, "session opened");
    let end = match requests(&core, session, &stream, &wake, &mut reader).await {
        Ok(never) => match never {},
        Err(end) => end,
    };
    if let End::Frame(_) | End::Refused(_) = &end {
        core.borrow_mut().flush(session);
        say_why(&stream, &end);
    }
    tracing::info!(session = session.0, "session closed: {end}");
    // The descriptors of the connection go before the wait for the process.
    drop((reader, stream));
    let held = {
        let mut core = core.borrow_mut();
        let held = core.closed(session);
        core.settle();
        held
    };
    if held {
        wait_for_death(pidfd, session).await;
        let mut core = core.borrow_mut();
        core.died(session);
        core.settle();
        tracing::info!(session = session.0, "process {pid} ended: all it held is free");
    }
}

async fn wait_for_death(pidfd: io::Result<OwnedFd>, session: SessionId) {
    let watched = match pidfd {
        Ok(fd) => watch::readable(fd),
        // It was dead when it came.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => Err(error),
    };
    let result = match &watched {
        Ok(fd) => fd.readable().await.map(|_ready| ()),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    };
    if let Err(error) = result {
        // Nothing will tell us that it died, so what it may still write to is never used again.
        tracing::error!(session = session.0, "cannot watch the client's process: {error}");
        std::future::pending::<()>().await;
    }
}

/// Tells a client why its connection ends, if the socket takes it.
fn say_why(stream: &UnixStream, end: &End) {
    let refused = match end {
        End::Refused(refused) => (**refused).clone(),
        End::Frame(FrameError::Header(HeaderError::Version { found })) => {
            let (client_min, client_max) = (*found, *found);
            handshake::version_refused(&VersionUnsupported { client_min, client_max })
        }
        End::Frame(error) => plain(Code::BadRequest, &error.to_string()),
        End::Eof | End::NoHello | End::Io(_) | End::Broken => return,
    };
    let mut outgoing = Outgoing::default();
    if outgoing.push(RequestId(0), &refused, Vec::new()).is_ok() {
        // The connection ends either way.
        let _sent = outgoing.flush(stream);
    }
}

async fn hello(
    core: &Rc<RefCell<Core>>,
    stream: &Rc<UnixStream>,
    peer: Peer,
    reader: &mut FrameReader,
) -> Result<(SessionId, Rc<Notify>), End> {
    loop {
        if let Some(mut frame) = reader.next_frame()? {
            let request = frame.header.request;
            if frame.header.kind != Kind::Hello {
                let message = format!("{:?} came before Hello", frame.header.kind);
                return Err(End::Refused(Box::new(plain(Code::BadRequest, &message))));
            }
            let hello: Hello = frame.decode().map_err(|error| {
                End::Refused(Box::new(plain(Code::BadRequest, &error.to_string())))
            })?;
            let agreed = handshake::accept(&hello).map_err(|r| End::Refused(Box::new(r)))?;
            let events = frame.fds.pop().map(event_socket).transpose()?;
            let mut core = core.borrow_mut();
            let (session, wake) = core
                .open(peer, Rc::clone(stream), events)
                .map_err(|refused| End::Refused(Box::new(refused)))?;
            tracing::debug!(
                session = session.0,
                name = hello.client_name.escape_debug().to_string()
            );
            let welcome = core.welcome(session, agreed.version, agreed.features);
            core.push(session, request, &welcome, Vec::new());
            core.settle();
            return Ok((session, wake));
        }
        receive(stream, reader).await?;
    }
}

/// The client's event socket: checked, and never waited for.
fn event_socket(fd: OwnedFd) -> Result<OwnedFd, End> {
    let refused = |message: &str| End::Refused(Box::new(plain(Code::BadRequest, message)));
    let is_stream = getsockopt(&fd, sockopt::SockType).is_ok_and(|kind| kind == SockType::Stream);
    let address = getsockname::<UnixAddr>(fd.as_raw_fd());
    if !is_stream || address.is_err() {
        return Err(refused("the descriptor in Hello is not a Unix stream socket"));
    }
    Ok(fd)
}

async fn receive(stream: &UnixStream, reader: &mut FrameReader) -> Result<(), End> {
    loop {
        stream.readable().await?;
        match stream.try_io(Interest::READABLE, || reader.try_receive(stream)) {
            Ok(0) => return Err(End::Eof),
            Ok(_count) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
}

async fn requests(
    core: &Rc<RefCell<Core>>,
    session: SessionId,
    stream: &UnixStream,
    wake: &Notify,
    reader: &mut FrameReader,
) -> Result<std::convert::Infallible, End> {
    loop {
        handle_buffered(core, session, reader).await?;
        let (broken, blocked) = core.borrow().state_of(session);
        if broken {
            return Err(End::Broken);
        }
        if blocked {
            // A client that does not read its replies is not asked for more requests.
            tokio::select! {
                ready = stream.writable() => ready?,
                () = wake.notified() => {}
            }
            send(core, session, stream)?;
            continue;
        }
        tokio::select! {
            received = receive(stream, reader) => received?,
            () = wake.notified() => {}
        }
    }
}

fn send(core: &Rc<RefCell<Core>>, session: SessionId, stream: &UnixStream) -> Result<(), End> {
    let sent = stream.try_io(Interest::WRITABLE, || {
        match core.borrow_mut().flush(session) {
            Flushed::All => Ok(()),
            // Tells the reactor to wait until the socket is writable again.
            Flushed::Blocked => Err(io::ErrorKind::WouldBlock.into()),
        }
    });
    match sent {
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error.into()),
        _ => Ok(()),
    }
}

/// Handles what has been received; yields now and then, so that one client can't starve the others.
async fn handle_buffered(
    core: &Rc<RefCell<Core>>,
    session: SessionId,
    reader: &mut FrameReader,
) -> Result<(), End> {
    loop {
        let mut handled = 0;
        {
            let mut core = core.borrow_mut();
            while handled < REQUESTS_PER_TURN {
                let frame = match reader.next_frame() {
                    Ok(Some(frame)) => frame,
                    Ok(None) => break,
                    Err(error) => {
                        core.settle();
                        return Err(error.into());
                    }
                };
                handled += 1;
                let (request, kind) = (frame.header.request, frame.header.kind);
                core.request(session, request, kind, parse(frame));
            }
            if handled > 0 {
                core.settle();
            }
        }
        if handled < REQUESTS_PER_TURN {
            return Ok(());
        }
        tokio::task::yield_now().await;
    }
}
