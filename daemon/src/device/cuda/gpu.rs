//! One GPU of this process: its driver, its primary context, what it is, and whether it is still of use.
#![expect(unsafe_code, reason = "calls the driver")]

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::OnceLock;

use lapis::cuda::driver::sys;
use lapis::cuda::driver::{CUcontext, CUdevice, CallFailed, Driver, MemHandle, code};
use lapis_proto::ids::VramFrame;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};

use super::error::{CudaError, fix, is_gone};
use crate::config::{GpuChoice, Size};
use crate::device::DeviceFault;

/// `CU_DEVICE_ATTRIBUTE_INTEGRATED`.
const ATTRIBUTE_INTEGRATED: c_int = 18;
/// `CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`.
const ATTRIBUTE_HOST_PAGE_TABLES: c_int = 100;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const HANDLE_POSIX_FD: c_uint = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const GRANULARITY_MINIMUM: c_uint = 0;
/// The driver's names are shorter.
const NAME_BYTES: usize = 256;

/// A GPU that is open. Its primary context is given up when this is dropped.
#[derive(Debug)]
pub struct Gpu {
    driver: Driver,
    device: CUdevice,
    context: Context,
    name: String,
    uuid: [u8; 16],
    label: String,
    granularity: usize,
    /// Why no call is made any more.
    lost: OnceLock<String>,
}

#[derive(Debug)]
struct Context(CUcontext);

// SAFETY: a context is a handle of the process, not of a thread: any thread may make it its current one, and the driver
// locks what it must. Nothing is reached through the pointer here.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Gpu {
    /// Starts the driver and opens a device, the first one if none is chosen. Its context is then the calling thread's.
    ///
    /// # Errors
    /// [`CudaError`]: there is none that can be used, and why.
    pub fn open(libcuda: Option<&Path>, choice: Option<GpuChoice>) -> Result<Gpu, CudaError> {
        let driver = Driver::start(libcuda)?;
        let found = list(&driver).map_err(|failed| CudaError::List { failed })?;
        let (device, uuid) = choose(&found, choice)?;
        let uuid_text = GpuChoice::Uuid(uuid);
        let named = name_of(&driver, device);
        let name = named.clone().unwrap_or_else(|_| "a GPU".to_owned());
        let label = format!("{device} ({name}, {uuid_text})");
        let open = |failed| CudaError::Open { gpu: label.clone(), failed };
        named.map_err(open)?;
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: the device was just listed, and the driver writes a handle to our variable.
        unsafe { driver.primary_context_retain(&raw mut context, device) }.map_err(open)?;
        let context = Context(context);
        // From here on, dropping it gives the context up.
        let lost = OnceLock::new();
        let mut gpu = Gpu { driver, device, context, name, uuid, label, granularity: 0, lost };
        gpu.make_current().map_err(|failed| gpu.cannot(failed))?;
        let unusable = |failed| CudaError::Unusable { gpu: gpu.label.clone(), failed };
        let granularity = gpu.ask_granularity().map_err(unusable)?;
        gpu.probe(granularity).map_err(unusable)?;
        gpu.granularity = granularity;
        Ok(gpu)
    }

    pub(super) fn cannot(&self, failed: CallFailed) -> CudaError {
        CudaError::Open { gpu: self.label.clone(), failed }
    }

    /// What it can do is found out by doing it: attributes claim more than some systems can.
    fn probe(&self, bytes: usize) -> Result<(), CallFailed> {
        let handle = self.create(bytes)?;
        let exported = self.export(handle).map(drop);
        let released = self.release(handle);
        exported.and(released)
    }

    fn ask_granularity(&self) -> Result<usize, CallFailed> {
        let mut bytes = 0;
        // SAFETY: both pointers are to our variables.
        unsafe {
            let prop = self.allocation_prop();
            self.driver.mem_granularity(&raw mut bytes, &raw const prop, GRANULARITY_MINIMUM)?;
        }
        // A driver that says nothing of use is taken to have the usual one.
        Ok(if bytes == 0 { 2 << 20 } else { bytes })
    }

    /// The driver.
    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Makes its context the calling thread's, which every thread that calls the driver must have done.
    pub(super) fn make_current(&self) -> Result<(), CallFailed> {
        // SAFETY: the context is retained until this is dropped.
        unsafe { self.driver.context_set(self.context.0) }
    }

    /// Free and all memory now. The calling thread has the context.
    ///
    /// # Errors
    /// [`CudaError::Open`].
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to our variables.
        let asked = unsafe { self.driver.mem_info(&raw mut free, &raw mut total) };
        asked.map_err(|failed| self.cannot(failed))?;
        Ok((free as u64, total as u64))
    }

    /// Refuses what the device can't hold, or not in such frames.
    ///
    /// # Errors
    /// [`CudaError::PageSize`], [`CudaError::NoRoom`].
    pub fn check(&self, frames: u32, page_size: u64) -> Result<(), CudaError> {
        let gpu = || self.label.clone();
        let granularity = self.granularity as u64;
        if !page_size.is_multiple_of(granularity) {
            return Err(CudaError::PageSize {
                gpu: gpu(),
                page_size: Size::from_bytes(page_size),
                granularity: Size::from_bytes(granularity),
            });
        }
        let (free, total) = self.memory()?;
        let asked = u64::from(frames) * page_size;
        if asked > free {
            let [asked, free, total] = [asked, free, total].map(Size::from_bytes);
            return Err(CudaError::NoRoom { gpu: gpu(), asked, free, total });
        }
        Ok(())
    }

    /// How its memory and the host's are one, if they are.
    pub(super) fn unified(&self) -> Option<&'static str> {
        let has = |attribute| {
            let mut value = 0;
            // SAFETY: the pointer is to our variable, the device is one of the driver's.
            let asked =
                unsafe { self.driver.device_attribute(&raw mut value, attribute, self.device) };
            // A driver that doesn't know the attribute has no such device.
            asked.is_ok() && value != 0
        };
        if has(ATTRIBUTE_INTEGRATED) {
            return Some("integrated: its memory is the host's");
        }
        has(ATTRIBUTE_HOST_PAGE_TABLES).then_some("coherent: it reads the host's memory in place")
    }

    /// Number, name and UUID, for people.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// UUID.
    pub(super) fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// Why the device is lost, if it is.
    pub(super) fn lost(&self) -> Option<DeviceFault> {
        let reason = self.lost.get()?;
        Some(DeviceFault::Lost { reason: Cow::Owned(reason.clone()) })
    }

    /// From now on the device is lost; the first reason stays.
    pub(super) fn lose(&self, reason: String) -> DeviceFault {
        let reason = self.lost.get_or_init(|| {
            tracing::error!("GPU {} is lost: {reason}", self.label);
            reason
        });
        DeviceFault::Lost { reason: Cow::Owned(reason.clone()) }
    }

    /// A call for a frame failed: what that means for the frame, or for all.
    pub(super) fn fault(&self, frame: VramFrame, failed: CallFailed) -> DeviceFault {
        if is_gone(failed.code) {
            return self.lose(format!("{failed}; {}", fix(failed.code)));
        }
        let fix = fix(failed.code);
        DeviceFault::Driver { frame: frame.0, failed, fix }
    }

    /// Memory of one piece that can be exported, without an address.
    pub(super) fn create(&self, bytes: usize) -> Result<MemHandle, CallFailed> {
        let (mut handle, prop) = (0, self.allocation_prop());
        // SAFETY: both pointers are to our variables.
        unsafe { self.driver.mem_create(&raw mut handle, bytes, &raw const prop, 0) }?;
        Ok(handle)
    }

    /// Gives a handle up.
    pub(super) fn release(&self, handle: MemHandle) -> Result<(), CallFailed> {
        // SAFETY: any number may be given: what is no handle is an error.
        unsafe { self.driver.mem_release(handle) }
    }

    /// A descriptor for other processes. It keeps the memory alive until it is closed.
    pub(super) fn export(&self, handle: MemHandle) -> Result<OwnedFd, CallFailed> {
        let mut fd: RawFd = -1;
        let target = (&raw mut fd).cast::<c_void>();
        // SAFETY: for this kind the driver writes an int to the pointer, which is to our variable.
        unsafe { self.driver.mem_export(target, handle, HANDLE_POSIX_FD, 0) }?;
        if fd < 0 {
            let name = "it gave no descriptor".to_owned();
            let call = "cuMemExportToShareableHandle";
            return Err(CallFailed { call, code: code::SUCCESS, name });
        }
        // SAFETY: the driver made the descriptor for us: it is open, and nobody else closes it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // It can't fail on an open descriptor, and without it only a program that we start could keep the memory.
        let _kept = fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
        Ok(fd)
    }

    fn location(&self) -> sys::CUmemLocation {
        let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        sys::CUmemLocation { type_, id: self.device }
    }

    fn allocation_prop(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType_enum(HANDLE_POSIX_FD),
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    /// Reading and writing by the device itself.
    pub(super) fn access(&self) -> sys::CUmemAccessDesc {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        sys::CUmemAccessDesc { location: self.location(), flags }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.lost.get().is_some() {
            // A broken context is only cleared away by the end of the process.
            return;
        }
        // SAFETY: retained by `open`, and nothing that belongs to it is left: all such things keep this one alive.
        if let Err(failed) = unsafe { self.driver.primary_context_release(self.device) } {
            tracing::warn!("GPU {}: {failed}", self.label);
        }
    }
}

/// Devices that this process sees, in the order of their numbers, each with its UUID.
fn list(driver: &Driver) -> Result<Vec<(CUdevice, [u8; 16])>, CallFailed> {
    let mut count = 0;
    // SAFETY: the pointer is to our variable.
    unsafe { driver.device_count(&raw mut count) }?;
    let one = |ordinal| {
        let mut device = 0;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the pointers are to our variables, and the driver gives the device before its UUID is asked for.
        unsafe {
            driver.device(&raw mut device, ordinal)?;
            driver.device_uuid(&raw mut uuid, device)?;
        }
        // The element type is the platform's char; the bytes are the same.
        Ok((device, uuid.bytes.map(|byte| u8::from_ne_bytes(byte.to_ne_bytes()))))
    };
    (0..count).map(one).collect()
}

fn choose(
    found: &[(CUdevice, [u8; 16])],
    choice: Option<GpuChoice>,
) -> Result<(CUdevice, [u8; 16]), CudaError> {
    if found.is_empty() {
        return Err(CudaError::NoGpu);
    }
    let asked = choice.unwrap_or(GpuChoice::Ordinal(0));
    let chosen = match asked {
        GpuChoice::Ordinal(ordinal) => found.get(ordinal as usize),
        GpuChoice::Uuid(uuid) => found.iter().find(|(_, other)| *other == uuid),
    };
    chosen.copied().ok_or_else(|| {
        let one = |(ordinal, (_, uuid)): (usize, &(CUdevice, [u8; 16]))| {
            format!("{ordinal} ({})", GpuChoice::Uuid(*uuid))
        };
        let seen: Vec<String> = found.iter().enumerate().map(one).collect();
        CudaError::NoSuchGpu { asked, seen: seen.join(", ") }
    })
}

fn name_of(driver: &Driver, device: CUdevice) -> Result<String, CallFailed> {
    let mut name = [0; NAME_BYTES];
    let length = c_int::try_from(name.len()).unwrap_or(0);
    // SAFETY: the driver writes at most `length` bytes to our array.
    unsafe { driver.device_name(name.as_mut_ptr().cast::<c_char>(), length, device) }?;
    let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
