//! Initialisation, versions, errors, and symbols by name.
#![expect(unsafe_code, reason = "exports symbols, and looks them up")]

use std::ffi::{CStr, CString, c_char, c_void};

use crate::call::{In, Out, exports};
use crate::code::{INVALID_VALUE, NOT_FOUND, Outcome, require};
use crate::code_names::CODES;
use crate::config::Config;
use crate::driver::Driver;
use crate::forms::is_known_to;

exports! {
    fn cuInit(flags: u32) = initialise;
    fn cuDriverGetVersion(version: Out<i32>) = version_of_driver;
    fn cuGetErrorName(code: u32, text: Out<*const c_char>) = error_name;
    fn cuGetErrorString(code: u32, text: Out<*const c_char>) = error_string;
    fn cuGetProcAddress(symbol: In<c_char>, function: Out<*mut c_void>, version: i32, flags: u64) = find;
    fn cuGetProcAddress_v2(
        symbol: In<c_char>,
        function: Out<*mut c_void>,
        version: i32,
        flags: u64,
        status: Out<u32>,
    ) = find_with_status;
}

/// `CU_GET_PROC_ADDRESS_SUCCESS`, `_SYMBOL_NOT_FOUND`, `_VERSION_NOT_SUFFICIENT`.
const FOUND: u32 = 0;
const NO_SYMBOL: u32 = 1;
const VERSION_TOO_LOW: u32 = 2;

fn initialise(flags: u32) -> Outcome {
    require(flags == 0, INVALID_VALUE)?;
    Driver::initialise()
}

/// May be asked before `cuInit`.
fn version_of_driver(version: Out<i32>) -> Outcome {
    version.put(Config::from_environment().map_err(|_| INVALID_VALUE)?.version)
}

fn error_name(code: u32, text: Out<*const c_char>) -> Outcome {
    describe(code, text, |(_, name, _)| name)
}

fn error_string(code: u32, text: Out<*const c_char>) -> Outcome {
    describe(code, text, |(_, _, text)| text)
}

type Described = (u32, &'static CStr, &'static CStr);

fn describe(
    code: u32,
    text: Out<*const c_char>,
    part: fn(&'static Described) -> &'static CStr,
) -> Outcome {
    let Some(found) = CODES.iter().find(|(listed, _, _)| *listed == code) else {
        text.put(std::ptr::null())?;
        return Err(INVALID_VALUE);
    };
    text.put(part(found).as_ptr())
}

fn find(symbol: In<c_char>, function: Out<*mut c_void>, version: i32, flags: u64) -> Outcome {
    let mut status = FOUND;
    look_up(symbol, function, version, flags, &mut status)
}

fn find_with_status(
    symbol: In<c_char>,
    function: Out<*mut c_void>,
    version: i32,
    flags: u64,
    status: Out<u32>,
) -> Outcome {
    let mut seen = FOUND;
    let found = look_up(symbol, function, version, flags, &mut seen);
    if status.wanted() {
        status.put(seen)?;
    }
    found
}

fn look_up(
    symbol: In<c_char>,
    function: Out<*mut c_void>,
    version: i32,
    flags: u64,
    status: &mut u32,
) -> Outcome {
    // Per-thread streams (2) get the usual functions: the fake has no others.
    require(flags <= 2, INVALID_VALUE)?;
    let symbol = symbol.text()?;
    function.put(std::ptr::null_mut())?;
    let forms = (2..=4).rev().map(|form| format!("{symbol}_v{form}")).chain([symbol.clone()]);
    *status = NO_SYMBOL;
    for name in forms {
        let Some(address) = exported(&name) else { continue };
        if is_known_to(&name, version) {
            *status = FOUND;
            return function.put(address);
        }
        *status = VERSION_TOO_LOW;
    }
    Err(NOT_FOUND)
}

/// A symbol of this very library.
fn exported(name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok().filter(|_| name.starts_with("cu"))?;
    // SAFETY: all zeros is a valid Dl_info.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = exported as *const c_void;
    // SAFETY: any address may be asked about, and `found` can be written.
    let known = unsafe { libc::dladdr(here, &raw mut found) };
    if known == 0 {
        return None;
    }
    // SAFETY: the file's name is a string of the loader's, which stays while the library is loaded: it is never unloaded.
    let library = unsafe { libc::dlopen(found.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: a handle of the loader's and a string that ends in zero.
    let address = unsafe { libc::dlsym(library, name.as_ptr()) };
    // SAFETY: closes what was opened above; the library itself stays.
    unsafe { libc::dlclose(library) };
    Some(address).filter(|address| !address.is_null())
}
