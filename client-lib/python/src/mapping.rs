//! Mappings, and what is exported of them.
//!
//! A view of mapped bytes that Python code got, as a buffer or by way of DLPack or `__cuda_array_interface__`, holds an
//! [`Export`]. While there is one the mapping can't be ended by name; one that ends by itself does so with the last export.
//! So nobody reads bytes that are not mapped any more.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lapis::model::Dtype;
use pyo3::exceptions::{PyIndexError, PyKeyError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{buffer, closed, raise};
use crate::tensor::Tensor;

/// What one range of a mapping is.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Of a model's tensor; plain bytes have none.
    pub(crate) name: Option<String>,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
}

impl Part {
    pub(crate) fn bytes(length: usize) -> Part {
        Part { name: None, dtype: Dtype::U8, shape: vec![length as u64] }
    }
}

/// A mapping with its exports.
#[derive(Debug)]
pub(crate) struct Mapped {
    state: Mutex<State>,
    pub(crate) writable: bool,
}

#[derive(Debug)]
struct State {
    /// Shared only while a thread copies, which holds an export.
    mapping: Option<Arc<lapis::Mapping>>,
    exports: usize,
    /// Whether it ends with its last export.
    ending: bool,
}

/// Something that needs the bytes mapped.
#[derive(Debug)]
pub(crate) struct Export {
    mapped: Arc<Mapped>,
    pub(crate) mapping: Option<Arc<lapis::Mapping>>,
}

impl Mapped {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the mapping, if it is one still.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&lapis::Mapping) -> R) -> PyResult<R> {
        let state = self.lock();
        match &state.mapping {
            Some(mapping) if !state.ending => Ok(look(mapping)),
            Some(_) | None => Err(closed("mapping")),
        }
    }

    /// Keeps it mapped.
    pub(crate) fn export(self: &Arc<Mapped>) -> PyResult<Export> {
        let mut state = self.lock();
        match &state.mapping {
            Some(mapping) if !state.ending => {
                let mapping = Some(Arc::clone(mapping));
                state.exports += 1;
                Ok(Export { mapped: Arc::clone(self), mapping })
            }
            Some(_) | None => Err(closed("mapping")),
        }
    }

    /// Copies to it, with no export beside this.
    pub(crate) fn copy_from_host(
        &self,
        range: usize,
        offset: u64,
        source: &[u8],
    ) -> PyResult<Result<(), lapis::Error>> {
        let mut state = self.lock();
        let mapping = state.mapping.as_mut().ok_or_else(|| closed("mapping"))?;
        let mapping = Arc::get_mut(mapping).ok_or_else(|| {
            buffer("the mapping can't be copied to while there are views of it, or while it is copied from")
        })?;
        Ok(mapping.copy_from_host(range, offset, source))
    }

    /// Takes the mapping out, to end it. `None` if it is over.
    fn end(&self) -> PyResult<Option<lapis::Mapping>> {
        let mut state = self.lock();
        match state.exports {
            0 => Ok(state.mapping.take().and_then(Arc::into_inner)),
            _ if state.ending => Ok(None),
            count => Err(buffer(format!(
                "the mapping can't end: {count} views of its bytes are in use; delete them first, e.g. arrays made of \
                 its tensors (del array), or copy what is to be kept (array.copy())"
            ))),
        }
    }

    /// Ends it now, or with its last export.
    fn end_soon(&self) -> Option<lapis::Mapping> {
        let mut state = self.lock();
        state.ending = true;
        if state.exports > 0 { None } else { state.mapping.take().and_then(Arc::into_inner) }
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // First, for the last one to go must be the state's.
        self.mapping = None;
        let mut state = self.mapped.lock();
        state.exports -= 1;
        let over = if state.exports == 0 && state.ending { state.mapping.take() } else { None };
        drop(state);
        drop(over);
    }
}

#[pyclass(frozen, module = "lapis")]
#[derive(Debug)]
pub(crate) struct Mapping {
    mapped: Arc<Mapped>,
    parts: Vec<Part>,
}

impl Mapping {
    pub(crate) fn new(mapping: lapis::Mapping, parts: Vec<Part>, writable: bool) -> Mapping {
        let mapping = Some(Arc::new(mapping));
        let state = Mutex::new(State { mapping, exports: 0, ending: false });
        Mapping { mapped: Arc::new(Mapped { state, writable }), parts }
    }

    fn tensor(&self, range: usize) -> PyResult<Tensor> {
        Tensor::new(Arc::clone(&self.mapped), range, self.parts[range].clone())
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.parts.iter().position(|part| part.name.as_deref() == Some(name))
    }
}

#[pymethods]
impl Mapping {
    fn __len__(&self) -> usize {
        self.parts.len()
    }

    fn __getitem__(&self, key: &Bound<'_, PyAny>) -> PyResult<Tensor> {
        if let Ok(name) = key.extract::<String>() {
            let range = self.find(&name).ok_or_else(|| PyKeyError::new_err(name))?;
            return self.tensor(range);
        }
        let index: isize = key.extract()?;
        let count = self.parts.len();
        let range =
            if index < 0 { count.checked_add_signed(index) } else { usize::try_from(index).ok() };
        let range = range.filter(|range| *range < count).ok_or_else(|| {
            PyIndexError::new_err(format!("range {index} of a mapping that has {count}"))
        })?;
        self.tensor(range)
    }

    fn __contains__(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn keys(&self) -> Vec<Option<String>> {
        self.parts.iter().map(|part| part.name.clone()).collect()
    }

    fn values(&self) -> PyResult<Vec<Tensor>> {
        (0..self.parts.len()).map(|range| self.tensor(range)).collect()
    }

    fn items(&self) -> PyResult<Vec<(Option<String>, Tensor)>> {
        Ok(self.keys().into_iter().zip(self.values()?).collect())
    }

    #[getter]
    fn closed(&self) -> bool {
        self.mapped.with(|_| ()).is_err()
    }

    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.mapped.with(lapis::Mapping::stats)?;
        let all = PyDict::new(py);
        all.set_item("pages", stats.pages)?;
        all.set_item("hits_vram", stats.hits_vram)?;
        all.set_item("hits_ram", stats.hits_ram)?;
        all.set_item("waited", stats.waited.as_secs_f64())?;
        Ok(all)
    }

    fn unmap(&self, py: Python<'_>) -> PyResult<()> {
        match self.mapped.end()? {
            Some(mapping) => py.detach(|| mapping.unmap()).map_err(|error| raise(&error)),
            None => Ok(()),
        }
    }

    #[pyo3(signature = (stream=0))]
    fn unmap_after(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        let Some(mapping) = self.mapped.end()? else { return Ok(()) };
        let end = || {
            #[expect(unsafe_code, reason = "Python's streams are numbers")]
            // SAFETY: the documentation asks for a live stream of the device's primary context.
            unsafe {
                mapping.unmap_after(std::ptr::with_exposed_provenance_mut(stream))
            }
        };
        py.detach(end).map_err(|error| raise(&error))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (kind, _exception, _traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _exception: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if kind.is_none() {
            return self.unmap(py);
        }
        // What is being raised matters more, and its traceback may hold the views.
        let mapping = self.mapped.end_soon();
        py.detach(|| drop(mapping));
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.mapped.end_soon());
    }
}
