//! One owned range of virtual memory, and what its pages are made of.
#![expect(unsafe_code, reason = "maps, advises and unmaps memory")]

use std::fs;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Bytes of a huge page.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
/// Bytes of a plain page.
pub(crate) const PLAIN_PAGE: usize = 4096;
/// What one thread populates at a time: enough that handing it out costs nothing.
const STRIPE: usize = 32 * HUGE_PAGE;

/// What memory is made of. The physical contiguity of buffers decides the disk's speed (4 KiB pages a fifth of it),
/// and what a first touch costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// 2 MiB pages from the reserved pool.
    Hugetlb,
    /// 2 MiB pages that the kernel found.
    Transparent,
    /// 4 KiB pages.
    Plain,
}

impl PageKind {
    /// For people and statistics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hugetlb => "hugetlb",
            Self::Transparent => "transparent huge pages",
            Self::Plain => "4 KiB pages",
        }
    }
}

/// Told the bytes populated so far, from any thread.
pub(crate) type Progress<'a> = dyn Fn(u64) + Sync + 'a;

const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// A mapping that is unmapped when dropped. Nothing is read or written through it here.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    length: NonZeroUsize,
}

// SAFETY: the range belongs to the process and not to a thread, and no method dereferences it: sharing or sending the
// owner moves no access. Whoever dereferences `base` argues for it there.
unsafe impl Send for Mapping {}
// SAFETY: as above; every `&self` method is a system call that the kernel serialises itself.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Zeroed private memory from the huge page pool, populated. `length` is a multiple of [`HUGE_PAGE`].
    ///
    /// # Errors
    /// The call that failed and why: `ENOMEM` when the pool has too few free pages.
    pub(crate) fn hugetlb(
        length: NonZeroUsize,
        progress: &Progress<'_>,
    ) -> Result<Self, (&'static str, Errno)> {
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_HUGETLB | MapFlags::MAP_HUGE_2MB;
        let mapping = Self::anonymous(length, READ_WRITE, flags)
            .map_err(|errno| ("mmap(MAP_HUGETLB)", errno))?;
        mapping.keep_private()?;
        // A page of the pool can still be out of reach, e.g. on a NUMA node that our cpuset excludes.
        mapping.populate(progress)?;
        Ok(mapping)
    }

    /// Zeroed private memory, populated, in transparent huge pages if the kernel has any; begins at a multiple of
    /// [`HUGE_PAGE`].
    ///
    /// # Errors
    /// The call that failed and why.
    pub(crate) fn private(
        length: NonZeroUsize,
        progress: &Progress<'_>,
    ) -> Result<Self, (&'static str, Errno)> {
        let mapping = Self::aligned(length, READ_WRITE).map_err(|errno| ("mmap", errno))?;
        mapping.keep_private()?;
        // Refused by kernels without them; `huge_bytes` tells what came of it.
        let _asked = mapping.advise(MmapAdvise::MADV_HUGEPAGE);
        mapping.populate(progress)?;
        Ok(mapping)
    }

    /// Bytes.
    pub(crate) fn length_nonzero(&self) -> NonZeroUsize {
        self.length
    }

    /// Addresses without memory, from a multiple of [`HUGE_PAGE`] on, to map other things over.
    ///
    /// # Errors
    /// The call's.
    pub(crate) fn reserved(length: NonZeroUsize) -> Result<Self, Errno> {
        Self::aligned(length, ProtFlags::PROT_NONE)
    }

    fn anonymous(
        length: NonZeroUsize,
        protection: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self, Errno> {
        // SAFETY: no address is asked for and MAP_FIXED is not among the flags, so the kernel picks a free range and
        // no existing mapping changes.
        let base = unsafe { mmap_anonymous(None, length, protection, flags)? };
        Ok(Self { base: base.cast(), length })
    }

    fn aligned(length: NonZeroUsize, protection: ProtFlags) -> Result<Self, Errno> {
        let with_slack = length.checked_add(HUGE_PAGE).ok_or(Errno::ENOMEM)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        let mut whole = Self::anonymous(with_slack, protection, flags)?;
        let misaligned = whole.base.as_ptr().addr() % HUGE_PAGE;
        whole.trim_front(if misaligned == 0 { 0 } else { HUGE_PAGE - misaligned })?;
        whole.trim_to(length)?;
        Ok(whole)
    }

    fn trim_front(&mut self, bytes: usize) -> Result<(), Errno> {
        let Some(rest) = self.length.get().checked_sub(bytes).and_then(NonZeroUsize::new) else {
            return Err(Errno::EINVAL);
        };
        if bytes > 0 {
            // SAFETY: the first `bytes` bytes are ours, and nobody has been given an address in them yet.
            unsafe { munmap(self.base.cast(), bytes)? };
            // SAFETY: `bytes` is below `length`, so the result stays inside our range.
            self.base = unsafe { self.base.add(bytes) };
            self.length = rest;
        }
        Ok(())
    }

    fn trim_to(&mut self, length: NonZeroUsize) -> Result<(), Errno> {
        let surplus = self.length.get().checked_sub(length.get()).ok_or(Errno::EINVAL)?;
        if surplus > 0 {
            // SAFETY: `length` is inside our range.
            let tail = unsafe { self.base.add(length.get()) };
            // SAFETY: the last `surplus` bytes are ours, and nobody has been given an address in them yet.
            unsafe { munmap(tail.cast(), surplus)? };
            self.length = length;
        }
        Ok(())
    }

    /// First byte.
    #[must_use]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    #[must_use]
    pub(crate) fn length(&self) -> usize {
        self.length.get()
    }

    /// Keeps the range out of children and core dumps: a child that writes would copy pages under the DMA.
    fn keep_private(&self) -> Result<(), (&'static str, Errno)> {
        self.advise(MmapAdvise::MADV_DONTFORK)
            .map_err(|errno| ("madvise(MADV_DONTFORK)", errno))?;
        self.advise(MmapAdvise::MADV_DONTDUMP).map_err(|errno| ("madvise(MADV_DONTDUMP)", errno))
    }

    fn advise(&self, advice: MmapAdvise) -> Result<(), Errno> {
        debug_assert!(matches!(
            advice,
            MmapAdvise::MADV_HUGEPAGE | MmapAdvise::MADV_DONTFORK | MmapAdvise::MADV_DONTDUMP
        ));
        // SAFETY: the range is one that we mapped and still own, and none of these advices changes its content.
        unsafe { madvise(self.base.cast(), self.length.get(), advice) }
    }

    /// Gives every page its memory now, on all cores; only for constructors.
    fn populate(&self, progress: &Progress<'_>) -> Result<(), (&'static str, Errno)> {
        let stripes = self.length().div_ceil(STRIPE);
        let done = AtomicUsize::new(0);
        let stripe = |stripe: usize| {
            let start = stripe * STRIPE;
            let length = STRIPE.min(self.length() - start);
            // SAFETY: `start + length` is at most our length, so the range is ours; both constructors that call this
            // mapped it readable and writable, and have given it to nobody yet.
            unsafe { populate(self.base.add(start), length)? };
            let so_far = done.fetch_add(length, Ordering::Relaxed) + length;
            progress(u64::try_from(so_far).unwrap_or(u64::MAX));
            Ok(())
        };
        in_parallel(stripes, &stripe).map_err(|errno| ("madvise(MADV_POPULATE_WRITE)", errno))
    }

    /// Gathers the pages into huge ones, after the fact.
    ///
    /// # Errors
    /// The call's: `EINVAL` before Linux 6.1, `ENOMEM` or `EAGAIN` when no huge page is to be had.
    pub(crate) fn collapse(&self) -> Result<(), Errno> {
        // SAFETY: the range is ours; collapsing moves its bytes to other physical pages and changes none.
        unsafe { collapse(self.base, self.length()) }
    }

    /// Bytes of this mapping that lie in transparent huge pages, as the kernel counts them.
    #[must_use]
    pub(crate) fn huge_bytes(&self) -> u64 {
        let text = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let start = self.base.as_ptr().addr();
        anonymous_huge_bytes(&text, start, start + self.length())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours whole, and whoever uses addresses in it keeps this owner alive.
        let outcome = unsafe { munmap(self.base.cast(), self.length.get()) };
        if let Err(errno) = outcome {
            tracing::error!(%errno, bytes = self.length(), "cannot unmap memory; it stays until the process ends");
        }
    }
}

/// Runs `work(0)` to `work(count - 1)` on as many threads as there are cores, and stops at the first failure.
pub(crate) fn in_parallel(
    count: usize,
    work: &(dyn Fn(usize) -> Result<(), Errno> + Sync),
) -> Result<(), Errno> {
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(count);
    let next = AtomicUsize::new(0);
    let worker = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return Ok(());
            }
            if let Err(errno) = work(index) {
                next.store(count, Ordering::Relaxed);
                return Err(errno);
            }
        }
    };
    thread::scope(|scope| {
        let handles: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
        let mut outcome = worker();
        for handle in handles {
            outcome = outcome.and(handle.join().unwrap_or(Err(Errno::EIO)));
        }
        outcome
    })
}

/// Gives the pages of a range their memory without changing any byte.
///
/// # Safety
/// The range is mapped readable and writable. Before Linux 5.14 it must also be fresh: it is then zeroed by hand.
pub(crate) unsafe fn populate(base: NonNull<u8>, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller's range is mapped; this advice faults pages in and changes no content.
    let outcome = unsafe { libc::madvise(base.as_ptr().cast(), length, libc::MADV_POPULATE_WRITE) };
    match Errno::result(outcome) {
        Ok(_) => Ok(()),
        Err(Errno::EINVAL) => {
            for offset in (0..length).step_by(PLAIN_PAGE) {
                // SAFETY: `offset` is below `length`, and the caller's range is writable; a fresh page reads zero, so
                // this write changes nothing.
                unsafe { base.add(offset).write_volatile(0) };
            }
            Ok(())
        }
        Err(errno) => Err(errno),
    }
}

/// Gathers the pages of a range into huge ones.
///
/// # Safety
/// The range is mapped by this process and stays so during the call.
pub(crate) unsafe fn collapse(base: NonNull<u8>, length: usize) -> Result<(), Errno> {
    // SAFETY: the caller's range is mapped; collapsing preserves its bytes.
    let outcome = unsafe { libc::madvise(base.as_ptr().cast(), length, libc::MADV_COLLAPSE) };
    Errno::result(outcome).map(drop)
}

/// Sums `AnonHugePages` over the mappings that overlap `start..end`.
fn anonymous_huge_bytes(smaps: &str, start: usize, end: usize) -> u64 {
    let mut inside = false;
    let mut bytes = 0_u64;
    for line in smaps.lines() {
        if let Some((from, to)) = address_range(line) {
            inside = from < end && to > start;
        } else if inside && let Some(kib) = line.strip_prefix("AnonHugePages:") {
            let kib: u64 =
                kib.trim().strip_suffix(" kB").and_then(|kib| kib.trim().parse().ok()).unwrap_or(0);
            bytes = bytes.saturating_add(kib.saturating_mul(1024));
        }
    }
    bytes
}

/// The addresses of a mapping's first line, `7f00-7f01 rw-p ...`.
fn address_range(line: &str) -> Option<(usize, usize)> {
    let (from, to) = line.split(' ').next()?.split_once('-')?;
    Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_bytes_are_summed_over_the_mappings_that_overlap() {
        let smaps = "1000-3000 rw-p 00000000 00:00 0 \nSize: 8 kB\nAnonHugePages:   2048 kB\n\
                     3000-5000 rw-p 00000000 00:00 0 \nAnonHugePages:      4096 kB\n\
                     9000-a000 rw-p 00000000 00:00 0 \nAnonHugePages:      8192 kB\n";
        assert_eq!(anonymous_huge_bytes(smaps, 0x2000, 0x5000), 6 << 20);
        assert_eq!(anonymous_huge_bytes(smaps, 0x5000, 0x9000), 0);
    }

    #[test]
    fn a_private_mapping_is_aligned_and_of_the_length_asked() {
        let length = NonZeroUsize::new(3 * PLAIN_PAGE).unwrap();
        let mapping = Mapping::private(length, &|_| ()).unwrap();
        assert_eq!(mapping.base().as_ptr().addr() % (2 << 20), 0);
        assert_eq!(mapping.length(), 12_288);
    }

    #[test]
    fn the_first_failure_stops_the_others() {
        let outcome =
            in_parallel(1_000_000, &|index| if index == 3 { Err(Errno::ENOMEM) } else { Ok(()) });
        assert_eq!(outcome, Err(Errno::ENOMEM));
    }
}
