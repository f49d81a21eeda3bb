//! What callers pass, checked.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use lapis::{Access, Advice, Allocation};

use crate::allocation::lapis_allocation;
use crate::code::lapis_code;
use crate::handles;
use crate::last::Failure;

/// Most elements of an array that is read at all.
const COUNT_MAX: usize = 1 << 20;

/// A time to wait when there is no reason for another: 60 s, in microseconds.
pub const LAPIS_WAIT_DEFAULT: u64 = 60_000_000;

/// What bytes are mapped for.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub enum lapis_access {
    /// To read them.
    LAPIS_READ = 0,
    /// To read and write them.
    LAPIS_WRITE = 1,
    /// To write all of them before any is read: they are not fetched.
    LAPIS_OVERWRITE = 2,
}

/// How bytes will be used.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub enum lapis_advice {
    /// Nothing is known.
    LAPIS_ADVICE_NORMAL = 0,
    /// In order.
    LAPIS_ADVICE_SEQUENTIAL = 1,
    /// In any order.
    LAPIS_ADVICE_RANDOM = 2,
    /// Often: to be kept in VRAM before others.
    LAPIS_ADVICE_KEEP = 3,
    /// Not soon.
    LAPIS_ADVICE_DONT_NEED = 4,
}

/// Bytes of an allocation.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_range {
    /// Which.
    pub allocation: *const lapis_allocation,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

pub(crate) fn access(number: c_int) -> Result<Access, Failure> {
    [Access::Read, Access::Write, Access::Overwrite]
        .into_iter()
        .zip(0..)
        .find_map(|(access, other)| (number == other).then_some(access))
        .ok_or_else(|| Failure::argument(format!("{number} is no lapis_access")))
}

pub(crate) fn advice(number: c_int) -> Result<Advice, Failure> {
    [Advice::Normal, Advice::Sequential, Advice::Random, Advice::Keep, Advice::DontNeed]
        .into_iter()
        .zip(0..)
        .find_map(|(advice, other)| (number == other).then_some(advice))
        .ok_or_else(|| Failure::argument(format!("{number} is no lapis_advice")))
}

pub(crate) fn wait(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

/// Where a result goes.
pub(crate) fn target<T>(pointer: *mut T, name: &str) -> Result<NonNull<T>, Failure> {
    NonNull::new(pointer).ok_or_else(|| Failure::argument(format!("{name} is NULL")))
}

/// Where a handle goes, which is NULL until there is one.
///
/// # Safety
/// It must be NULL or writable.
pub(crate) unsafe fn handle<H>(
    pointer: *mut *mut H,
    name: &str,
) -> Result<NonNull<*mut H>, Failure> {
    let target = target(pointer, name)?;
    // SAFETY: the caller's promise.
    unsafe { target.write(std::ptr::null_mut()) };
    Ok(target)
}

/// A text; `None` for NULL.
///
/// # Safety
/// It must be NULL, or end with a NUL and live as long as the result.
pub(crate) unsafe fn text_or_null<'a>(
    pointer: *const c_char,
    name: &str,
) -> Result<Option<&'a str>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| Failure::argument(format!("{name} is not UTF-8")))
}

/// A text.
///
/// # Safety
/// As [`text_or_null`].
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str, Failure> {
    // SAFETY: the caller's promise.
    let text = unsafe { text_or_null(pointer, name) }?;
    text.ok_or_else(|| Failure::argument(format!("{name} is NULL")))
}

/// A path, of any bytes; `None` for NULL.
///
/// # Safety
/// It must be NULL, or end with a NUL.
pub(crate) unsafe fn path_or_null(pointer: *const c_char) -> Option<PathBuf> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { CStr::from_ptr(pointer) }.to_bytes();
    Some(PathBuf::from(OsStr::from_bytes(bytes)))
}

/// A path.
///
/// # Safety
/// As [`path_or_null`].
pub(crate) unsafe fn path(pointer: *const c_char, name: &str) -> Result<PathBuf, Failure> {
    // SAFETY: the caller's promise.
    let path = unsafe { path_or_null(pointer) };
    path.ok_or_else(|| Failure::argument(format!("{name} is NULL")))
}

/// An array, which may be NULL if it has no elements.
///
/// # Safety
/// It must have so many elements, and live as long as the result.
pub(crate) unsafe fn array<'a, T>(
    pointer: *const T,
    count: usize,
    name: &str,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if count > COUNT_MAX {
        let message = format!("{name} has {count} elements; at most {COUNT_MAX} are possible");
        return Err(Failure::new(lapis_code::LAPIS_TOO_LARGE, message));
    }
    if pointer.is_null() {
        return Err(Failure::argument(format!("{name} is NULL, with {count} elements")));
    }
    if !pointer.is_aligned() {
        return Err(Failure::argument(format!("{name} is not aligned")));
    }
    // SAFETY: the caller's promise; it isn't null, aligned, and of less than half the address space.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// Ranges with their allocations.
pub(crate) struct Ranges(Vec<(Arc<Allocation>, Range<u64>)>);

impl Ranges {
    /// # Safety
    /// As [`array`].
    pub(crate) unsafe fn read(ranges: *const lapis_range, count: usize) -> Result<Ranges, Failure> {
        // SAFETY: the caller's promise.
        let ranges = unsafe { array(ranges, count, "ranges") }?;
        let one = |range: &lapis_range| {
            let allocation = handles::get(range.allocation)?;
            Ok((allocation, bytes(range.offset, range.length)))
        };
        ranges.iter().map(one).collect::<Result<_, Failure>>().map(Ranges)
    }

    pub(crate) fn as_vec(&self) -> Vec<(&Allocation, Range<u64>)> {
        self.0.iter().map(|(allocation, range)| (allocation.as_ref(), range.clone())).collect()
    }
}

/// An end beyond 64 bits is outside of every allocation, as the largest one is.
pub(crate) fn bytes(offset: u64, length: u64) -> Range<u64> {
    offset..offset.saturating_add(length)
}

/// Writes a structure that may have fewer fields for its caller, who was compiled with an older header, or more.
///
/// # Safety
/// `target` must be NULL or have `size` writable bytes. `T` is `repr(C)` and has no padding that matters to anyone.
pub(crate) unsafe fn put<T: Copy>(target: *mut T, size: usize, value: T) -> Result<(), Failure> {
    let target = self::target(target, "out")?;
    let known = size_of::<T>();
    if size == 0 {
        return Err(Failure::argument("size is 0: pass the structure's sizeof"));
    }
    if size > known * 16 {
        return Err(Failure::argument(format!("size is {size}: pass the structure's sizeof")));
    }
    let (source, target) = ((&raw const value).cast::<u8>(), target.cast::<u8>());
    // SAFETY: `target` has `size` bytes, `source` `known`; they don't overlap, for `value` is ours.
    unsafe {
        target.write_bytes(0, size);
        std::ptr::copy_nonoverlapping(source, target.as_ptr(), size.min(known));
    }
    Ok(())
}
