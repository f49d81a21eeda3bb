//! The GPU that the daemon's frames are on, as this process's driver has it.
//!
//! All calls are made with the device's primary context current to the calling thread, and leave the thread with the
//! context that it had: programs that use the CUDA runtime share that context, others keep their own.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{c_char, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use super::driver::{
    CUcontext, CUdevice, CUevent, CUstream, CUuuid, CallFailed, DevicePtr, Driver, MemHandle,
};
use super::error::{CudaError, uuid_text};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const HANDLE_TYPE_FD: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: such an event costs least.
const EVENT_WITHOUT_TIME: u32 = 2;

/// One device with its primary context, which is kept until this is dropped.
#[derive(Debug)]
pub(crate) struct Gpu {
    driver: Driver,
    ordinal: i32,
    device: CUdevice,
    context: CUcontext,
    process: u32,
}

// SAFETY: a context is a handle, which the driver lets all threads use at once; nothing here is tied to a thread.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Starts the driver (the library named, or the system's), finds the device, and makes its context.
    pub(crate) fn start(library: Option<&Path>, uuid: &[u8; 16]) -> Result<Gpu, CudaError> {
        let driver = Driver::start(library)?;
        let (ordinal, device) = find(&driver, uuid)?;
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is to a context's handle; the driver gave the device.
        unsafe { driver.primary_context_retain(&raw mut context, device) }?;
        Ok(Gpu { driver, ordinal, device, context, process: std::process::id() })
    }

    /// Its place among the devices of this process.
    pub(crate) fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Its number in this process.
    pub(super) fn device(&self) -> CUdevice {
        self.device
    }

    /// Whether this process is a fork of the one that started the driver. Then there is no driver.
    pub(super) fn is_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Calls the driver in the context.
    pub(super) fn within<T>(
        &self,
        body: impl FnOnce(&Driver) -> Result<T, CallFailed>,
    ) -> Result<T, CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { self.driver.context_push(self.context) }?;
        let result = body(&self.driver);
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is to a context's handle; what is popped is what was pushed above.
        let restored = unsafe { self.driver.context_pop(&raw mut popped) };
        let value = result?;
        restored?;
        Ok(value)
    }

    /// Waits for all work of this process in the context.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: takes nothing.
        self.within(|driver| unsafe { driver.context_synchronize() })
    }

    /// Takes in a frame.
    pub(crate) fn import(self: &Arc<Gpu>, fd: &OwnedFd) -> Result<DeviceFrame, CudaError> {
        let mut handle = 0;
        // By value, in the place of a pointer.
        let shareable = ptr::without_provenance_mut(usize::try_from(fd.as_raw_fd()).unwrap_or(0));
        // SAFETY: the pointer is to a handle; the descriptor is open, and looked at only during the call.
        self.within(|driver| unsafe {
            driver.mem_import(&raw mut handle, shareable, HANDLE_TYPE_FD)
        })?;
        Ok(DeviceFrame { gpu: Arc::clone(self), handle })
    }

    /// Copies from the device; waits for it.
    ///
    /// # Safety
    /// The bytes from `source` on must be in pages that the device may read until this returns.
    pub(crate) unsafe fn copy_to_host(
        &self,
        target: &mut [u8],
        source: DevicePtr,
    ) -> Result<(), CudaError> {
        if target.is_empty() {
            return Ok(());
        }
        let pointer = target.as_mut_ptr().cast();
        // SAFETY: `target` is writable for its length until the call returns, which is when the copy is done; of the
        // source the caller promises.
        self.within(|driver| unsafe { driver.copy_down_now(pointer, source, target.len()) })
    }

    /// Copies to the device; waits for it.
    ///
    /// # Safety
    /// The bytes from `target` on must be in pages that the device may write until this returns.
    pub(crate) unsafe fn copy_from_host(
        &self,
        target: DevicePtr,
        source: &[u8],
    ) -> Result<(), CudaError> {
        if source.is_empty() {
            return Ok(());
        }
        let pointer = source.as_ptr().cast();
        self.within(|driver| {
            // SAFETY: `source` is readable for its length until the copy is done, which the null stream's end says;
            // of the target the caller promises.
            unsafe { driver.copy_up_now(target, pointer, source.len()) }?;
            // From pageable memory the call above may return once the bytes are staged.
            // SAFETY: null is the stream that the copy was made in.
            unsafe { driver.stream_synchronize(ptr::null_mut()) }
        })
    }

    /// Marks where a stream is now.
    ///
    /// # Safety
    /// `stream` must be null or a live stream.
    pub(crate) unsafe fn mark(self: &Arc<Gpu>, stream: *mut c_void) -> Result<Mark, CudaError> {
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is to an event's handle.
        self.within(|driver| unsafe { driver.event_create(&raw mut event, EVENT_WITHOUT_TIME) })?;
        let mark = Mark { gpu: Arc::clone(self), event };
        let stream: CUstream = stream.cast();
        // SAFETY: the event was made above; of the stream the caller promises.
        self.within(|driver| unsafe { driver.event_record(event, stream) })?;
        Ok(mark)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !self.is_forked() {
            // Fails if the process is ending and the driver ended first: then it is given up already.
            // SAFETY: retained once, in `start`; all that uses the context holds `self`.
            let _ = unsafe { self.driver.primary_context_release(self.device) };
        }
    }
}

/// The device with this UUID. Its ordinal depends on the process.
fn find(driver: &Driver, uuid: &[u8; 16]) -> Result<(i32, CUdevice), CudaError> {
    let mut devices = 0;
    // SAFETY: the pointer is to a number.
    unsafe { driver.device_count(&raw mut devices) }?;
    for ordinal in 0..devices {
        let (mut device, mut found) = (0, CUuuid { bytes: [0; 16] });
        // SAFETY: the pointer is to a device's number, and the ordinal is below the count.
        unsafe { driver.device(&raw mut device, ordinal) }?;
        // SAFETY: the pointer is to a UUID; the device was given above.
        unsafe { driver.device_uuid(&raw mut found, device) }?;
        if found.bytes.map(c_char::to_ne_bytes).concat() == *uuid {
            return Ok((ordinal, device));
        }
    }
    Err(CudaError::NotVisible { uuid: uuid_text(uuid), devices })
}

/// A VRAM frame of the daemon's. Given up on drop; its memory lives on where it is mapped.
#[derive(Debug)]
pub(crate) struct DeviceFrame {
    gpu: Arc<Gpu>,
    handle: MemHandle,
}

impl DeviceFrame {
    pub(super) fn handle(&self) -> MemHandle {
        self.handle
    }
}

impl Drop for DeviceFrame {
    fn drop(&mut self) {
        if !self.gpu.is_forked() {
            // Fails only in a broken context, whose memory comes back when the process ends.
            // SAFETY: imported once, and nobody else has the handle.
            let _ = self.gpu.within(|driver| unsafe { driver.mem_release(self.handle) });
        }
    }
}

/// A place in a stream's work.
#[derive(Debug)]
pub(crate) struct Mark {
    gpu: Arc<Gpu>,
    event: CUevent,
}

// SAFETY: an event is a handle, which the driver lets all threads use at once.
unsafe impl Send for Mark {}

impl Mark {
    /// Whether all work before it is over. It is as well in a context that is broken or gone: nothing runs there.
    pub(crate) fn is_reached(&self) -> bool {
        // SAFETY: the event was made by this driver and lives as long as `self`.
        match self.gpu.within(|driver| unsafe { driver.event_query(self.event) }) {
            Ok(()) => true,
            // Mostly that it isn't ready.
            Err(error) => error.means_idle(),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if !self.gpu.is_forked() {
            // Fails only in a broken context, with which the event goes.
            // SAFETY: made once, and nobody else has it; the driver lets it be destroyed before it is reached.
            let _ = self.gpu.within(|driver| unsafe { driver.event_destroy(self.event) });
        }
    }
}
