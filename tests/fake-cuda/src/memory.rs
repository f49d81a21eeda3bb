//! One piece of device memory, as one process holds it.
#![expect(unsafe_code, reason = "maps the memory's file")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::code::{INVALID_VALUE, OPERATING_SYSTEM, Outcome};
use crate::ledger::{self, Ledger, PREFIX};

/// What new memory is full of when it is poisoned.
const POISON: u8 = 0xA5;

/// Holds the memory by a mapping that only the driver's own copies go through: no descriptor is kept.
/// Dropping it gives the hold up.
#[derive(Debug)]
pub(crate) struct Memory {
    alias: *mut u8,
    bytes: usize,
    name: String,
    ledger: Arc<Ledger>,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// `CUmemAllocationHandleType` that it may be exported as.
    pub(crate) handle_types: u32,
    /// Whether it came from another process's export.
    pub(crate) imported: bool,
}

// SAFETY: the mapping belongs to this value alone; what it points to is shared with other processes anyway, and is only touched
// by copies whose order is the caller's affair, as on a GPU.
unsafe impl Send for Memory {}
// SAFETY: as above; nothing but the memory itself changes behind `&self`.
unsafe impl Sync for Memory {}

impl Memory {
    /// New memory of a device.
    pub(crate) fn create(
        (ledger, device): (&Arc<Ledger>, usize),
        bytes: usize,
        handle_types: u32,
        poison: bool,
    ) -> Outcome<Self> {
        let (file, name) = ledger.create(bytes as u64)?;
        let alias = map(&file, bytes)?;
        if poison {
            // SAFETY: `alias` is `bytes` of writable memory that nobody else knows yet.
            unsafe { alias.write_bytes(POISON, bytes) };
        }
        let ledger = Arc::clone(ledger);
        Ok(Self { alias, bytes, name, ledger, device, handle_types, imported: false })
    }

    /// Memory that another process, or this one, exported as `file`.
    pub(crate) fn import(
        (ledger, device): (&Arc<Ledger>, usize),
        file: &File,
        name: &str,
        handle_types: u32,
    ) -> Outcome<Self> {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let own = ledger.reopen(path.as_ref()).map_err(|error| ledger::said(path.as_ref(), &error));
        let own = own?;
        let length = own.metadata().map_err(|_| INVALID_VALUE)?.len();
        let bytes = usize::try_from(length).map_err(|_| INVALID_VALUE)?;
        let alias = map(&own, bytes)?;
        let (ledger, name) = (Arc::clone(ledger), name.to_owned());
        Ok(Self { alias, bytes, name, ledger, device, handle_types, imported: true })
    }

    /// A descriptor that holds the memory wherever it goes.
    pub(crate) fn export(&self) -> Outcome<File> {
        let path = self.ledger.directory().join(&self.name);
        self.ledger.reopen(&path).map_err(|error| ledger::said(&path, &error))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the driver's copies reach it: `bytes` of memory, while `self` lives.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.alias
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is `bytes` at `alias`, made by `map`, and nobody uses it any more: copies hold an `Arc` of `self`.
        unsafe { libc::munmap(self.alias.cast(), self.bytes) };
        self.ledger.settle(&self.name, self.bytes as u64);
    }
}

/// The physical device and the name of the memory that an exported descriptor is for; none if it is for something else.
pub(crate) fn identify(file: &File, devices: &std::path::Path) -> Option<(u32, String)> {
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let name = path.file_name()?.to_str()?;
    let directory = path.parent()?;
    let device = directory.file_name()?.to_str()?.strip_prefix("device-")?.parse().ok()?;
    let ours = directory.parent()? == devices.canonicalize().ok()? && name.starts_with(PREFIX);
    ours.then(|| (device, name.to_owned()))
}

fn map(file: &File, bytes: usize) -> Outcome<*mut u8> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping, at an address of the kernel's choice, of a file that is open.
    let alias =
        unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, file.as_raw_fd(), 0) };
    if alias == libc::MAP_FAILED { Err(OPERATING_SYSTEM) } else { Ok(alias.cast()) }
}
