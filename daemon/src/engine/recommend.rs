//! What VRAM should keep of the pages that no plan speaks of: the advice of [`Adapt`], by chunks of neighbouring pages.
//!
//! Chunks that it lets go stand behind all others in the orders, the first one last; chunks that it takes back stand
//! where their predicted next use puts them.

use lapis_proto::message::Advice;

use super::Engine;
use super::allocator::Span;
use super::ids::{BackingId, PageRef};
use super::policy::next_use::{NEVER, predict};
use super::policy::plan::NO_PLAN;
use crate::policy::adapt::{Adapt, Changes};
use crate::policy::duel::Leader;

/// Pages of a chunk at most.
const CHUNK_PAGES_MAX: u32 = 16;
/// Chunks that VRAM holds at least, if they needn't be smaller than a page for that.
const CHUNKS_MIN: u32 = 256;

/// Advice on pages of no plan.
#[derive(Debug)]
pub(super) struct Recommender {
    adapt: Adapt,
    /// Pages of a chunk, a power of two.
    chunk: u32,
    changes: Changes,
    /// Chunks let go so far: the later one was let go, the less far behind it stands.
    let_go: u64,
    /// The capacity that it was told.
    capacity: u32,
}

impl Recommender {
    pub(super) fn new(vram_frames: u32) -> Self {
        let fitting = (vram_frames / CHUNKS_MIN).clamp(1, CHUNK_PAGES_MAX);
        Self {
            adapt: Adapt::new(u64::from(vram_frames), Leader::Lirs),
            chunk: 1 << fitting.ilog2(),
            changes: Changes::default(),
            let_go: 0,
            capacity: vram_frames,
        }
    }

    /// Pages of a chunk at most.
    pub(super) fn chunk_pages(&self) -> u32 {
        self.chunk
    }

    /// Who leads.
    pub(super) fn leader(&self) -> Leader {
        self.adapt.leader()
    }

    pub(super) fn unit(&self, at: PageRef) -> u64 {
        u64::from(at.backing.0) << 32 | u64::from(at.index / self.chunk)
    }

    fn pages(&self, unit: u64, pages_count: u32) -> (BackingId, std::ops::Range<u32>) {
        let backing = BackingId(u32::try_from(unit >> 32).expect("made from a u32"));
        let first = u32::try_from(unit & u64::from(u32::MAX)).expect("masked") * self.chunk;
        (backing, first..(first + self.chunk).min(pages_count))
    }
}

impl Engine {
    /// Pages are mapped: learns from those that no plan speaks of. While all there is fits in VRAM there is nothing to
    /// know.
    pub(super) fn recommend(&mut self, spans: &[Span]) {
        if self.table.pages <= u64::from(self.vram.capacity()) {
            return;
        }
        let capacity = self.vram.capacity() - u32::try_from(self.sizes.parked.len()).unwrap_or(0);
        if capacity != self.recommender.capacity {
            self.recommender.capacity = capacity;
            let Recommender { adapt, changes, .. } = &mut self.recommender;
            adapt.resize(u64::from(capacity), changes);
            self.follow_recommendation();
        }
        for span in spans {
            let chunk = self.recommender.chunk;
            let end = span.first + span.count;
            for first in (span.first / chunk * chunk..end).step_by(chunk as usize) {
                let index = first.max(span.first);
                let at = PageRef { backing: span.backing, index };
                if self.table.page(at).plan != NO_PLAN {
                    continue;
                }
                let pages = self.table.backing(span.backing).pages_count();
                let weight = chunk.min(pages - first);
                let unit = self.recommender.unit(at);
                let Recommender { adapt, changes, .. } = &mut self.recommender;
                adapt.touch(unit, weight, changes);
                self.follow_recommendation();
            }
        }
    }

    /// A backing is gone: its number may be another one's soon.
    pub(super) fn forget_recommended(&mut self, backing: BackingId, pages_count: u32) {
        if self.recommender.adapt.known() == 0 {
            return;
        }
        for index in (0..pages_count).step_by(self.recommender.chunk as usize) {
            let unit = self.recommender.unit(PageRef { backing, index });
            self.recommender.adapt.forget(unit);
        }
    }

    fn follow_recommendation(&mut self) {
        let changes = std::mem::take(&mut self.recommender.changes);
        for unit in &changes.taken {
            self.place_chunk(*unit, None);
        }
        for unit in &changes.let_go {
            self.recommender.let_go += 1;
            let behind = 2 * NEVER - self.recommender.let_go.min(NEVER / 2);
            self.place_chunk(*unit, Some(behind));
        }
        self.recommender.changes = changes;
    }

    fn place_chunk(&mut self, unit: u64, behind: Option<u64>) {
        let (backing, _) = self.recommender.pages(unit, 0);
        let Some(pages_count) = self.table.pages_count(backing) else { return };
        let (backing, pages) = self.recommender.pages(unit, pages_count);
        for index in pages {
            let at = PageRef { backing, index };
            let page = self.table.page(at);
            if page.plan != NO_PLAN || page.advice != Advice::Normal {
                continue;
            }
            let next_use = behind.unwrap_or_else(|| {
                predict(page.last_use, self.clock.max(page.last_use), pages_count)
            });
            if next_use != page.next_use {
                self.table.update(at, |page| page.next_use = next_use);
            }
        }
    }
}
