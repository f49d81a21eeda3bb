//! What all handles of one client share, and its end: addresses first, then frames, then goodbye.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use lapis_proto::frame::FrameReader;
use lapis_proto::message::Welcome;

use crate::connection::Connection;
use crate::error::Error;
use crate::events::Events;
use crate::frames::FrameTable;
use crate::memory::Memory;

/// What the event thread needs too.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) connection: Connection,
    pub(crate) memory: Mutex<Memory>,
}

/// One connection. Allocations and mappings keep it; by the time it is dropped none is left, nor any address.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) shared: Arc<Shared>,
    pub(crate) welcome: Welcome,
    events: Events,
}

impl Session {
    /// After the handshake on `stream`; `reader` may hold bytes that came after it.
    pub(crate) fn start(
        stream: UnixStream,
        reader: FrameReader,
        events: UnixStream,
        welcome: Welcome,
    ) -> Result<Session, Error> {
        let frames = FrameTable::new(welcome.page_size, welcome.vram_frames);
        let connection = Connection::new(stream, reader, frames);
        let shared = Arc::new(Shared { connection, memory: Mutex::default() });
        let events = Events::start(events, Arc::clone(&shared))?;
        Ok(Session { shared, welcome, events })
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.shared.connection
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.connection().is_forked() {
            self.events.forget();
            return;
        }
        self.events.stop();
        self.connection().goodbye();
    }
}
