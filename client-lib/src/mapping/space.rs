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
use std::ops::Range;
use std::sync::Arc;

use lapis_proto::ids::VramFrame;

use crate::cuda::gpu::Gpu;
use crate::error::{Error, ProtocolError};
use crate::frames::FrameTable;

use super::area::{Area, Base, Frame, MemfdArea, too_long};

/// What may be done to a page's bytes. Ordered: more allows more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Protection {
    None,
    Read,
    Write,
}

/// One page's place.
#[derive(Debug, Clone)]
struct Place {
    /// The frame that is mapped here.
    frame: Option<VramFrame>,
    /// As the kernel or the driver has it.
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

/// An allocation's addresses.
#[derive(Debug)]
pub(crate) struct Space {
    area: Area,
    places: Vec<Place>,
    /// Places with a frame.
    framed: usize,
}

impl Space {
    /// Reserves addresses for `pages` pages: of the GPU, or else of this process, aligned to the page size or to a
    /// huge page.
    pub(crate) fn reserve(
        pages: u32,
        page_size: u64,
        gpu: Option<&Arc<Gpu>>,
    ) -> Result<Space, Error> {
        let page_size = usize::try_from(page_size).map_err(|_| too_long())?;
        let count = usize::try_from(pages).map_err(|_| too_long())?;
        let size = count.checked_mul(page_size).filter(|size| *size > 0).ok_or_else(too_long)?;
        let area = match gpu {
            Some(gpu) => Area::on_device(gpu, page_size, size)?,
            None => Area::Memfd(MemfdArea::reserve(page_size, size)?),
        };
        let place = Place { frame: None, protection: Protection::None, readers: 0, writers: 0 };
        Ok(Space { area, places: vec![place; count], framed: 0 })
    }

    /// Address of the first page.
    pub(crate) fn base(&self) -> Base {
        self.area.base()
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
        let mut missing: Vec<Option<Frame>> = Vec::with_capacity(frames.len());
        for (page, frame) in pages.clone().zip(frames) {
            let place = &self.places[page];
            missing.push(match place.frame {
                Some(here) if here == *frame => None,
                Some(here) if place.is_held() => {
                    let page = u32::try_from(page).unwrap_or(u32::MAX);
                    return Err(ProtocolError::Moved { page, held: here.0, found: frame.0 }.into());
                }
                Some(_) | None => Some(self.area.frame(table, *frame)?),
            });
        }
        let protection = if write { Protection::Write } else { Protection::Read };
        for run in runs(&missing, Option::is_some) {
            for index in run.clone() {
                if let Some(frame) = &missing[index] {
                    self.place_frame(pages.start + index, (frames[index], frame), protection)?;
                }
            }
            self.area.placed(pages.start + run.start..pages.start + run.end)?;
        }
        Ok(())
    }

    fn place_frame(
        &mut self,
        page: usize,
        (number, frame): (VramFrame, &Frame),
        protection: Protection,
    ) -> Result<(), Error> {
        if !self.area.replaces() {
            self.vacate(page..page + 1)?;
        }
        let protection = self.area.place(page, frame, protection)?;
        let place = &mut self.places[page];
        if place.frame.replace(number).is_none() {
            self.framed += 1;
        }
        place.protection = protection;
        Ok(())
    }

    /// Takes the frames out of `pages`, which no mapping may hold.
    fn vacate(&mut self, pages: Range<usize>) -> Result<(), Error> {
        debug_assert!(self.places[pages.clone()].iter().all(|place| !place.is_held()));
        let step = self.area.vacated_max().min(pages.len());
        for start in pages.clone().step_by(step.max(1)) {
            let these = start..(start + step).min(pages.end);
            if self.places[these.clone()].iter().all(|place| place.frame.is_none()) {
                continue;
            }
            self.area.vacate(these.clone())?;
            for place in &mut self.places[these] {
                if place.frame.take().is_some() {
                    self.framed -= 1;
                }
                place.protection = Protection::None;
            }
        }
        Ok(())
    }

    /// The protection that a page is to have: what its holders need, or more where it can't be lowered under them.
    fn wanted(&self, place: &Place) -> Protection {
        match place.wanted() {
            Protection::None => Protection::None,
            needed if self.area.lowers() => needed,
            needed => needed.max(place.protection),
        }
    }

    /// Gives each page the protection that its holders need, one call per run of pages that lack the same one.
    fn settle(&mut self, pages: Range<usize>) -> Result<(), Error> {
        let mut page = pages.start;
        while page < pages.end {
            let wanted = self.wanted(&self.places[page]);
            let lacks = |place: &Place| place.protection != wanted && self.wanted(place) == wanted;
            let count = self.places[page..pages.end].iter().take_while(|p| lacks(p)).count();
            if count == 0 {
                page += 1;
                continue;
            }
            self.area.protect(page..page + count, wanted)?;
            for place in &mut self.places[page..page + count] {
                place.protection = wanted;
            }
            page += count;
        }
        Ok(())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        let places = self.places.iter().enumerate();
        self.area.clear(places.filter(|(_, place)| place.frame.is_some()).map(|(page, _)| page));
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

#[cfg(test)]
mod tests;
