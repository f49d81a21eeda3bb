//! Addresses of the device, reserved for an allocation's life, where frames are mapped a page each.
#![expect(unsafe_code, reason = "calls the driver")]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{CUmemAccess_flags, CUmemLocation, CUmemLocationType};

use super::driver::{CUmemAccessDesc, DevicePtr};
use super::error::CudaError;
use super::gpu::{DeviceFrame, Gpu};

/// What the device may do with a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceAccess {
    None,
    Read,
    Write,
}

/// A reservation. Its owner takes all frames out before it is dropped.
#[derive(Debug)]
pub(crate) struct DeviceArea {
    gpu: Arc<Gpu>,
    base: DevicePtr,
    page_size: usize,
    bytes: usize,
}

impl DeviceArea {
    /// Reserves `bytes`, a multiple of `page_size`, which is one of the device's granularity.
    pub(crate) fn reserve(
        gpu: &Arc<Gpu>,
        page_size: usize,
        bytes: usize,
    ) -> Result<DeviceArea, CudaError> {
        let mut base = 0;
        // SAFETY: the pointer is to an address; 0 is the alignment, address and flags that the driver chooses.
        gpu.within(|driver| unsafe { driver.address_reserve(&raw mut base, bytes, 0, 0, 0) })?;
        Ok(DeviceArea { gpu: Arc::clone(gpu), base, page_size, bytes })
    }

    /// The GPU it is on.
    pub(crate) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Whether this process is a fork of the one that reserved it. Then there is nothing to call.
    pub(crate) fn is_forked(&self) -> bool {
        self.gpu.is_forked()
    }

    /// Its first address.
    pub(crate) fn base(&self) -> DevicePtr {
        self.base
    }

    /// Maps a frame at a page where none is, without access.
    pub(crate) fn map(&self, page: usize, frame: &DeviceFrame) -> Result<(), CudaError> {
        let address = self.address(page);
        // SAFETY: the page lies in our reservation, and the frame's handle is live. A page that has a frame already,
        // or a frame shorter than a page, is refused by the driver.
        self.gpu.within(|driver| unsafe {
            driver.mem_map(address, self.page_size, 0, frame.handle(), 0)
        })
    }

    /// Takes the frame out of a page. The caller has seen to it that no work that uses it is under way: the driver
    /// doesn't wait.
    pub(crate) fn unmap(&self, page: usize) -> Result<(), CudaError> {
        let address = self.address(page);
        // SAFETY: the page lies in our reservation; one without a frame is refused by the driver. Device addresses
        // are behind no reference of this process.
        self.gpu.within(|driver| unsafe { driver.mem_unmap(address, self.page_size) })
    }

    /// Sets what the device may do with pages that all have frames, in one call.
    pub(crate) fn protect(
        &self,
        pages: Range<usize>,
        access: DeviceAccess,
    ) -> Result<(), CudaError> {
        let description = CUmemAccessDesc {
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.gpu.device(),
            },
            flags: match access {
                DeviceAccess::None => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
                DeviceAccess::Read => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ,
                DeviceAccess::Write => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            },
        };
        let (address, bytes) = (self.address(pages.start), pages.len() * self.page_size);
        // SAFETY: the range lies in our reservation, and the pointer is to one description. Pages without frames
        // are refused by the driver.
        self.gpu.within(|driver| unsafe {
            driver.mem_set_access(address, bytes, &raw const description, 1)
        })
    }

    fn address(&self, page: usize) -> DevicePtr {
        debug_assert!(page * self.page_size <= self.bytes);
        self.base + (page * self.page_size) as DevicePtr
    }
}

impl Drop for DeviceArea {
    fn drop(&mut self) {
        if !self.gpu.is_forked() {
            // Fails if a frame could not be taken out, in a broken context: the addresses go with the process.
            // SAFETY: reserved once, with this length, and its user is gone.
            let _ = self.gpu.within(|driver| unsafe { driver.address_free(self.base, self.bytes) });
        }
    }
}
