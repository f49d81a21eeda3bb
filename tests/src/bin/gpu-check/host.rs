//! Memory of the host, in pages of its own.
#![expect(unsafe_code, reason = "maps memory")]

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::Outcome;

/// Anonymous memory, present.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    bytes: usize,
}

impl HostMemory {
    /// In huge pages, if asked for and the kernel has them.
    pub(crate) fn new(bytes: usize, huge: bool) -> Outcome<Self> {
        let length = NonZeroUsize::new(bytes).ok_or("no bytes")?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE) }?;
        let mut memory = Self { start: start.cast(), bytes };
        let advice = if huge { MmapAdvise::MADV_HUGEPAGE } else { MmapAdvise::MADV_NOHUGEPAGE };
        // Without huge pages in this kernel it is as good as it gets.
        // SAFETY: the mapping is ours, and the advice changes no bytes.
        let _kept = unsafe { madvise(start, bytes, advice) };
        memory.slice().fill(1);
        Ok(memory)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of a byte.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.bytes);
        self.start.as_ptr().wrapping_add(offset)
    }

    pub(crate) fn slice(&mut self) -> &mut [u8] {
        // SAFETY: mapped, writable and zeroed by the kernel; nobody else has it while it is borrowed: copies of the
        // GPU are waited for where they are made.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it any more.
        let _gone = unsafe { munmap(self.start.cast(), self.bytes) };
    }
}

/// Descriptors that this process has open.
pub(crate) fn descriptors() -> Outcome<usize> {
    // One of them is the directory itself.
    Ok(std::fs::read_dir("/proc/self/fd")?.count().saturating_sub(1))
}
