//! The one state behind all calls of a process: devices, and tables of what handles stand for.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::abi::STREAM_LEGACY;
use crate::code::{
    CONTEXT_IS_DESTROYED, Code, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE,
    NO_DEVICE, NOT_INITIALIZED, Outcome, UNKNOWN, require,
};
use crate::config::Config;
use crate::event::Event;
use crate::faults;
use crate::gate::Gate;
use crate::host::Hosts;
use crate::ledger::{self, Ledger};
use crate::memory::Memory;
use crate::space::Space;
use crate::stream::{Kind, Stream};
use crate::work::Work;

static DRIVER: OnceLock<Driver> = OnceLock::new();

/// Contexts have handles unlike any address.
const CONTEXT_BASE: u64 = 0xC7_0000;

thread_local! {
    /// Devices whose contexts this thread has pushed; the last one is current.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// All of it.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) config: Config,
    /// By ordinal.
    pub(crate) devices: Vec<Device>,
    tables: Mutex<Tables>,
    process: u32,
}

/// One device and its primary context.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) physical: u32,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) gate: Gate,
    primary: Mutex<Primary>,
    /// The sticky error, 0 for none. Nothing takes it away but the end of the process.
    fault: AtomicU32,
}

/// The primary context; it exists while it is retained.
#[derive(Debug, Default)]
pub(crate) struct Primary {
    retained: u32,
    null_stream: Option<Arc<Stream>>,
}

/// What handles and addresses stand for.
#[derive(Debug)]
pub(crate) struct Tables {
    next: u64,
    pub(crate) handles: BTreeMap<u64, Handle>,
    pub(crate) space: Space,
    pub(crate) hosts: Hosts,
    pub(crate) streams: BTreeMap<u64, Arc<Stream>>,
    pub(crate) events: BTreeMap<u64, Arc<Event>>,
}

/// A `CUmemGenericAllocationHandle`.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) memory: Arc<Memory>,
    pub(crate) references: u64,
}

impl Driver {
    /// `cuInit`: makes the state, or says that it is there.
    pub(crate) fn initialise() -> Outcome {
        static MAKING: Mutex<()> = Mutex::new(());
        let _one = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if DRIVER.get().is_none() {
            let driver =
                Self::open().inspect_err(|code| eprintln!("fake-cuda: cuInit: {code:?}"))?;
            DRIVER.set(driver).expect("one thread makes it");
        }
        Self::get().map(drop)
    }

    fn open() -> Outcome<Self> {
        let wrong = |why: String| {
            eprintln!("fake-cuda: {why}");
            UNKNOWN
        };
        let config = Config::from_environment().map_err(wrong)?;
        faults::check_environment().map_err(wrong)?;
        require(!config.visible.is_empty(), NO_DEVICE)?;
        let shared = |name: &str| {
            let path = config.directory.join(name);
            ledger::shared_directory(&path).map_err(|error| ledger::said(&path, &error))
        };
        shared("")?;
        shared("events")?;
        let visible = config.visible.iter().enumerate();
        let devices = visible.map(|(ordinal, physical)| Device::open(&config, ordinal, *physical));
        Ok(Self {
            devices: devices.collect::<Outcome<_>>()?,
            tables: Mutex::new(Tables::new(config.host_access)),
            process: std::process::id(),
            config,
        })
    }

    /// The state; `NOT_INITIALIZED` before `cuInit`, and for ever in a child that was forked after it.
    pub(crate) fn get() -> Outcome<&'static Self> {
        let driver = DRIVER.get().ok_or(NOT_INITIALIZED)?;
        require(driver.process == std::process::id(), NOT_INITIALIZED)?;
        Ok(driver)
    }

    /// The state and the device of the calling thread's context, which must be alive and unbroken.
    pub(crate) fn current() -> Outcome<(&'static Self, &'static Device)> {
        let driver = Self::get()?;
        let ordinal = Self::top()?.ok_or(INVALID_CONTEXT)?;
        let device = &driver.devices[ordinal];
        require(device.primary().retained > 0, CONTEXT_IS_DESTROYED)?;
        device.unbroken()?;
        Ok((driver, device))
    }

    /// A fault was injected: a sticky one breaks the calling thread's context.
    pub(crate) fn injected(code: Code) {
        if let (true, Ok((driver, device))) = (code.is_sticky(), Self::current()) {
            driver.break_device(device, code);
        }
    }

    pub(crate) fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A device by its ordinal.
    pub(crate) fn device(&self, ordinal: i32) -> Outcome<&Device> {
        let found = usize::try_from(ordinal).ok().and_then(|ordinal| self.devices.get(ordinal));
        found.ok_or(INVALID_DEVICE)
    }

    /// The ordinal of a physical device; `INVALID_DEVICE` if this process doesn't see it.
    pub(crate) fn ordinal(&self, physical: u32) -> Outcome<usize> {
        let found = self.devices.iter().find(|device| device.physical == physical);
        found.map(|device| device.ordinal).ok_or(INVALID_DEVICE)
    }

    /// Makes an error stick, and wakes all who wait for work that will not be done.
    pub(crate) fn break_device(&self, device: &Device, code: Code) {
        // The first one stays.
        let (one, other) = (Ordering::SeqCst, Ordering::SeqCst);
        let _earlier = device.fault.compare_exchange(0, code.0, one, other);
        for stream in self.streams(device) {
            stream.wake();
        }
        let events: Vec<_> = self.tables().events.values().cloned().collect();
        for event in events {
            event.wake();
        }
    }

    /// The context current to this thread: its device's ordinal.
    pub(crate) fn top() -> Outcome<Option<usize>> {
        Self::get()?;
        Ok(STACK.with_borrow(|stack| stack.last().copied()))
    }

    /// Changes this thread's stack of contexts.
    pub(crate) fn with_stack<T>(body: impl FnOnce(&mut Vec<usize>) -> T) -> Outcome<T> {
        Self::get()?;
        Ok(STACK.with_borrow_mut(body))
    }

    /// The device that a context's handle is for, if the context exists.
    pub(crate) fn context(&self, handle: u64) -> Outcome<&Device> {
        let found = self.devices.iter().find(|device| device.context_handle() == handle);
        let device = found.ok_or(INVALID_CONTEXT)?;
        require(device.primary().retained > 0, CONTEXT_IS_DESTROYED)?;
        Ok(device)
    }

    /// A stream of the current context.
    pub(crate) fn stream(&self, device: &Device, handle: u64) -> Outcome<Arc<Stream>> {
        if handle == 0 || handle == STREAM_LEGACY {
            return device.primary().null_stream.clone().ok_or(CONTEXT_IS_DESTROYED);
        }
        let stream = self.tables().streams.get(&handle).cloned().ok_or(INVALID_HANDLE)?;
        require(stream.device == device.ordinal, INVALID_HANDLE)?;
        Ok(stream)
    }

    /// Queues work behind all that it must come after. Returns what to wait for.
    pub(crate) fn submit(&self, stream: &Arc<Stream>, work: Work) -> u64 {
        let device = &self.devices[stream.device];
        for other in self.streams(device) {
            let ordered = match stream.kind {
                Kind::Null => other.kind == Kind::Blocking,
                Kind::Blocking => other.kind == Kind::Null,
                Kind::NonBlocking => false,
            };
            if ordered && !other.is_idle() {
                let count = other.submitted();
                stream.push(Work::After { stream: other, count });
            }
        }
        stream.push(work)
    }

    /// Waits for everything that is queued on a device.
    pub(crate) fn synchronize(&self, device: &Device) -> Outcome {
        for stream in self.streams(device) {
            stream.wait(stream.submitted(), || device.fault())?;
        }
        device.unbroken()
    }

    /// All streams of a device, the null stream too.
    pub(crate) fn streams(&self, device: &Device) -> Vec<Arc<Stream>> {
        let null = device.primary().null_stream.clone();
        let tables = self.tables();
        let named = tables.streams.values().filter(|stream| stream.device == device.ordinal);
        named.cloned().chain(null).collect()
    }
}

impl Device {
    fn open(config: &Config, ordinal: usize, physical: u32) -> Outcome<Self> {
        let directory = config.directory.join(format!("device-{physical}"));
        let gate = Gate::of_device(&directory);
        let ledger = Ledger::open(directory.clone(), config.memory)
            .map_err(|error| ledger::said(&directory, &error))?;
        let ledger = Arc::new(ledger);
        let (primary, fault) = (Mutex::default(), AtomicU32::new(0));
        Ok(Self { ordinal, physical, ledger, gate, primary, fault })
    }

    pub(crate) fn context_handle(&self) -> u64 {
        CONTEXT_BASE + 16 * (self.ordinal as u64 + 1)
    }

    /// The sticky error.
    pub(crate) fn fault(&self) -> Option<Code> {
        Some(Code(self.fault.load(Ordering::SeqCst))).filter(|code| code.0 != 0)
    }

    /// The sticky error as a result.
    pub(crate) fn unbroken(&self) -> Outcome {
        self.fault().map_or(Ok(()), Err)
    }

    pub(crate) fn is_retained(&self) -> bool {
        self.primary().retained > 0
    }

    /// One more user of the primary context; the first one makes it.
    pub(crate) fn retain(&self, driver: &'static Driver) {
        let mut primary = self.primary();
        primary.retained += 1;
        if primary.null_stream.is_none() {
            primary.null_stream = Some(Stream::start(driver, self.ordinal, Kind::Null));
        }
    }

    /// One user less. The last one takes all that belongs to the context along.
    pub(crate) fn release(&self, driver: &Driver) -> Outcome {
        let mut primary = self.primary();
        require(primary.retained > 0, INVALID_CONTEXT)?;
        primary.retained -= 1;
        if primary.retained > 0 {
            return Ok(());
        }
        let null_stream = primary.null_stream.take();
        drop(primary);
        let mut tables = driver.tables();
        let mut streams: Vec<_> = null_stream.into_iter().collect();
        tables.streams.retain(|_, stream| {
            let stays = stream.device != self.ordinal;
            if !stays {
                streams.push(Arc::clone(stream));
            }
            stays
        });
        tables.events.retain(|_, event| event.device != self.ordinal);
        let registrations = tables.hosts.remove_all(self.ordinal);
        for address in tables.space.allocations(self.ordinal) {
            tables.space.free_allocation(address)?;
        }
        drop(tables);
        streams.iter().for_each(|stream| stream.close());
        registrations.iter().for_each(|registration| registration.end());
        Ok(())
    }

    fn primary(&self) -> MutexGuard<'_, Primary> {
        self.primary.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tables {
    fn new(host_access: bool) -> Self {
        Self {
            next: 0x1000,
            handles: BTreeMap::new(),
            space: Space::new(host_access),
            hosts: Hosts::default(),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
        }
    }

    /// A number for a new object: never used twice, whatever the kind of object.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 0x10;
        self.next
    }

    /// Gives memory a handle.
    pub(crate) fn name(&mut self, memory: Arc<Memory>) -> u64 {
        let number = self.number();
        self.handles.insert(number, Handle { memory, references: 1 });
        number
    }

    /// The memory of a handle.
    pub(crate) fn memory(&self, handle: u64) -> Outcome<Arc<Memory>> {
        let handle = self.handles.get(&handle).ok_or(INVALID_VALUE)?;
        Ok(Arc::clone(&handle.memory))
    }
}
