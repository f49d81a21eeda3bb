//! Allocations.

use std::ffi::c_char;
use std::os::fd::{FromRawFd, OwnedFd};

use lapis::{Allocation, Client};

use crate::client::lapis_client;
use crate::code::lapis_code;
use crate::last::Failure;
use crate::{arguments, guard, handles};

/// Bytes with addresses of their own, wherever their pages are.
#[derive(Debug)]
pub struct lapis_allocation {
    _opaque: [u8; 0],
}

/// Reserves size bytes, which start as zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_allocate(
    client: *const lapis_client,
    size: u64,
    out: *mut *mut lapis_allocation,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let client = handles::get::<Client, _>(client)?;
        let handle = handles::insert(client.allocate(size)?);
        // SAFETY: the caller's promise.
        unsafe { out.write(handle) };
        Ok(())
    })
}

/// Makes length bytes of an open file, from offset on, an allocation that can be read. The daemon reads them through
/// this descriptor, which may be closed afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_open_file(
    client: *const lapis_client,
    descriptor: i32,
    offset: u64,
    length: u64,
    out: *mut *mut lapis_allocation,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let client = handles::get::<Client, _>(client)?;
        // One of our own, for the caller may close his meanwhile, and sending what isn't open ends the connection.
        // SAFETY: fcntl takes any number.
        let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            let error = std::io::Error::last_os_error();
            return Err(Failure::argument(format!("descriptor {descriptor}: {error}")));
        }
        // SAFETY: it is open, and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(copy) };
        let handle = handles::insert(client.open_file(file, offset, length)?);
        // SAFETY: the caller's promise.
        unsafe { out.write(handle) };
        Ok(())
    })
}

/// Opens a file and makes length bytes of it, from offset on, an allocation that can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_open_path(
    client: *const lapis_client,
    path: *const c_char,
    offset: u64,
    length: u64,
    out: *mut *mut lapis_allocation,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let path = unsafe { arguments::path(path, "path") }?;
        let handle = handles::insert(client.open_path(path, offset, length)?);
        // SAFETY: the caller's promise.
        unsafe { out.write(handle) };
        Ok(())
    })
}

/// How many bytes were asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_allocation_size(
    allocation: *const lapis_allocation,
    out: *mut u64,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        let allocation = handles::get::<Allocation, _>(allocation)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(allocation.size()) };
        Ok(())
    })
}

/// Its number, as lapisctl shows it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_allocation_id(
    allocation: *const lapis_allocation,
    out: *mut u64,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        let allocation = handles::get::<Allocation, _>(allocation)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(allocation.id().0) };
        Ok(())
    })
}

/// Gives the allocation up, once no mapping has any of it.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_allocation_free(allocation: *mut lapis_allocation) -> lapis_code {
    guard(|| handles::close::<Allocation, _>(allocation).map(drop))
}
