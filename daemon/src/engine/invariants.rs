//! What must hold after every event, checked in full. For tests: it walks everything.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::Access;

use super::Engine;
use super::ids::{PageRef, VramFrame};
use super::page::{Motion, Page, RamClass, VramClass};
use super::policy::plan::{NO_PLAN, Place};

impl Engine {
    /// Checks every invariant.
    ///
    /// # Panics
    /// With the invariant that doesn't hold.
    pub fn verify_invariants(&self) {
        self.verify_frames();
        self.verify_pins();
        self.verify_maps();
        self.verify_allocations();
        self.verify_plans();
    }

    fn all_pages(&self) -> impl Iterator<Item = (PageRef, &Page, bool)> {
        self.table.iter().flat_map(move |(id, backing)| {
            (0..backing.pages_count()).map(move |index| {
                let at = PageRef { backing: id, index };
                (at, self.table.page(at), backing.file_backed())
            })
        })
    }

    /// Every frame of every tier is exactly one of: free, a page's copy, a hop's target, being revoked.
    fn verify_frames(&self) {
        let mut vram: BTreeMap<VramFrame, &str> = BTreeMap::new();
        let mut ram: BTreeSet<u32> = BTreeSet::new();
        let mut slots: BTreeSet<u32> = BTreeSet::new();
        let mut claim = |frame: VramFrame, by: &'static str| {
            let old = vram.insert(frame, by);
            assert!(old.is_none(), "{frame:?} is {old:?} and {by}");
        };
        self.vram.iter().for_each(|frame| claim(frame, "free"));
        self.vram.revoking().for_each(|frame| claim(frame, "revoking"));
        let sizes = &self.sizes;
        let out = [&sizes.releasing, &sizes.parked, &sizes.restoring];
        out.into_iter().flatten().for_each(|frame| claim(*frame, "out of use"));
        ram.extend(self.ram.iter());
        assert_eq!(ram.len(), self.ram.free() as usize, "a RAM frame is free twice");
        for frame in &self.sizes.ram_aside {
            assert!(ram.insert(*frame), "RAM frame {frame} is set aside and free");
        }
        slots.extend(self.slots.iter());
        assert_eq!(slots.len(), self.slots.free() as usize, "a slot is free twice");
        for slot in &self.sizes.slots_aside {
            assert!(slots.insert(*slot), "slot {slot} is set aside and free");
        }
        let (mut reads, mut downs, mut outs, mut moving) = (0, 0, 0, 0);
        let mut prefetches = 0;
        for (at, page, _) in self.all_pages() {
            prefetches += u32::from(page.filled_by_prefetch);
            page.vram.into_iter().for_each(|frame| claim(frame, "a copy"));
            let mut ram_frame = |frame: super::ids::RamFrame| {
                assert!(ram.insert(frame.0), "{frame:?} of {at:?} is used twice");
            };
            page.ram.into_iter().for_each(&mut ram_frame);
            if let Some(slot) = page.slot {
                assert!(slots.insert(slot.0), "{slot:?} of {at:?} is used twice");
            }
            moving += u32::from(!matches!(page.motion, Motion::Still | Motion::NeedRam { .. }));
            match page.motion {
                Motion::Still => {}
                Motion::NeedRam { target } => claim(target, "waiting for RAM"),
                Motion::Up { target } => {
                    claim(target, "going up");
                    assert!(page.ram.is_some(), "{at:?} goes up from nowhere");
                }
                Motion::Zero { target } => claim(target, "being zeroed"),
                Motion::Reading { target, ram } => {
                    claim(target, "being read");
                    if self.limits.unified {
                        assert_eq!(ram.0, target.0, "{at:?} is read elsewhere");
                    } else {
                        ram_frame(ram);
                    }
                    reads += 1;
                }
                Motion::Down { ram } => {
                    assert!(page.vram.is_some(), "{at:?} goes down from nowhere");
                    ram_frame(ram);
                    downs += 1;
                }
                Motion::Out { slot } => {
                    let unified = self.limits.unified && page.vram.is_some();
                    assert!(page.ram.is_some() || unified, "{at:?} goes out from nowhere");
                    assert!(slots.insert(slot.0), "{slot:?} of {at:?} is used twice");
                    outs += 1;
                }
            }
        }
        assert_eq!(vram.len(), self.vram.capacity() as usize, "a VRAM frame is lost");
        assert_eq!(ram.len(), self.ram.capacity() as usize, "a RAM frame is lost");
        assert_eq!(slots.len(), self.slots.capacity() as usize, "a slot is lost");
        assert_eq!((reads, downs, outs), (self.reads, self.downs, self.outs));
        assert_eq!(moving as usize, self.transfers.len(), "a hop without a transfer");
        assert_eq!(prefetches, self.prefetches_moving, "prefetches under way");
    }

    /// Pins are those of the mappings and of the admitted maps; the orders hold what they should.
    fn verify_pins(&self) {
        let mut pins: BTreeMap<PageRef, u32> = BTreeMap::new();
        let admitted = self.pending.values().filter(|map| map.admitted).map(|map| &map.spans);
        for spans in self.mappings.values().map(|map| &map.spans).chain(admitted) {
            for at in spans.iter().flat_map(|span| span.pages()) {
                *pins.entry(at).or_default() += 1;
            }
        }
        let cap = self.mapped_pages_max();
        assert_eq!(pins.len(), self.table.pinned as usize, "pinned pages");
        let shrinking = self.sizes.vram_target < self.vram.capacity();
        let within = self.table.pinned <= cap || shrinking;
        assert!(within, "{} pages are pinned of {cap}", self.table.pinned);
        let mut writers: BTreeMap<PageRef, u32> = BTreeMap::new();
        let granted = self.mappings.values().map(|map| (map.access, &map.spans));
        for (_, spans) in granted.clone().filter(|(access, _)| *access != Access::Read) {
            for at in spans.iter().flat_map(|span| span.pages()) {
                let page = self.table.page(at);
                assert_eq!((page.ram, page.slot), (None, None), "{at:?} has stale copies");
            }
        }
        let admitted = self.pending.values().filter(|map| map.admitted);
        let admitted = admitted.map(|map| (map.access, &map.spans));
        let writing = granted.chain(admitted).filter(|(access, _)| *access != Access::Read);
        for at in writing.flat_map(|(_, spans)| spans).flat_map(|span| span.pages()) {
            *writers.entry(at).or_default() += 1;
        }
        let mut overwriters: BTreeMap<PageRef, u32> = BTreeMap::new();
        let overwriting =
            self.pending.values().filter(|map| map.admitted && map.access == Access::Overwrite);
        for at in overwriting.flat_map(|map| &map.spans).flat_map(|span| span.pages()) {
            *overwriters.entry(at).or_default() += 1;
        }
        let mut in_orders = [0usize; 9];
        for (at, page, file_backed) in self.all_pages() {
            assert_eq!(page.pins, pins.get(&at).copied().unwrap_or(0), "pins of {at:?}");
            let expected = writers.get(&at).copied().unwrap_or(0);
            assert_eq!(page.writers, expected, "writers of {at:?}");
            let expected = overwriters.get(&at).copied().unwrap_or(0);
            assert_eq!(page.overwriters, expected, "overwriters of {at:?}");
            assert!(!page.provisional || (expected > 0 && page.vram.is_some()), "{at:?}: {page:?}");
            assert!(!page.zeros || (page.ram.is_none() && page.slot.is_none()), "{at:?}: {page:?}");
            assert_eq!(page.vram_class, page.class_in_vram(), "order of {at:?} in VRAM");
            assert_eq!(page.ram_class, page.class_in_ram(file_backed), "order of {at:?} in RAM");
            match page.vram_class {
                VramClass::None => {}
                VramClass::Evictable => {
                    in_orders[0] += 1;
                    assert!(self.table.evictable.contains(page.plan, page.next_use, at), "{at:?}");
                }
                VramClass::Cheap => {
                    in_orders[8] += 1;
                    assert!(self.table.cheap.contains(page.plan, page.next_use, at), "{at:?}");
                }
                VramClass::Protected => {
                    in_orders[1] += 1;
                    assert!(self.table.protected.contains(page.prefetched_at, at), "{at:?}");
                }
                VramClass::Kept => {
                    in_orders[2] += 1;
                    assert!(self.table.kept.contains(page.plan, page.next_use, at), "{at:?}");
                }
            }
            match page.ram_class {
                RamClass::None => {}
                RamClass::Duplicate => in_orders[3] += 1,
                RamClass::Clean => in_orders[4] += 1,
                RamClass::Sole => in_orders[5] += 1,
                RamClass::Wanted => in_orders[6] += 1,
                RamClass::WantedSole => in_orders[7] += 1,
            }
            if page.needs_fill() {
                let queued = self.fill_demand.contains(&at)
                    || self.fill_prefetch.values().any(|wanted| wanted.page == at);
                assert!(queued, "{at:?} is wanted and in no queue: {page:?}");
                assert!(
                    page.pins == 0 || self.fill_demand.contains(&at),
                    "{at:?} waits behind prefetches"
                );
            }
        }
        let table = &self.table;
        let orders = [
            table.evictable.len(),
            table.protected.len(),
            table.kept.len(),
            table.ram_duplicate.len(),
            table.ram_clean.len(),
            table.ram_sole.len(),
            table.ram_wanted.len(),
            table.ram_wanted_sole.len(),
            table.cheap.len(),
        ];
        assert_eq!(in_orders, orders, "orders");
    }

    /// Plans count their pages right, and every page stands in the order of a plan that speaks of it.
    fn verify_plans(&self) {
        for (at, page, _) in self.all_pages() {
            let backing = self.table.backing(at.backing);
            assert!(page.plan == NO_PLAN || backing.plans.contains(&page.plan), "{at:?}: {page:?}");
        }
        for (id, plan) in self.table.plans() {
            assert!(self.sessions.get(&plan.session).is_some_and(|session| !session.lingering));
            for backing in plan.backings() {
                let listed = self.table.backing(backing).plans.iter().filter(|other| *other == id);
                assert_eq!(listed.count(), 1, "{id:?} in {backing:?}");
            }
            for (pages, backing, held, below) in plan.counts() {
                let pages = pages.map(|index| self.table.page(PageRef { backing, index }).place());
                let places: Vec<_> = pages.collect();
                let count =
                    |counts: fn(&Place) -> bool| places.iter().filter(|p| counts(p)).count();
                assert_eq!(held as usize, count(|place| place.vram), "{id:?}, {backing:?}");
                let expected = count(|place| !place.vram && !place.ram);
                assert_eq!(below as usize, expected, "{id:?}, {backing:?}");
            }
        }
    }

    /// Maps that wait have what they wait for; granted ones have all their pages.
    fn verify_maps(&self) {
        for (id, map) in &self.pending {
            assert!(self.deadlines.contains(&(map.deadline_us, *id)), "{id:?} never times out");
            assert_ne!(map.admitted, self.queue.contains(id), "{id:?} is admitted or queued");
            let waits = self.page_waiters.values().flatten().filter(|waiter| *waiter == id);
            assert_eq!(map.missing as usize, waits.count(), "missing pages of {id:?}");
            assert!(!map.admitted || map.missing > 0, "{id:?} is complete and not granted");
        }
        let waits = self.pending.len() + self.flushes.len() + self.sizes.pending.len();
        assert_eq!(self.deadlines.len(), waits);
        for (id, flush) in &self.flushes {
            let waits = self.flush_waiters.values().flatten().filter(|waiter| *waiter == id);
            assert_eq!(flush.missing as usize, waits.count(), "unwritten pages of {id:?}");
            assert!(flush.missing > 0, "{id:?} is done and not answered");
        }
        for (at, page, _) in self.all_pages() {
            assert_eq!(page.flushing, self.flush_waiters.contains_key(&at), "{at:?}: {page:?}");
        }
        assert!(self.complete.is_empty(), "complete maps are granted at once");
        for mapping in self.mappings.values() {
            for at in mapping.spans.iter().flat_map(|span| span.pages()) {
                assert!(self.table.page(at).vram.is_some(), "{at:?} is mapped and not in VRAM");
            }
        }
        for (id, session) in &self.sessions {
            let waiting = self.pending.values().filter(|map| map.session == *id).count();
            assert_eq!(session.waiting as usize, waiting, "maps that {id:?} waits for");
            for mapping in &session.mappings {
                assert_eq!(self.mappings[mapping].session, *id);
            }
        }
    }

    /// No overcommit; reference counts are right; nothing is kept that nobody refers to.
    fn verify_allocations(&self) {
        let mut references: BTreeMap<_, u32> = BTreeMap::new();
        for (id, allocation) in &self.allocations {
            *references.entry(allocation.backing).or_default() += 1;
            let spans = self.mappings.values().filter(|map| map.session == allocation.session);
            let spans = spans.flat_map(|map| &map.spans);
            let flushes = self.flushes.values().flat_map(|flush| &flush.spans);
            let pending = self.pending.values().flat_map(|map| &map.spans).chain(flushes);
            let mapped = spans.chain(pending).filter(|span| span.allocation == *id).count();
            assert_eq!(allocation.mapped as usize, mapped, "mappings of {id:?}");
            assert!(self.sessions[&allocation.session].allocations.contains(id));
        }
        let (mut anonymous, mut pages) = (0, 0);
        for (id, backing) in self.table.iter() {
            let expected = references.get(&id).copied().unwrap_or(0);
            assert_eq!(backing.references, expected, "references of {id:?}");
            assert!(expected > 0 || backing.busy > 0, "{id:?} is kept for nobody");
            anonymous += if backing.file_backed() { 0 } else { u64::from(backing.pages_count()) };
            pages += u64::from(backing.pages_count());
        }
        assert_eq!(anonymous, self.anonymous_pages);
        assert_eq!(pages, self.table.pages);
        assert!(anonymous <= self.anonymous_pages_max(), "overcommitted");
    }
}
