//! What a stream's thread does.
//!
//! Device addresses are resolved when the work runs, not when it is queued, as a GPU does: memory that was unmapped in between is an
//! illegal access, and what was mapped there anew is what gets the bytes.
#![expect(unsafe_code, reason = "copies between pointers, calls host functions")]

use std::sync::Arc;

use crate::abi::{ACCESS_READ_WRITE, HostFunction, REGISTER_DEVICE_MAP};
use crate::call::as_host_function;
use crate::code::{Code, ILLEGAL_ADDRESS, Outcome, require};
use crate::driver::{Device, Driver};
use crate::event::Event;
use crate::faults::{self, WORK};
use crate::host::{Cover, Registration};
use crate::memory::Memory;
use crate::stream::Stream;

/// One end of a copy.
#[derive(Debug)]
pub(crate) enum Place {
    /// A device address.
    Device(usize),
    /// Host memory that was registered when the copy was queued.
    Pinned(usize),
    /// Host memory of a caller that waits for the end of the copy.
    Lent(usize),
    /// Host memory that was staged.
    Bytes(Vec<u8>),
}

/// One entry of a queue.
#[derive(Debug)]
pub(crate) enum Work {
    Copy {
        to: Place,
        from: Place,
        bytes: usize,
    },
    Fill {
        address: usize,
        bytes: usize,
        pattern: Vec<u8>,
    },
    Record {
        event: Arc<Event>,
        generation: u64,
    },
    WaitFor {
        event: Arc<Event>,
        generation: u64,
    },
    /// What another stream had queued comes first.
    After {
        stream: Arc<Stream>,
        count: u64,
    },
    Call {
        function: HostFunction,
        data: usize,
    },
}

/// A contiguous part of a place, and what keeps it there.
#[derive(Debug)]
struct Part {
    pointer: *mut u8,
    bytes: usize,
    keep: Keep,
}

#[derive(Debug)]
enum Keep {
    Memory { _memory: Arc<Memory>, address: usize, number: u64 },
    Host(Arc<Registration>),
    Caller,
}

impl Work {
    /// Does it; an error breaks the context.
    pub(crate) fn run(&self, driver: &'static Driver, device: &Device) -> Outcome {
        match self {
            Self::Copy { to, from, bytes } => {
                injected()?;
                let from = parts(driver, from, *bytes, false)?;
                let to = parts(driver, to, *bytes, true)?;
                copy(&to, &from)?;
                unchanged(driver, from.iter().chain(&to))
            }
            Self::Fill { address, bytes, pattern } => {
                injected()?;
                let to = parts(driver, &Place::Device(*address), *bytes, true)?;
                fill(&to, pattern)?;
                unchanged(driver, to.iter())
            }
            // That is for `complete_event`.
            Self::Record { .. } => Ok(()),
            Self::WaitFor { event, generation } => {
                let other = &driver.devices[event.device];
                event.wait(*generation, || device.fault().is_some() || other.fault().is_some());
                Ok(())
            }
            // A fault is noticed by the stream before its next work.
            Self::After { stream, count } => stream.wait(*count, || device.fault()).or(Ok(())),
            Self::Call { function, data } => {
                // SAFETY: the caller of cuLaunchHostFunc promised that this may be called with that, once, on any thread.
                as_host_function(|| unsafe { function(*data as *mut _) });
                Ok(())
            }
        }
    }

    /// For a record: all before it is done.
    pub(crate) fn complete_event(&self) {
        if let Self::Record { event, generation } = self {
            event.complete(*generation);
        }
    }
}

fn injected() -> Outcome {
    faults::take(WORK).map_or(Ok(()), Err)
}

/// Where a place's bytes are now; `ILLEGAL_ADDRESS` if the device may not touch them.
fn parts(driver: &Driver, place: &Place, bytes: usize, write: bool) -> Outcome<Vec<Part>> {
    let caller = |pointer: *mut u8| Part { pointer, bytes, keep: Keep::Caller };
    match place {
        Place::Device(address) => device_parts(driver, *address, bytes, write),
        Place::Pinned(address) => Ok(vec![host_part(driver, *address, bytes, 0)?]),
        Place::Lent(address) => Ok(vec![caller(*address as *mut u8)]),
        // Only ever read.
        Place::Bytes(staged) => Ok(vec![caller(staged.as_ptr().cast_mut())]),
    }
}

fn device_parts(driver: &Driver, start: usize, bytes: usize, write: bool) -> Outcome<Vec<Part>> {
    let tables = driver.tables();
    if !tables.space.is_ours(start) {
        drop(tables);
        return Ok(vec![host_part(driver, start, bytes, REGISTER_DEVICE_MAP)?]);
    }
    let (mut address, end) = (start, start + bytes);
    let mut parts = Vec::new();
    while address < end {
        let (base, mapping) = tables.space.mapping(address).ok_or(ILLEGAL_ADDRESS)?;
        let allowed = if write { mapping.access == ACCESS_READ_WRITE } else { mapping.access != 0 };
        require(allowed, ILLEGAL_ADDRESS)?;
        let part_end = end.min(base + mapping.bytes);
        let memory = Arc::clone(&mapping.memory);
        let pointer = memory.pointer().wrapping_add(address - base);
        let keep = Keep::Memory { _memory: memory, address, number: mapping.number };
        parts.push(Part { pointer, bytes: part_end - address, keep });
        address = part_end;
    }
    Ok(parts)
}

fn host_part(driver: &Driver, start: usize, bytes: usize, flags: u32) -> Outcome<Part> {
    match driver.tables().hosts.cover(start, bytes) {
        Cover::Whole(found) if found.flags & flags == flags => {
            Ok(Part { pointer: start as *mut u8, bytes, keep: Keep::Host(found) })
        }
        _ => Err(ILLEGAL_ADDRESS),
    }
}

/// Holds all registered memory that the parts are in, so that it isn't unregistered meanwhile.
macro_rules! hold {
    ($parts:expr) => {
        $parts
            .filter_map(|part| match &part.keep {
                Keep::Host(registration) => Some(registration.hold().ok_or(ILLEGAL_ADDRESS)),
                _ => None,
            })
            .collect::<Result<Vec<_>, Code>>()?
    };
}

fn copy(to: &[Part], from: &[Part]) -> Outcome {
    let _held = hold!(to.iter().chain(from));
    let (mut to, mut from) = (to.iter(), from.iter());
    let (mut target, mut source) = (Cursor::default(), Cursor::default());
    while target.refill(&mut to) && source.refill(&mut from) {
        let bytes = target.bytes.min(source.bytes);
        // SAFETY: both parts have that many bytes left. They stay mapped: device memory by the `Arc` in the part, registered
        // memory by what is held above, a caller's by the caller, who waits. They may overlap, and others may write at the
        // same time: that is the caller's race, of bytes only.
        unsafe { std::ptr::copy(source.pointer, target.pointer, bytes) };
        target.advance(bytes);
        source.advance(bytes);
    }
    Ok(())
}

fn fill(to: &[Part], pattern: &[u8]) -> Outcome {
    let _held = hold!(to.iter());
    for part in to {
        for at in (0..part.bytes).step_by(pattern.len()) {
            let bytes = pattern.len().min(part.bytes - at);
            // SAFETY: inside the part, which stays mapped as it does for a copy.
            unsafe { part.pointer.add(at).copy_from_nonoverlapping(pattern.as_ptr(), bytes) };
        }
    }
    Ok(())
}

/// Whether what was touched is still mapped where it was: an unmap that did not wait is caught in the act.
fn unchanged<'a>(driver: &Driver, mut parts: impl Iterator<Item = &'a Part>) -> Outcome {
    let tables = driver.tables();
    let same = parts.all(|part| match &part.keep {
        Keep::Memory { address, number, .. } => {
            tables.space.mapping(*address).is_some_and(|(_, now)| now.number == *number)
        }
        Keep::Host(_) | Keep::Caller => true,
    });
    require(same, ILLEGAL_ADDRESS)
}

/// What is left of one part.
#[derive(Debug)]
struct Cursor {
    pointer: *mut u8,
    bytes: usize,
}

impl Default for Cursor {
    fn default() -> Self {
        Self { pointer: std::ptr::null_mut(), bytes: 0 }
    }
}

impl Cursor {
    /// Goes on to the next part when this one is done. False when there is none.
    fn refill<'a>(&mut self, parts: &mut impl Iterator<Item = &'a Part>) -> bool {
        if self.bytes == 0
            && let Some(part) = parts.next()
        {
            *self = Self { pointer: part.pointer, bytes: part.bytes };
        }
        self.bytes > 0
    }

    fn advance(&mut self, bytes: usize) {
        self.pointer = self.pointer.wrapping_add(bytes);
        self.bytes -= bytes;
    }
}
