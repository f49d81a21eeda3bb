//! All pages, by backing, and the orders in which they would leave VRAM and RAM.
//!
//! A page changes only through [`PageTable::update`], which takes it out of the orders, changes it, and puts it back
//! where it now belongs: the orders can't go stale.

use std::collections::BTreeSet;

use lapis_proto::message::Advice;

use super::ids::{AllocationId, BackingId, Domain, FileId, PageRef};
use super::page::{Page, RamClass, VramClass};
use super::policy::next_use::NextUse;
use super::policy::order::{Order, Plans};
use super::policy::plan::{NO_PLAN, Plan, PlanId};
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
    /// No page from here on holds a VRAM frame.
    vram_end: u32,
    /// Plans that speak of its pages.
    pub plans: Vec<PlanId>,
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
    pub evictable: Order,
    /// VRAM pages that may be evicted, are planned, and come back from RAM.
    pub cheap: Order,
    /// Prefetched VRAM pages, in order of prefetch.
    pub protected: NextUse,
    /// VRAM pages that a client asked to keep.
    pub kept: Order,
    /// RAM copies of pages that VRAM keeps.
    pub ram_duplicate: Order,
    /// RAM copies beside another copy.
    pub ram_clean: Order,
    /// RAM copies that are the only one.
    pub ram_sole: Order,
    /// RAM copies beside another copy, of pages that maps wait for.
    pub ram_wanted: Order,
    /// RAM copies that are the only one, of pages that maps wait for.
    pub ram_wanted_sole: Order,
    plans: Plans,
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
            vram_end: 0,
            plans: Vec::new(),
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
        for plan in &backing.plans {
            self.plans.get_mut(plan).expect("a backing's plans are in force").forget(id);
        }
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

    /// Pages of a backing, if it is there.
    #[must_use]
    pub fn pages_count(&self, id: BackingId) -> Option<u32> {
        Some(self.backings.get(id.0 as usize)?.as_ref()?.pages_count())
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

    /// The plans in force.
    #[must_use]
    pub fn plans(&self) -> &Plans {
        &self.plans
    }

    /// A plan, to move it on.
    pub fn plan_mut(&mut self, id: PlanId) -> Option<&mut Plan> {
        self.plans.get_mut(&id)
    }

    /// Puts a plan in force, with its pages counted as they are.
    pub fn add_plan(&mut self, id: PlanId, mut plan: Plan) {
        for backing in plan.backings() {
            self.backing_mut(backing).plans.push(id);
        }
        let nowhere = Page::new().place();
        for at in plan.pages().collect::<Vec<_>>() {
            let place = self.page(at).place();
            if place != nowhere {
                plan.count(at, nowhere, place);
            }
        }
        self.plans.insert(id, plan);
    }

    /// Ends a plan; its pages still stand in its order.
    pub fn remove_plan(&mut self, id: PlanId) -> Option<Plan> {
        let plan = self.plans.remove(&id)?;
        for backing in plan.backings() {
            self.backing_mut(backing).plans.retain(|other| *other != id);
        }
        Some(plan)
    }

    /// Has a plan speak of a backing no more; the backing's pages still stand in its order.
    pub fn forget_in_plan(&mut self, id: PlanId, backing: BackingId) {
        if let Some(plan) = self.plans.get_mut(&id) {
            plan.forget(backing);
            self.backing_mut(backing).plans.retain(|other| *other != id);
        }
    }

    /// Bytes of metadata.
    #[must_use]
    pub fn metadata_bytes(&self) -> u64 {
        let entry = size_of::<(u64, PageRef)>() as u64 * 3 / 2;
        let orders = [
            &self.evictable,
            &self.cheap,
            &self.kept,
            &self.ram_duplicate,
            &self.ram_clean,
            &self.ram_sole,
            &self.ram_wanted,
            &self.ram_wanted_sole,
        ];
        let entries = orders.iter().map(|order| order.len()).sum::<usize>() + self.protected.len();
        self.pages * size_of::<Page>() as u64 + entries as u64 * entry
    }

    /// Changes a page and keeps the orders and counts right.
    pub fn update<T>(&mut self, at: PageRef, change: impl FnOnce(&mut Page) -> T) -> T {
        let backing = self.backings[at.backing.0 as usize].as_mut().expect("a live backing");
        let file_backed = backing.file_backed();
        let page = &mut backing.pages[at.index as usize];
        let (was_pinned, was_busy, had_vram) = (page.pins > 0, busy(page), page.holds_vram());
        let was_leaving = page.leaves_vram();
        let place = page.place();
        let before = Standing::of(page);
        let result = change(page);
        page.vram_class = page.class_in_vram();
        page.ram_class = page.class_in_ram(file_backed);
        let (new_place, after) = (page.place(), Standing::of(page));
        let (is_pinned, is_busy, has_vram) = (page.pins > 0, busy(page), page.holds_vram());
        let is_leaving = page.leaves_vram();
        if has_vram {
            backing.vram_end = backing.vram_end.max(at.index + 1);
        }
        self.pinned = self.pinned + u32::from(is_pinned) - u32::from(was_pinned);
        backing.pinned = backing.pinned + u32::from(is_pinned) - u32::from(was_pinned);
        backing.in_vram = backing.in_vram + u32::from(has_vram) - u32::from(had_vram);
        backing.leaving = backing.leaving + u32::from(is_leaving) - u32::from(was_leaving);
        backing.busy = backing.busy + u32::from(is_busy) - u32::from(was_busy);
        if place != new_place {
            for id in &backing.plans {
                let plan = self.plans.get_mut(id).expect("a backing's plans are in force");
                plan.count(at, place, new_place);
            }
        }
        if before != after {
            self.move_in_orders(at, before, after);
        }
        result
    }

    /// The last page of a chain that may be evicted in place of one of its pages.
    pub fn leaf_of(&mut self, at: PageRef) -> PageRef {
        let backing = self.backings[at.backing.0 as usize].as_mut().expect("a live backing");
        let pages = &backing.pages;
        while backing.vram_end > at.index && !pages[backing.vram_end as usize - 1].holds_vram() {
            backing.vram_end -= 1;
        }
        let may_go = |index: &u32| {
            let page = &pages[*index as usize];
            // What a plan says of a page goes before what it is part of.
            page.vram_class != VramClass::None
                && page.advice == Advice::Chain
                && page.plan == NO_PLAN
        };
        let last = (at.index..backing.vram_end).rev().find(may_go);
        last.map_or(at, |index| PageRef { index, ..at })
    }

    fn move_in_orders(&mut self, at: PageRef, before: Standing, after: Standing) {
        match before.vram {
            VramClass::None => {}
            VramClass::Evictable => self.evictable.remove(before.plan, before.next_use, at),
            VramClass::Cheap => self.cheap.remove(before.plan, before.next_use, at),
            VramClass::Protected => self.protected.remove(before.prefetched_at, at),
            VramClass::Kept => self.kept.remove(before.plan, before.next_use, at),
        }
        match after.vram {
            VramClass::None => {}
            VramClass::Evictable => self.evictable.insert(after.plan, after.next_use, at),
            VramClass::Cheap => self.cheap.insert(after.plan, after.next_use, at),
            VramClass::Protected => self.protected.insert(after.prefetched_at, at),
            VramClass::Kept => self.kept.insert(after.plan, after.next_use, at),
        }
        if let Some(order) = self.ram_order(before.ram) {
            order.remove(before.plan, before.next_use, at);
        }
        if let Some(order) = self.ram_order(after.ram) {
            order.insert(after.plan, after.next_use, at);
        }
    }

    fn ram_order(&mut self, class: RamClass) -> Option<&mut Order> {
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

/// Where a page stands in the orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Standing {
    vram: VramClass,
    ram: RamClass,
    plan: PlanId,
    next_use: u64,
    prefetched_at: u64,
}

impl Standing {
    fn of(page: &Page) -> Self {
        Self {
            vram: page.vram_class,
            ram: page.ram_class,
            plan: page.plan,
            next_use: page.next_use,
            prefetched_at: page.prefetched_at,
        }
    }
}

fn busy(page: &Page) -> bool {
    page.pins > 0 || page.motion != super::page::Motion::Still
}

#[cfg(test)]
mod tests;
