//! Connections.

use std::ffi::c_char;

use lapis::{Client, ConnectOptions, DeviceKind};

use crate::code::lapis_code;
use crate::last::Failure;
use crate::{arguments, guard, handles};

/// A connection to lapisd.
#[derive(Debug)]
pub struct lapis_client {
    _opaque: [u8; 0],
}

/// How to connect. Fill it with zeros, then set size to sizeof(lapis_options), and what is to be different.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_options {
    /// sizeof(lapis_options).
    pub size: usize,
    /// The daemon's socket. NULL: $LAPIS_SOCKET, else $XDG_RUNTIME_DIR/lapis.sock, else /run/lapis/lapis.sock.
    pub socket: *const c_char,
    /// Name for the daemon's log. NULL: the program's.
    pub name: *const c_char,
    /// The CUDA driver's library. NULL: $LAPIS_LIBCUDA, else the system's.
    pub libcuda: *const c_char,
    /// How long to wait for the daemon's welcome. 0: 10 s.
    pub timeout_us: u64,
    /// Whether to leave the process's limit of open files as it is. Otherwise it is raised so that each VRAM frame can
    /// have a descriptor.
    pub leave_open_files: bool,
}

/// What a daemon's VRAM is.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub enum lapis_device {
    /// Host memory: mapped bytes are for the CPU.
    LAPIS_DEVICE_SIM = 0,
    /// Memory of a CUDA device: mapped bytes are for the GPU.
    LAPIS_DEVICE_CUDA = 1,
}

/// What the daemon said of itself.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_info {
    /// Bytes of a page: the unit in which bytes are in VRAM or not.
    pub page_size: u64,
    /// Number of this connection.
    pub session: u64,
    /// Frames of VRAM.
    pub vram_frames: u32,
    /// Most pages that can be mapped at once.
    pub mapped_pages_max: u32,
    /// What VRAM is: a lapis_device.
    pub device: i32,
    /// Version of the protocol.
    pub protocol: u32,
    /// Whether the device shares the host's memory.
    pub unified: bool,
    /// Which CUDA device, as cuDeviceGetUuid says.
    pub device_uuid: [u8; 16],
}

/// Connects to the daemon at a socket. NULL: $LAPIS_SOCKET, else $XDG_RUNTIME_DIR/lapis.sock, else /run/lapis/lapis.sock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_connect(
    socket: *const c_char,
    out: *mut *mut lapis_client,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        // SAFETY: the caller's promise.
        let socket = unsafe { arguments::path_or_null(socket) };
        let client = ConnectOptions { socket, ..ConnectOptions::default() }.connect()?;
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(client)) };
        Ok(())
    })
}

/// Connects with options.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_connect_with(
    options: *const lapis_options,
    out: *mut *mut lapis_client,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        // SAFETY: the caller's promise.
        let client = unsafe { options_of(options) }?.connect()?;
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(client)) };
        Ok(())
    })
}

/// # Safety
/// The pointer must be NULL or one to options, whose texts end with a NUL.
unsafe fn options_of(options: *const lapis_options) -> Result<ConnectOptions, Failure> {
    let mut given = ConnectOptions::default();
    if options.is_null() {
        return Ok(given);
    }
    if !options.is_aligned() {
        return Err(Failure::argument("options is not aligned"));
    }
    // SAFETY: the caller's promise; the first field says how many others there are.
    let size = unsafe { (&raw const (*options).size).read() };
    if size != size_of::<lapis_options>() {
        return Err(Failure::argument(format!(
            "options.size is {size}: set it to sizeof(lapis_options), {} for this library",
            size_of::<lapis_options>()
        )));
    }
    // SAFETY: the caller's promise, and it is as large as this library's.
    let options = unsafe { &*options };
    // SAFETY: the caller's promise, for all three.
    unsafe {
        given.socket = arguments::path_or_null(options.socket);
        given.libcuda = arguments::path_or_null(options.libcuda);
        if let Some(name) = arguments::text_or_null(options.name, "options.name")? {
            name.clone_into(&mut given.name);
        }
    }
    if options.timeout_us > 0 {
        given.timeout = arguments::wait(options.timeout_us);
    }
    given.raise_open_files = !options.leave_open_files;
    Ok(given)
}

/// What the daemon said of itself. size: sizeof(lapis_info).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_client_info(
    client: *const lapis_client,
    out: *mut lapis_info,
    size: usize,
) -> lapis_code {
    guard(|| {
        let client = handles::get::<Client, _>(client)?;
        let welcome = client.welcome();
        let device = match welcome.device {
            DeviceKind::Sim => lapis_device::LAPIS_DEVICE_SIM,
            DeviceKind::Cuda => lapis_device::LAPIS_DEVICE_CUDA,
        };
        let info = lapis_info {
            page_size: welcome.page_size,
            session: welcome.session.0,
            vram_frames: welcome.vram_frames,
            mapped_pages_max: welcome.mapped_pages_max,
            device: device as i32,
            protocol: u32::from(welcome.version),
            unified: welcome.unified,
            device_uuid: welcome.device_uuid,
        };
        // SAFETY: the caller's promise.
        unsafe { arguments::put(out, size, info) }
    })
}

/// Closes a connection: it ends with the last of its allocations, mappings, models and plans.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_client_close(client: *mut lapis_client) -> lapis_code {
    guard(|| handles::close::<Client, _>(client).map(drop))
}

/// Version of this library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn lapis_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}
