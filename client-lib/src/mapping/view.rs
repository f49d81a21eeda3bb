//! One range of a mapping's bytes.

use std::ops::Range;

use crate::allocation::Owned;
use crate::error::Error;

use super::area::Base;

/// See the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    pub(super) start: Base,
    pub(super) length: usize,
}

impl View {
    /// No bytes.
    pub(super) const EMPTY: View = View { start: Base::NOWHERE, length: 0 };

    /// `bytes` of an allocation, which must have them.
    pub(crate) fn new(allocation: &Owned, bytes: &Range<u64>) -> View {
        debug_assert!(bytes.start <= bytes.end && bytes.end <= allocation.size);
        // What is reserved fits in the address space, and so does any part of it.
        let offset = usize::try_from(allocation.shift + bytes.start).unwrap_or(0);
        let length = usize::try_from(bytes.end - bytes.start).unwrap_or(0);
        View { start: allocation.base.offset(offset), length }
    }

    /// Where `length` bytes from `offset` on lie in it.
    pub(super) fn inside(&self, offset: u64, length: usize) -> Result<Range<usize>, Error> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        match start.checked_add(length) {
            Some(end) if end <= self.length => Ok(start..end),
            _ => Err(Error::OutOfRange {
                start: offset,
                end: offset.saturating_add(length as u64),
                size: self.length as u64,
            }),
        }
    }

    /// The device address of its byte `offset`.
    pub(super) fn device_ptr(&self, offset: usize) -> u64 {
        self.start.offset(offset).as_ptr().addr() as u64
    }
}
