//! The frames' memory: one sealed memfd a frame, mapped side by side, in huge pages where there are any.
#![expect(unsafe_code, reason = "maps frames, and reads and writes them")]

use std::ffi::CStr;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use lapis_proto::ids::VramFrame;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap};
use nix::unistd::ftruncate;

use super::copy::copy;
use crate::device::{DeviceFault, check_descriptors};
use crate::sys::memory::mapping::{HUGE_PAGE, Mapping, collapse, in_parallel, populate};
use crate::sys::memory::{PageKind, RamPool, check_budget};

const NAME: &CStr = c"lapis-vram";
/// Entries of the process's memory map beside one a frame.
const MAPS_SPARE: u64 = 1024;

/// All frames.
#[derive(Debug)]
pub(super) struct Frames {
    memory: Arc<Mapping>,
    memfds: Vec<OwnedFd>,
    page_bytes: usize,
    page_kind: PageKind,
}

impl Frames {
    pub(super) fn new(frames: u32, page_size: u64) -> Result<Self, DeviceFault> {
        check_limits(frames)?;
        let bytes = u64::from(frames) * page_size;
        check_budget(bytes)?;
        let page_bytes = usize::try_from(page_size).expect("a page fits in memory");
        let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
        let length = length.ok_or(DeviceFault::Setup { call: "mmap", source: Errno::EINVAL })?;
        let memory = Mapping::reserved(length)
            .map_err(|source| DeviceFault::Setup { call: "mmap", source })?;
        let hugetlb = page_bytes.is_multiple_of(HUGE_PAGE) && hugetlb_has_room(bytes);
        let mut memfds = Vec::with_capacity(frames as usize);
        for frame in 0..frames {
            let memfd = make(page_size, hugetlb).map_err(|(call, source)| DeviceFault::Frame {
                frame,
                call,
                source,
            })?;
            memfds.push(memfd);
        }
        let memory = Arc::new(memory);
        let mut all = Self { memory, memfds, page_bytes, page_kind: PageKind::Plain };
        all.map()?;
        all.page_kind = all.touch(hugetlb)?;
        if all.page_kind == PageKind::Plain && page_bytes >= HUGE_PAGE {
            tracing::warn!(
                "VRAM frames lie in 4 KiB pages: slow to touch; see /sys/kernel/mm/transparent_hugepage \
                 or reserve vm.nr_hugepages"
            );
        }
        Ok(all)
    }

    /// Puts each frame at its place.
    fn map(&self) -> Result<(), DeviceFault> {
        let length = NonZeroUsize::new(self.page_bytes).expect("checked with the whole");
        for (index, memfd) in self.memfds.iter().enumerate() {
            let place = NonZeroUsize::new(self.place(index).as_ptr().addr());
            // SAFETY: MAP_FIXED replaces page_bytes of our own reservation, which begins at `place(index)` and has
            // room for every frame; nobody uses addresses in it yet.
            let mapped = unsafe {
                let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
                mmap(place, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, flags, memfd, 0)
            };
            mapped.map_err(|source| frame_fault(index, "mmap", source))?;
        }
        // SAFETY: the range is ours; the advice keeps it out of children and changes no byte.
        let kept = unsafe {
            madvise(self.memory.base().cast(), self.memory.length(), MmapAdvise::MADV_DONTFORK)
        };
        kept.map_err(|source| DeviceFault::Setup { call: "madvise(MADV_DONTFORK)", source })
    }

    /// Gives each frame its memory, in huge pages if there are any.
    fn touch(&self, hugetlb: bool) -> Result<PageKind, DeviceFault> {
        let collapsed = std::sync::atomic::AtomicUsize::new(0);
        let touch = |index: usize| {
            if self.touch_one(index)? {
                collapsed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            Ok(())
        };
        in_parallel(self.memfds.len(), &touch)
            .map_err(|source| DeviceFault::Setup { call: "touching the frames", source })?;
        Ok(if hugetlb {
            PageKind::Hugetlb
        } else if collapsed.into_inner() == self.memfds.len() {
            PageKind::Transparent
        } else {
            PageKind::Plain
        })
    }

    /// Gives one frame its memory. Answers whether it was gathered into huge pages.
    fn touch_one(&self, index: usize) -> Result<bool, Errno> {
        let place = self.place(index);
        // SAFETY: the frame is mapped readable and writable, and fresh: never touched, or released.
        unsafe { populate(place, self.page_bytes)? };
        // SAFETY: the frame is mapped and stays so. On hugetlb memory the call fails and changes nothing.
        let collapsed = self.page_bytes.is_multiple_of(HUGE_PAGE)
            && unsafe { collapse(place, self.page_bytes) }.is_ok();
        Ok(collapsed)
    }

    pub(super) fn page_kind(&self) -> PageKind {
        self.page_kind
    }

    /// The frames as what the store reads into and writes from.
    pub(super) fn as_pool(&self) -> Result<RamPool, DeviceFault> {
        let frames = u32::try_from(self.memfds.len()).expect("made from a u32");
        let memory = Arc::clone(&self.memory);
        Ok(RamPool::over(memory, frames, self.page_size(), self.page_kind)?)
    }

    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    pub(super) fn page_size(&self) -> u64 {
        self.page_bytes as u64
    }

    pub(super) fn export(&self, frame: VramFrame) -> Result<OwnedFd, DeviceFault> {
        self.memfds[frame.0 as usize].try_clone().map_err(|error| {
            let source = Errno::from_raw(error.raw_os_error().unwrap_or(0));
            frame_fault(frame.0 as usize, "dup", source)
        })
    }

    fn place(&self, index: usize) -> NonNull<u8> {
        assert!(index < self.memfds.capacity(), "frame {index} does not exist");
        // SAFETY: the reservation has room for `frames` pages, which is what `memfds` was made for.
        unsafe { self.memory.base().add(index * self.page_bytes) }
    }

    /// Overwrites a frame with a page.
    pub(super) fn write(&self, frame: VramFrame, page: &[u8]) {
        assert_eq!(page.len(), self.page_bytes, "a page");
        let target = self.place(frame.0 as usize).as_ptr();
        // SAFETY: the frame is page_bytes of mapped, writable memory that can't shrink (sealed), aligned to at least
        // 4096. The operation in flight owns it: the engine gives it to no other operation and to no client before
        // the completion. A client that breaks the rules can only spoil bytes of its own trust domain, and we make
        // no reference to them.
        unsafe { copy(page, target) }
    }

    /// Copies a frame to a page.
    pub(super) fn read(&self, frame: VramFrame, page: &mut [u8]) {
        assert_eq!(page.len(), self.page_bytes, "a page");
        let source = self.place(frame.0 as usize).as_ptr();
        // SAFETY: as in `write`; `page` is borrowed mutably, so it doesn't overlap the frame. No reference to the
        // frame is made, as a client that breaks the rules could write there.
        unsafe { source.copy_to_nonoverlapping(page.as_mut_ptr(), self.page_bytes) }
    }

    /// Gives a frame's memory back to the system; reading it would make it anew, as zeros.
    pub(super) fn release(&self, frame: VramFrame) -> Result<(), DeviceFault> {
        let length = libc::off_t::try_from(self.page_bytes).expect("a page is small");
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&self.memfds[frame.0 as usize], hole, 0, length)
            .map_err(|source| frame_fault(frame.0 as usize, "fallocate(PUNCH_HOLE)", source))
    }

    /// Gives a released frame memory again.
    pub(super) fn restore(&self, frame: VramFrame) -> Result<(), DeviceFault> {
        let index = frame.0 as usize;
        self.touch_one(index).map(drop).map_err(|source| frame_fault(index, "touching", source))
    }

    /// Fills a frame with zeros.
    pub(super) fn zero(&self, frame: VramFrame) {
        let target = self.place(frame.0 as usize).as_ptr();
        // SAFETY: as in `write`.
        unsafe { target.write_bytes(0, self.page_bytes) }
    }
}

fn frame_fault(index: usize, call: &'static str, source: Errno) -> DeviceFault {
    DeviceFault::Frame { frame: u32::try_from(index).unwrap_or(u32::MAX), call, source }
}

/// A memfd of a page that nobody can resize: a client that shrinks it would kill us with SIGBUS.
fn make(page_size: u64, hugetlb: bool) -> Result<OwnedFd, (&'static str, Errno)> {
    let mut flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    if hugetlb {
        flags |= MFdFlags::MFD_HUGETLB | MFdFlags::MFD_HUGE_2MB;
    }
    let memfd = memfd_create(NAME, flags).map_err(|errno| ("memfd_create", errno))?;
    let length = libc::off_t::try_from(page_size).expect("a page is small");
    ftruncate(&memfd, length).map_err(|errno| ("ftruncate", errno))?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(memfd.as_fd(), FcntlArg::F_ADD_SEALS(seals)).map_err(|errno| ("F_ADD_SEALS", errno))?;
    Ok(memfd)
}

/// Whether the pool of huge pages has enough free ones, and some to spare for the RAM tier.
fn hugetlb_has_room(bytes: u64) -> bool {
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free = free.ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
    free.saturating_mul(HUGE_PAGE as u64) >= bytes
}

/// One descriptor and one entry of the memory map a frame.
fn check_limits(frames: u32) -> Result<(), DeviceFault> {
    check_descriptors(frames)?;
    let maps = std::fs::read_to_string("/proc/sys/vm/max_map_count");
    let maps = maps.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(u64::MAX);
    let needed = u64::from(frames) + MAPS_SPARE;
    if maps < needed {
        let fix = "raise the sysctl vm.max_map_count, or take a larger page_size";
        let limit = "vm.max_map_count";
        return Err(DeviceFault::Limit { frames, limit, needed, found: maps, fix });
    }
    Ok(())
}
