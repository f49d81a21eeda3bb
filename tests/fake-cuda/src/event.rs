//! Events, of one process or of several: a page of counters that is waited on with a futex.
//!
//! A record takes the next generation; the event is complete up to a generation. Waiting is for the generation that is the newest
//! when the wait is asked for. A process that dies with a record under way leaves it incomplete for ever, as a semaphore
//! of a GPU would be: whoever waits for somebody else's event waits on that somebody's word.
#![expect(unsafe_code, reason = "shared memory and futexes")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use crate::abi::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, IpcEventHandle};
use crate::code::{INVALID_CONTEXT, INVALID_HANDLE, OPERATING_SYSTEM, Outcome, require};
use crate::ledger;

const PAGE_BYTES: usize = 4096;
const MAGIC: &[u8; 8] = b"lapisipc";

/// What is shared.
#[repr(C)]
#[derive(Debug, Default)]
struct Page {
    /// Changes with everything that somebody may wait for.
    signal: AtomicU32,
    recorded: AtomicU64,
    completed: AtomicU64,
    /// Nanoseconds, of the newest completion; of one process only.
    stamp: AtomicU64,
}

const _: () = assert!(size_of::<Page>() <= PAGE_BYTES);

/// An event of this process, or one that it opened.
#[derive(Debug)]
pub(crate) struct Event {
    page: *const Page,
    pub(crate) device: usize,
    pub(crate) flags: u32,
    /// The file and its number, of one that others may open; only its maker removes it.
    shared: Option<(PathBuf, u64)>,
}

// SAFETY: the page is mapped until `self` is dropped, and holds nothing but atomics.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub(crate) fn create(directory: &Path, device: usize, flags: u32) -> Outcome<Self> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        if flags & EVENT_INTERPROCESS == 0 {
            return Ok(Self { page: map(None)?, device, flags, shared: None });
        }
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let path = path(directory, std::process::id(), serial);
        let made = ledger::open_shared(&path).and_then(|file| {
            file.set_len(PAGE_BYTES as u64)?;
            Ok(file)
        });
        let file = made.map_err(|error| ledger::said(&path, &error))?;
        Ok(Self { page: map(Some(&file))?, device, flags, shared: Some((path, serial)) })
    }

    /// The handle for other processes, of an event made to be shared.
    pub(crate) fn handle(&self, physical: u32) -> Outcome<IpcEventHandle> {
        let (_, serial) = self.shared.as_ref().ok_or(INVALID_HANDLE)?;
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&std::process::id().to_le_bytes());
        bytes[12..16].copy_from_slice(&physical.to_le_bytes());
        bytes[16..24].copy_from_slice(&serial.to_le_bytes());
        Ok(IpcEventHandle { bytes })
    }

    /// Opens another process's event; its own it may not. `ordinal` finds a physical device.
    pub(crate) fn open(
        directory: &Path,
        handle: &IpcEventHandle,
        ordinal: impl FnOnce(u32) -> Outcome<usize>,
    ) -> Outcome<Self> {
        let word = |at: usize| handle.bytes[at..at + 4].try_into().map(u32::from_le_bytes);
        require(handle.bytes.starts_with(MAGIC), INVALID_HANDLE)?;
        let (process, physical) = (word(8).expect("4 bytes"), word(12).expect("4 bytes"));
        let serial = u64::from_le_bytes(handle.bytes[16..24].try_into().expect("8 bytes"));
        require(process != std::process::id(), INVALID_CONTEXT)?;
        let device = ordinal(physical)?;
        let path = path(directory, process, serial);
        let file = File::options().read(true).write(true).open(path).map_err(|_| INVALID_HANDLE)?;
        let flags = EVENT_DISABLE_TIMING;
        Ok(Self { page: map(Some(&file))?, device, flags, shared: None })
    }

    /// Takes the next generation.
    pub(crate) fn record(&self) -> u64 {
        self.page().recorded.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn recorded(&self) -> u64 {
        self.page().recorded.load(Ordering::SeqCst)
    }

    pub(crate) fn complete(&self, generation: u64) {
        static START: OnceLock<Instant> = OnceLock::new();
        let now = START.get_or_init(Instant::now).elapsed().as_nanos();
        self.page().stamp.store(u64::try_from(now).unwrap_or(u64::MAX), Ordering::SeqCst);
        self.page().completed.fetch_max(generation, Ordering::SeqCst);
        self.wake();
    }

    pub(crate) fn is_complete(&self, generation: u64) -> bool {
        self.page().completed.load(Ordering::SeqCst) >= generation
    }

    /// Nanoseconds when it was completed last.
    pub(crate) fn stamp(&self) -> u64 {
        self.page().stamp.load(Ordering::SeqCst)
    }

    /// Returns when the generation is complete, or `give_up` says so.
    pub(crate) fn wait(&self, generation: u64, give_up: impl Fn() -> bool) {
        loop {
            // Read before the questions: what changes after them changes this, and the futex doesn't wait.
            let signal = self.page().signal.load(Ordering::SeqCst);
            if self.is_complete(generation) || give_up() {
                return;
            }
            self.futex(libc::FUTEX_WAIT, signal);
        }
    }

    /// Makes all who wait look again.
    pub(crate) fn wake(&self) {
        self.page().signal.fetch_add(1, Ordering::SeqCst);
        self.futex(libc::FUTEX_WAKE, i32::MAX as u32);
    }

    fn page(&self) -> &Page {
        // SAFETY: `map` made it, zeroed or already in use as a `Page`, and it stays mapped while `self` lives.
        unsafe { &*self.page }
    }

    fn futex(&self, operation: i32, value: u32) {
        let word = self.page().signal.as_ptr();
        let forever = std::ptr::null::<libc::timespec>();
        // SAFETY: the word is aligned and mapped; the kernel reads it and keeps no pointer. Any result means to look again.
        unsafe { libc::syscall(libc::SYS_futex, word, operation, value, forever) };
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some((path, _)) = &self.shared {
            drop(std::fs::remove_file(path));
        }
        // SAFETY: mapped by `map`; the last user is gone.
        unsafe { libc::munmap(self.page.cast_mut().cast(), PAGE_BYTES) };
    }
}

fn path(directory: &Path, process: u32, serial: u64) -> PathBuf {
    directory.join("events").join(format!("{process}-{serial}"))
}

/// A page of zeros, or that of a file.
fn map(file: Option<&File>) -> Outcome<*const Page> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let (flags, descriptor) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page =
        unsafe { libc::mmap(std::ptr::null_mut(), PAGE_BYTES, access, flags, descriptor, 0) };
    if page == libc::MAP_FAILED { Err(OPERATING_SYSTEM) } else { Ok(page.cast_const().cast()) }
}
