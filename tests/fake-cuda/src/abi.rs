//! What crosses the border: structures and constants as `cuda.h` has them.
//!
//! Enumerations are plain integers here, as a caller may pass any number.

/// `CUdeviceptr`.
pub(crate) type Address = u64;

/// `CUuuid`.
pub(crate) type Uuid = [u8; 16];

/// `CUhostFn`.
pub(crate) type HostFunction = unsafe extern "C" fn(*mut libc::c_void);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocationProperties {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: Location,
    pub(crate) win32: *mut libc::c_void,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessDescription {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

/// `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct IpcEventHandle {
    pub(crate) bytes: [u8; 64],
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub(crate) const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(crate) const HANDLE_FABRIC: u32 = 8;
/// `CU_MEM_ACCESS_FLAGS_PROT_NONE`.
pub(crate) const ACCESS_NONE: u32 = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`.
pub(crate) const ACCESS_READ: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const ACCESS_READ_WRITE: u32 = 3;

/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
pub(crate) const REGISTER_DEVICE_MAP: u32 = 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`.
pub(crate) const REGISTER_READ_ONLY: u32 = 8;
/// PORTABLE, DEVICEMAP and READ_ONLY. IOMEMORY (4) is for memory that the fake has none of.
pub(crate) const REGISTER_FLAGS: u32 = 0b1011;

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_STREAM_LEGACY`, another name of the null stream.
pub(crate) const STREAM_LEGACY: u64 = 1;

/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
pub(crate) const EVENT_INTERPROCESS: u32 = 4;
/// BLOCKING_SYNC, DISABLE_TIMING and INTERPROCESS.
pub(crate) const EVENT_FLAGS: u32 = 0b111;
