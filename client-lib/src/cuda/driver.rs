//! The CUDA driver: found at run time, called through a table of function pointers that return their code as a number.
//!
//! cudarc supplies the structures and the search for the library. Its own functions panic where the library or a
//! symbol is missing, and its `CUresult` is an enum: a code that it doesn't list, from a driver that is newer, would
//! be undefined behaviour.
#![expect(unsafe_code, reason = "calls the driver, and names the types of its functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::path::{Path, PathBuf};

/// Structures and constants of `cuda.h`; none of its functions.
pub use cudarc::driver::sys;
pub use cudarc::driver::sys::{
    CUcontext, CUdevice, CUevent, CUmemAccessDesc, CUmemAllocationProp, CUstream, CUuuid,
};

/// An address on a device.
pub type DevicePtr = u64;
/// A piece of a device's memory.
pub type MemHandle = u64;

/// Codes that are told apart; all others are errors of no special kind.
pub mod code {
    /// It worked.
    pub const SUCCESS: u32 = 0;
    /// No memory left.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// The driver wasn't started, or this process is a fork of the one that did.
    pub const NOT_INITIALIZED: u32 = 3;
    /// The driver has ended, because the process ends.
    pub const DEINITIALIZED: u32 = 4;
    /// A library for linking only, from the toolkit, in place of the driver.
    pub const STUB_LIBRARY: u32 = 34;
    /// No device.
    pub const NO_DEVICE: u32 = 100;
    /// A device that doesn't exist, or that this process may not see.
    pub const INVALID_DEVICE: u32 = 101;
    /// No such context.
    pub const INVALID_CONTEXT: u32 = 201;
    /// A query: not done yet.
    pub const NOT_READY: u32 = 600;
    /// The device or this driver can't do it.
    pub const NOT_SUPPORTED: u32 = 801;
    /// The driver's and the kernel module's versions differ.
    pub const SYSTEM_DRIVER_MISMATCH: u32 = 803;

    /// Whether every further call of this process will fail the same way: the context is broken.
    #[must_use]
    pub const fn is_sticky(code: u32) -> bool {
        // Illegal addresses and instructions, launch and assertion failures, uncorrectable and contained memory
        // errors, lost devices.
        matches!(code, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719)
    }
}

/// A call of the driver failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed with {code} ({name})")]
pub struct CallFailed {
    /// Which function.
    pub call: &'static str,
    /// Its code, as in `cuda.h`.
    pub code: u32,
    /// The driver's name for it.
    pub name: String,
}

/// The driver can't be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverError {
    /// No library.
    #[error(
        "there is no CUDA driver: libcuda.so.1 is not found; install NVIDIA's driver, or name its library \
         (lapisd by libcuda, a client by LAPIS_LIBCUDA)"
    )]
    NotFound,
    /// The named library can't be loaded.
    #[error("{} can't be loaded: {reason}", path.display())]
    Load {
        /// Which.
        path: PathBuf,
        /// What the loader says.
        reason: String,
    },
    /// A function is missing.
    #[error(
        "the CUDA driver has no {symbol}: it is too old; update it to one for CUDA 11.3 or later"
    )]
    Symbol {
        /// Which.
        symbol: &'static str,
    },
    /// It does not start.
    #[error("the CUDA driver does not start: {failed}; {}", start_fix(failed.code))]
    Start {
        /// Which call.
        failed: CallFailed,
    },
}

fn start_fix(start: u32) -> &'static str {
    match start {
        code::STUB_LIBRARY => {
            "this is the toolkit's stub: take its `stubs` directory off LD_LIBRARY_PATH"
        }
        code::NO_DEVICE => {
            "look whether `nvidia-smi` shows the GPU, and whether this process may see it"
        }
        code::SYSTEM_DRIVER_MISMATCH => {
            "the driver was updated under the running kernel module: restart the machine"
        }
        999 => "load the kernel module (`modprobe nvidia-uvm`), or look into the kernel's log",
        _ => "look whether `nvidia-smi` works",
    }
}

/// The table, and a method a function.
macro_rules! functions {
    ($($(#[$doc:meta])* $symbol:literal $method:ident($($argument:ident: $type:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Table {
            $($method: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Table {
            fn load(library: &libloading::Library) -> Result<Table, DriverError> {
                Ok(Table {
                    $($method: {
                        // SAFETY: the symbol is this function of the driver, whose signature cuda.h gives; the
                        // pointer is kept only as long as the library is loaded, which is for ever.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($type),*) -> u32>(
                                concat!($symbol, "\0").as_bytes(),
                            )
                        };
                        *symbol.map_err(|_| DriverError::Symbol { symbol: $symbol })?
                    },)*
                })
            }
        }

        impl Driver {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// [`CallFailed`].
                ///
                /// # Safety
                /// As the driver's documentation asks: pointers to what they should point to, handles that are live.
                pub unsafe fn $method(&self, $($argument: $type),*) -> Result<(), CallFailed> {
                    // SAFETY: the caller's promise; the pointer is that of this function.
                    let code = unsafe { (self.table.$method)($($argument),*) };
                    self.check($symbol, code)
                }
            )*
        }
    };
}

/// The driver of this process. It stays loaded until the process ends.
#[derive(Clone, Copy)]
pub struct Driver {
    table: Table,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// Loads and starts the driver: the library at `path`, or the one that the system finds.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(path: Option<&Path>) -> Result<Driver, DriverError> {
        let library = match path {
            Some(path) => {
                // SAFETY: loading the driver runs its initialisers, which is what it is for; whoever names another
                // library could run any program.
                let library = unsafe { libloading::Library::new(path) };
                let library = library.map_err(|error| DriverError::Load {
                    path: path.to_owned(),
                    reason: error.to_string(),
                })?;
                // Never unloaded: the driver has threads of its own.
                &*Box::leak(Box::new(library))
            }
            None => {
                // SAFETY: as above; the search is the system's, for the driver's names.
                if !unsafe { sys::is_culib_present() } {
                    return Err(DriverError::NotFound);
                }
                // SAFETY: as above; it is there, so this doesn't panic.
                unsafe { sys::culib() }
            }
        };
        let driver = Driver { table: Table::load(library)? };
        // SAFETY: takes a number.
        unsafe { driver.init(0) }.map_err(|failed| DriverError::Start { failed })?;
        Ok(driver)
    }

    fn check(&self, call: &'static str, code: u32) -> Result<(), CallFailed> {
        if code == code::SUCCESS {
            return Ok(());
        }
        Err(CallFailed { call, code, name: self.name_of(code) })
    }

    /// The driver's name of a code.
    #[must_use]
    pub fn name_of(&self, code: u32) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: takes any number, and writes a pointer to a text that is never freed, or null.
        let known = unsafe { (self.table.error_name)(code, &raw mut name) } == code::SUCCESS;
        if !known || name.is_null() {
            return "a code that this driver has no name for".to_owned();
        }
        // SAFETY: not null, and the driver's texts end with a zero and live as long as it.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

functions! {
    /// Starts the driver.
    "cuInit" init(flags: c_uint);
    /// Its version, as 1000 times the major and 10 times the minor one.
    "cuDriverGetVersion" driver_version(version: *mut c_int);
    /// A code's name.
    "cuGetErrorName" error_name(code: u32, name: *mut *const c_char);
    /// Devices that this process sees.
    "cuDeviceGetCount" device_count(count: *mut c_int);
    /// A device by its ordinal in this process.
    "cuDeviceGet" device(device: *mut CUdevice, ordinal: c_int);
    /// A device's name.
    "cuDeviceGetName" device_name(name: *mut c_char, length: c_int, device: CUdevice);
    /// A device's UUID, of a MIG instance if it is one.
    "cuDeviceGetUuid_v2" device_uuid(uuid: *mut CUuuid, device: CUdevice);
    /// An attribute by its number in `cuda.h`.
    "cuDeviceGetAttribute" device_attribute(value: *mut c_int, attribute: c_int, device: CUdevice);
    /// The device's context that all users in a process share.
    "cuDevicePrimaryCtxRetain" primary_context_retain(context: *mut CUcontext, device: CUdevice);
    /// Gives it up.
    "cuDevicePrimaryCtxRelease_v2" primary_context_release(device: CUdevice);
    /// Makes a context the calling thread's.
    "cuCtxSetCurrent" context_set(context: CUcontext);
    /// Makes a context the calling thread's until it is popped.
    "cuCtxPushCurrent_v2" context_push(context: CUcontext);
    /// Makes the context before it the calling thread's again.
    "cuCtxPopCurrent_v2" context_pop(context: *mut CUcontext);
    /// Waits for everything in the context.
    "cuCtxSynchronize" context_synchronize();
    /// Free and all bytes of the current device.
    "cuMemGetInfo_v2" mem_info(free: *mut usize, total: *mut usize);
    /// What sizes and addresses must be multiples of.
    "cuMemGetAllocationGranularity" mem_granularity(bytes: *mut usize, prop: *const CUmemAllocationProp, option: c_uint);
    /// Allocates memory that has no address yet.
    "cuMemCreate" mem_create(handle: *mut MemHandle, bytes: usize, prop: *const CUmemAllocationProp, flags: u64);
    /// Gives a handle up; the memory lives on while it is mapped or exported.
    "cuMemRelease" mem_release(handle: MemHandle);
    /// Reserves addresses.
    "cuMemAddressReserve" address_reserve(address: *mut DevicePtr, bytes: usize, alignment: usize, hint: DevicePtr, flags: u64);
    /// Gives addresses back.
    "cuMemAddressFree" address_free(address: DevicePtr, bytes: usize);
    /// Gives memory an address; the offset is 0.
    "cuMemMap" mem_map(address: DevicePtr, bytes: usize, offset: usize, handle: MemHandle, flags: u64);
    /// Takes an address from memory. Does not wait for work that uses it.
    "cuMemUnmap" mem_unmap(address: DevicePtr, bytes: usize);
    /// Makes mapped memory accessible.
    "cuMemSetAccess" mem_set_access(address: DevicePtr, bytes: usize, desc: *const CUmemAccessDesc, count: usize);
    /// A descriptor for another process, into an `int`.
    "cuMemExportToShareableHandle" mem_export(fd: *mut c_void, handle: MemHandle, kind: c_uint, flags: u64);
    /// Memory of another process; the descriptor is passed by value and not consumed.
    "cuMemImportFromShareableHandle" mem_import(handle: *mut MemHandle, fd: *mut c_void, kind: c_uint);
    /// Pins host memory for asynchronous copies.
    "cuMemHostRegister_v2" host_register(memory: *mut c_void, bytes: usize, flags: c_uint);
    /// Unpins it.
    "cuMemHostUnregister" host_unregister(memory: *mut c_void);
    /// Starts a copy to the device.
    "cuMemcpyHtoDAsync_v2" copy_up(target: DevicePtr, source: *const c_void, bytes: usize, stream: CUstream);
    /// Starts a copy from the device.
    "cuMemcpyDtoHAsync_v2" copy_down(target: *mut c_void, source: DevicePtr, bytes: usize, stream: CUstream);
    /// Copies to the device, in the null stream. Returns when the host memory may be changed.
    "cuMemcpyHtoD_v2" copy_up_now(target: DevicePtr, source: *const c_void, bytes: usize);
    /// Copies from the device, in the null stream. Returns when the bytes are there.
    "cuMemcpyDtoH_v2" copy_down_now(target: *mut c_void, source: DevicePtr, bytes: usize);
    /// Starts to fill with a byte.
    "cuMemsetD8Async" fill(target: DevicePtr, byte: u8, count: usize, stream: CUstream);
    /// Makes a stream; 1: without waiting for the null stream.
    "cuStreamCreate" stream_create(stream: *mut CUstream, flags: c_uint);
    /// Destroys a stream once its work is done.
    "cuStreamDestroy_v2" stream_destroy(stream: CUstream);
    /// Waits for a stream.
    "cuStreamSynchronize" stream_synchronize(stream: CUstream);
    /// Makes an event; 2: without time.
    "cuEventCreate" event_create(event: *mut CUevent, flags: c_uint);
    /// Destroys an event.
    "cuEventDestroy_v2" event_destroy(event: CUevent);
    /// Marks a place in a stream.
    "cuEventRecord" event_record(event: CUevent, stream: CUstream);
    /// Whether it has been reached: [`code::NOT_READY`] if not.
    "cuEventQuery" event_query(event: CUevent);
    /// Waits until it is reached.
    "cuEventSynchronize" event_synchronize(event: CUevent);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_none_is_refused_by_name() {
        let error = Driver::start(Some(Path::new("/etc/hostname"))).expect_err("a text");
        assert!(error.to_string().starts_with("/etc/hostname can't be loaded: "), "{error}");
        let error = Driver::start(Some(Path::new("/nowhere/libcuda.so.1"))).expect_err("nothing");
        assert!(matches!(error, DriverError::Load { .. }), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_refused_with_the_first() {
        let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/usr/lib/libc.so.6"];
        let Some(libc) = libc.iter().map(Path::new).find(|path| path.exists()) else { return };
        let error = Driver::start(Some(libc)).expect_err("another library");
        assert_eq!(error, DriverError::Symbol { symbol: "cuInit" });
    }
}
