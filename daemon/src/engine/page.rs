//! One page: where its copies are and what is moving.
//!
//! Invariant: all copies of a page hold the same bytes, except while it is mapped for writing: then VRAM's is the only
//! one; and except for a provisional VRAM copy, which an overwriter waits for. So nothing is ever "dirty" by a flag: a copy may be dropped exactly when another one remains (a file counts as
//! one, and so do zeros for a page never written).

use lapis_proto::message::{Access, Advice};

use super::ids::{RamFrame, SpillSlot, VramFrame};
use super::policy::plan::{NO_PLAN, Place, PlanId};

/// What is moving. One hop at a time; the hop owns its frames.
///
/// ```text
///            +-> Zero ----------------------+
/// Still -----+-> NeedRam -> Reading -+      +-> Still
///   |        +---------------------> Up ----+
///   +-> Down (VRAM to RAM) -> Still
///   +-> Out (RAM to spill) -> Still
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Motion {
    /// Nothing.
    Still,
    /// Has a VRAM frame to fill, waits for a RAM frame to read into. Dropped: the frame is free again.
    NeedRam {
        /// To be filled.
        target: VramFrame,
    },
    /// Being read from its file or the spill.
    Reading {
        /// To be filled next.
        target: VramFrame,
        /// Being filled.
        ram: RamFrame,
    },
    /// Being copied from its RAM copy.
    Up {
        /// Being filled.
        target: VramFrame,
    },
    /// Being filled with zeros.
    Zero {
        /// Being filled.
        target: VramFrame,
    },
    /// Being copied from its VRAM copy, to leave VRAM.
    Down {
        /// Being filled.
        ram: RamFrame,
    },
    /// Its RAM copy is being written to the spill.
    Out {
        /// Being written.
        slot: SpillSlot,
    },
}

/// Which order of VRAM victims a page stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VramClass {
    /// None: not there, pinned or moving.
    None,
    /// May be evicted.
    Evictable,
    /// May be evicted, is planned, and comes back from RAM.
    Cheap,
    /// Prefetched and not used yet: evicted only for a page that someone waits for.
    Protected,
    /// A client asked to keep it: evicted when there is nothing else.
    Kept,
}

/// Which order of RAM victims a page stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RamClass {
    /// None: not there, or moving.
    None,
    /// VRAM holds it, and has kept it from one use to the next or will until the next: this copy is worth least.
    Duplicate,
    /// May be dropped: another copy exists.
    Clean,
    /// The only copy.
    Sole,
    /// Clean, and somebody waits for it to be copied up: goes only if nothing else can.
    Wanted,
    /// The only copy, and somebody waits for it to be copied up.
    WantedSole,
}

/// One page's state.
#[derive(Debug, Clone)]
pub struct Page {
    /// Copy in VRAM.
    pub vram: Option<VramFrame>,
    /// Copy in RAM.
    pub ram: Option<RamFrame>,
    /// Copy in the spill.
    pub slot: Option<SpillSlot>,
    /// What is moving.
    pub motion: Motion,
    /// Mappings that hold it, or wait for it with its place in VRAM granted.
    pub pins: u32,
    /// Checksum of the copy in the spill.
    pub checksum: u64,
    /// Clock of the last use, 0: never.
    pub last_use: u64,
    /// The plan that says when it is used next, [`NO_PLAN`] if none does.
    pub plan: PlanId,
    /// Its place in the orders: the plan's key, or the predicted clock of the next use.
    pub next_use: u64,
    /// Clock when it was prefetched: its place among the protected.
    pub prefetched_at: u64,
    /// Wanted in VRAM by a prefetch and not used since.
    pub prefetched: bool,
    /// Filled since its last use, so VRAM did not keep it.
    pub fetched: bool,
    /// The fill under way began for a prefetch.
    pub filled_by_prefetch: bool,
    /// VRAM kept it from its last use but one to its last.
    pub retained: bool,
    /// Its VRAM copy is zeros and was never mapped for writing.
    pub zeros: bool,
    /// Mappings that may write it, and admitted maps that will: it may not be copied meanwhile.
    pub writers: u32,
    /// A flush waits for its copy in the spill.
    pub flushing: bool,
    /// Reads of it that failed in a row.
    pub read_failures: u8,
    /// The last fill failed: nobody fetches it ahead before a map has brought it in.
    pub unfetchable: bool,
    /// Priority of the prefetch that wants it.
    pub prefetch_priority: u8,
    /// How it is used, as far as a client has said.
    pub advice: Advice,
    /// Admitted maps that will overwrite it and are not granted yet.
    pub overwriters: u32,
    /// Its VRAM copy is a frame to be overwritten, not the page's bytes; the other copies still are.
    pub provisional: bool,
    pub(super) vram_class: VramClass,
    pub(super) ram_class: RamClass,
}

impl Page {
    pub(super) fn new() -> Self {
        Self {
            vram: None,
            ram: None,
            slot: None,
            motion: Motion::Still,
            pins: 0,
            checksum: 0,
            last_use: 0,
            plan: NO_PLAN,
            next_use: 0,
            prefetched_at: 0,
            prefetched: false,
            fetched: false,
            filled_by_prefetch: false,
            retained: false,
            zeros: false,
            writers: 0,
            flushing: false,
            read_failures: 0,
            unfetchable: false,
            prefetch_priority: 0,
            advice: Advice::Normal,
            overwriters: 0,
            provisional: false,
            vram_class: VramClass::None,
            ram_class: RamClass::None,
        }
    }

    /// Whether it can be used in VRAM right now. A write to the spill doesn't hinder readers.
    #[must_use]
    pub fn ready(&self, access: Access) -> bool {
        self.vram.is_some()
            && (access == Access::Overwrite || !self.provisional)
            && match self.motion {
                Motion::Still => true,
                Motion::Out { .. } => access == Access::Read,
                Motion::NeedRam { .. }
                | Motion::Reading { .. }
                | Motion::Up { .. }
                | Motion::Zero { .. }
                | Motion::Down { .. } => false,
            }
    }

    /// Whether somebody wants it in VRAM and nothing is moving it there.
    #[must_use]
    pub fn needs_fill(&self) -> bool {
        self.vram.is_none() && self.motion == Motion::Still && (self.pins > 0 || self.prefetched)
    }

    /// Whether a VRAM frame is taken up by it: its copy's, or one that is being filled.
    #[must_use]
    pub fn holds_vram(&self) -> bool {
        let target = match self.motion {
            Motion::NeedRam { .. }
            | Motion::Reading { .. }
            | Motion::Up { .. }
            | Motion::Zero { .. } => true,
            Motion::Still | Motion::Down { .. } | Motion::Out { .. } => false,
        };
        self.vram.is_some() || target
    }

    /// Where its copies are, as far as plans count them.
    pub(super) fn place(&self) -> Place {
        Place { vram: self.holds_vram() || self.unfetchable, ram: self.ram.is_some() }
    }

    /// Whether it is being copied down, to leave VRAM.
    #[must_use]
    pub fn leaves_vram(&self) -> bool {
        match self.motion {
            Motion::Down { .. } => true,
            Motion::Still
            | Motion::NeedRam { .. }
            | Motion::Reading { .. }
            | Motion::Up { .. }
            | Motion::Zero { .. }
            | Motion::Out { .. } => false,
        }
    }

    /// Whether a flush still has to write it: it has bytes of its own, and the spill doesn't hold them.
    #[must_use]
    pub fn needs_flush(&self) -> bool {
        self.slot.is_none()
            && (self.ram.is_some() || (self.vram.is_some() && !self.zeros && !self.provisional))
    }

    /// Whether its VRAM copy may go without being copied.
    #[must_use]
    pub fn vram_droppable(&self, file_backed: bool) -> bool {
        file_backed || self.zeros || self.ram.is_some() || self.slot.is_some()
    }

    pub(super) fn class_in_vram(&self) -> VramClass {
        if self.vram.is_none() || self.pins > 0 || self.motion != Motion::Still {
            VramClass::None
        } else if self.prefetched && self.plan == NO_PLAN {
            VramClass::Protected
        } else if self.advice == Advice::Keep {
            VramClass::Kept
        } else if self.plan != NO_PLAN && self.ram.is_some() {
            VramClass::Cheap
        } else {
            VramClass::Evictable
        }
    }

    pub(super) fn class_in_ram(&self, file_backed: bool) -> RamClass {
        if self.ram.is_none() || self.motion != Motion::Still {
            return RamClass::None;
        }
        if self.vram.is_some() && !self.provisional {
            // Of what a plan says, VRAM keeps until its next use what it has.
            let stays = self.retained || self.plan != NO_PLAN;
            return if stays { RamClass::Duplicate } else { RamClass::Clean };
        }
        match (file_backed || self.slot.is_some(), self.pins > 0) {
            (true, false) => RamClass::Clean,
            (false, false) => RamClass::Sole,
            (true, true) => RamClass::Wanted,
            (false, true) => RamClass::WantedSole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_of_a_page_is_small() {
        assert!(size_of::<Page>() <= 104, "{} bytes", size_of::<Page>());
    }

    #[test]
    fn only_zeros_files_and_copies_make_a_vram_page_droppable() {
        let mut page = Page { vram: Some(VramFrame(3)), ..Page::new() };
        assert!(!page.vram_droppable(false));
        assert!(page.vram_droppable(true));
        page.zeros = true;
        assert!(page.vram_droppable(false));
        page.zeros = false;
        page.slot = Some(SpillSlot(1));
        assert!(page.vram_droppable(false));
    }

    #[test]
    fn a_page_that_is_written_to_the_spill_serves_readers_only() {
        let page = Page {
            vram: Some(VramFrame(3)),
            ram: Some(RamFrame(2)),
            motion: Motion::Out { slot: SpillSlot(0) },
            ..Page::new()
        };
        assert!(page.ready(Access::Read));
        assert!(!page.ready(Access::Write));
    }
}
