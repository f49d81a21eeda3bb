//! The address range of one allocation, reserved for its life: page `k` is always at `base + k * page_size`.
//!
//! ```text
//!            not mapped yet          in a mapping            left by a mapping
//!   page     reserved, no access ->  frame, read (+write) -> frame, no access
//!                ^                                             |  another frame is put over it, or
//!                +---------------------------------------------+  it is given up (revoked, too many)
//! ```
//!
//! A frame that a mapping left stays where it is, unreadable: if the page comes back in the same frame, one `mprotect`
//! for a whole run of pages is all it costs. A page is readable only while a mapping of this process holds it.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use lapis_proto::ids::VramFrame;

use crate::error::{Error, ProtocolError};
use crate::frames::FrameTable;

/// A larger alignment gains nothing: huge pages are this long.
const ALIGNMENT_MAX: usize = 2 << 20;

/// What may be done to a page's bytes. Ordered: more allows more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Protection {
    None,
    Read,
    Write,
}

impl Protection {
    fn flags(self) -> libc::c_int {
        match self {
            Protection::None => libc::PROT_NONE,
            Protection::Read => libc::PROT_READ,
            Protection::Write => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// One page's place.
#[derive(Debug, Clone)]
struct Place {
    /// The frame that is mapped here.
    frame: Option<VramFrame>,
    /// As the kernel has it.
    protection: Protection,
    /// Mappings that hold the page for reading.
    readers: u32,
    /// Mappings that hold it for writing too.
    writers: u32,
}

impl Place {
    fn is_held(&self) -> bool {
        self.readers > 0 || self.writers > 0
    }

    /// What the mappings that hold it need.
    fn wanted(&self) -> Protection {
        if self.writers > 0 {
            Protection::Write
        } else if self.readers > 0 {
            Protection::Read
        } else {
            Protection::None
        }
    }

    fn holders(&mut self, write: bool) -> &mut u32 {
        if write { &mut self.writers } else { &mut self.readers }
    }
}

/// An address in a space. Only a mapping may go there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Base(NonNull<u8>);

// SAFETY: an address alone gives no access; who may touch the bytes is the Mapping's business.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Base {
    /// The address `bytes` further, which must be inside the space or at its end.
    pub(crate) fn offset(self, bytes: usize) -> Base {
        Base(NonNull::new(self.0.as_ptr().wrapping_add(bytes)).unwrap_or(self.0))
    }

    pub(crate) fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }
}

/// An allocation's addresses. Unmapped on drop, except in a forked child, which never had them.
#[derive(Debug)]
pub(crate) struct Space {
    base: NonNull<u8>,
    page_size: usize,
    places: Vec<Place>,
    /// Places with a frame.
    framed: usize,
    process: u32,
}

// SAFETY: a Space owns its address range as a Vec owns its memory; nothing about it is tied to a thread.
unsafe impl Send for Space {}

impl Space {
    /// Reserves addresses for `pages` pages, aligned to the page size or to a huge page.
    pub(crate) fn reserve(pages: u32, page_size: u64) -> Result<Space, Error> {
        let too_long = || Error::Io { call: "mmap", source: io::ErrorKind::OutOfMemory.into() };
        let page_size = usize::try_from(page_size).map_err(|_| too_long())?;
        let count = usize::try_from(pages).map_err(|_| too_long())?;
        let size = count.checked_mul(page_size).filter(|size| *size > 0).ok_or_else(too_long)?;
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
        let place = Place { frame: None, protection: Protection::None, readers: 0, writers: 0 };
        let process = std::process::id();
        let space = Space { base, page_size, places: vec![place; count], framed: 0, process };
        space.keep_from_children(0..count)?;
        Ok(space)
    }

    /// Address of the first page.
    pub(crate) fn base(&self) -> Base {
        Base(self.base)
    }

    /// Pages that have a frame mapped, each of which costs the process an entry of its memory map.
    pub(crate) fn framed(&self) -> usize {
        self.framed
    }

    /// Holds `pages`, which are in `frames`, for a mapping. On error nothing is held.
    pub(crate) fn hold(
        &mut self,
        pages: Range<usize>,
        frames: &[VramFrame],
        write: bool,
        table: &FrameTable,
    ) -> Result<(), Error> {
        if frames.len() != pages.len() || pages.end > self.places.len() {
            let expected = pages.len();
            return Err(ProtocolError::FrameCount { found: frames.len(), expected }.into());
        }
        let result = self.place_frames(pages.clone(), frames, write, table).and_then(|()| {
            for place in &mut self.places[pages.clone()] {
                *place.holders(write) += 1;
            }
            self.settle(pages.clone()).inspect_err(|_| self.count_down(pages.clone(), write))
        });
        if result.is_err() {
            // Pages that were opened for nothing are closed again; if that fails too, they keep an access that
            // nothing hands out an address for.
            let _ = self.settle(pages);
        }
        result
    }

    /// Ends what `hold` began. With `give_up`, pages that nobody holds any more also lose their frame.
    pub(crate) fn release(
        &mut self,
        pages: Range<usize>,
        write: bool,
        give_up: bool,
    ) -> Result<(), Error> {
        self.count_down(pages.clone(), write);
        if !give_up {
            return self.settle(pages);
        }
        let unheld: Vec<bool> = self.places[pages.clone()].iter().map(|p| !p.is_held()).collect();
        for run in runs(&unheld, |unheld| *unheld) {
            self.vacate(pages.start + run.start..pages.start + run.end)?;
        }
        self.settle(pages)
    }

    /// Takes `frames` out of every place that no mapping holds. Adds those that one does hold to `held`.
    pub(crate) fn revoke(
        &mut self,
        frames: &HashSet<VramFrame>,
        held: &mut HashSet<VramFrame>,
    ) -> Result<(), Error> {
        for page in 0..self.places.len() {
            let place = &self.places[page];
            match place.frame {
                Some(frame) if frames.contains(&frame) && place.is_held() => {
                    held.insert(frame);
                }
                Some(frame) if frames.contains(&frame) => self.vacate(page..page + 1)?,
                Some(_) | None => {}
            }
        }
        Ok(())
    }

    fn count_down(&mut self, pages: Range<usize>, write: bool) {
        for place in &mut self.places[pages] {
            let holders = place.holders(write);
            *holders = holders.saturating_sub(1);
        }
    }

    /// Maps each page's frame at its place, with at least the protection it needs, unless it is there already.
    fn place_frames(
        &mut self,
        pages: Range<usize>,
        frames: &[VramFrame],
        write: bool,
        table: &FrameTable,
    ) -> Result<(), Error> {
        let mut fds: Vec<Option<Arc<OwnedFd>>> = Vec::with_capacity(frames.len());
        for (page, frame) in pages.clone().zip(frames) {
            let place = &self.places[page];
            fds.push(match place.frame {
                Some(here) if here == *frame => None,
                Some(here) if place.is_held() => {
                    let page = u32::try_from(page).unwrap_or(u32::MAX);
                    return Err(ProtocolError::Moved { page, held: here.0, found: frame.0 }.into());
                }
                Some(_) | None => Some(table.get(*frame)?),
            });
        }
        let protection = if write { Protection::Write } else { Protection::Read };
        for run in runs(&fds, Option::is_some) {
            for index in run.clone() {
                if let Some(fd) = &fds[index] {
                    self.place_frame(
                        pages.start + index,
                        frames[index],
                        fd.as_raw_fd(),
                        protection,
                    )?;
                }
            }
            self.keep_from_children(pages.start + run.start..pages.start + run.end)?;
        }
        Ok(())
    }

    fn place_frame(
        &mut self,
        page: usize,
        frame: VramFrame,
        fd: RawFd,
        protection: Protection,
    ) -> Result<(), Error> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE;
        // SAFETY: the address range is page `page` of our reservation, which nothing else uses and which no mapping
        // holds (`place_frames` checked), so no reference into it exists. `fd` is open: the caller keeps it. The
        // file has exactly one page and can't shrink (`FrameTable`'s invariant), so every byte is backed.
        let address = unsafe {
            libc::mmap(self.address(page), self.page_size, protection.flags(), flags, fd, 0)
        };
        if address == libc::MAP_FAILED {
            return Err(last_error("mmap"));
        }
        let place = &mut self.places[page];
        if place.frame.replace(frame).is_none() {
            self.framed += 1;
        }
        place.protection = protection;
        Ok(())
    }

    /// Puts the bare reservation back over `pages`, which no mapping may hold.
    fn vacate(&mut self, pages: Range<usize>) -> Result<(), Error> {
        debug_assert!(self.places[pages.clone()].iter().all(|place| !place.is_held()));
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: the range lies in our reservation and no mapping holds it, so no reference into it exists; what
        // replaces it is inaccessible.
        let address = unsafe {
            libc::mmap(
                self.address(pages.start),
                pages.len() * self.page_size,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(last_error("mmap"));
        }
        for place in &mut self.places[pages.clone()] {
            if place.frame.take().is_some() {
                self.framed -= 1;
            }
            place.protection = Protection::None;
        }
        self.keep_from_children(pages)
    }

    /// Gives each page the protection that its holders need, one call per run of pages that lack the same one.
    fn settle(&mut self, pages: Range<usize>) -> Result<(), Error> {
        let mut page = pages.start;
        while page < pages.end {
            let wanted = self.places[page].wanted();
            let lacks = |place: &Place| place.protection != wanted && place.wanted() == wanted;
            let count = self.places[page..pages.end].iter().take_while(|p| lacks(p)).count();
            if count == 0 {
                page += 1;
                continue;
            }
            // SAFETY: the range lies in our reservation. Access is taken only from pages that no mapping holds, and
            // write access only from pages that no writer holds, so no reference loses what it relies on.
            let result = unsafe {
                libc::mprotect(self.address(page), count * self.page_size, wanted.flags())
            };
            if result != 0 {
                return Err(last_error("mprotect"));
            }
            for place in &mut self.places[page..page + count] {
                place.protection = wanted;
            }
            page += count;
        }
        Ok(())
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

impl Drop for Space {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: the range is ours and its last owner goes: mappings keep their allocation alive, so none holds a
        // page here. Fails only for a range that isn't mapped at all.
        unsafe { libc::munmap(self.address(0), self.places.len() * self.page_size) };
    }
}

/// The longest runs of items of which `wanted` holds.
fn runs<T>(items: &[T], wanted: impl Fn(&T) -> bool) -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut start = 0;
    for group in items.chunk_by(|a, b| wanted(a) == wanted(b)) {
        let end = start + group.len();
        if wanted(&items[start]) {
            found.push(start..end);
        }
        start = end;
    }
    found
}

fn last_error(call: &'static str) -> Error {
    Error::Io { call, source: io::Error::last_os_error() }
}

#[cfg(test)]
mod tests;
