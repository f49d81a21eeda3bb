//! DLPack: tensors for other libraries, in capsules. The structures are those of `dlpack.h` 1.1.

#![expect(unsafe_code, reason = "fills C structures that others free")]

use std::ffi::{CStr, c_void};
use std::ptr;

use lapis::model::Dtype;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::error::buffer;
use crate::mapping::Export;
use crate::tensor::Tensor;

const CPU: i32 = 1;
const CUDA: i32 = 2;
const READ_ONLY: u64 = 1;

#[repr(C)]
struct DLDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: i32,
    dtype: DLDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// Before version 1.
#[repr(C)]
struct DLManagedTensor {
    tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

#[repr(C)]
struct DLManagedTensorVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    flags: u64,
    tensor: DLTensor,
}

/// What a capsule keeps: the bytes mapped, and the numbers that its structure points to.
struct Kept {
    _export: Export,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

/// Code and bits of a type, if DLPack has it with one element a byte or more.
fn type_of(dtype: Dtype) -> Option<(u8, u8)> {
    Some(match dtype {
        Dtype::I8 => (0, 8),
        Dtype::I16 => (0, 16),
        Dtype::I32 => (0, 32),
        Dtype::I64 => (0, 64),
        Dtype::U8 => (1, 8),
        Dtype::U16 => (1, 16),
        Dtype::U32 => (1, 32),
        Dtype::U64 => (1, 64),
        Dtype::F16 => (2, 16),
        Dtype::F32 => (2, 32),
        Dtype::F64 => (2, 64),
        Dtype::BF16 => (4, 16),
        Dtype::C64 => (5, 64),
        Dtype::BOOL => (6, 8),
        Dtype::F8_E4M3 => (10, 8),
        Dtype::F8_E4M3FNUZ => (11, 8),
        Dtype::F8_E5M2 => (12, 8),
        Dtype::F8_E5M2FNUZ => (13, 8),
        Dtype::F8_E8M0 => (14, 8),
        _ => return None,
    })
}

/// Kind and number of the device.
pub(crate) fn device(ordinal: Option<i32>) -> (i32, i32) {
    ordinal.map_or((CPU, 0), |ordinal| (CUDA, ordinal))
}

/// A capsule, of version 1 if the consumer knows that.
pub(crate) fn capsule(py: Python<'_>, tensor: &Tensor, versioned: bool) -> PyResult<Py<PyAny>> {
    let dtype = tensor.part.dtype;
    let (code, bits) = type_of(dtype)
        .ok_or_else(|| buffer(format!("DLPack has no elements of type {dtype}: use raw()")))?;
    if !versioned && !tensor.mapped.writable {
        return Err(buffer(
            "the bytes are mapped for reading, which only DLPack 1 can say: use a newer release of what imports them, \
             or numpy()",
        ));
    }
    let too_large = |_| buffer("the tensor has too many elements");
    let shape = tensor.part.shape.iter().map(|size| i64::try_from(*size));
    let shape: Vec<i64> = shape.collect::<Result<_, _>>().map_err(too_large)?;
    let mut strides = vec![0; shape.len()];
    let mut step = 1_i64;
    for (stride, size) in strides.iter_mut().zip(&shape).rev() {
        *stride = step;
        step = step.saturating_mul(*size);
    }
    let export = tensor.mapped.export()?;
    let mut kept = Box::new(Kept { _export: export, shape, strides });
    let (kind, id) = device(tensor.device);
    let tensor_of = |kept: &mut Kept| DLTensor {
        data: ptr::with_exposed_provenance_mut(tensor.address),
        device: DLDevice { kind, id },
        ndim: i32::try_from(kept.shape.len()).unwrap_or(0),
        dtype: DLDataType { code, bits, lanes: 1 },
        shape: kept.shape.as_mut_ptr(),
        strides: kept.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let inner = tensor_of(&mut kept);
    let context = Box::into_raw(kept).cast();
    if versioned {
        let flags = if tensor.mapped.writable { 0 } else { READ_ONLY };
        let deleter: unsafe extern "C" fn(_) = delete_versioned;
        let deleter = Some(deleter);
        let managed =
            DLManagedTensorVersioned { version: [1, 0], context, deleter, flags, tensor: inner };
        let managed = Box::into_raw(Box::new(managed));
        // SAFETY: `managed` is of the kind that the name and the destructor say.
        unsafe { wrap(py, managed.cast(), VERSIONED, end_versioned) }
    } else {
        let deleter: unsafe extern "C" fn(_) = delete;
        let managed = DLManagedTensor { tensor: inner, context, deleter: Some(deleter) };
        let managed = Box::into_raw(Box::new(managed));
        // SAFETY: as above.
        unsafe { wrap(py, managed.cast(), UNVERSIONED, end) }
    }
}

const VERSIONED: &CStr = c"dltensor_versioned";
const UNVERSIONED: &CStr = c"dltensor";

/// # Safety
/// `managed` must be what `destructor` frees in a capsule of this name.
unsafe fn wrap(
    py: Python<'_>,
    managed: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Py<PyAny>> {
    // SAFETY: the interpreter is held; the name lives for ever; the rest is the caller's promise.
    let capsule = unsafe { ffi::PyCapsule_New(managed, name.as_ptr(), Some(destructor)) };
    // SAFETY: it is a new reference, or NULL with an exception set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind)
}

/// A capsule whose tensor nobody took: whoever takes it renames the capsule.
unsafe extern "C" fn end_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter for a capsule of `wrap`; one that still has its name holds our structure.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED.as_ptr()) == 1 {
            delete_versioned(ffi::PyCapsule_GetPointer(capsule, VERSIONED.as_ptr()).cast());
        }
    }
}

/// As [`end_versioned`].
unsafe extern "C" fn end(capsule: *mut ffi::PyObject) {
    // SAFETY: as in `end_versioned`.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr()).cast());
        }
    }
}

/// Called once by whoever took the tensor, on any thread, with or without the interpreter.
unsafe extern "C" fn delete_versioned(managed: *mut DLManagedTensorVersioned) {
    if !managed.is_null() {
        // SAFETY: both come from `Box::into_raw` in `capsule`, and are freed once.
        unsafe {
            let managed = Box::from_raw(managed);
            drop(Box::from_raw(managed.context.cast::<Kept>()));
        }
    }
}

/// As [`delete_versioned`].
unsafe extern "C" fn delete(managed: *mut DLManagedTensor) {
    if !managed.is_null() {
        // SAFETY: as in `delete_versioned`.
        unsafe {
            let managed = Box::from_raw(managed);
            drop(Box::from_raw(managed.context.cast::<Kept>()));
        }
    }
}
