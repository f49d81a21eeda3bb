//! A live mapping: bytes of allocations that are in VRAM and may be touched until it is dropped.
//!
//! Drop takes the access to its pages away, unless another mapping of this process holds them too, then tells the
//! daemon. Frames that the daemon asked back meanwhile are given back with it. In a forked child it does nothing.

#![expect(
    unsafe_code,
    reason = "hands out references into frames that are mapped at fixed addresses"
)]

mod space;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lapis_proto::ids::{MappingId, VramFrame};
use lapis_proto::message::{Done, Revoked, Unmap};

pub(crate) use space::{Base, Space};

use crate::allocation::Owned;
use crate::error::Error;
use crate::memory::{Claim, Held};
use crate::session::Session;

/// What a mapping cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MapStats {
    /// Pages that were in VRAM when it was asked for.
    pub hits_vram: u32,
    /// Pages that came from RAM.
    pub hits_ram: u32,
    /// Pages in all.
    pub pages: u32,
    /// How long the daemon took from the request's arrival to its reply.
    pub waited: Duration,
}

/// The right to touch some ranges of bytes.
///
/// The ranges are counted from 0 in the order they were asked for. Each has an address that stays the same for every
/// mapping of the same bytes.
#[derive(Debug)]
pub struct Mapping {
    pub(crate) session: Arc<Session>,
    /// `None` if it has no pages or isn't granted yet.
    pub(crate) id: Option<MappingId>,
    /// Pages held, with what keeps their addresses.
    pub(crate) held: Vec<Held>,
    /// Bytes that no other mapping of this process may have in a way that conflicts.
    pub(crate) claims: Vec<Claim>,
    pub(crate) views: Vec<View>,
    pub(crate) write: bool,
    pub(crate) stats: MapStats,
}

/// One range of bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    start: Base,
    length: usize,
}

impl View {
    /// `bytes` of an allocation, which must have them.
    pub(crate) fn new(allocation: &Owned, bytes: &Range<u64>) -> View {
        debug_assert!(bytes.start <= bytes.end && bytes.end <= allocation.size);
        // What is reserved fits in the address space, and so does any part of it.
        let offset = usize::try_from(allocation.shift + bytes.start).unwrap_or(0);
        let length = usize::try_from(bytes.end - bytes.start).unwrap_or(0);
        View { start: allocation.base.offset(offset), length }
    }
}

impl Mapping {
    /// How many ranges it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.views.len()
    }

    /// Whether it has no ranges.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.views.is_empty()
    }

    /// Exactly the bytes of the `range`-th range.
    ///
    /// # Panics
    /// If there is no such range.
    #[must_use]
    pub fn bytes(&self, range: usize) -> &[u8] {
        let view = self.views[range];
        // SAFETY: the bytes lie in pages that `held` holds, readable, until this mapping is dropped, which the
        // borrow outlives not; frames can't shrink, so they are backed and initialized. Nobody writes them
        // meanwhile: through this mapping that takes `&mut self`; other mappings of this process that write
        // overlapping bytes are refused (`claims`); the daemon leaves held frames alone, and other processes share
        // only read-only allocations.
        unsafe { std::slice::from_raw_parts(view.start.as_ptr(), view.length) }
    }

    /// The bytes of the `range`-th range, to be written.
    ///
    /// # Panics
    /// If there is no such range, or the mapping is only for reading.
    #[must_use]
    pub fn bytes_mut(&mut self, range: usize) -> &mut [u8] {
        assert!(self.write, "the mapping was made with Access::Read");
        let view = self.views[range];
        // SAFETY: as in `bytes`, and: the pages are writable while this mapping holds them for writing, `&mut self`
        // keeps every other reference that this mapping gave out away, and `claims` keeps overlapping mappings away.
        unsafe { std::slice::from_raw_parts_mut(view.start.as_ptr(), view.length) }
    }

    /// Address of the `range`-th range: the same for every mapping of these bytes while the allocation lives, but
    /// to be touched only while a mapping does.
    ///
    /// # Panics
    /// If there is no such range.
    #[must_use]
    pub fn as_ptr(&self, range: usize) -> *mut u8 {
        self.views[range].start.as_ptr()
    }

    /// What it cost.
    #[must_use]
    pub fn stats(&self) -> MapStats {
        self.stats
    }

    /// Ends the mapping and waits until the daemon has taken note. Dropping it does the same without waiting.
    ///
    /// # Errors
    /// The mapping is over in any case. [`Error::Disconnected`] if the daemon is gone; [`Error::Io`] if this
    /// process's access to the pages could not be taken away.
    pub fn unmap(mut self) -> Result<(), Error> {
        if self.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        let Closed { held, owed, result } = self.close();
        let told = match self.id.take() {
            Some(id) => {
                let request = Unmap { mappings: vec![id] };
                self.session.connection().call(&request, None).map(|Done {}| ())
            }
            None => Ok(()),
        };
        drop(held);
        told.and(self.give_back(owed)).and(result)
    }

    /// Gives up the pages and bytes, as far as this process goes.
    fn close(&mut self) -> Closed {
        let mut memory = crate::lock(&self.session.shared.memory);
        memory.unclaim(&self.claims, self.write);
        self.claims.clear();
        let held = std::mem::take(&mut self.held);
        let mut result = Ok(());
        for Held { allocation, pages } in &held {
            result = result.and(memory.release(allocation.id, pages.clone(), self.write));
        }
        let settled = memory.settle(self.session.connection().frames());
        let (owed, settled) =
            settled.map_or_else(|error| (Vec::new(), Err(error)), |owed| (owed, Ok(())));
        Closed { held, owed, result: result.and(settled) }
    }

    /// Tells the daemon that frames it asked for are unmapped. Only after it knows that the mapping is over: until
    /// then it takes them for mapped.
    fn give_back(&self, frames: Vec<VramFrame>) -> Result<(), Error> {
        if frames.is_empty() {
            return Ok(());
        }
        self.session.connection().post(&Revoked { frames })
    }
}

/// What is left of a mapping.
struct Closed {
    /// May go once the daemon knows.
    held: Vec<Held>,
    /// Frames to give back then.
    owed: Vec<VramFrame>,
    /// Whether access could be taken away.
    result: Result<(), Error>,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.session.connection().is_forked() {
            return;
        }
        // A page that could not be closed stays readable to this process, which may not touch it any more anyway.
        let Closed { held, owed, result: _ } = self.close();
        // A daemon that is gone holds no mapping and asks for nothing either; a refusal is kept for
        // `Client::take_refusal`.
        if let Some(id) = self.id.take() {
            let _ = self.session.connection().post(&Unmap { mappings: vec![id] });
        }
        let _ = self.give_back(owed);
        drop(held);
    }
}
