//! What all handles of one client share, and its end: addresses first, then frames, then goodbye.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, OnceLock};

use lapis_proto::frame::FrameReader;
use lapis_proto::message::{DeviceKind, Welcome};

use crate::connection::Connection;
use crate::cuda::gpu::Gpu;
use crate::drains::{Drains, WAIT_MAX};
use crate::error::Error;
use crate::events::Events;
use crate::frames::FrameTable;
use crate::lock;
use crate::memory::Memory;
use crate::plan::Recorders;

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
    /// Mappings that end when the GPU has come to some point.
    pub(crate) drains: Drains,
    /// Numbers plans.
    pub(crate) plans: AtomicU32,
    pub(crate) recorders: Mutex<Recorders>,
    events: Events,
    /// The CUDA driver's library.
    libcuda: Option<PathBuf>,
    /// Set once the GPU is in use.
    gpu: OnceLock<Arc<Gpu>>,
    /// Held while the driver starts.
    gpu_starting: Mutex<()>,
}

impl Session {
    /// After the handshake on `stream`; `reader` may hold bytes that came after it.
    pub(crate) fn start(
        (stream, reader): (UnixStream, FrameReader),
        events: UnixStream,
        welcome: Welcome,
        libcuda: Option<PathBuf>,
    ) -> Result<Session, Error> {
        let frames = FrameTable::new(welcome.page_size, welcome.vram_frames, welcome.device);
        let connection = Connection::new(stream, reader, frames);
        let shared = Arc::new(Shared { connection, memory: Mutex::default() });
        let events = Events::start(events, Arc::clone(&shared))?;
        Ok(Session {
            shared,
            welcome,
            drains: Drains::new(WAIT_MAX),
            plans: AtomicU32::new(0),
            recorders: Mutex::default(),
            events,
            libcuda,
            gpu: OnceLock::new(),
            gpu_starting: Mutex::default(),
        })
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.shared.connection
    }

    /// The GPU that the daemon's frames are on; `None` for a simulated device. The first call starts the driver, so
    /// that clients that only ask for numbers need none. After a failure the next call tries again.
    pub(crate) fn start_gpu(&self) -> Result<Option<&Arc<Gpu>>, Error> {
        match self.welcome.device {
            DeviceKind::Sim => return Ok(None),
            DeviceKind::Cuda => {}
        }
        if self.connection().is_forked() {
            return Err(Error::Forked);
        }
        let _one = lock(&self.gpu_starting);
        if self.gpu.get().is_none() {
            let gpu = Gpu::start(self.libcuda.as_deref(), &self.welcome.device_uuid)?;
            // It is empty: only this thread fills it.
            let _ = self.gpu.set(Arc::new(gpu));
        }
        Ok(self.gpu.get())
    }

    /// The GPU, where mappings are on one.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.gpu.get()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.connection().is_forked() {
            self.events.forget();
            return;
        }
        self.drains.close();
        self.events.stop();
        self.connection().goodbye();
    }
}
