//! Where frames are mapped: addresses of this process for memory files, addresses of the device for its memory.
//!
//! It does as told: which page has which frame, and who holds it, is `Space`'s business.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use lapis_proto::ids::VramFrame;

use crate::cuda::area::{DeviceAccess, DeviceArea};
use crate::cuda::gpu::{DeviceFrame, Gpu};
use crate::error::Error;
use crate::frames::FrameTable;

use super::space::Protection;

/// A larger alignment gains nothing: huge pages are this long.
const ALIGNMENT_MAX: usize = 2 << 20;

/// An address in an area. Only a mapping may go there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Base(NonNull<u8>);

// SAFETY: an address alone gives no access; who may touch the bytes is the Mapping's business.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Base {
    /// The address `bytes` further, which must be inside the area or at its end.
    pub(crate) fn offset(self, bytes: usize) -> Base {
        Base(NonNull::new(self.0.as_ptr().wrapping_add(bytes)).unwrap_or(self.0))
    }

    pub(crate) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Where no bytes are.
    pub(super) const NOWHERE: Base = Base(NonNull::dangling());
}

/// A frame, as it is mapped.
#[derive(Debug)]
pub(super) enum Frame {
    Memfd(Arc<OwnedFd>),
    Device(Arc<DeviceFrame>),
}

/// An allocation's addresses.
#[derive(Debug)]
pub(super) enum Area {
    Memfd(MemfdArea),
    Device(DeviceArea),
}

impl Area {
    /// The first address.
    pub(super) fn base(&self) -> Base {
        match self {
            Area::Memfd(area) => Base(area.base),
            // Never 0, and if it were, never touched.
            Area::Device(area) => {
                let address = usize::try_from(area.base()).unwrap_or(0);
                let pointer = std::ptr::without_provenance_mut(address);
                Base(NonNull::new(pointer).unwrap_or(NonNull::dangling()))
            }
        }
    }

    /// The frame, ready to be mapped here.
    pub(super) fn frame(&self, table: &FrameTable, frame: VramFrame) -> Result<Frame, Error> {
        Ok(match self {
            Area::Memfd(_) => Frame::Memfd(table.get(frame)?),
            Area::Device(area) => Frame::Device(table.device_frame(frame, area.gpu())?),
        })
    }

    /// Whether a frame can be mapped where another is, which no mapping may hold.
    pub(super) fn replaces(&self) -> bool {
        match self {
            Area::Memfd(_) => true,
            Area::Device(_) => false,
        }
    }

    /// How many neighbouring pages can be vacated in one call.
    pub(super) fn vacated_max(&self) -> usize {
        match self {
            Area::Memfd(_) => usize::MAX,
            Area::Device(_) => 1,
        }
    }

    /// Whether access may be lowered, though not taken, while another mapping holds the page.
    pub(super) fn lowers(&self) -> bool {
        match self {
            Area::Memfd(_) => true,
            // Its readers' kernels run; that the driver changes the page under them unseen is nowhere promised.
            Area::Device(_) => false,
        }
    }

    /// Maps a frame at a page that no mapping holds. Returns the protection that it has then: at most `wanted`.
    pub(super) fn place(
        &self,
        page: usize,
        frame: &Frame,
        wanted: Protection,
    ) -> Result<Protection, Error> {
        match (self, frame) {
            (Area::Memfd(area), Frame::Memfd(fd)) => {
                area.place(page, fd, wanted)?;
                Ok(wanted)
            }
            (Area::Device(area), Frame::Device(frame)) => {
                area.map(page, frame)?;
                Ok(Protection::None)
            }
            // `frame` makes the kind that belongs here.
            (Area::Memfd(_), Frame::Device(_)) | (Area::Device(_), Frame::Memfd(_)) => {
                Err(Error::Unsupported { what: "mapping another device's frame" })
            }
        }
    }

    /// To be called after `place`, once for a run of pages.
    pub(super) fn placed(&self, pages: Range<usize>) -> Result<(), Error> {
        match self {
            Area::Memfd(area) => area.keep_from_children(pages),
            // Device addresses mean nothing to a child.
            Area::Device(_) => Ok(()),
        }
    }

    /// Takes the frames out of at most [`Self::vacated_max`] pages, which no mapping may hold.
    pub(super) fn vacate(&self, pages: Range<usize>) -> Result<(), Error> {
        match self {
            Area::Memfd(area) => area.vacate(pages),
            Area::Device(area) => Ok(area.unmap(pages.start)?),
        }
    }

    /// Sets the protection of pages that have frames, in one call.
    pub(super) fn protect(&self, pages: Range<usize>, wanted: Protection) -> Result<(), Error> {
        match self {
            Area::Memfd(area) => area.protect(pages, wanted),
            Area::Device(area) => {
                let access = match wanted {
                    Protection::None => DeviceAccess::None,
                    Protection::Read => DeviceAccess::Read,
                    Protection::Write => DeviceAccess::Write,
                };
                Ok(area.protect(pages, access)?)
            }
        }
    }

    /// Before the end: takes the frames out of `framed` pages. The addresses go with the area.
    pub(super) fn clear(&self, framed: impl Iterator<Item = usize>) {
        match self {
            // The end of the addresses is the end of what is mapped there.
            Area::Memfd(_) => {}
            Area::Device(area) => {
                if area.is_forked() {
                    return;
                }
                for page in framed {
                    // Fails in a broken context, whose memory comes back when the process ends.
                    let _ = area.unmap(page);
                }
            }
        }
    }

    /// Reserves addresses on a GPU.
    pub(super) fn on_device(gpu: &Arc<Gpu>, page_size: usize, size: usize) -> Result<Area, Error> {
        Ok(Area::Device(DeviceArea::reserve(gpu, page_size, size)?))
    }
}

/// Addresses of this process, where memory files are mapped. Unmapped on drop, except in a forked child, which never
/// had them.
#[derive(Debug)]
pub(super) struct MemfdArea {
    base: NonNull<u8>,
    page_size: usize,
    size: usize,
    process: u32,
}

// SAFETY: it owns its address range as a Vec owns its memory; nothing about it is tied to a thread.
unsafe impl Send for MemfdArea {}

impl MemfdArea {
    /// Reserves `size` bytes of addresses, aligned to the page size or to a huge page.
    pub(super) fn reserve(page_size: usize, size: usize) -> Result<MemfdArea, Error> {
        let alignment = page_size.min(ALIGNMENT_MAX);
        let padded = size.checked_add(alignment).ok_or_else(too_long)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new private mapping at an address of the kernel's choice touches nothing that exists.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), padded, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(last_error("mmap"));
        }
        let start = start.cast::<u8>();
        let before = start.align_offset(alignment).min(alignment);
        // SAFETY: `before <= alignment`, so `before + size` is within the `padded` bytes just mapped.
        let (base, end) = unsafe { (start.add(before), start.add(before + size)) };
        // SAFETY: head and tail are whole hardware pages of the mapping just made, outside `base..end`, and nobody
        // else knows of them. Trimming can't fail for what is mapped; if it did, only addresses would be wasted.
        unsafe {
            if before > 0 {
                libc::munmap(start.cast(), before);
            }
            if alignment > before {
                libc::munmap(end.cast(), alignment - before);
            }
        }
        let base = NonNull::new(base).ok_or_else(too_long)?;
        let area = MemfdArea { base, page_size, size, process: std::process::id() };
        area.keep_from_children(0..size / page_size)?;
        Ok(area)
    }

    fn place(&self, page: usize, fd: &OwnedFd, protection: Protection) -> Result<(), Error> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE;
        // SAFETY: the address range is page `page` of our reservation, which nothing else uses and which no mapping
        // holds (`Space::place_frames` checked), so no reference into it exists. `fd` is open. The file has exactly
        // one page and can't shrink (`FrameTable`'s invariant), so every byte is backed.
        let address = unsafe {
            libc::mmap(
                self.address(page),
                self.page_size,
                flags_of(protection),
                flags,
                fd.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED { Err(last_error("mmap")) } else { Ok(()) }
    }

    /// Puts the bare reservation back over `pages`, which no mapping may hold.
    fn vacate(&self, pages: Range<usize>) -> Result<(), Error> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let length = pages.len() * self.page_size;
        // SAFETY: the range lies in our reservation and no mapping holds it, so no reference into it exists; what
        // replaces it is inaccessible.
        let address =
            unsafe { libc::mmap(self.address(pages.start), length, libc::PROT_NONE, flags, -1, 0) };
        if address == libc::MAP_FAILED {
            return Err(last_error("mmap"));
        }
        self.keep_from_children(pages)
    }

    fn protect(&self, pages: Range<usize>, wanted: Protection) -> Result<(), Error> {
        let length = pages.len() * self.page_size;
        // SAFETY: the range lies in our reservation. Access is taken only from pages that no mapping holds, and
        // write access only from pages that no writer holds, so no reference loses what it relies on.
        let result = unsafe { libc::mprotect(self.address(pages.start), length, flags_of(wanted)) };
        if result == 0 { Ok(()) } else { Err(last_error("mprotect")) }
    }

    /// A forked child doesn't get these addresses: it holds no mapping, and would keep frames alive unseen.
    fn keep_from_children(&self, pages: Range<usize>) -> Result<(), Error> {
        let length = pages.len() * self.page_size;
        // SAFETY: the range lies in our reservation; the advice changes what fork copies, nothing here.
        let result =
            unsafe { libc::madvise(self.address(pages.start), length, libc::MADV_DONTFORK) };
        if result == 0 { Ok(()) } else { Err(last_error("madvise")) }
    }

    fn address(&self, page: usize) -> *mut libc::c_void {
        // SAFETY: `page` is at most the number of pages, so this stays in the reservation or at its end.
        unsafe { self.base.as_ptr().add(page * self.page_size) }.cast()
    }
}

impl Drop for MemfdArea {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: the range is ours and its last owner goes: mappings keep their allocation alive, so none holds a
        // page here. Fails only for a range that isn't mapped at all.
        unsafe { libc::munmap(self.address(0), self.size) };
    }
}

fn flags_of(protection: Protection) -> libc::c_int {
    match protection {
        Protection::None => libc::PROT_NONE,
        Protection::Read => libc::PROT_READ,
        Protection::Write => libc::PROT_READ | libc::PROT_WRITE,
    }
}

/// More addresses than there are.
pub(super) fn too_long() -> Error {
    Error::Io { call: "mmap", source: io::ErrorKind::OutOfMemory.into() }
}

fn last_error(call: &'static str) -> Error {
    Error::Io { call, source: io::Error::last_os_error() }
}
