//! The reactor: one thread that runs the sessions, the engine, the ring and the timers.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::task::LocalSet;

use crate::config::{Config, ConfigError, IoEngine};
use crate::device::cuda::Gpu;
use crate::device::open::{self, OpenError};
use crate::device::{Device, DeviceFault};
use crate::engine::Engine;
use crate::engine::limits::Limits;
use crate::metrics::endpoint::Endpoint;
use crate::metrics::{Board, DeviceFacts, Phase};
use crate::reload;
use crate::server::core::Core;
use crate::server::listener::{self, ListenError, Listener, SocketFile};
use crate::server::session;
use crate::store::spill::{Spill, SpillError};
use crate::store::{AnyStore, StoreSetupError};
use crate::sys::descriptors;
use crate::sys::memory::MemoryError;
use crate::sys::systemd::{InheritError, Inherited, Notifier};
use crate::sys::waker::Waker;
use crate::sys::watch;
use crate::transfer::Transfer;

/// How long transfers under way may take when the daemon stops.
const DRAIN_WAIT: Duration = Duration::from_secs(10);
/// How long to wait after `accept` failed, or for descriptors.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// Between two signs of life.
const PULSE: Duration = Duration::from_millis(500);
/// Between two looks at what the service manager is told for people.
const STATUS: Duration = Duration::from_secs(2);

/// The daemon can't start, or had to end.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration can't be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The RAM tier can't be had.
    #[error("cannot make the RAM tier: {0}")]
    Memory(#[from] MemoryError),
    /// The VRAM tier can't be had.
    #[error("cannot make the VRAM tier: {0}")]
    Device(#[from] DeviceFault),
    /// The spill can't be had.
    #[error("cannot make the spill: {0}")]
    Spill(#[from] SpillError),
    /// Neither io_uring nor threads can be had.
    #[error("cannot set up file I/O: {0}")]
    Store(#[from] StoreSetupError),
    /// io_uring is asked for by name and refused.
    #[error("io = \"uring\" is configured, but io_uring is refused here; use io = \"auto\"")]
    NoUring,
    /// A quota that the engine can't keep.
    #[error("cannot set a quota: {0}")]
    Quota(String),
    /// Sockets from systemd can't be used.
    #[error(transparent)]
    Inherit(#[from] InheritError),
    /// The socket can't be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Metrics can't be served.
    #[error("cannot serve metrics on {address}: {source}; choose another address with --metrics")]
    Metrics {
        /// Where.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// The system refuses something that everything needs.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// Something under way did not end when the daemon was to stop.
    #[error(
        "a transfer does not end: gave up after {DRAIN_WAIT:?}; the device, or a disk that is read or written, hangs: \
         see the kernel's log"
    )]
    Wedged,
    /// The device failed for good.
    #[error("the device is lost; the daemon ends so that it can be started afresh")]
    DeviceLost,
}

impl From<OpenError> for StartError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Device(fault) => fault.into(),
            OpenError::Memory(error) => error.into(),
        }
    }
}

/// Tells a running daemon to stop: when the sender sends or is dropped.
pub type Stop = oneshot::Receiver<()>;

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> StartError {
    move |source| StartError::System { what, source }
}

/// Reads the configuration again; an error is for people, and nothing changes then.
pub type Reload = Box<dyn FnMut() -> Result<Config, String>>;

/// What a daemon that is a service has around it.
pub struct Service {
    /// Who wants to know how it is.
    pub notifier: Notifier,
    /// Sockets that are there already.
    pub inherited: Inherited,
    /// What `SIGHUP` does.
    pub reload: Reload,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("inherited", &self.inherited).finish_non_exhaustive()
    }
}

impl Service {
    /// Nothing.
    fn none() -> Self {
        let reload = || Err("an embedded daemon has no configuration file".to_owned());
        Self {
            notifier: Notifier::silent(),
            inherited: Inherited::default(),
            reload: Box::new(reload),
        }
    }
}

/// Runs a daemon on this thread until `SIGTERM` or `SIGINT`.
///
/// # Errors
/// [`StartError`].
pub fn run(config: &Config, service: Service) -> Result<(), StartError> {
    block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        let mut term = signal(SignalKind::terminate()).map_err(system("catch SIGTERM"))?;
        let mut hangups = signal(SignalKind::hangup()).map_err(system("catch SIGHUP"))?;
        let mut int = signal(SignalKind::interrupt()).map_err(system("catch SIGINT"))?;
        let stop = async move {
            tokio::select! {
                _ = term.recv() => "SIGTERM",
                _ = int.recv() => "SIGINT",
            }
        };
        let hangup = async || hangups.recv().await.unwrap_or(());
        serve(config, service, hangup, || (), stop).await
    })
}

fn block_on<T>(future: impl Future<Output = Result<T, StartError>>) -> Result<T, StartError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(system("start the reactor"))?;
    LocalSet::new().block_on(&runtime, future)
}

/// The movers and the engine that a configuration asks for.
fn build(config: &Config, waker: &Waker, board: &Arc<Board>) -> Result<Core, StartError> {
    config.validate()?;
    let gpu = open::gpu(config).map_err(DeviceFault::from)?;
    let free = gpu.as_ref().map(Gpu::memory).transpose().map_err(DeviceFault::from)?;
    let settled = config.settled(free.map(|(free, _)| free))?;
    if config.vram != settled.vram {
        let (vram, nvme) = (settled.vram, settled.nvme_size());
        tracing::info!(%vram, %nvme, "vram is {} of the GPU's free memory", config.vram);
        if let Some(warning) = settled.warning() {
            tracing::warn!("{warning}");
        }
    }
    let config = &settled;
    let (device, pool) = open::device(config, gpu, waker)?;
    let unified = device.info().unified;
    let slots = config.spill_slots();
    let spill = (slots > 0)
        .then(|| Spill::create(&config.spill_dir, slots, config.page_size))
        .transpose()?;
    let limits = Limits {
        page_size: config.page_size,
        vram_frames: device.info().frames,
        ram_frames: if unified { 0 } else { pool.frames() },
        unified,
        spill_slots: slots,
        depth: config.queue_depth,
        sessions_max: config.limits.sessions_max,
        allocations_per_session_max: config.limits.allocations_max,
        mappings_per_session_max: config.limits.mappings_max,
        waiting_per_session_max: config.limits.requests_max,
        map_wait_us_max: u64::try_from(config.limits.map_wait_max.as_micros()).unwrap_or(u64::MAX),
        pages_max: u64::from(config.limits.pages_max),
    };
    let frames_ready = device.info().frames_ready;
    tracing::info!(
        vram_frames = limits.vram_frames,
        vram_pages = device.info().page_kind,
        ram_frames = limits.ram_frames,
        ram_pages = pool.page_kind().name(),
        spill_slots = slots,
        "tiers are ready"
    );
    let force_threads = config.io == IoEngine::Threads;
    let store = AnyStore::open(pool, spill, config.queue_depth, waker.clone(), force_threads)?;
    if let (IoEngine::Uring, AnyStore::Threads(_)) = (config.io, &store) {
        return Err(StartError::NoUring);
    }
    let info = device.info();
    board.describe(DeviceFacts {
        kind: info.kind,
        uuid: info.uuid,
        name: info.name.clone(),
        unified: info.unified,
        store: store.kind(),
    });
    let transfer = Transfer::new(store, device);
    let mut engine = Engine::new(limits);
    engine.begin_with(frames_ready);
    for quota in &config.quotas {
        engine.put_quota(*quota).map_err(|refused| StartError::Quota(refused.message))?;
    }
    Ok(Core::new(engine, transfer, config.admin_gid, Arc::clone(board)))
}

async fn serve(
    config: &Config,
    service: Service,
    hangup: impl AsyncFnMut(),
    ready: impl FnOnce(),
    stop: impl Future<Output = &'static str>,
) -> Result<(), StartError> {
    let waker = Waker::new().map_err(|errno| system("make an eventfd")(errno.into()))?;
    // The socket first: a second daemon must not touch memory or spill before it learns that there is one.
    let Service { notifier, inherited, reload } = service;
    let listener = match inherited.clients {
        Some(socket) => Listener::adopt(socket)?,
        None => Listener::bind(&config.socket, config.socket_mode)?,
    };
    notifier.status(format_args!("Making the tiers: VRAM {}, RAM {}", config.vram, config.ram));
    let board = Arc::new(Board::new(waker.clone()));
    // Before the tiers, which take their time: that the daemon starts is to be seen as well.
    let _endpoint = serve_metrics(config, inherited.metrics, &board)?;
    let core = Rc::new(RefCell::new(build(config, &waker, &board)?));
    let completions = waker.as_fd().try_clone_to_owned().and_then(watch::readable);
    let completions = completions.map_err(system("watch for completions"))?;
    {
        // The VRAM frames that are not there yet.
        let mut core = core.borrow_mut();
        core.tick();
        core.settle();
    }
    board.enter(Phase::Serving);
    ready();
    notifier.ready();
    tracing::info!("ready on {}", listener.path().display());
    let ended = tokio::select! {
        reason = stop => {
            tracing::info!("stopping: {reason}");
            Ok(())
        }
        () = accept(&core, &listener) => Ok(()),
        () = timers(&core) => Ok(()),
        () = pulse(&core, &notifier, true) => Ok(()),
        () = reload_on(hangup, &core, &notifier, config, reload) => Ok(()),
        error = complete(&core, &waker, &completions, &board) => Err(error),
    };
    board.enter(Phase::Stopping);
    notifier.stopping();
    // No new clients; what is moving ends before its buffers go.
    drop(listener);
    let drained = tokio::select! {
        drained = drain(&core, &waker, &completions, &board) => drained,
        () = pulse(&core, &notifier, false) => Ok(()),
    };
    ended.and(drained)
}

/// Starts the thread that answers for metrics and health, if it is to be.
fn serve_metrics(
    config: &Config,
    inherited: Option<std::os::unix::net::UnixListener>,
    board: &Arc<Board>,
) -> Result<Option<(Endpoint, Option<SocketFile>)>, StartError> {
    let address = config.metrics;
    if address.is_none() && config.metrics_socket.is_none() && inherited.is_none() {
        return Ok(None);
    }
    let failed = |source| StartError::Metrics {
        address: address.map(|address| address.to_string()).unwrap_or_default(),
        source,
    };
    let tcp = address.map(std::net::TcpListener::bind).transpose().map_err(failed)?;
    let (unix, file) = match (inherited, &config.metrics_socket) {
        (Some(socket), _) => (Some(socket), None),
        (None, Some(path)) => {
            let (socket, file) = listener::bind(path, config.socket_mode)?;
            (Some(socket), Some(file))
        }
        (None, None) => (None, None),
    };
    let endpoint = Endpoint::start(Arc::clone(board), tcp, unix);
    let endpoint = endpoint.map_err(system("start the thread of the metrics"))?;
    if let Some(address) = endpoint.address() {
        tracing::info!("metrics on http://{address}/metrics");
        if !address.ip().is_loopback() {
            tracing::warn!("everyone who reaches {address} can read the metrics");
        }
    }
    Ok(Some((endpoint, file)))
}

/// Says that the reactor turns, to whoever wants to know.
async fn pulse(core: &Rc<RefCell<Core>>, notifier: &Notifier, serving: bool) {
    let watchdog = notifier.watchdog();
    // Twice as often as need be, at least.
    let rest = watchdog.map_or(PULSE, |longest| PULSE.min(longest / 2));
    let mut said = String::new();
    let mut since_status = STATUS;
    loop {
        core.borrow().beat();
        if watchdog.is_some() {
            notifier.alive();
        }
        if serving && since_status >= STATUS {
            since_status = Duration::ZERO;
            let line = core.borrow().status_line();
            if line != said {
                notifier.status(&line);
                said = line;
            }
        }
        tokio::time::sleep(rest).await;
        since_status += rest;
    }
}

/// Reads the configuration again, whenever it is told to.
async fn reload_on(
    mut hangup: impl AsyncFnMut(),
    core: &Rc<RefCell<Core>>,
    notifier: &Notifier,
    config: &Config,
    mut reload: Reload,
) {
    let mut config = config.clone();
    loop {
        hangup().await;
        notifier.reloading();
        match reload() {
            Ok(new) => config = reload::apply(&mut core.borrow_mut(), &config, &new),
            Err(error) => tracing::error!("reload: nothing is changed: {error}"),
        }
        notifier.ready();
    }
}

async fn accept(core: &Rc<RefCell<Core>>, listener: &Listener) {
    loop {
        wait_for_descriptors(listener).await;
        match listener.socket().accept().await {
            Ok((stream, _address)) => {
                let core = Rc::clone(core);
                // Ends with its client, or with the daemon.
                let _task = tokio::task::spawn_local(session::serve(core, stream));
            }
            Err(error) => {
                tracing::warn!("cannot accept a client: {error}");
                tokio::time::sleep(ACCEPT_REST).await;
            }
        }
    }
}

/// Clients wait outside while few descriptors are left.
async fn wait_for_descriptors(listener: &Listener) {
    if !descriptors::are_scarce(listener.socket()) {
        return;
    }
    tracing::warn!("few descriptors are left: clients wait until some are free; raise LimitNOFILE");
    while descriptors::are_scarce(listener.socket()) {
        tokio::time::sleep(ACCEPT_REST).await;
    }
}

async fn timers(core: &Rc<RefCell<Core>>) {
    let changed = Rc::clone(&core.borrow().timer);
    loop {
        let (deadline, now) = {
            let core = core.borrow();
            (core.next_deadline(), core.now_us())
        };
        let Some(deadline) = deadline else {
            changed.notified().await;
            continue;
        };
        let wait = Duration::from_micros(deadline.saturating_sub(now));
        tokio::select! {
            () = changed.notified() => {}
            () = tokio::time::sleep(wait) => {
                let mut core = core.borrow_mut();
                core.tick();
                core.settle();
            }
        }
    }
}

async fn complete(
    core: &Rc<RefCell<Core>>,
    waker: &Waker,
    completions: &AsyncFd<OwnedFd>,
    board: &Board,
) -> StartError {
    loop {
        match completions.readable().await {
            Ok(mut ready) => {
                waker.clear();
                ready.clear_ready();
            }
            Err(error) => return system("watch for completions")(error),
        }
        let mut core = core.borrow_mut();
        core.completions();
        core.settle();
        if board.is_wanted() {
            board.publish(core.snapshot());
        }
        if core.device_lost() {
            return StartError::DeviceLost;
        }
    }
}

/// Waits until nothing moves any more.
async fn drain(
    core: &Rc<RefCell<Core>>,
    waker: &Waker,
    completions: &AsyncFd<OwnedFd>,
    board: &Board,
) -> Result<(), StartError> {
    core.borrow_mut().stop_growing();
    let drained = tokio::time::timeout(DRAIN_WAIT, async {
        while core.borrow().is_moving() {
            match completions.readable().await {
                Ok(mut ready) => {
                    waker.clear();
                    ready.clear_ready();
                }
                Err(error) => return tracing::error!("cannot watch for completions: {error}"),
            }
            core.borrow_mut().completions();
            if board.is_wanted() {
                board.publish(core.borrow().snapshot());
            }
        }
    });
    drained.await.map_err(|_elapsed| {
        // What is under way owns its buffers, and would be waited for when they are dropped.
        std::mem::forget(Rc::clone(core));
        StartError::Wedged
    })
}

/// A daemon on a thread of this process, on a socket of its own. Stops when dropped.
#[derive(Debug)]
pub struct Embedded {
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<Result<(), StartError>>>,
    // Last, so that it is removed after the daemon has stopped.
    _directory: PrivateDirectory,
}

impl Embedded {
    /// Starts a daemon; returns once it serves. `config.socket` is ignored.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(mut config: Config) -> Result<Self, StartError> {
        let directory = PrivateDirectory::new().map_err(system("make a directory for a socket"))?;
        let socket = directory.0.join("lapis.sock");
        config.socket.clone_from(&socket);
        config.socket_mode = 0o600;
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("lapisd".to_owned())
            .spawn(move || {
                let stop = async move {
                    // A dropped sender says the same as a message.
                    let _dropped = stopped.await;
                    "its owner is done"
                };
                // The receiver waits until it is told or this thread has failed.
                let ready = move || ready.send(()).expect("the starter waits");
                let hangup = async || std::future::pending().await;
                block_on(serve(&config, Service::none(), hangup, ready, stop))
            })
            .map_err(system("start a thread"))?;
        if is_ready.recv().is_err() {
            return match thread.join() {
                Ok(Err(error)) => Err(error),
                Ok(Ok(())) | Err(_) => Err(system("start the embedded daemon")(
                    std::io::Error::other("its thread ended early"),
                )),
            };
        }
        Ok(Self { socket, stop: Some(stop), thread: Some(thread), _directory: directory })
    }

    /// Where it listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        drop(self.stop.take());
        match self.thread.take().map(std::thread::JoinHandle::join) {
            None | Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => tracing::error!("the embedded daemon failed: {error}"),
            Some(Err(_panic)) => tracing::error!("the embedded daemon panicked"),
        }
    }
}

/// A directory only we can enter; removed when dropped.
#[derive(Debug)]
struct PrivateDirectory(PathBuf);

impl PrivateDirectory {
    fn new() -> std::io::Result<Self> {
        let parent = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let parent = parent.filter(|path| path.is_dir()).unwrap_or_else(std::env::temp_dir);
        let template = parent.join("lapis-XXXXXX");
        Ok(Self(nix::unistd::mkdtemp(&template)?))
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}
