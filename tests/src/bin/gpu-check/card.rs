//! A GPU of this process: the calls that the probes make.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::{Duration, Instant};

use lapis::CallFailed;
use lapis::cuda::driver::{
    CUdevice, CUmemAllocationProp, CUstream, DevicePtr, Driver, MemHandle, sys,
};

use crate::Outcome;
use crate::host::HostMemory;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const HANDLE_FD: u32 = 1;
const NAME_BYTES: usize = 256;

pub(crate) type Called<T = ()> = Result<T, CallFailed>;

/// The first GPU that this process sees, its context the calling thread's. Given up by the end of the process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Card {
    driver: Driver,
    device: CUdevice,
}

impl Card {
    pub(crate) fn open() -> Outcome<Card> {
        let driver = Driver::start(None)?;
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the pointers are to our variables; the driver gives the device before its context is asked for.
        unsafe {
            driver.device(&raw mut device, 0)?;
            driver.primary_context_retain(&raw mut context, device)?;
            driver.context_set(context)?;
        }
        Ok(Card { driver, device })
    }

    pub(crate) fn count(&self) -> Called<i32> {
        let mut count = 0;
        // SAFETY: the pointer is to our variable.
        unsafe { self.driver.device_count(&raw mut count) }?;
        Ok(count)
    }

    pub(crate) fn version(&self) -> Called<i32> {
        let mut version = 0;
        // SAFETY: the pointer is to our variable.
        unsafe { self.driver.driver_version(&raw mut version) }?;
        Ok(version)
    }

    pub(crate) fn name(&self) -> Called<String> {
        let mut name = [0; NAME_BYTES];
        let length = c_int::try_from(name.len()).unwrap_or(0);
        // SAFETY: the driver writes at most `length` bytes to our array.
        unsafe {
            self.driver.device_name(name.as_mut_ptr().cast::<c_char>(), length, self.device)
        }?;
        let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }

    pub(crate) fn attribute(&self, attribute: c_int) -> Called<i32> {
        let mut value = 0;
        // SAFETY: the pointer is to our variable.
        unsafe { self.driver.device_attribute(&raw mut value, attribute, self.device) }?;
        Ok(value)
    }

    pub(crate) fn granularity(&self) -> Called<usize> {
        let (mut bytes, prop) = (0, self.prop());
        // SAFETY: both pointers are to our variables.
        unsafe { self.driver.mem_granularity(&raw mut bytes, &raw const prop, 0) }?;
        Ok(bytes)
    }

    /// Free and all bytes.
    pub(crate) fn memory(&self) -> Called<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both pointers are to our variables.
        unsafe { self.driver.mem_info(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }

    pub(crate) fn create(&self, bytes: usize) -> Called<MemHandle> {
        let (mut handle, prop) = (0, self.prop());
        // SAFETY: both pointers are to our variables.
        unsafe { self.driver.mem_create(&raw mut handle, bytes, &raw const prop, 0) }?;
        Ok(handle)
    }

    pub(crate) fn release(&self, handle: MemHandle) -> Called {
        // SAFETY: what is no handle is an error.
        unsafe { self.driver.mem_release(handle) }
    }

    pub(crate) fn export(&self, handle: MemHandle) -> Outcome<OwnedFd> {
        let mut fd: RawFd = -1;
        // SAFETY: for this kind the driver writes an int to the pointer, which is to our variable.
        unsafe { self.driver.mem_export((&raw mut fd).cast::<c_void>(), handle, HANDLE_FD, 0) }?;
        if fd < 0 {
            return Err("the export gave no descriptor".into());
        }
        // SAFETY: the driver made the descriptor for us, and nobody else closes it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(crate) fn import(&self, fd: BorrowedFd<'_>) -> Called<MemHandle> {
        let mut handle = 0;
        let by_value = ptr::without_provenance_mut(usize::try_from(fd.as_raw_fd()).unwrap_or(0));
        // SAFETY: the pointer is to our variable; the descriptor is open during the call.
        unsafe { self.driver.mem_import(&raw mut handle, by_value, HANDLE_FD) }?;
        Ok(handle)
    }

    pub(crate) fn reserve(&self, bytes: usize) -> Called<DevicePtr> {
        let mut address = 0;
        // SAFETY: the pointer is to our variable.
        unsafe { self.driver.address_reserve(&raw mut address, bytes, 0, 0, 0) }?;
        Ok(address)
    }

    pub(crate) fn map(&self, address: DevicePtr, bytes: usize, handle: MemHandle) -> Called {
        // SAFETY: what is reserved or mapped otherwise is an error; device addresses are behind no reference.
        unsafe { self.driver.mem_map(address, bytes, 0, handle, 0) }
    }

    pub(crate) fn unmap(&self, address: DevicePtr, bytes: usize) -> Called {
        // SAFETY: as above; all work of this process was waited for.
        unsafe { self.driver.mem_unmap(address, bytes) }
    }

    pub(crate) fn allow(&self, address: DevicePtr, bytes: usize) -> Called {
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: self.location(), flags };
        // SAFETY: the pointer is to one description.
        unsafe { self.driver.mem_set_access(address, bytes, &raw const access, 1) }
    }

    /// Reserves, maps and allows; it stays so.
    pub(crate) fn place(&self, bytes: usize, handle: MemHandle) -> Called<DevicePtr> {
        let address = self.reserve(bytes)?;
        self.map(address, bytes, handle)?;
        self.allow(address, bytes)?;
        Ok(address)
    }

    /// Undoes [`Self::place`] and gives the handle up.
    pub(crate) fn remove(&self, address: DevicePtr, bytes: usize, handle: MemHandle) -> Called {
        self.unmap(address, bytes)?;
        // SAFETY: nothing is mapped there any more.
        unsafe { self.driver.address_free(address, bytes) }?;
        self.release(handle)
    }

    /// Fills, and waits for it.
    pub(crate) fn fill(&self, address: DevicePtr, bytes: usize, byte: u8) -> Called {
        // SAFETY: device memory only; what isn't mapped is an error. Null is the default stream.
        unsafe {
            self.driver.fill(address, byte, bytes, ptr::null_mut())?;
            self.driver.context_synchronize()
        }
    }

    /// Copies to the host.
    pub(crate) fn read(&self, address: DevicePtr, bytes: usize) -> Called<Vec<u8>> {
        let mut target = vec![0; bytes];
        // SAFETY: the target is writable for so many bytes until the call returns, when the copy is done.
        unsafe { self.driver.copy_down_now(target.as_mut_ptr().cast(), address, bytes) }?;
        Ok(target)
    }

    pub(crate) fn pin(&self, start: *mut u8, bytes: usize) -> Called {
        // SAFETY: the callers' memory is mapped, and unpinned before it is unmapped.
        unsafe { self.driver.host_register(start.cast(), bytes, 0) }
    }

    pub(crate) fn unpin(&self, start: *mut u8) -> Called {
        // SAFETY: what isn't registered is an error.
        unsafe { self.driver.host_unregister(start.cast()) }
    }

    /// Copies all of `host` to or from `address`, in pieces of one stream, and waits for it.
    pub(crate) fn copy_all(
        &self,
        up: bool,
        address: DevicePtr,
        host: &mut HostMemory,
        piece: usize,
    ) -> Called<Duration> {
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: the pointer is to our variable.
        unsafe { self.driver.stream_create(&raw mut stream, 1) }?;
        let started = Instant::now();
        let mut queued = Ok(());
        for offset in (0..host.bytes()).step_by(piece) {
            let bytes = piece.min(host.bytes() - offset);
            let (there, here) = (address + offset as DevicePtr, host.at(offset).cast::<c_void>());
            // SAFETY: the host's bytes are its own and stay until the stream was waited for below.
            queued = queued.and_then(|()| unsafe {
                if up {
                    self.driver.copy_up(there, here, bytes, stream)
                } else {
                    self.driver.copy_down(here, there, bytes, stream)
                }
            });
        }
        // SAFETY: made above. If it can't be waited for, the context is broken, and nothing runs.
        let waited = unsafe { self.driver.stream_synchronize(stream) };
        let took = started.elapsed();
        // SAFETY: made above.
        let destroyed = unsafe { self.driver.stream_destroy(stream) };
        queued.and(waited).and(destroyed).map(|()| took)
    }

    fn location(&self) -> sys::CUmemLocation {
        let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        sys::CUmemLocation { type_, id: self.device }
    }

    fn prop(&self) -> CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType_enum(HANDLE_FD),
            location: self.location(),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }
}
