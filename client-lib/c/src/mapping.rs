//! Mappings.

use std::ffi::{c_int, c_void};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use lapis::model::TensorSlice;
use lapis::{Client, Mapping};

use crate::arguments::{Ranges, lapis_range};
use crate::client::lapis_client;
use crate::code::lapis_code;
use crate::last::Failure;
use crate::{arguments, guard, handles};

/// The right to touch some ranges of bytes, which are in VRAM meanwhile. Ranges are counted from 0, in the order in which
/// they were asked for.
#[derive(Debug)]
pub struct lapis_mapping {
    _opaque: [u8; 0],
}

/// What a mapping cost.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_map_stats {
    /// Pages in all.
    pub pages: u32,
    /// Pages that were in VRAM when it was asked for.
    pub hits_vram: u32,
    /// Pages that came from RAM.
    pub hits_ram: u32,
    /// 0.
    pub reserved: u32,
    /// How long the daemon took, in microseconds.
    pub waited_us: u64,
}

/// A mapping, and which tensors its ranges are, if it is one of a model.
#[derive(Debug)]
pub(crate) struct Mapped {
    /// Written only while bytes are copied to it, so that two threads which do so take turns.
    mapping: RwLock<Mapping>,
    tensors: Vec<TensorSlice>,
    writable: bool,
}

impl Mapped {
    pub(crate) fn new(mapping: Mapping, tensors: Vec<TensorSlice>, writable: bool) -> Mapped {
        Mapped { mapping: RwLock::new(mapping), tensors, writable }
    }

    fn read(&self) -> RwLockReadGuard<'_, Mapping> {
        self.mapping.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Mapping> {
        self.mapping.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Refuses a range that the mapping doesn't have.
fn check(mapping: &Mapping, range: usize) -> Result<(), Failure> {
    let count = mapping.len();
    if range < count {
        return Ok(());
    }
    let message = format!("range {range} of a mapping that has {count}");
    Err(Failure::new(lapis_code::LAPIS_OUT_OF_RANGE, message))
}

/// Refuses bytes beyond the end of a range, before anything is made of the caller's pointer.
fn check_inside(
    mapping: &Mapping,
    range: usize,
    offset: u64,
    length: usize,
) -> Result<(), Failure> {
    check(mapping, range)?;
    let size = mapping.length(range) as u64;
    let end = offset.saturating_add(length as u64);
    if end <= size {
        Ok(())
    } else {
        Err(lapis::Error::OutOfRange { start: offset, end, size }.into())
    }
}

/// Brings ranges of bytes to VRAM, all or none of them, and keeps them there until lapis_unmap. access: a lapis_access.
/// Waits up to wait_us microseconds for other mappings to make room; with 0 only as long as the transfers take.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_map(
    client: *const lapis_client,
    ranges: *const lapis_range,
    count: usize,
    access: c_int,
    wait_us: u64,
    out: *mut *mut lapis_mapping,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let ranges = unsafe { Ranges::read(ranges, count) }?;
        let access = arguments::access(access)?;
        let mapping = client.map(&ranges.as_vec(), access, arguments::wait(wait_us))?;
        let mapped = Mapped::new(mapping, Vec::new(), access != lapis::Access::Read);
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(mapped)) };
        Ok(())
    })
}

/// How many ranges it has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_count(
    mapping: *const lapis_mapping,
    out: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        let mapped = handles::get::<Mapped, _>(mapping)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(mapped.read().len()) };
        Ok(())
    })
}

/// Which of its model's tensors a range is, for a mapping of a model.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_tensor(
    mapping: *const lapis_mapping,
    range: usize,
    out: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        let mapped = handles::get::<Mapped, _>(mapping)?;
        check(&mapped.read(), range)?;
        let slice = mapped.tensors.get(range).ok_or_else(|| {
            Failure::new(lapis_code::LAPIS_OUT_OF_RANGE, "the mapping is not one of a model")
        })?;
        // SAFETY: the caller's promise.
        unsafe { out.write(slice.tensor) };
        Ok(())
    })
}

/// The bytes of a range, to be read until lapis_unmap: afterwards reading them faults. LAPIS_ON_DEVICE on a CUDA device.
/// length may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_bytes(
    mapping: *const lapis_mapping,
    range: usize,
    out: *mut *const c_void,
    length: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe { out.write(std::ptr::null()) };
        let mapped = handles::get::<Mapped, _>(mapping)?;
        let mapping = mapped.read();
        check(&mapping, range)?;
        let bytes = mapping.try_bytes(range)?;
        // SAFETY: the caller's promise, for both.
        unsafe {
            out.write(bytes.as_ptr().cast());
            if !length.is_null() {
                length.write(bytes.len());
            }
        }
        Ok(())
    })
}

/// The bytes of a range, to be read and written until lapis_unmap: afterwards touching them faults. LAPIS_READ_ONLY if
/// they were mapped for reading, LAPIS_ON_DEVICE on a CUDA device. length may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_bytes_mut(
    mapping: *const lapis_mapping,
    range: usize,
    out: *mut *mut c_void,
    length: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe { out.write(std::ptr::null_mut()) };
        let mapped = handles::get::<Mapped, _>(mapping)?;
        let mapping = mapped.read();
        check(&mapping, range)?;
        if !mapped.writable {
            return Err(lapis::Error::ReadOnly.into());
        }
        // Only for its error.
        mapping.try_bytes(range)?;
        // SAFETY: the caller's promise, for both.
        unsafe {
            out.write(mapping.as_ptr(range).cast());
            if !length.is_null() {
                length.write(mapping.length(range));
            }
        }
        Ok(())
    })
}

/// The device address of a range, a CUdeviceptr, for kernels until lapis_unmap. LAPIS_UNSUPPORTED where the device isn't
/// a CUDA device. length may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_device_ptr(
    mapping: *const lapis_mapping,
    range: usize,
    out: *mut u64,
    length: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        // SAFETY: the caller's promise.
        unsafe { out.write(0) };
        let mapped = handles::get::<Mapped, _>(mapping)?;
        let mapping = mapped.read();
        check(&mapping, range)?;
        let pointer = mapping.device_ptr(range).ok_or_else(|| {
            let message = "the daemon's device is not a CUDA device: use lapis_mapping_bytes";
            Failure::new(lapis_code::LAPIS_UNSUPPORTED, message)
        })?;
        // SAFETY: the caller's promise, for both.
        unsafe {
            out.write(pointer);
            if !length.is_null() {
                length.write(mapping.length(range));
            }
        }
        Ok(())
    })
}

/// Copies length bytes of a range, from its byte offset on, to target, on any device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_copy_to_host(
    mapping: *const lapis_mapping,
    range: usize,
    offset: u64,
    target: *mut c_void,
    length: usize,
) -> lapis_code {
    guard(|| {
        let mapped = handles::get::<Mapped, _>(mapping)?;
        let mapping = mapped.read();
        check_inside(&mapping, range, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let target = arguments::target(target.cast::<u8>(), "target")?;
        // SAFETY: the caller's promise; what a mapping has is less than half the address space.
        let target = unsafe { std::slice::from_raw_parts_mut(target.as_ptr(), length) };
        Ok(mapping.copy_to_host(range, offset, target)?)
    })
}

/// Copies length bytes at source over a range, from its byte offset on, on any device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_copy_from_host(
    mapping: *const lapis_mapping,
    range: usize,
    offset: u64,
    source: *const c_void,
    length: usize,
) -> lapis_code {
    guard(|| {
        let mapped = handles::get::<Mapped, _>(mapping)?;
        let mut mapping = mapped.write();
        check_inside(&mapping, range, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let source = arguments::target(source.cast_mut().cast::<u8>(), "source")?;
        // SAFETY: the caller's promise; what a mapping has is less than half the address space.
        let source = unsafe { std::slice::from_raw_parts(source.as_ptr(), length) };
        Ok(mapping.copy_from_host(range, offset, source)?)
    })
}

/// What it cost. size: sizeof(lapis_map_stats).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_mapping_stats(
    mapping: *const lapis_mapping,
    out: *mut lapis_map_stats,
    size: usize,
) -> lapis_code {
    guard(|| {
        let mapped = handles::get::<Mapped, _>(mapping)?;
        let stats = mapped.read().stats();
        let stats = lapis_map_stats {
            pages: stats.pages,
            hits_vram: stats.hits_vram,
            hits_ram: stats.hits_ram,
            reserved: 0,
            waited_us: u64::try_from(stats.waited.as_micros()).unwrap_or(u64::MAX),
        };
        // SAFETY: the caller's promise.
        unsafe { arguments::put(out, size, stats) }
    })
}

/// Ends a mapping. On a CUDA device it waits first for all work of this process in the device's primary context. The
/// handle is closed whatever is returned, except LAPIS_BUSY.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_unmap(mapping: *mut lapis_mapping) -> lapis_code {
    guard(|| match handles::end::<Mapped, _>(mapping)? {
        Some(mapped) => Ok(into_inner(mapped).unmap()?),
        None => Ok(()),
    })
}

/// Ends a mapping once the GPU has done what stream holds now, and returns at once. stream: a live CUstream or
/// cudaStream_t of the device's primary context, or NULL for its default stream. Where the device isn't a CUDA device, it
/// ends at once. The handle is closed whatever is returned, except LAPIS_BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_unmap_after(
    mapping: *mut lapis_mapping,
    stream: *mut c_void,
) -> lapis_code {
    guard(|| match handles::end::<Mapped, _>(mapping)? {
        // SAFETY: the caller's promise.
        Some(mapped) => Ok(unsafe { into_inner(mapped).unmap_after(stream) }?),
        None => Ok(()),
    })
}

fn into_inner(mapped: Mapped) -> Mapping {
    mapped.mapping.into_inner().unwrap_or_else(PoisonError::into_inner)
}
