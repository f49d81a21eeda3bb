//! Models, their layers and tensors.

use lapis::model::TensorSlice;
use pyo3::exceptions::{PyIndexError, PyKeyError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::Arc;

use crate::client::{Plan, Slot, detached};
use crate::convert::seconds;
use crate::mapping::{Mapping, Part};

#[pyclass(frozen, module = "lapis")]
#[derive(Debug)]
pub(crate) struct Model {
    model: Slot<Arc<lapis::model::Model>>,
}

impl Model {
    pub(crate) fn new(model: lapis::model::Model) -> Model {
        Model { model: Slot::new(Arc::new(model), "model") }
    }

    fn open(&self) -> PyResult<Arc<lapis::model::Model>> {
        self.model.with(Arc::clone)
    }
}

/// A mapping of a model, with what its ranges are.
fn mapping(model: &lapis::model::Model, mapped: lapis::model::LayerMapping) -> Mapping {
    let (mapping, slices) = mapped.into_parts();
    let part = |slice: &TensorSlice| {
        let tensor = &model.tensors()[slice.tensor];
        let mut shape = tensor.shape.clone();
        let bytes = slice.inside.end - slice.inside.start;
        if let Some(rows) = shape.first_mut()
            && bytes != tensor.bytes()
        {
            *rows = bytes / (tensor.bytes() / *rows);
        }
        Part { name: Some(tensor.name.clone()), dtype: tensor.dtype, shape }
    };
    let parts = slices.iter().map(part).collect();
    Mapping::new(mapping, parts, false)
}

/// A tensor by its name, or some of its rows.
fn slice(model: &lapis::model::Model, given: &Bound<'_, PyAny>) -> PyResult<TensorSlice> {
    let (name, rows): (String, Option<(u64, u64)>) = match given.extract::<String>() {
        Ok(name) => (name, None),
        Err(_) => {
            let (name, start, stop) = given.extract()?;
            (name, Some((start, stop)))
        }
    };
    let Some(index) = model.files().find(&name) else { return Err(PyKeyError::new_err(name)) };
    let tensor = &model.tensors()[index];
    let bytes = tensor.bytes();
    let inside = match rows {
        None => 0..bytes,
        Some((start, stop)) => {
            let count = tensor.shape.first().copied().unwrap_or(0);
            let whole = count > 0 && bytes.is_multiple_of(count);
            if !whole || start > stop || stop > count {
                return Err(PyIndexError::new_err(format!(
                    "rows {start}..{stop} of {name}, which has {} of whole bytes",
                    if whole { count } else { 0 }
                )));
            }
            // Not beyond the tensor's end.
            let row = bytes / count;
            start * row..stop * row
        }
    };
    let range = tensor.range.start + inside.start..tensor.range.start + inside.end;
    Ok(TensorSlice { tensor: index, inside, shard: tensor.shard, range })
}

fn layer_index(model: &lapis::model::Model, layer: isize) -> PyResult<usize> {
    let count = model.layers().len();
    let index =
        if layer < 0 { count.checked_add_signed(layer) } else { usize::try_from(layer).ok() };
    index
        .filter(|index| *index < count)
        .ok_or_else(|| PyIndexError::new_err(format!("layer {layer} of a model that has {count}")))
}

#[pymethods]
impl Model {
    #[getter]
    fn layers(&self) -> PyResult<Vec<String>> {
        self.model.with(|model| model.layers().iter().map(|layer| layer.name.clone()).collect())
    }

    #[getter]
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let model = self.open()?;
        let all = PyDict::new(py);
        for tensor in model.tensors() {
            let shape = pyo3::types::PyTuple::new(py, &tensor.shape)?;
            all.set_item(&tensor.name, (tensor.dtype.name(), shape, tensor.bytes()))?;
        }
        Ok(all)
    }

    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let model = self.open()?;
        let all = PyDict::new(py);
        for (key, value) in model.files().metadata().iter() {
            all.set_item(key, value)?;
        }
        Ok(all)
    }

    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        self.model.with(|model| model.files().bytes())
    }

    fn layer_tensors(&self, layer: isize) -> PyResult<Vec<String>> {
        let model = self.open()?;
        let layer = &model.layers()[layer_index(&model, layer)?];
        Ok(layer.tensors.iter().map(|tensor| model.tensors()[*tensor].name.clone()).collect())
    }

    #[pyo3(signature = (layer, wait=60.0))]
    fn map_layer(&self, py: Python<'_>, layer: isize, wait: f64) -> PyResult<Mapping> {
        let (model, wait) = (self.open()?, seconds(wait, "wait")?);
        let layer = layer_index(&model, layer)?;
        let mapped = detached(py, || model.map_layer(layer, wait))?;
        Ok(mapping(&model, mapped))
    }

    #[pyo3(signature = (names, wait=60.0))]
    fn map_tensors(
        &self,
        py: Python<'_>,
        names: &Bound<'_, PyAny>,
        wait: f64,
    ) -> PyResult<Mapping> {
        let (model, wait) = (self.open()?, seconds(wait, "wait")?);
        let names: Vec<Bound<'_, PyAny>> = names.extract()?;
        let slices = names.iter().map(|name| slice(&model, name)).collect::<PyResult<Vec<_>>>()?;
        let mapped = detached(py, || model.map_slices(slices, wait))?;
        Ok(mapping(&model, mapped))
    }

    fn prefetch_layer(&self, py: Python<'_>, layer: isize) -> PyResult<()> {
        let model = self.open()?;
        let layer = layer_index(&model, layer)?;
        detached(py, || model.prefetch_layer(layer))
    }

    #[pyo3(signature = (cyclic=true))]
    fn plan(&self, py: Python<'_>, cyclic: bool) -> PyResult<Plan> {
        let model = self.open()?;
        detached(py, || model.plan(cyclic)).map(Plan::new)
    }

    fn close(&self, py: Python<'_>) {
        let model = self.model.take();
        py.detach(|| drop(model));
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}
