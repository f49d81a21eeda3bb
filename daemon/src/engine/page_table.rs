//! All pages, by backing, and the orders in which they would leave VRAM and RAM.
//!
//! A page changes only through [`PageTable::update`], which takes it out of the orders, changes it, and puts it back
//! where it now belongs: the orders can't go stale.

use std::collections::BTreeSet;

use super::ids::{AllocationId, BackingId, Domain, FileId, PageRef};
use super::page::{Page, RamClass, VramClass};
use super::policy::next_use::NextUse;
use super::quota::Owner;
use crate::store::FileIdentity;

/// A file range shared by every session of a domain that opens the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileKey {
    /// Of whom.
    pub domain: Domain,
    /// Of what.
    pub identity: FileIdentity,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// What stands behind an allocation's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Zeros at first, private to one allocation.
    Anonymous(AllocationId),
    /// A file.
    File {
        /// The store's id.
        file: FileId,
        /// Which range.
        key: FileKey,
    },
}

/// Pages with one source.
#[derive(Debug)]
pub struct Backing {
    /// Where the bytes come from.
    pub source: Source,
    /// Who may see them.
    pub domain: Domain,
    /// Whom they are charged to.
    pub owner: Owner,
    /// Pages that hold a VRAM frame, or are being filled.
    pub in_vram: u32,
    /// Those of them that are being copied down.
    pub leaving: u32,
    /// Pages with a pin.
    pub pinned: u32,
    /// Allocations that share it; 0: it goes as soon as nothing moves or pins its pages.
    pub references: u32,
    /// Pages with a pin or in motion: while there are any, the backing stays.
    pub busy: u32,
    pages: Vec<Page>,
}

impl Backing {
    /// Pages.
    #[must_use]
    pub fn pages_count(&self) -> u32 {
        u32::try_from(self.pages.len()).expect("made from a u32")
    }

    /// Whether the bytes come from a file.
    #[must_use]
    pub fn file_backed(&self) -> bool {
        matches!(self.source, Source::File { .. })
    }
}

/// All pages.
#[derive(Debug, Default)]
pub struct PageTable {
    backings: Vec<Option<Backing>>,
    vacant: BTreeSet<u32>,
    /// Pages of all backings.
    pub pages: u64,
    /// Pages with at least one pin.
    pub pinned: u32,
    /// VRAM pages that may be evicted.
    pub evictable: NextUse,
    /// Prefetched VRAM pages, in order of prefetch.
    pub protected: NextUse,
    /// VRAM pages that a client asked to keep.
    pub kept: NextUse,
    /// RAM copies of pages that VRAM keeps.
    pub ram_duplicate: NextUse,
    /// RAM copies beside another copy.
    pub ram_clean: NextUse,
    /// RAM copies that are the only one.
    pub ram_sole: NextUse,
    /// RAM copies beside another copy, of pages that maps wait for.
    pub ram_wanted: NextUse,
    /// RAM copies that are the only one, of pages that maps wait for.
    pub ram_wanted_sole: NextUse,
}

impl PageTable {
    /// Makes a backing of `pages` pages.
    pub fn add(&mut self, source: Source, owner: Owner, pages: u32) -> BackingId {
        let pages_vec = (0..pages).map(|_| Page::new()).collect();
        let backing = Backing {
            source,
            domain: owner.domain,
            owner,
            in_vram: 0,
            leaving: 0,
            pinned: 0,
            references: 1,
            busy: 0,
            pages: pages_vec,
        };
        self.pages += u64::from(pages);
        if let Some(index) = self.vacant.pop_first() {
            self.backings[index as usize] = Some(backing);
            return BackingId(index);
        }
        self.backings.push(Some(backing));
        BackingId(u32::try_from(self.backings.len() - 1).expect("bounded by allocations"))
    }

    /// Takes a backing whose pages have all been emptied.
    pub fn remove(&mut self, id: BackingId) -> Backing {
        let backing = self.backings[id.0 as usize].take().expect("a live backing");
        self.pages -= u64::from(backing.pages_count());
        self.vacant.insert(id.0);
        backing
    }

    /// A live backing.
    #[must_use]
    pub fn backing(&self, id: BackingId) -> &Backing {
        self.backings[id.0 as usize].as_ref().expect("a live backing")
    }

    /// A live backing, to change its reference count.
    pub fn backing_mut(&mut self, id: BackingId) -> &mut Backing {
        self.backings[id.0 as usize].as_mut().expect("a live backing")
    }

    /// Whether a backing is still there: queues may hold pages of one that has gone.
    #[must_use]
    pub fn find(&self, page: PageRef) -> Option<&Page> {
        self.backings.get(page.backing.0 as usize)?.as_ref()?.pages.get(page.index as usize)
    }

    /// A page of a live backing.
    #[must_use]
    pub fn page(&self, page: PageRef) -> &Page {
        &self.backing(page.backing).pages[page.index as usize]
    }

    /// Live backings in order.
    pub fn iter(&self) -> impl Iterator<Item = (BackingId, &Backing)> {
        self.backings.iter().enumerate().filter_map(|(index, backing)| {
            let id = BackingId(u32::try_from(index).expect("bounded by allocations"));
            backing.as_ref().map(|backing| (id, backing))
        })
    }

    /// Bytes of metadata.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        let entry = size_of::<(u64, PageRef)>() as u64 * 3 / 2;
        let orders = [
            &self.evictable,
            &self.protected,
            &self.kept,
            &self.ram_duplicate,
            &self.ram_clean,
            &self.ram_sole,
            &self.ram_wanted,
            &self.ram_wanted_sole,
        ];
        let entries: usize = orders.iter().map(|order| order.len()).sum();
        self.pages * size_of::<Page>() as u64 + entries as u64 * entry
    }

    /// Changes a page and keeps the orders and counts right.
    pub fn update<T>(&mut self, at: PageRef, change: impl FnOnce(&mut Page) -> T) -> T {
        let backing = self.backings[at.backing.0 as usize].as_mut().expect("a live backing");
        let file_backed = backing.file_backed();
        let page = &mut backing.pages[at.index as usize];
        let (was_pinned, was_busy, had_vram) = (page.pins > 0, busy(page), page.holds_vram());
        let was_leaving = page.leaves_vram();
        let before = (page.vram_class, page.ram_class, page.next_use, page.prefetched_at);
        let result = change(page);
        page.vram_class = page.class_in_vram();
        page.ram_class = page.class_in_ram(file_backed);
        let after = (page.vram_class, page.ram_class, page.next_use, page.prefetched_at);
        let (is_pinned, is_busy, has_vram) = (page.pins > 0, busy(page), page.holds_vram());
        let is_leaving = page.leaves_vram();
        self.pinned = self.pinned + u32::from(is_pinned) - u32::from(was_pinned);
        backing.pinned = backing.pinned + u32::from(is_pinned) - u32::from(was_pinned);
        backing.in_vram = backing.in_vram + u32::from(has_vram) - u32::from(had_vram);
        backing.leaving = backing.leaving + u32::from(is_leaving) - u32::from(was_leaving);
        backing.busy = backing.busy + u32::from(is_busy) - u32::from(was_busy);
        if before != after {
            self.move_in_orders(at, before, after);
        }
        result
    }

    fn move_in_orders(
        &mut self,
        at: PageRef,
        before: (VramClass, RamClass, u64, u64),
        after: (VramClass, RamClass, u64, u64),
    ) {
        match before.0 {
            VramClass::None => {}
            VramClass::Evictable => self.evictable.remove(before.2, at),
            VramClass::Protected => self.protected.remove(before.3, at),
            VramClass::Kept => self.kept.remove(before.2, at),
        }
        match after.0 {
            VramClass::None => {}
            VramClass::Evictable => self.evictable.insert(after.2, at),
            VramClass::Protected => self.protected.insert(after.3, at),
            VramClass::Kept => self.kept.insert(after.2, at),
        }
        if let Some(order) = self.ram_order(before.1) {
            order.remove(before.2, at);
        }
        if let Some(order) = self.ram_order(after.1) {
            order.insert(after.2, at);
        }
    }

    fn ram_order(&mut self, class: RamClass) -> Option<&mut NextUse> {
        match class {
            RamClass::None => None,
            RamClass::Duplicate => Some(&mut self.ram_duplicate),
            RamClass::Clean => Some(&mut self.ram_clean),
            RamClass::Sole => Some(&mut self.ram_sole),
            RamClass::Wanted => Some(&mut self.ram_wanted),
            RamClass::WantedSole => Some(&mut self.ram_wanted_sole),
        }
    }
}

fn busy(page: &Page) -> bool {
    page.pins > 0 || page.motion != super::page::Motion::Still
}

#[cfg(test)]
mod tests;
