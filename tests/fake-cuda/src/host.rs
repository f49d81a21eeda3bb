//! Host memory that is registered for DMA.
#![expect(unsafe_code, reason = "pins the caller's memory")]

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use crate::abi::REGISTER_READ_ONLY;
use crate::code::{
    HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED, INVALID_VALUE, Outcome, require,
};

const HOST_PAGE: usize = 4096;

/// A registered range. A copy holds it open while it runs.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) flags: u32,
    pub(crate) device: usize,
    /// False once it is unregistered: then the memory may be gone.
    live: RwLock<bool>,
}

/// How a range lies to what is registered.
#[derive(Debug)]
pub(crate) enum Cover {
    /// All of it in one registration.
    Whole(Arc<Registration>),
    /// Some of it, or in several registrations.
    Part,
    /// Nothing of it.
    None,
}

/// All registrations, by their start.
#[derive(Debug, Default)]
pub(crate) struct Hosts(BTreeMap<usize, Arc<Registration>>);

impl Hosts {
    pub(crate) fn register(
        &mut self,
        (start, bytes): (usize, usize),
        flags: u32,
        device: usize,
    ) -> Outcome {
        let (from, to) = pages(start, bytes)?;
        let overlaps = self.0.values().any(|other| {
            let (start, end) = pages(other.start, other.bytes).expect("it was registered");
            start < to && from < end
        });
        require(!overlaps, HOST_MEMORY_ALREADY_REGISTERED)?;
        let live = RwLock::new(true);
        self.0.insert(start, Arc::new(Registration { start, bytes, flags, device, live }));
        Ok(())
    }

    /// Takes the registration that begins there away; the caller must `end` it, without locks.
    pub(crate) fn remove(&mut self, start: usize) -> Outcome<Arc<Registration>> {
        self.0.remove(&start).ok_or(HOST_MEMORY_NOT_REGISTERED)
    }

    /// Takes all of a device away.
    pub(crate) fn remove_all(&mut self, device: usize) -> Vec<Arc<Registration>> {
        let of_device = self.0.values().filter(|found| found.device == device);
        let starts: Vec<_> = of_device.map(|found| found.start).collect();
        starts.iter().filter_map(|start| self.0.remove(start)).collect()
    }

    pub(crate) fn cover(&self, start: usize, bytes: usize) -> Cover {
        let end = start.saturating_add(bytes);
        let mut touched =
            self.0.values().filter(|found| found.start < end && start < found.start + found.bytes);
        match touched.next() {
            None => Cover::None,
            Some(found) if found.start <= start && end <= found.start + found.bytes => {
                Cover::Whole(Arc::clone(found))
            }
            Some(_) => Cover::Part,
        }
    }
}

impl Registration {
    /// Keeps the memory from being unregistered until dropped; none if it was.
    pub(crate) fn hold(&self) -> Option<RwLockReadGuard<'_, bool>> {
        let live = self.live.read().unwrap_or_else(PoisonError::into_inner);
        live.then_some(live)
    }

    /// Waits for the copy that runs, if one does; those that are queued will find it gone.
    pub(crate) fn end(&self) {
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = false;
    }
}

/// Makes the pages be there, as pinning does: `INVALID_VALUE` if they can't be read, or written where they must be.
pub(crate) fn populate(start: usize, bytes: usize, flags: u32) -> Outcome {
    let (from, to) = pages(start, bytes)?;
    let advice = if flags & REGISTER_READ_ONLY == 0 {
        libc::MADV_POPULATE_WRITE
    } else {
        libc::MADV_POPULATE_READ
    };
    // SAFETY: populating changes no contents and takes any range; one that isn't mapped is an error.
    let done = unsafe { libc::madvise(from as *mut _, to - from, advice) };
    require(done == 0, INVALID_VALUE)
}

/// The pages around a range.
fn pages(start: usize, bytes: usize) -> Outcome<(usize, usize)> {
    let end = start.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(HOST_PAGE));
    require(start != 0 && bytes != 0, INVALID_VALUE)?;
    Ok((start - start % HOST_PAGE, end.ok_or(INVALID_VALUE)?))
}
