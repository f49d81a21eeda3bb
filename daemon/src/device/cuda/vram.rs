//! The frames: one exportable handle each, side by side in one range of device addresses.
//!
//! Each is exported once, when it is made, and clients get copies of that descriptor: so the reactor never waits for
//! the driver, which may hang. A frame's memory is gone when its handle, its mapping and all descriptors are.
//!
//! Tens of thousands take the driver seconds. So only the first are made before the daemon serves; the engine has the
//! others restored, a few at a time, while it does.
#![expect(unsafe_code, reason = "calls the driver")]

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lapis::cuda::driver::{CallFailed, DevicePtr, MemHandle};
use lapis_proto::ids::VramFrame;
use nix::errno::Errno;

use super::error::CudaError;
use super::gpu::Gpu;
use crate::device::{DeviceFault, check_descriptors};

/// A descriptor a frame, none while it is released. All that the reactor has of the frames.
#[derive(Debug)]
pub(super) struct Exports(Mutex<Vec<Option<OwnedFd>>>);

impl Exports {
    /// A copy of a frame's descriptor.
    pub(super) fn of(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault> {
        let fault = |source| DeviceFault::Frame { frame: frame.0, call: "dup", source };
        let all = self.lock();
        let fd = all.get(frame.0 as usize).and_then(Option::as_ref);
        // The engine shows no frame to anyone that it has released.
        let fd = fd.ok_or_else(|| fault(Errno::ENXIO))?;
        fd.try_clone().map_err(|error| fault(Errno::from_raw(error.raw_os_error().unwrap_or(0))))
    }

    fn put(&self, frame: VramFrame, fd: Option<OwnedFd>) {
        let mut all = self.lock();
        let old = all.get_mut(frame.0 as usize).map(|slot| std::mem::replace(slot, fd));
        // Closed without the lock: that may take the kernel a while.
        drop(all);
        drop(old);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frames that are made before the daemon serves: by reports of others, a tenth of a second's work.
const READY_MAX: u32 = 256;

/// All frames. Dropped, they are unmapped and released.
#[derive(Debug)]
pub(super) struct Vram {
    gpu: Arc<Gpu>,
    base: DevicePtr,
    page_bytes: usize,
    frames: u32,
    /// A handle a frame; none while it is released. Only the thread of the way up takes and puts.
    handles: Mutex<Vec<Option<MemHandle>>>,
    exports: Arc<Exports>,
}

impl Vram {
    /// Makes the first frames, as [`Self::ready`] says; the others are as if they were released. Their content is
    /// whatever the driver left there. The calling thread has the context.
    pub(super) fn new(gpu: &Arc<Gpu>, frames: u32, page_size: u64) -> Result<Self, DeviceFault> {
        gpu.check(frames, page_size)?;
        check_descriptors(frames)?;
        let too_large = || DeviceFault::Setup { call: "counting bytes", source: Errno::EOVERFLOW };
        let page_bytes = usize::try_from(page_size).map_err(|_| too_large())?;
        let length = page_bytes.checked_mul(frames as usize).ok_or_else(too_large)?;
        let mut base = 0;
        // SAFETY: the pointer is to our variable.
        let reserved = unsafe { gpu.driver().address_reserve(&raw mut base, length, 0, 0, 0) };
        let gpu_label = || gpu.label().to_owned();
        reserved.map_err(|failed| CudaError::Open { gpu: gpu_label(), failed })?;
        let none = |_| None;
        let exports = Exports(Mutex::new((0..frames).map(|_| None).collect()));
        let vram = Self {
            gpu: Arc::clone(gpu),
            base,
            page_bytes,
            frames,
            handles: Mutex::new((0..frames).map(none).collect()),
            exports: Arc::new(exports),
        };
        // From here on, dropping it takes back what was made.
        for frame in (0..vram.ready()).map(VramFrame) {
            vram.make(frame).map_err(|failed| vram.gpu.fault(frame, failed))?;
        }
        let allowed = vram.allow(vram.base, page_bytes * vram.ready() as usize);
        allowed.map_err(|failed| CudaError::Open { gpu: gpu_label(), failed })?;
        if vram.ready() < frames {
            tracing::info!(
                "{} of {frames} VRAM frames are made, the others follow while the daemon serves",
                vram.ready()
            );
        }
        Ok(vram)
    }

    /// Frames, the first ones, that are made at once.
    pub(super) fn ready(&self) -> u32 {
        self.frames.min(READY_MAX)
    }

    /// What the reactor needs of them.
    pub(super) fn exports(&self) -> Arc<Exports> {
        Arc::clone(&self.exports)
    }

    /// Bytes of a frame.
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Device address of a frame.
    pub(super) fn place(&self, frame: VramFrame) -> DevicePtr {
        assert!(frame.0 < self.frames, "VRAM frame {} of {}", frame.0, self.frames);
        // Below the length of the range, which was reserved.
        self.base + u64::from(frame.0) * self.page_bytes as u64
    }

    /// Gives a frame's memory back to the device. Nothing in flight touches it, and no process has it mapped.
    pub(super) fn release(&self, frame: VramFrame) -> Result<(), CallFailed> {
        let place = self.place(frame);
        let Some(handle) = self.handle(frame) else { return Ok(()) };
        // SAFETY: the frame is mapped there as a whole since it was made, and its copies have completed.
        unsafe { self.gpu.driver().mem_unmap(place, self.page_bytes) }?;
        self.exports.put(frame, None);
        self.put(frame, None);
        self.gpu.release(handle)
    }

    /// Gives a released frame memory again, with whatever the driver left there.
    pub(super) fn restore(&self, frame: VramFrame) -> Result<(), CallFailed> {
        if self.handle(frame).is_some() {
            // It could not be released.
            return Ok(());
        }
        self.make(frame)?;
        self.allow(self.place(frame), self.page_bytes).inspect_err(|_| {
            let _first_failure_counts = self.release(frame);
        })?;
        self.tell_progress(frame);
        Ok(())
    }

    /// The log hears of each tenth: frames are made in order, and made again in any.
    fn tell_progress(&self, frame: VramFrame) {
        let tenth = |made: u32| u64::from(made) * 10 / u64::from(self.frames);
        let made = frame.0 + 1;
        if self.ready() < self.frames && tenth(made) > tenth(frame.0) {
            tracing::info!("{made} of {} VRAM frames are made", self.frames);
        }
    }

    /// Creates, exports and maps a frame; no access yet. All or nothing.
    fn make(&self, frame: VramFrame) -> Result<(), CallFailed> {
        let (gpu, place) = (&self.gpu, self.place(frame));
        let handle = gpu.create(self.page_bytes)?;
        let mapped = gpu.export(handle).and_then(|fd| {
            // SAFETY: the place is a page of our reservation, and nothing is mapped there: the frame has no handle.
            unsafe { gpu.driver().mem_map(place, self.page_bytes, 0, handle, 0) }?;
            Ok(fd)
        });
        match mapped {
            Ok(fd) => {
                self.exports.put(frame, Some(fd));
                self.put(frame, Some(handle));
                Ok(())
            }
            Err(failed) => {
                let _first_failure_counts = gpu.release(handle);
                Err(failed)
            }
        }
    }

    /// Lets the device read and write what is mapped there.
    fn allow(&self, place: DevicePtr, bytes: usize) -> Result<(), CallFailed> {
        let access = self.gpu.access();
        // SAFETY: the pointer is to one description, and the range is whole frames that are mapped.
        unsafe { self.gpu.driver().mem_set_access(place, bytes, &raw const access, 1) }
    }

    fn handle(&self, frame: VramFrame) -> Option<MemHandle> {
        self.lock().get(frame.0 as usize).copied().flatten()
    }

    fn put(&self, frame: VramFrame, handle: Option<MemHandle>) {
        if let Some(slot) = self.lock().get_mut(frame.0 as usize) {
            *slot = handle;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<MemHandle>>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Vram {
    fn drop(&mut self) {
        if self.gpu.lost().is_some() {
            // The driver answers nothing else any more; the end of the process gives the memory back.
            return;
        }
        let mut outcome = Ok(());
        for frame in (0..self.frames).map(VramFrame) {
            outcome = outcome.and(self.release(frame));
        }
        let length = self.page_bytes * self.frames as usize;
        // SAFETY: reserved by `new` with this length; what is still mapped makes the call fail.
        outcome = outcome.and(unsafe { self.gpu.driver().address_free(self.base, length) });
        if let Err(failed) = outcome {
            tracing::error!("VRAM stays taken until the process ends: {failed}");
        }
    }
}
