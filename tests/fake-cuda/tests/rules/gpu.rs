//! A device ready for use, and shorter names for what most tests do with it.
#![expect(unsafe_code, reason = "reads and writes device memory by the CPU")]

use std::path::Path;

use lapis_fake_cuda::harness::FakeCuda;

use crate::api::{Access, Api, Location, Properties};

/// The fake's usual granularity.
pub(crate) const FRAME: usize = 2 << 20;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ` and `..._READWRITE`.
pub(crate) const READ: u32 = 1;
pub(crate) const READ_WRITE: u32 = 3;

/// Memory on a device that can be exported as a descriptor.
pub(crate) fn properties(device: i32) -> Properties {
    Properties {
        kind: 1,
        handle_types: 1,
        location: Location { kind: 1, id: device },
        win32: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

/// Access of a device.
pub(crate) fn access(device: i32, flags: u32) -> Access {
    Access { location: Location { kind: 1, id: device }, flags }
}

/// The driver, with the context of device 0 current to the thread that made this.
pub(crate) struct Gpu {
    pub(crate) api: Api,
    pub(crate) context: u64,
}

impl std::ops::Deref for Gpu {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}

impl Gpu {
    pub(crate) fn start(fake: &FakeCuda) -> Self {
        Self::load(&fake.library())
    }

    pub(crate) fn load(library: &Path) -> Self {
        let api = Api::load(library);
        assert_eq!(api.cuInit(0), 0);
        let mut context = 0;
        assert_eq!(api.cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(api.cuCtxSetCurrent(context), 0);
        Self { api, context }
    }

    /// A new handle, or the error.
    pub(crate) fn try_create(&self, bytes: usize) -> Result<u64, u32> {
        let mut handle = 0;
        match self.cuMemCreate(&raw mut handle, bytes, &properties(0), 0) {
            0 => Ok(handle),
            code => Err(code),
        }
    }

    pub(crate) fn create(&self) -> u64 {
        self.try_create(FRAME).expect("there is memory")
    }

    pub(crate) fn reserve(&self, bytes: usize) -> u64 {
        let mut address = 0;
        assert_eq!(self.cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0), 0);
        address
    }

    pub(crate) fn allow(&self, address: u64, bytes: usize, flags: u32) {
        assert_eq!(self.cuMemSetAccess(address, bytes, &access(0, flags), 1), 0);
    }

    /// A frame at an address of its own, readable and writable, its handle released.
    pub(crate) fn frame(&self) -> u64 {
        let (handle, address) = (self.create(), self.reserve(FRAME));
        assert_eq!(self.cuMemMap(address, FRAME, 0, handle, 0), 0);
        self.allow(address, FRAME, READ_WRITE);
        assert_eq!(self.cuMemRelease(handle), 0);
        address
    }

    pub(crate) fn free(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        assert_eq!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total), 0);
        assert!(free <= total);
        free
    }

    pub(crate) fn stream(&self, flags: u32) -> u64 {
        let mut stream = 0;
        assert_eq!(self.cuStreamCreate(&raw mut stream, flags), 0);
        stream
    }

    pub(crate) fn event(&self, flags: u32) -> u64 {
        let mut event = 0;
        assert_eq!(self.cuEventCreate(&raw mut event, flags), 0);
        event
    }

    pub(crate) fn export(&self, handle: u64) -> i32 {
        let mut descriptor = -1;
        assert_eq!(self.cuMemExportToShareableHandle(&raw mut descriptor, handle, 1, 0), 0);
        descriptor
    }

    pub(crate) fn import(&self, descriptor: i32) -> Result<u64, u32> {
        let mut handle = 0;
        let shareable = usize::try_from(descriptor).expect("a descriptor");
        match self.cuMemImportFromShareableHandle(&raw mut handle, shareable, 1) {
            0 => Ok(handle),
            code => Err(code),
        }
    }

    /// Writes by a synchronous copy.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        assert_eq!(self.cuMemcpyHtoD_v2(address, bytes.as_ptr(), bytes.len()), 0);
    }

    /// Reads by a synchronous copy.
    pub(crate) fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        assert_eq!(self.cuMemcpyDtoH_v2(found.as_mut_ptr(), address, bytes), 0);
        found
    }
}

/// Reads a byte of device memory with the CPU.
pub(crate) fn peek(address: u64) -> u8 {
    let address = usize::try_from(address).expect("an address");
    // SAFETY: the tests do this where memory is mapped, or in a process that is meant to die of it.
    unsafe { std::ptr::read_volatile(address as *const u8) }
}

/// Writes a byte of device memory with the CPU.
pub(crate) fn poke(address: u64, value: u8) {
    let address = usize::try_from(address).expect("an address");
    // SAFETY: as for `peek`; nothing else of this program lies at a device address.
    unsafe { std::ptr::write_volatile(address as *mut u8, value) };
}

/// Returns when a copy of ones into zeros has begun. It may go from either end, and do the very ends last.
pub(crate) fn wait_for_a_copy_to(address: u64, bytes: usize) {
    let near = 2 * 4096;
    while peek(address + near) == 0 && peek(address + bytes as u64 - near) == 0 {
        std::thread::yield_now();
    }
}

/// Host memory in whole pages.
pub(crate) struct HostMemory {
    pub(crate) start: *mut u8,
    pub(crate) bytes: usize,
}

impl HostMemory {
    pub(crate) fn new(bytes: usize) -> Self {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { start: start.cast(), bytes }
    }

    pub(crate) fn fill(&self, value: u8) {
        // SAFETY: all of it is writable and ours; what copies it at the same time copies bytes.
        unsafe { self.start.write_bytes(value, self.bytes) };
    }

    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset)
    }

    pub(crate) fn byte(&self, offset: usize) -> u8 {
        assert!(offset < self.bytes);
        // SAFETY: inside the mapping.
        unsafe { std::ptr::read_volatile(self.at(offset)) }
    }
}
