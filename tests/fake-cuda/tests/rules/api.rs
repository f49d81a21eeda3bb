//! The driver's functions as a program has them: looked up by name in the shared library.
#![expect(unsafe_code, reason = "calls C")]
#![expect(non_snake_case, reason = "libcuda's names")]

use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: Location,
    pub(crate) win32: *mut c_void,
    pub(crate) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

/// `CUipcEventHandle`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct IpcEvent {
    pub(crate) bytes: [u8; 64],
}

pub(crate) type HostFunction = extern "C" fn(*mut c_void);

macro_rules! api {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {
        /// The functions.
        #[derive(Clone, Copy)]
        pub(crate) struct Api {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Api {
            /// Looks all of them up.
            pub(crate) fn load(library: &Path) -> Self {
                let library = Library::open(library);
                Self {
                    $($name: {
                        let symbol = library.symbol(stringify!($name));
                        // SAFETY: the symbol is a function with that signature in `cuda.h`.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($type),*) -> u32,
                            >(symbol)
                        }
                    },)*
                }
            }

            $(
                pub(crate) fn $name(&self, $($argument: $type),*) -> u32 {
                    // SAFETY: the tests pass pointers that are null or good for what the function does with them.
                    unsafe { (self.$name)($($argument),*) }
                }
            )*
        }
    };
}

api! {
    cuInit(flags: u32);
    cuDriverGetVersion(version: *mut i32);
    cuGetErrorName(code: u32, text: *mut *const c_char);
    cuGetErrorString(code: u32, text: *mut *const c_char);
    cuGetProcAddress_v2(symbol: *const c_char, function: *mut *mut c_void, version: i32, flags: u64, status: *mut u32);
    cuDeviceGetCount(count: *mut i32);
    cuDeviceGet(device: *mut i32, ordinal: i32);
    cuDeviceGetName(name: *mut u8, length: i32, device: i32);
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    cuDeviceGetPCIBusId(text: *mut u8, length: i32, device: i32);
    cuDeviceGetByPCIBusId(device: *mut i32, text: *const c_char);
    cuDevicePrimaryCtxRetain(context: *mut u64, device: i32);
    cuDevicePrimaryCtxRelease_v2(device: i32);
    cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32);
    cuCtxGetCurrent(context: *mut u64);
    cuCtxSetCurrent(context: u64);
    cuCtxPushCurrent_v2(context: u64);
    cuCtxPopCurrent_v2(context: *mut u64);
    cuCtxGetDevice(device: *mut i32);
    cuCtxSynchronize();
    cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const Properties, option: u32);
    cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, flags: u64);
    cuMemRelease(handle: u64);
    cuMemRetainAllocationHandle(handle: *mut u64, address: u64);
    cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64);
    cuMemExportToShareableHandle(shareable: *mut i32, handle: u64, kind: u32, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut u64, shareable: usize, kind: u32);
    cuMemAddressReserve(address: *mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64);
    cuMemAddressFree(address: u64, bytes: usize);
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemSetAccess(address: u64, bytes: usize, descriptions: *const Access, count: usize);
    cuMemGetAccess(flags: *mut u64, location: *const Location, address: u64);
    cuMemAlloc(address: *mut u32, bytes: u32);
    cuMemAlloc_v2(address: *mut u64, bytes: usize);
    cuMemFree_v2(address: u64);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemHostRegister_v2(start: *mut u8, bytes: usize, flags: u32);
    cuMemHostUnregister(start: *mut u8);
    cuMemHostGetDevicePointer_v2(address: *mut u64, start: *mut u8, flags: u32);
    cuStreamCreate(stream: *mut u64, flags: u32);
    cuStreamDestroy_v2(stream: u64);
    cuStreamSynchronize(stream: u64);
    cuStreamQuery(stream: u64);
    cuStreamWaitEvent(stream: u64, event: u64, flags: u32);
    cuLaunchHostFunc(stream: u64, function: Option<HostFunction>, data: *mut c_void);
    cuEventCreate(event: *mut u64, flags: u32);
    cuEventDestroy_v2(event: u64);
    cuEventRecord(event: u64, stream: u64);
    cuEventQuery(event: u64);
    cuEventSynchronize(event: u64);
    cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64);
    cuIpcGetEventHandle(handle: *mut IpcEvent, event: u64);
    cuIpcOpenEventHandle(event: *mut u64, handle: IpcEvent);
    cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize);
    cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize);
    cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, stream: u64);
    cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, stream: u64);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64);
    cuMemsetD8_v2(to: u64, value: u8, count: usize);
    cuMemsetD32_v2(to: u64, value: u32, count: usize);
    cuMemsetD8Async(to: u64, value: u8, count: usize, stream: u64);
    cuMemsetD32Async(to: u64, value: u32, count: usize, stream: u64);
    cuModuleLoadData(module: *mut u64, image: *const c_void);
    fakeCudaFail(symbol: *const c_char, after: u64, code: u32, times: u64);
    fakeCudaClearFaults();
    fakeCudaPause(device: i32);
    fakeCudaResume(device: i32);
}

/// A loaded library; it is never closed.
pub(crate) struct Library(*mut c_void);

impl Library {
    pub(crate) fn open(path: &Path) -> Self {
        let path = CString::new(path.as_os_str().as_bytes()).expect("no zero in a path");
        // SAFETY: a string that ends in zero; the library's constructors are Rust's own.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{path:?} can't be loaded");
        Self(handle)
    }

    /// The address of a symbol that must be there.
    pub(crate) fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).expect("no zero in a name");
        // SAFETY: the handle is open and the name ends in zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?} is not exported");
        address
    }
}
