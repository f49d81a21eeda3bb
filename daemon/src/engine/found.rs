//! Where the pages of a map were when it was admitted. Counted when it is granted: one that fails is no hit.

use lapis_proto::message::Counters;

use super::page::Page;

/// Pages of one map, by where they were.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Found {
    pub(super) vram: u32,
    pub(super) ram: u32,
    /// Only in their file or the spill.
    below: u32,
    /// Nowhere: never written.
    nowhere: u32,
    prefetched: u32,
    /// Prefetched, and not there yet.
    prefetched_late: u32,
}

impl Found {
    /// One page more. A frame that waits to be overwritten holds no bytes of it.
    pub(super) fn note(&mut self, page: &Page, file_backed: bool) {
        if page.vram.is_some() && !page.provisional {
            self.vram += 1;
        } else if page.ram.is_some() {
            self.ram += 1;
        } else if file_backed || page.slot.is_some() {
            self.below += 1;
        } else {
            self.nowhere += 1;
        }
        self.prefetched += u32::from(page.prefetched && page.fetched);
        self.prefetched_late += u32::from(page.prefetched && page.vram.is_none());
    }

    /// The map is granted.
    pub(super) fn count(self, counters: &mut Counters) {
        counters.hits_vram += u64::from(self.vram);
        counters.hits_ram += u64::from(self.ram);
        counters.misses += u64::from(self.below);
        counters.zero_fills += u64::from(self.nowhere);
        counters.prefetch_useful += u64::from(self.prefetched);
        counters.prefetch_late += u64::from(self.prefetched_late);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ids::{SpillSlot, VramFrame};

    #[test]
    fn a_frame_to_be_overwritten_is_no_hit() {
        let page = Page { vram: Some(VramFrame(1)), slot: Some(SpillSlot(2)), ..Page::new() };
        let mut found = Found::default();
        found.note(&page, false);
        assert_eq!((found.vram, found.below), (1, 0));
        found.note(&Page { provisional: true, ..page }, false);
        assert_eq!((found.vram, found.below), (1, 1));
    }
}
