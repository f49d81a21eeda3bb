//! A live mapping: bytes of allocations that are in VRAM and may be touched until it is dropped.
//!
//! Drop takes the access to its pages away, unless another mapping of this process holds them too, then tells the
//! daemon. Frames that the daemon asked back meanwhile are given back with it. In a forked child it does nothing.
//!
//! On a CUDA device the GPU may still be at work on the bytes, and the driver takes access away without asking: so drop
//! first waits for all work of this process in the device's primary context. [`Mapping::unmap_after`] does not. If the
//! driver can't say whether the work is over, the mapping stays: its pages are in VRAM until this process ends.

#![expect(
    unsafe_code,
    reason = "hands out references into frames that are mapped at fixed addresses"
)]

mod area;
mod space;
mod view;

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lapis_proto::ids::{MappingId, VramFrame};
use lapis_proto::message::{Done, Revoked, Unmap};

pub(crate) use area::Base;
pub(crate) use space::Space;
pub(crate) use view::View;

use crate::cuda::gpu::Gpu;
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
    /// Whether its addresses were handed out, so that a GPU may be at work on them.
    pub(crate) in_use: bool,
    pub(crate) stats: MapStats,
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

    /// Exactly the bytes of the `range`-th range. On a CUDA device an empty slice, whatever the range: the CPU can't
    /// reach them; [`Self::try_bytes`] says so.
    ///
    /// # Panics
    /// If there is no such range.
    #[must_use]
    pub fn bytes(&self, range: usize) -> &[u8] {
        let view = self.host_view(range);
        // SAFETY: the bytes lie in pages that `held` holds, readable, until this mapping is dropped, which the
        // borrow outlives not; frames can't shrink, so they are backed and initialized. Nobody writes them
        // meanwhile: through this mapping that takes `&mut self`; other mappings of this process that write
        // overlapping bytes are refused (`claims`); the daemon leaves held frames alone, and other processes share
        // only read-only allocations. On a CUDA device the length is 0.
        unsafe { std::slice::from_raw_parts(view.start.as_ptr(), view.length) }
    }

    /// The bytes of the `range`-th range, to be written. On a CUDA device an empty slice; see [`Self::bytes`].
    ///
    /// # Panics
    /// If there is no such range, or the mapping is only for reading.
    #[must_use]
    pub fn bytes_mut(&mut self, range: usize) -> &mut [u8] {
        assert!(self.write, "the mapping was made with Access::Read");
        let view = self.host_view(range);
        // SAFETY: as in `bytes`, and: the pages are writable while this mapping holds them for writing, `&mut self`
        // keeps every other reference that this mapping gave out away, and `claims` keeps overlapping mappings away.
        unsafe { std::slice::from_raw_parts_mut(view.start.as_ptr(), view.length) }
    }

    /// Exactly the bytes of the `range`-th range, where the CPU can reach them.
    ///
    /// # Errors
    /// [`Error::OnDevice`] on a CUDA device.
    ///
    /// # Panics
    /// If there is no such range.
    pub fn try_bytes(&self, range: usize) -> Result<&[u8], Error> {
        if self.gpu().is_some() { Err(Error::OnDevice) } else { Ok(self.bytes(range)) }
    }

    /// The bytes of the `range`-th range, to be written, where the CPU can reach them.
    ///
    /// # Errors
    /// [`Error::OnDevice`] on a CUDA device; [`Error::ReadOnly`].
    ///
    /// # Panics
    /// If there is no such range.
    pub fn try_bytes_mut(&mut self, range: usize) -> Result<&mut [u8], Error> {
        if !self.write {
            return Err(Error::ReadOnly);
        }
        if self.gpu().is_some() { Err(Error::OnDevice) } else { Ok(self.bytes_mut(range)) }
    }

    /// Bytes of the `range`-th range.
    ///
    /// # Panics
    /// If there is no such range.
    #[must_use]
    pub fn length(&self, range: usize) -> usize {
        self.views[range].length
    }

    /// Address of the `range`-th range: the same for every mapping of these bytes while the allocation lives, but
    /// to be touched only while a mapping does. On a CUDA device it is an address of the device, for kernels and
    /// copies, and nothing that this process's CPU may touch.
    ///
    /// # Panics
    /// If there is no such range.
    #[must_use]
    pub fn as_ptr(&self, range: usize) -> *mut u8 {
        self.views[range].start.as_ptr()
    }

    /// Device address of the `range`-th range, a `CUdeviceptr` in the address space that all contexts of the process
    /// share; `None` where the device isn't a CUDA device.
    ///
    /// # Panics
    /// If there is no such range.
    #[must_use]
    pub fn device_ptr(&self, range: usize) -> Option<u64> {
        let view = self.views[range];
        self.gpu().map(|_| view.device_ptr(0))
    }

    /// The device that its addresses are on, by its ordinal in this process (`cuDeviceGet`); `None` where it isn't a CUDA
    /// device.
    #[must_use]
    pub fn device_ordinal(&self) -> Option<i32> {
        self.gpu().map(|gpu| gpu.ordinal())
    }

    /// Copies bytes of the `range`-th range, from its byte `offset` on, as many as `target` takes, on any device.
    /// Returns when they are there. On a CUDA device it comes after what was queued in the null stream, and in streams
    /// that wait for it; work in other streams that writes the bytes must have ended.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] past the end of the range; [`Error::Cuda`]; [`Error::Forked`].
    ///
    /// # Panics
    /// If there is no such range.
    pub fn copy_to_host(&self, range: usize, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        let inside = self.inside(range, offset, target.len())?;
        match self.gpu() {
            None => target.copy_from_slice(&self.bytes(range)[inside]),
            Some(gpu) => {
                let source = self.views[range].device_ptr(inside.start);
                // SAFETY: the bytes lie inside the range, whose pages `held` holds, readable, while this mapping
                // lives.
                unsafe { gpu.copy_to_host(target, source) }?;
            }
        }
        Ok(())
    }

    /// Copies `source` over bytes of the `range`-th range, from its byte `offset` on, on any device. Returns when they
    /// are there. For its order on a CUDA device see [`Self::copy_to_host`].
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::OutOfRange`] past the end of the range; [`Error::Cuda`]; [`Error::Forked`].
    ///
    /// # Panics
    /// If there is no such range.
    pub fn copy_from_host(
        &mut self,
        range: usize,
        offset: u64,
        source: &[u8],
    ) -> Result<(), Error> {
        if !self.write {
            return Err(Error::ReadOnly);
        }
        let inside = self.inside(range, offset, source.len())?;
        match self.gpu() {
            None => self.bytes_mut(range)[inside].copy_from_slice(source),
            Some(gpu) => {
                let target = self.views[range].device_ptr(inside.start);
                // SAFETY: the bytes lie inside the range, whose pages `held` holds, writable, while this mapping
                // lives; `claims` keeps overlapping mappings away.
                unsafe { gpu.copy_from_host(target, source) }?;
            }
        }
        Ok(())
    }

    /// What it cost.
    #[must_use]
    pub fn stats(&self) -> MapStats {
        self.stats
    }

    /// Ends the mapping and waits until the daemon has taken note. Dropping it does the same without waiting for that.
    /// On a CUDA device both wait first for all work of this process in the device's primary context, for as long as that
    /// takes; not to be done in a host function of a stream, where the driver answers no questions.
    ///
    /// # Errors
    /// The mapping is over in any case. [`Error::Disconnected`] if the daemon is gone; [`Error::Io`] or [`Error::Cuda`]
    /// if this process's access to the pages could not be taken away, or the GPU waited for. If the driver can't say
    /// whether the GPU still uses them, the pages stay in VRAM until this process ends.
    pub fn unmap(mut self) -> Result<(), Error> {
        if self.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        let drained = self.drain();
        if self.in_use {
            // Drop asks once more, and leaves it as it is.
            return drained;
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
        told.and(self.give_back(owed)).and(drained).and(result)
    }

    /// Ends the mapping once the GPU has done what `stream` holds now, and returns at once. Nothing else that is under
    /// way may use its bytes. Until then its pages stay in VRAM, and its bytes can't be mapped in a way that conflicts;
    /// the connection stays open, though the last handle be dropped. What the GPU hasn't done after 10 minutes counts as
    /// stuck: then the pages stay in VRAM until this process ends.
    ///
    /// Where the device isn't a CUDA device there is nothing to wait for, and this is a drop.
    ///
    /// # Errors
    /// [`Error::Cuda`] if the stream takes no event: then the mapping was dropped instead, which waits for the GPU.
    ///
    /// # Safety
    /// `stream` must be a live `CUstream` of the device's primary context, or null for its default stream. A
    /// `cudaStream_t` is one.
    pub unsafe fn unmap_after(self, stream: *mut c_void) -> Result<(), Error> {
        if self.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        let Some(gpu) = self.gpu() else { return Ok(()) };
        // SAFETY: the caller's promise.
        let mark = unsafe { gpu.mark(stream) }?;
        let session = Arc::clone(&self.session);
        session.drains.push(mark, self)
    }

    /// Ends it when the GPU doesn't use it any more.
    pub(crate) fn end_unused(mut self) {
        self.in_use = false;
    }

    /// The GPU that it is on.
    fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.session.gpu()
    }

    /// A range as the CPU can reach it: nothing of it on a CUDA device.
    fn host_view(&self, range: usize) -> View {
        let view = self.views[range];
        match self.gpu() {
            None => view,
            Some(_) => View::EMPTY,
        }
    }

    /// Where `length` bytes from `offset` on lie in a range.
    fn inside(&self, range: usize, offset: u64, length: usize) -> Result<Range<usize>, Error> {
        if self.session.connection().is_forked() {
            return Err(Error::Forked);
        }
        self.views[range].inside(offset, length)
    }

    /// Waits until the GPU doesn't use it any more. It is in use still if that can't be known.
    fn drain(&mut self) -> Result<(), Error> {
        let drained = match self.gpu() {
            Some(gpu) if self.in_use && !self.held.is_empty() => gpu.synchronize(),
            Some(_) | None => Ok(()),
        };
        self.in_use = drained.as_ref().is_err_and(|error| !error.means_idle());
        Ok(drained?)
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
        // Fails in a broken context, where nothing runs any more.
        let _ = self.drain();
        if self.in_use {
            // What the GPU may use stays as it is: pages, bytes, and the session, which the pages keep.
            std::mem::forget(std::mem::take(&mut self.held));
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
