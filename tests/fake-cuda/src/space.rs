//! The process's device addresses: reservations, and what is mapped in them.
//!
//! A reservation is inaccessible memory of this process, so a device address is never another object's. Mapping memory puts
//! its pages there (without access), access is `mprotect`, unmapping puts inaccessible memory back.
#![expect(unsafe_code, reason = "reserves and maps addresses")]

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::{ACCESS_NONE, ACCESS_READ, ACCESS_READ_WRITE};
use crate::code::{INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY, Outcome, require};
use crate::memory::Memory;

/// Which calls may free or map in a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `cuMemAddressReserve`.
    Reserved,
    /// `cuMemAlloc`.
    Allocated,
}

#[derive(Debug)]
struct Reservation {
    bytes: usize,
    kind: Kind,
}

/// Memory at an address.
#[derive(Clone, Debug)]
pub(crate) struct Mapping {
    pub(crate) bytes: usize,
    pub(crate) memory: Arc<Memory>,
    /// `CUmemAccess_flags`, of the memory's own device.
    pub(crate) access: u32,
    /// Another number for each mapping ever made.
    pub(crate) number: u64,
}

/// All reservations and mappings.
#[derive(Debug)]
pub(crate) struct Space {
    reservations: BTreeMap<usize, Reservation>,
    mappings: BTreeMap<usize, Mapping>,
    numbers: u64,
    /// Whether the CPU gets the access that the device has.
    host_access: bool,
}

impl Space {
    pub(crate) fn new(host_access: bool) -> Self {
        let (reservations, mappings) = (BTreeMap::new(), BTreeMap::new());
        Self { reservations, mappings, numbers: 0, host_access }
    }

    pub(crate) fn reserve(
        &mut self,
        (bytes, alignment): (usize, usize),
        hint: usize,
        kind: Kind,
    ) -> Outcome<usize> {
        let address = reserve(bytes, alignment, hint)?;
        self.reservations.insert(address, Reservation { bytes, kind });
        Ok(address)
    }

    /// Frees a whole reservation with nothing mapped in it.
    pub(crate) fn free(&mut self, address: usize, bytes: usize) -> Outcome {
        let reservation = self.reservations.get(&address).ok_or(INVALID_VALUE)?;
        require(reservation.kind == Kind::Reserved && reservation.bytes == bytes, INVALID_VALUE)?;
        require(self.mappings.range(address..address + bytes).next().is_none(), INVALID_VALUE)?;
        self.forget(address, bytes);
        Ok(())
    }

    /// Maps memory in a reservation, where nothing is mapped.
    pub(crate) fn map(&mut self, address: usize, bytes: usize, memory: Arc<Memory>) -> Outcome {
        require(bytes <= memory.bytes(), INVALID_VALUE)?;
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let (start, reservation) = self.reservation(address).ok_or(INVALID_VALUE)?;
        require(end <= start + reservation.bytes, INVALID_VALUE)?;
        require(self.mappings.range(address..end).next().is_none(), INVALID_VALUE)?;
        require(self.mapping(address).is_none(), INVALID_VALUE)?;
        self.put(address, bytes, memory)
    }

    /// Takes exactly one mapping away.
    pub(crate) fn unmap(&mut self, address: usize, bytes: usize) -> Outcome {
        let mapping = self.mappings.get(&address).ok_or(INVALID_VALUE)?;
        require(mapping.bytes == bytes && !self.is_allocated(address), INVALID_VALUE)?;
        protect_nothing(address, bytes)?;
        // The memory goes last: with this its pages may be the last hold of it.
        self.mappings.remove(&address);
        Ok(())
    }

    /// Sets the access of whole mappings that lie side by side.
    pub(crate) fn set_access(&mut self, address: usize, bytes: usize, flags: u32) -> Outcome {
        self.whole_mappings(address, bytes)?;
        for (start, mapping) in self.mappings.range_mut(address..address + bytes) {
            if self.host_access {
                let protection = match flags {
                    ACCESS_READ_WRITE => libc::PROT_READ | libc::PROT_WRITE,
                    ACCESS_READ => libc::PROT_READ,
                    _ => libc::PROT_NONE,
                };
                // SAFETY: the range is a mapping that the driver made inside its own reservation.
                let result = unsafe { libc::mprotect(*start as *mut _, mapping.bytes, protection) };
                require(result == 0, OPERATING_SYSTEM)?;
            }
            mapping.access = flags;
        }
        Ok(())
    }

    /// The mappings from `address` on, side by side, that make up exactly `bytes`.
    pub(crate) fn whole_mappings(&self, address: usize, bytes: usize) -> Outcome<Vec<&Mapping>> {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        require(bytes > 0 && !self.is_allocated(address), INVALID_VALUE)?;
        let mut next = address;
        let mut found = Vec::new();
        while next < end {
            let mapping = self.mappings.get(&next).ok_or(INVALID_VALUE)?;
            next += mapping.bytes;
            found.push(mapping);
        }
        require(next == end, INVALID_VALUE)?;
        Ok(found)
    }

    /// `cuMemAlloc`: a reservation with memory in it, ready for use.
    pub(crate) fn allocate(&mut self, memory: Arc<Memory>) -> Outcome<usize> {
        let bytes = memory.bytes();
        let address = self.reserve((bytes, 1), 0, Kind::Allocated)?;
        let mapped = self.put(address, bytes, memory);
        if mapped.is_err() {
            self.forget(address, bytes);
        }
        mapped?;
        let mapping = self.mappings.get_mut(&address).expect("mapped above");
        mapping.access = ACCESS_READ_WRITE;
        Ok(address)
    }

    /// `cuMemFree`, of what `allocate` returned. Returns the ordinal of the device.
    pub(crate) fn allocation_device(&self, address: usize) -> Outcome<usize> {
        let reservation = self.reservations.get(&address).ok_or(INVALID_VALUE)?;
        require(reservation.kind == Kind::Allocated, INVALID_VALUE)?;
        Ok(self.mappings.get(&address).expect("an allocation is mapped").memory.device)
    }

    /// Frees what `allocate` returned.
    pub(crate) fn free_allocation(&mut self, address: usize) -> Outcome {
        self.allocation_device(address)?;
        let bytes = self.reservations[&address].bytes;
        self.forget(address, bytes);
        self.mappings.remove(&address);
        Ok(())
    }

    /// All that `cuMemAlloc` made on a device.
    pub(crate) fn allocations(&self, device: usize) -> Vec<usize> {
        let all = self.reservations.keys().copied();
        all.filter(|address| self.allocation_device(*address) == Ok(device)).collect()
    }

    /// The mapping that an address is in, with its start.
    pub(crate) fn mapping(&self, address: usize) -> Option<(usize, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.bytes).then_some((*start, mapping))
    }

    /// Whether the driver gave the address out, mapped or not.
    pub(crate) fn is_ours(&self, address: usize) -> bool {
        self.reservation(address).is_some()
    }

    fn is_allocated(&self, address: usize) -> bool {
        self.reservation(address).is_some_and(|(_, found)| found.kind == Kind::Allocated)
    }

    fn reservation(&self, address: usize) -> Option<(usize, &Reservation)> {
        let (start, reservation) = self.reservations.range(..=address).next_back()?;
        (address < start + reservation.bytes).then_some((*start, reservation))
    }

    fn put(&mut self, address: usize, bytes: usize, memory: Arc<Memory>) -> Outcome {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let (from, to) = (memory.pointer(), address as *mut libc::c_void);
        // SAFETY: `from` is a shared mapping of at least `bytes`; an old size of 0 leaves it there and makes a second one of
        // the same pages. The target is inside a reservation of ours, where nothing is mapped: no one's memory is replaced.
        let mapped = unsafe { libc::mremap(from.cast(), 0, bytes, flags, to) };
        require(mapped != libc::MAP_FAILED, OPERATING_SYSTEM)?;
        // SAFETY: the mapping made above.
        let protected = unsafe { libc::mprotect(to, bytes, libc::PROT_NONE) };
        require(protected == 0, OPERATING_SYSTEM)?;
        self.numbers += 1;
        let mapping = Mapping { bytes, memory, access: ACCESS_NONE, number: self.numbers };
        self.mappings.insert(address, mapping);
        Ok(())
    }

    fn forget(&mut self, address: usize, bytes: usize) {
        // SAFETY: a whole reservation of ours; the caller checked that its user gave it up.
        unsafe { libc::munmap(address as *mut _, bytes) };
        self.reservations.remove(&address);
    }
}

/// Puts inaccessible memory where a mapping was.
fn protect_nothing(address: usize, bytes: usize) -> Outcome {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces a mapping that the driver made inside its own reservation.
    let put = unsafe { libc::mmap(address as *mut _, bytes, libc::PROT_NONE, flags, -1, 0) };
    require(put != libc::MAP_FAILED, OPERATING_SYSTEM)
}

/// Inaccessible memory at an aligned address.
fn reserve(bytes: usize, alignment: usize, hint: usize) -> Outcome<usize> {
    let whole = bytes.checked_add(alignment).ok_or(OUT_OF_MEMORY)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping; the hint is only a hint without MAP_FIXED.
    let found = unsafe { libc::mmap(hint as *mut _, whole, libc::PROT_NONE, flags, -1, 0) };
    require(found != libc::MAP_FAILED, OUT_OF_MEMORY)?;
    let start = found as usize;
    let address = start.next_multiple_of(alignment);
    let (before, after) = (address - start, start + whole - (address + bytes));
    for (start, bytes) in [(start, before), (address + bytes, after)] {
        if bytes > 0 {
            // SAFETY: the part of the mapping made above that is not returned.
            unsafe { libc::munmap(start as *mut _, bytes) };
        }
    }
    Ok(address)
}
