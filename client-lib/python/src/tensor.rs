//! Tensors: typed views of mapped bytes, for numpy and others without a copy.

#![expect(unsafe_code, reason = "gives bytes out through the interpreter's C structures")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use lapis::model::Dtype;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyAttributeError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::dlpack;
use crate::error::{buffer, raise};
use crate::mapping::{Export, Mapped, Part};

/// `struct` format of a type, if buffers have one for it.
fn format(dtype: Dtype) -> Option<&'static CStr> {
    Some(match dtype {
        Dtype::F64 => c"d",
        Dtype::F32 => c"f",
        Dtype::F16 => c"e",
        Dtype::C64 => c"Zf",
        Dtype::I64 => c"q",
        Dtype::I32 => c"i",
        Dtype::I16 => c"h",
        Dtype::I8 => c"b",
        Dtype::U64 => c"Q",
        Dtype::U32 => c"I",
        Dtype::U16 => c"H",
        Dtype::U8 => c"B",
        Dtype::BOOL => c"?",
        _ => return None,
    })
}

/// The type as `__cuda_array_interface__` spells it.
fn typestr(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::F64 => "<f8",
        Dtype::F32 => "<f4",
        Dtype::F16 => "<f2",
        Dtype::C64 => "<c8",
        Dtype::I64 => "<i8",
        Dtype::I32 => "<i4",
        Dtype::I16 => "<i2",
        Dtype::I8 => "|i1",
        Dtype::U64 => "<u8",
        Dtype::U32 => "<u4",
        Dtype::U16 => "<u2",
        Dtype::U8 => "|u1",
        Dtype::BOOL => "|b1",
        _ => return None,
    })
}

#[pyclass(frozen, module = "lapis")]
#[derive(Debug)]
pub(crate) struct Tensor {
    pub(crate) mapped: Arc<Mapped>,
    range: usize,
    pub(crate) part: Part,
    pub(crate) address: usize,
    nbytes: usize,
    /// The device's ordinal; `None` where the CPU can reach the bytes.
    pub(crate) device: Option<i32>,
    /// In elements of the buffer, as its consumers want them.
    shape: Vec<isize>,
    strides: Vec<isize>,
    /// Whoever uses the address of `__cuda_array_interface__` keeps this tensor, and nothing else.
    addressed: std::sync::Mutex<Option<Export>>,
}

impl Tensor {
    pub(crate) fn new(mapped: Arc<Mapped>, range: usize, part: Part) -> PyResult<Tensor> {
        let look = |mapping: &lapis::Mapping| {
            (mapping.as_ptr(range).addr(), mapping.length(range), mapping.device_ordinal())
        };
        let (address, nbytes, device) = mapped.with(look)?;
        let too_large =
            |_| PyValueError::new_err("the tensor has too many elements for this machine");
        let shape: Vec<isize> = part
            .shape
            .iter()
            .map(|size| isize::try_from(*size))
            .collect::<Result<_, _>>()
            .map_err(too_large)?;
        let mut strides = vec![0; shape.len()];
        let mut step = isize::try_from(part.dtype.block().1).map_err(too_large)?;
        for (stride, size) in strides.iter_mut().zip(&shape).rev() {
            *stride = step;
            step = step.saturating_mul(*size);
        }
        let addressed = std::sync::Mutex::new(None);
        Ok(Tensor { mapped, range, part, address, nbytes, device, shape, strides, addressed })
    }

    fn block_bytes(&self) -> isize {
        // At most 292.
        isize::try_from(self.part.dtype.block().1).unwrap_or(isize::MAX)
    }

    /// Bytes on a GPU, or of a type that no buffer has, are no buffer.
    fn exportable(&self) -> PyResult<&'static CStr> {
        if self.device.is_some() {
            return Err(raise(&lapis::Error::OnDevice));
        }
        format(self.part.dtype).ok_or_else(|| {
            buffer(format!(
                "buffers have no elements of type {}: use numpy(), or raw() for the bytes",
                self.part.dtype
            ))
        })
    }
}

#[pymethods]
impl Tensor {
    #[getter]
    fn name(&self) -> Option<&str> {
        self.part.name.as_deref()
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.part.dtype.name()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.part.shape)
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    #[getter]
    fn readonly(&self) -> bool {
        !self.mapped.writable
    }

    #[getter]
    fn device(&self) -> &'static str {
        if self.device.is_some() { "cuda" } else { "sim" }
    }

    #[getter]
    fn device_ptr(&self) -> PyResult<Option<usize>> {
        self.mapped.with(|_| self.device.map(|_| self.address))
    }

    fn __repr__(&self) -> String {
        let Part { name, dtype, shape } = &self.part;
        let name = name.as_deref().map(|name| format!("{name:?}, ")).unwrap_or_default();
        let over = if self.mapped.with(|_| ()).is_ok() { "" } else { ", unmapped" };
        format!("<lapis.Tensor {name}{dtype}, {shape:?}{over}>")
    }

    fn raw(&self) -> PyResult<Tensor> {
        Tensor::new(Arc::clone(&self.mapped), self.range, Part::bytes(self.nbytes))
    }

    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().mapped.with(|_| ())?;
        slf.py().import("lapis._numpy")?.call_method1("as_numpy", (slf,))
    }

    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        slf.get().mapped.with(|_| ())?;
        slf.py().import("lapis._numpy")?.call_method1("as_array", (slf, dtype, copy))
    }

    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let export = self.mapped.export()?;
        PyBytes::new_with(py, self.nbytes, |target| {
            let copied = py.detach(|| copy_out(&export, self.range, target));
            copied.map_err(|error| raise(&error))
        })
    }

    #[pyo3(signature = (source, offset=0))]
    fn copy_from(&self, py: Python<'_>, source: &Bound<'_, PyAny>, offset: u64) -> PyResult<()> {
        let source = match source.cast::<PyBytes>() {
            Ok(bytes) => bytes.as_bytes().to_vec(),
            Err(_) => source.call_method0("tobytes").map_or_else(
                |_| PyBuffer::<u8>::get(source)?.to_vec(py),
                |bytes| {
                    Ok(bytes
                        .cast::<PyBytes>()
                        .map_err(|_| {
                            PyTypeError::new_err(
                                "what is copied must be bytes, or have a buffer or tobytes()",
                            )
                        })?
                        .as_bytes()
                        .to_vec())
                },
            )?,
        };
        let copied = py.detach(|| self.mapped.copy_from_host(self.range, offset, &source));
        copied?.map_err(|error| raise(&error))
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let tensor = slf.get();
        if view.is_null() {
            return Err(buffer("the view is NULL"));
        }
        // SAFETY: the interpreter passes a view to fill; on error its object must be NULL.
        unsafe { (*view).obj = ptr::null_mut() };
        tensor.mapped.with(|_| ())?;
        let format = tensor.exportable()?;
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE && !tensor.mapped.writable {
            return Err(buffer("the bytes are mapped for reading"));
        }
        let export = Box::new(tensor.mapped.export()?);
        let asked = |flag: c_int| flags & flag == flag;
        // SAFETY: the view is the interpreter's to fill. What it points to is the tensor's, which it keeps by `obj`, and
        // doesn't change; the bytes stay mapped while the export lives, until `__releasebuffer__`. Consumers only read
        // shape and strides.
        unsafe {
            (*view).buf = ptr::with_exposed_provenance_mut::<c_void>(tensor.address);
            (*view).len = isize::try_from(tensor.nbytes).unwrap_or(isize::MAX);
            (*view).readonly = c_int::from(!tensor.mapped.writable);
            (*view).itemsize = tensor.block_bytes();
            (*view).format =
                if asked(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).ndim = c_int::try_from(tensor.shape.len()).unwrap_or(0);
            (*view).shape = if asked(ffi::PyBUF_ND) {
                tensor.shape.as_ptr().cast_mut()
            } else {
                ptr::null_mut()
            };
            (*view).strides = if asked(ffi::PyBUF_STRIDES) {
                tensor.strides.as_ptr().cast_mut()
            } else {
                ptr::null_mut()
            };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = Box::into_raw(export).cast();
            (*view).obj = slf.into_any().into_ptr();
        }
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: `internal` is what `__getbuffer__` put there, and a view is released once.
        drop(unsafe { Box::from_raw((*view).internal.cast::<Export>()) });
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let none = |why| PyAttributeError::new_err(format!("no __cuda_array_interface__: {why}"));
        if self.device.is_none() {
            return Err(none("the bytes are not on a CUDA device".to_owned()));
        }
        let dtype = self.part.dtype;
        let typestr = typestr(dtype)
            .ok_or_else(|| none(format!("it has no type {dtype}; use __dlpack__")))?;
        let export = self.mapped.export()?;
        *self.addressed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(export);
        let interface = PyDict::new(py);
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("typestr", typestr)?;
        interface.set_item("data", (self.address, self.readonly()))?;
        interface.set_item("strides", py.None())?;
        // What is mapped is there: nothing has to be waited for.
        interface.set_item("stream", py.None())?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device(self.device)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        slf: &Bound<'_, Self>,
        stream: Option<Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        // What is mapped is there, for every stream.
        drop(stream);
        let tensor = slf.get();
        if dl_device.is_some_and(|asked| asked != dlpack::device(tensor.device)) {
            return Err(buffer("the bytes can't be had on another device"));
        }
        if copy == Some(true) {
            return Err(buffer("copies are not made here"));
        }
        dlpack::capsule(slf.py(), tensor, max_version.is_some_and(|(major, _)| major >= 1))
    }
}

fn copy_out(export: &Export, range: usize, target: &mut [u8]) -> Result<(), lapis::Error> {
    match &export.mapping {
        Some(mapping) => mapping.copy_to_host(range, 0, target),
        None => Ok(()),
    }
}
