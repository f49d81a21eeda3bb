//! What the daemon asks for on its own: a thread that waits on the event socket and gives revoked frames back.
//!
//! It ends when either side closes the event socket, which `Client` does before it says goodbye.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;

use lapis_proto::frame::FrameReader;
use lapis_proto::kind::Kind;
use lapis_proto::message::{Revoke, Revoked};
use nix::sys::signal::{SigSet, SigmaskHow};

use crate::error::{Error, ProtocolError};
use crate::lock;
use crate::session::Shared;

/// The thread parses short messages and makes system calls.
const STACK_BYTES: usize = 128 * 1024;

/// The thread, and the socket it waits on.
#[derive(Debug)]
pub(crate) struct Events {
    socket: Arc<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Events {
    /// Starts the thread. It takes no signals: those are for the program's own threads.
    pub(crate) fn start(socket: UnixStream, shared: Arc<Shared>) -> Result<Events, Error> {
        let failed = |call| move |source| Error::Io { call, source };
        let socket = Arc::new(socket);
        let theirs = Arc::clone(&socket);
        let before = SigSet::all()
            .thread_swap_mask(SigmaskHow::SIG_SETMASK)
            .map_err(io::Error::from)
            .map_err(failed("pthread_sigmask"))?;
        let thread = std::thread::Builder::new()
            .name("lapis-events".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || run(&theirs, &shared));
        before.thread_set_mask().map_err(io::Error::from).map_err(failed("pthread_sigmask"))?;
        Ok(Events { socket, thread: Some(thread.map_err(failed("thread spawn"))?) })
    }

    /// Ends the thread and waits for it.
    pub(crate) fn stop(&mut self) {
        // Fails only if the daemon has closed it already, which ends the thread as well.
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // It doesn't panic; if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }

    /// In a forked child there is no such thread.
    pub(crate) fn forget(&mut self) {
        std::mem::forget(self.thread.take());
    }
}

fn run(socket: &UnixStream, shared: &Shared) {
    let mut reader = FrameReader::new();
    while let Ok(1..) = reader.receive(socket) {
        if handle(&mut reader, shared).is_err() {
            // The daemon sees the event socket close, and quarantines what it can't have back.
            let _ = socket.shutdown(Shutdown::Both);
            return;
        }
    }
}

fn handle(reader: &mut FrameReader, shared: &Shared) -> Result<(), Error> {
    while let Some(frame) = reader.next_frame().map_err(ProtocolError::from)? {
        if frame.header.kind != Kind::Revoke {
            let (kind, request) = (frame.header.kind, frame.header.request.0);
            return Err(ProtocolError::Unsolicited { kind, request }.into());
        }
        let revoke: Revoke = frame.decode().map_err(ProtocolError::from)?;
        let frames = lock(&shared.memory).revoke(&revoke.frames, shared.connection.frames())?;
        if !frames.is_empty() {
            shared.connection.post(&Revoked { frames })?;
        }
    }
    Ok(())
}
