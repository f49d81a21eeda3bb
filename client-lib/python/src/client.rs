//! Connections, allocations, plans and recordings.

use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use lapis::{ConnectOptions, DeviceKind, PrefetchOptions};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::convert::{self, Ranges, borrow, seconds};
use crate::error::{closed, raise};
use crate::mapping::{Mapping, Part};
use crate::model::Model;

/// An object that can be closed. Its lock is held only to look.
#[derive(Debug)]
pub(crate) struct Slot<T> {
    content: Mutex<Option<T>>,
    what: &'static str,
}

impl<T> Slot<T> {
    pub(crate) fn new(content: T, what: &'static str) -> Slot<T> {
        Slot { content: Mutex::new(Some(content)), what }
    }

    pub(crate) fn take(&self) -> Option<T> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn with<R>(&self, look: impl FnOnce(&T) -> R) -> PyResult<R> {
        let content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        content.as_ref().map(look).ok_or_else(|| closed(self.what))
    }
}

/// Runs without the interpreter's lock.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    call: impl FnOnce() -> Result<T, lapis::Error> + Send,
) -> PyResult<T> {
    py.detach(call).map_err(|error| raise(&error))
}

#[pyclass(frozen, module = "lapis")]
#[derive(Debug)]
pub(crate) struct Client {
    client: Slot<lapis::Client>,
}

impl Client {
    fn open(&self) -> PyResult<lapis::Client> {
        self.client.with(lapis::Client::clone)
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (socket=None, *, name=None, timeout=10.0, libcuda=None, raise_open_files=true))]
    fn new(
        py: Python<'_>,
        socket: Option<PathBuf>,
        name: Option<String>,
        timeout: f64,
        libcuda: Option<PathBuf>,
        raise_open_files: bool,
    ) -> PyResult<Client> {
        let mut options = ConnectOptions {
            socket,
            timeout: seconds(timeout, "timeout")?,
            raise_open_files,
            libcuda,
            ..ConnectOptions::default()
        };
        if let Some(name) = name {
            options.name = name;
        }
        let client = detached(py, || options.connect())?;
        Ok(Client { client: Slot::new(client, "client") })
    }

    fn close(&self, py: Python<'_>) {
        let client = self.client.take();
        py.detach(|| drop(client));
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    #[getter]
    fn page_size(&self) -> PyResult<u64> {
        self.client.with(lapis::Client::page_size)
    }

    #[getter]
    fn device(&self) -> PyResult<&'static str> {
        self.client.with(|client| match client.welcome().device {
            DeviceKind::Sim => "sim",
            DeviceKind::Cuda => "cuda",
        })
    }

    #[getter]
    fn mapped_pages_max(&self) -> PyResult<u32> {
        self.client.with(|client| client.welcome().mapped_pages_max)
    }

    #[getter]
    fn daemon_version(&self) -> PyResult<String> {
        self.client.with(|client| client.welcome().daemon_version.clone())
    }

    fn allocate(&self, py: Python<'_>, size: u64) -> PyResult<Allocation> {
        let client = self.open()?;
        detached(py, move || client.allocate(size)).map(Allocation::new)
    }

    #[pyo3(signature = (path, offset=0, length=None))]
    fn open_path(
        &self,
        py: Python<'_>,
        path: PathBuf,
        offset: u64,
        length: Option<u64>,
    ) -> PyResult<Allocation> {
        let client = self.open()?;
        let open = move || {
            let length = match length {
                Some(length) => length,
                // What can't be looked at can't be opened either, which tells why.
                None => path.metadata().map_or(1, |file| file.len()).saturating_sub(offset),
            };
            client.open_path(path, offset, length)
        };
        detached(py, open).map(Allocation::new)
    }

    fn open_file(
        &self,
        py: Python<'_>,
        file: &Bound<'_, PyAny>,
        offset: u64,
        length: u64,
    ) -> PyResult<Allocation> {
        let client = self.open()?;
        let descriptor: i32 = match file.extract() {
            Ok(descriptor) => descriptor,
            Err(_) => file.call_method0("fileno")?.extract()?,
        };
        // One of our own, for the caller may close his meanwhile, and sending what isn't open ends the connection.
        let copy: i32 = py.import("os")?.call_method1("dup", (descriptor,))?.extract()?;
        #[expect(unsafe_code, reason = "Python's descriptors are numbers")]
        // SAFETY: it is open, and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(copy) };
        detached(py, move || client.open_file(file, offset, length)).map(Allocation::new)
    }

    fn open_model(&self, py: Python<'_>, path: PathBuf) -> PyResult<Model> {
        let client = self.open()?;
        detached(py, move || client.open_model(path)).map(Model::new)
    }

    #[pyo3(signature = (ranges, access="read", wait=60.0))]
    fn map(
        &self,
        py: Python<'_>,
        ranges: &Bound<'_, PyAny>,
        access: &str,
        wait: f64,
    ) -> PyResult<Mapping> {
        let (client, ranges) = (self.open()?, convert::ranges(ranges)?);
        map(py, &client, &ranges, access, wait)
    }

    #[pyo3(signature = (ranges, priority=0, within=None))]
    fn prefetch(
        &self,
        py: Python<'_>,
        ranges: &Bound<'_, PyAny>,
        priority: u8,
        within: Option<f64>,
    ) -> PyResult<()> {
        let (client, ranges) = (self.open()?, convert::ranges(ranges)?);
        let within = within.map(|within| seconds(within, "within")).transpose()?;
        let options = PrefetchOptions { priority, within };
        detached(py, || client.prefetch_with(&borrow(&ranges), options))
    }

    fn cancel_prefetch(&self, py: Python<'_>, ranges: &Bound<'_, PyAny>) -> PyResult<()> {
        let (client, ranges) = (self.open()?, convert::ranges(ranges)?);
        detached(py, || client.cancel_prefetch(&borrow(&ranges)))
    }

    fn advise(&self, py: Python<'_>, ranges: &Bound<'_, PyAny>, advice: &str) -> PyResult<()> {
        let (client, ranges) = (self.open()?, convert::ranges(ranges)?);
        let advice = convert::advice(advice)?;
        detached(py, || client.advise(&borrow(&ranges), advice))
    }

    #[pyo3(signature = (ranges, wait=60.0))]
    fn flush(&self, py: Python<'_>, ranges: &Bound<'_, PyAny>, wait: f64) -> PyResult<()> {
        let (client, ranges) = (self.open()?, convert::ranges(ranges)?);
        let wait = seconds(wait, "wait")?;
        detached(py, || client.flush(&borrow(&ranges), wait))
    }

    #[pyo3(signature = (steps, cyclic=true))]
    fn plan(&self, py: Python<'_>, steps: &Bound<'_, PyAny>, cyclic: bool) -> PyResult<Plan> {
        let client = self.open()?;
        let mut owned: Vec<(Ranges, lapis::Access)> = Vec::new();
        for step in steps.try_iter()? {
            let step = step?;
            let named = step.extract::<(Bound<'_, PyAny>, Bound<'_, PyString>)>();
            let (ranges, access) = match named {
                Ok((ranges, access)) => (ranges, convert::access(&access.to_cow()?)?),
                Err(_) => (step, lapis::Access::Read),
            };
            owned.push((convert::ranges(&ranges)?, access));
        }
        let plan = detached(py, || {
            let steps: Vec<lapis::Step<'_>> = owned.iter().map(borrow_step).collect();
            client.plan(&steps, cyclic)
        })?;
        Ok(Plan::new(plan))
    }

    fn record(&self) -> PyResult<Recording> {
        let recording = self.open()?.record();
        Ok(Recording { recording: Slot::new(recording, "recording") })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.open()?;
        let stats = detached(py, move || client.stats())?;
        let all = PyDict::new(py);
        for (name, tier) in [("vram", stats.vram), ("ram", stats.ram), ("nvme", stats.nvme)] {
            let one = PyDict::new(py);
            one.set_item("capacity", tier.capacity)?;
            one.set_item("used", tier.used)?;
            one.set_item("pinned", tier.pinned)?;
            one.set_item("degraded", tier.degraded)?;
            all.set_item(name, one)?;
        }
        for (name, counters) in [("session", stats.session), ("total", stats.total)] {
            let one = PyDict::new(py);
            one.set_item("maps", counters.maps)?;
            one.set_item("hits_vram", counters.hits_vram)?;
            one.set_item("hits_ram", counters.hits_ram)?;
            one.set_item("misses", counters.misses)?;
            one.set_item("zero_fills", counters.zero_fills)?;
            one.set_item(
                "stalled",
                std::time::Duration::from_micros(counters.stalled_us).as_secs_f64(),
            )?;
            one.set_item("file_to_ram_bytes", counters.file_to_ram.bytes)?;
            one.set_item("spill_to_ram_bytes", counters.spill_to_ram.bytes)?;
            one.set_item("ram_to_vram_bytes", counters.ram_to_vram.bytes)?;
            one.set_item("vram_to_ram_bytes", counters.vram_to_ram.bytes)?;
            one.set_item("ram_to_spill_bytes", counters.ram_to_spill.bytes)?;
            one.set_item("prefetch_useful", counters.prefetch_useful)?;
            one.set_item("prefetch_late", counters.prefetch_late)?;
            one.set_item("prefetch_wasted", counters.prefetch_wasted)?;
            all.set_item(name, one)?;
        }
        all.set_item("sessions", stats.sessions)?;
        all.set_item("allocations", stats.allocations)?;
        all.set_item("mappings", stats.mappings)?;
        Ok(all)
    }
}

fn borrow_step((ranges, access): &(Ranges, lapis::Access)) -> lapis::Step<'_> {
    ranges.iter().map(|(allocation, range)| (allocation, range.clone(), *access)).collect()
}

/// Maps ranges, each of them a part without a name.
fn map(
    py: Python<'_>,
    client: &lapis::Client,
    ranges: &Ranges,
    access: &str,
    wait: f64,
) -> PyResult<Mapping> {
    let (access, wait) = (convert::access(access)?, seconds(wait, "wait")?);
    let mapping = detached(py, || client.map(&borrow(ranges), access, wait))?;
    let parts = (0..mapping.len()).map(|range| Part::bytes(mapping.length(range))).collect();
    Ok(Mapping::new(mapping, parts, access != lapis::Access::Read))
}

#[pyclass(frozen, module = "lapis")]
#[derive(Debug)]
pub(crate) struct Allocation {
    allocation: Slot<lapis::Allocation>,
}

impl Allocation {
    fn new(allocation: lapis::Allocation) -> Allocation {
        Allocation { allocation: Slot::new(allocation, "allocation") }
    }

    pub(crate) fn open(&self) -> PyResult<lapis::Allocation> {
        self.allocation.with(lapis::Allocation::clone)
    }
}

#[pymethods]
impl Allocation {
    #[getter]
    fn size(&self) -> PyResult<u64> {
        self.allocation.with(lapis::Allocation::size)
    }

    #[getter]
    fn id(&self) -> PyResult<u64> {
        self.allocation.with(|allocation| allocation.id().0)
    }

    #[pyo3(signature = (start=0, stop=None, access="read", wait=60.0))]
    fn map(
        &self,
        py: Python<'_>,
        start: u64,
        stop: Option<u64>,
        access: &str,
        wait: f64,
    ) -> PyResult<Mapping> {
        let allocation = self.open()?;
        let stop = stop.unwrap_or_else(|| allocation.size());
        let client = allocation.client();
        map(py, &client, &vec![(allocation, start..stop)], access, wait)
    }

    fn free(&self, py: Python<'_>) {
        let allocation = self.allocation.take();
        py.detach(|| drop(allocation));
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.free(py);
    }
}

#[pyclass(frozen, module = "lapis")]
#[derive(Debug)]
pub(crate) struct Plan {
    plan: Slot<lapis::Plan>,
}

impl Plan {
    pub(crate) fn new(plan: lapis::Plan) -> Plan {
        Plan { plan: Slot::new(plan, "plan") }
    }
}

#[pymethods]
impl Plan {
    fn end(&self, py: Python<'_>) {
        let plan = self.plan.take();
        py.detach(|| drop(plan));
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.end(py);
    }
}

#[pyclass(frozen, module = "lapis")]
#[derive(Debug)]
pub(crate) struct Recording {
    recording: Slot<lapis::Recording>,
}

#[pymethods]
impl Recording {
    #[pyo3(signature = (cyclic=true))]
    fn plan(&self, py: Python<'_>, cyclic: bool) -> PyResult<Plan> {
        let recording = self.recording.take().ok_or_else(|| closed("recording"))?;
        detached(py, move || recording.finish().plan(cyclic)).map(Plan::new)
    }

    fn end(&self) {
        drop(self.recording.take());
    }
}
