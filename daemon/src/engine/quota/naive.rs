//! Quotas and what they bind, told naively: lists of contents, of mappings and of quotas, over which everything is summed
//! anew. Where a page lies is asked of the page table, page by page.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::{Access, Map, PageRange};
use proptest::prelude::*;

use super::super::cases::{Bench, pick};
use super::super::event::{Event, Request};
use super::super::ids::{AllocationId, FileId, MappingId};
use super::super::limits::Limits;
use super::super::page::Motion;
use super::*;
use crate::store::FileIdentity;

pub(super) const PAGE: u64 = 4096;
const VRAM_FRAMES: u32 = 12;
/// Pages that may be mapped: one frame stays free to move others through.
const CAP: usize = 11;
/// 64 RAM frames, less 8 kept for pages on their way down and 1 to read into.
const ANONYMOUS_MAX: u64 = 55;

#[derive(Debug, Clone)]
pub(super) enum Op {
    Connect { domain: u32, gid: u32, admin: bool },
    SetQuota { session: usize, quota: Quota },
    Allocate { session: usize, pages: u32 },
    OpenFile { session: usize, inode: u64 },
    Free { allocation: usize },
    Map { session: usize, ranges: Vec<(usize, u32, u32)>, access: Access },
    Unmap { mapping: usize },
    Die { session: usize },
}

/// Pages by content.
type Pages = BTreeSet<(usize, u32)>;

struct Content {
    owner: Owner,
    pages: u32,
    /// `None` if anonymous.
    inode: Option<u64>,
}

pub(super) struct Naive {
    bench: Bench,
    sessions: BTreeMap<SessionId, (Owner, bool)>,
    quotas: BTreeMap<QuotaSubject, Quota>,
    contents: Vec<Content>,
    allocations: BTreeMap<AllocationId, (SessionId, usize)>,
    mappings: BTreeMap<MappingId, (SessionId, Vec<AllocationId>, Pages)>,
}

impl Naive {
    pub(super) fn new() -> Self {
        Self {
            bench: Bench::new(Limits::small(VRAM_FRAMES, 64, 0)),
            sessions: BTreeMap::new(),
            quotas: BTreeMap::new(),
            contents: Vec::new(),
            allocations: BTreeMap::new(),
            mappings: BTreeMap::new(),
        }
    }

    /// Whether two owners are bound by a quota together; of one and the same owner, whether it binds it at all.
    fn together(&self, quota: &Quota, one: &Owner, other: &Owner) -> bool {
        match quota.subject {
            QuotaSubject::EachSession => one.session.is_some() && one.session == other.session,
            QuotaSubject::EachUid => {
                let own = QuotaSubject::Uid(one.domain.0);
                !self.quotas.contains_key(&own) && one.domain == other.domain
            }
            QuotaSubject::Uid(uid) => one.domain.0 == uid && other.domain.0 == uid,
            QuotaSubject::Gid(gid) => one.gid == gid && other.gid == gid,
        }
    }

    fn binds(&self, quota: &Quota, owner: &Owner) -> bool {
        self.together(quota, owner, owner)
    }

    fn owner(&self, (content, _): &(usize, u32)) -> &Owner {
        &self.contents[*content].owner
    }

    /// How many of the pages are bound by a quota together with this owner.
    fn count(&self, quota: &Quota, owner: &Owner, pages: &Pages) -> u64 {
        pages.iter().filter(|page| self.together(quota, owner, self.owner(page))).count() as u64
    }

    fn pinned(&self) -> Pages {
        self.mappings.values().flat_map(|(.., pages)| pages.iter().copied()).collect()
    }

    fn live(&self) -> BTreeMap<usize, BackingId> {
        let backing = |id: &AllocationId| self.bench.engine.allocations[id].backing;
        self.allocations.iter().map(|(id, (_, content))| (*content, backing(id))).collect()
    }

    /// All pages of live contents that `lie`.
    fn lying(&self, lies: impl Fn(&super::super::page::Page) -> bool) -> Pages {
        let mut pages = Pages::new();
        for (content, backing) in self.live() {
            for index in 0..self.contents[content].pages {
                if lies(self.bench.engine.table.page(PageRef { backing, index })) {
                    pages.insert((content, index));
                }
            }
        }
        pages
    }

    fn in_vram(&self) -> Pages {
        self.lying(|page| page.vram.is_some())
    }

    fn anonymous(&self) -> Pages {
        let anonymous = self.live().into_keys().filter(|c| self.contents[*c].inode.is_none());
        anonymous.flat_map(|c| (0..self.contents[c].pages).map(move |page| (c, page))).collect()
    }

    fn limited(&self, limit: fn(&Quota) -> Option<u64>) -> Vec<(Quota, u64)> {
        let quotas = self.quotas.values();
        quotas.filter_map(|quota| Some((*quota, limit(quota)? / PAGE))).collect()
    }

    fn reserved(&self) -> Vec<(Quota, u64)> {
        self.limited(|quota| Some(quota.vram_reserved))
    }

    /// Asks the engine and the lists, and compares.
    pub(super) fn run(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Connect { domain, gid, admin } => {
                let session = SessionId(self.bench.fresh());
                let domain = Domain(domain);
                let owner = Owner { domain, gid, session: Some(session) };
                self.sessions.insert(session, (owner, admin));
                self.bench.apply(Event::SessionOpened { session, domain, gid, admin });
            }
            Op::Die { session } => {
                let Some(session) = self.session(session) else { return Ok(()) };
                self.sessions.remove(&session);
                self.allocations.retain(|_, (owner, _)| *owner != session);
                self.mappings.retain(|_, (owner, ..)| *owner != session);
                self.bench.apply(Event::ProcessDied { session });
            }
            Op::SetQuota { session, quota } => {
                let Some(session) = self.session(session) else { return Ok(()) };
                self.set_quota(session, quota)?;
            }
            Op::Allocate { session, pages } => {
                let Some(session) = self.session(session) else { return Ok(()) };
                self.allocate(session, pages)?;
            }
            Op::OpenFile { session, inode } => {
                let Some(session) = self.session(session) else { return Ok(()) };
                self.open_file(session, inode)?;
            }
            Op::Free { allocation } => {
                let mapped = |id: &AllocationId| {
                    self.mappings.values().any(|(_, named, _)| named.contains(id))
                };
                let free = self.allocations.keys().copied().filter(|id| !mapped(id));
                let Some(id) = pick(free, allocation) else { return Ok(()) };
                let (session, _) = self.allocations[&id];
                self.bench.ask(session, Request::Free(id), &[])?;
                self.allocations.remove(&id);
            }
            Op::Map { session, ranges, access } => {
                let Some(session) = self.session(session) else { return Ok(()) };
                self.map(session, &ranges, access)?;
            }
            Op::Unmap { mapping } => {
                let Some(id) = pick(self.mappings.keys().copied(), mapping) else { return Ok(()) };
                let (session, ..) = self.mappings.remove(&id).expect("picked among them");
                self.bench.ask(session, Request::Unmap(vec![id]), &[])?;
            }
        }
        self.compare()
    }

    fn session(&self, number: usize) -> Option<SessionId> {
        pick(self.sessions.keys().copied(), number)
    }

    fn set_quota(&mut self, session: SessionId, quota: Quota) -> Result<(), TestCaseError> {
        let mut quotas = self.quotas.clone();
        quotas.insert(quota.subject, quota);
        let reserved: u64 = quotas.values().map(|quota| quota.vram_reserved / PAGE).sum();
        let each = matches!(quota.subject, QuotaSubject::EachSession | QuotaSubject::EachUid);
        let reasons = [
            (!self.sessions[&session].1, Code::NotPermitted),
            (each && quota.vram_reserved > 0, Code::BadRequest),
            (reserved > CAP as u64, Code::OverCapacity),
        ];
        let reasons: Vec<_> =
            reasons.into_iter().filter_map(|(holds, code)| holds.then_some(code)).collect();
        self.bench.ask(session, Request::SetQuota(quota), &reasons)?;
        if reasons.is_empty() {
            quotas.retain(|_, quota| !quota.is_none());
            self.quotas = quotas;
        }
        Ok(())
    }

    fn allocate(&mut self, session: SessionId, pages: u32) -> Result<(), TestCaseError> {
        let owner = self.sessions[&session].0;
        let (taken, mut reasons) = (self.anonymous(), Vec::new());
        if taken.len() as u64 + u64::from(pages) > ANONYMOUS_MAX {
            reasons.push(Code::OutOfMemory);
        }
        for (quota, limit) in self.limited(|quota| quota.anonymous_max) {
            let wanted = self.count(&quota, &owner, &taken) + u64::from(pages);
            if self.binds(&quota, &owner) && wanted > limit {
                reasons.push(Code::OverQuota);
            }
        }
        let size = u64::from(pages) * PAGE;
        let reply = self.bench.ask(session, Request::Allocate { size }, &reasons)?;
        if let Some(Reply::Allocated { allocation, .. }) = reply {
            self.allocations.insert(allocation, (session, self.contents.len()));
            self.contents.push(Content { owner, pages, inode: None });
        }
        Ok(())
    }

    fn open_file(&mut self, session: SessionId, inode: u64) -> Result<(), TestCaseError> {
        let size = 6 * PAGE;
        let identity = FileIdentity { device: 1, inode, size, mtime_ns: 0, ctime_ns: 0 };
        let file = FileId(self.bench.fresh());
        self.bench.files.insert(file);
        let request = Request::OpenFile { file, identity, offset: 0, length: size };
        let reply = self.bench.ask(session, request, &[])?;
        let Some(Reply::Allocated { allocation, pages }) = reply else {
            return Err(TestCaseError::fail(format!("{reply:?}")));
        };
        // Shared inside a domain, and charged to the group of whoever was first.
        let opener = self.sessions[&session].0;
        let shared = self.live().into_keys().find(|content| {
            let Content { owner, inode: own, .. } = &self.contents[*content];
            owner.domain == opener.domain && *own == Some(inode)
        });
        self.allocations.insert(allocation, (session, shared.unwrap_or(self.contents.len())));
        if shared.is_none() {
            let owner = Owner { session: None, ..opener };
            self.contents.push(Content { owner, pages, inode: Some(inode) });
        }
        Ok(())
    }

    /// Reasons to refuse a map for ever, and reasons why it would have to wait.
    fn reasons(&self, asked: &Pages) -> (Vec<Code>, Vec<Code>) {
        let (mut never, mut now) = (Vec::new(), Vec::new());
        let pinned = self.pinned();
        let new: Pages = asked.difference(&pinned).copied().collect();
        for (quota, limit) in self.limited(|quota| quota.vram_max) {
            for owner in asked.iter().map(|page| self.owner(page)) {
                let count = |pages: &Pages| self.count(&quota, owner, pages);
                if count(asked) > limit {
                    never.push(Code::OverQuota);
                }
                if count(&new) > 0 && count(&pinned) + count(&new) > limit {
                    now.push(Code::TimedOut);
                }
            }
        }
        // Pages reserved for others than the owners of the pages that are asked for.
        let (mut all, mut unused) = (0, 0);
        for (quota, reserved) in self.reserved() {
            if !asked.iter().all(|page| self.binds(&quota, self.owner(page))) {
                let theirs = pinned.iter().filter(|page| self.binds(&quota, self.owner(page)));
                all += reserved;
                unused += reserved.saturating_sub(theirs.count() as u64);
            }
        }
        let cap = CAP as u64;
        if asked.len() as u64 + all > cap {
            never.push(Code::OverCapacity);
        }
        if !new.is_empty() && (pinned.len() + new.len()) as u64 + unused > cap {
            now.push(Code::TimedOut);
        }
        (never, now)
    }

    fn map(
        &mut self,
        session: SessionId,
        ranges: &[(usize, u32, u32)],
        access: Access,
    ) -> Result<(), TestCaseError> {
        let (mut named, mut asked, mut request) = (Vec::new(), Pages::new(), Vec::new());
        for (number, first, count) in ranges {
            // Only what is anonymous may be written.
            let own = self.allocations.iter().filter(|(_, (owner, content))| {
                let anonymous = self.contents[*content].inode.is_none();
                *owner == session && (anonymous || access == Access::Read)
            });
            let own = own.map(|(id, (_, content))| (*id, *content));
            let Some((allocation, content)) = pick(own, *number) else { return Ok(()) };
            let pages = self.contents[content].pages;
            let first = first % pages;
            let count = (*count).min(pages - first);
            named.push(allocation);
            asked.extend((first..first + count).map(|page| (content, page)));
            request.push(PageRange { allocation, first, count });
        }
        let (never, now) = self.reasons(&asked);
        let reasons = if never.is_empty() { now } else { never };
        let before = self.in_vram();
        let map = Map { ranges: request, access, wait_us: 0 };
        let reply = self.bench.ask(session, Request::Map(map), &reasons)?;
        if let Some(Reply::Mapped(mapped)) = reply {
            self.mappings.insert(mapped.mapping, (session, named, asked.clone()));
        }
        self.check_vram(&asked, &before)
    }

    /// What a map of these pages may have done to who is in VRAM.
    fn check_vram(&self, asked: &Pages, before: &Pages) -> Result<(), TestCaseError> {
        let after = self.in_vram();
        for (quota, limit) in self.limited(|quota| quota.vram_max) {
            for owner in self.contents.iter().map(|content| &content.owner) {
                let count = |pages| self.count(&quota, owner, pages);
                let (most, found) = (limit.max(count(before)), count(&after));
                prop_assert!(found <= most, "{found} pages in VRAM, {most} allowed by {quota:?}");
            }
        }
        for (quota, reserved) in self.reserved() {
            let theirs = |pages: &Pages| {
                let bound = pages.iter().filter(|page| self.binds(&quota, self.owner(page)));
                bound.copied().collect::<Pages>()
            };
            if theirs(asked).is_empty() && !self.limited_together(asked, &theirs(before)) {
                let (had, has) = (theirs(before).len() as u64, theirs(&after).len() as u64);
                let least = had.min(reserved);
                prop_assert!(has >= least, "{has} pages left in VRAM, {least} kept by {quota:?}");
            }
        }
        Ok(())
    }

    /// Whether a limit binds owners of both: then their pages make room for one another, reserved or not.
    fn limited_together(&self, some: &Pages, others: &Pages) -> bool {
        self.limited(|quota| quota.vram_max).iter().any(|(quota, _)| {
            some.iter().any(|page| self.count(quota, self.owner(page), others) > 0)
        })
    }

    fn compare(&mut self) -> Result<(), TestCaseError> {
        let moving = self.lying(|page| page.motion != Motion::Still);
        prop_assert!(moving.is_empty(), "{moving:?} move still");
        let (vram, pinned, anonymous) = (self.in_vram(), self.pinned(), self.anonymous());
        for (session, (owner, _)) in self.sessions.clone() {
            let used = |quota: &Quota, pages: &Pages| {
                // A user's own quota does not keep what "each user" reports of it from being told.
                let same = |other: &Owner| match quota.subject {
                    QuotaSubject::EachUid => other.domain == owner.domain,
                    QuotaSubject::EachSession => other.session == owner.session,
                    QuotaSubject::Uid(uid) => other.domain.0 == uid,
                    QuotaSubject::Gid(gid) => other.gid == gid,
                };
                PAGE * pages.iter().filter(|page| same(self.owner(page))).count() as u64
            };
            let expected = self.quotas.values().map(|quota| QuotaUse {
                quota: *quota,
                vram_used: used(quota, &vram),
                vram_mapped: used(quota, &pinned),
                anonymous_used: used(quota, &anonymous),
            });
            let expected = Reply::Quotas(expected.collect());
            let binding = self.quotas.values().filter(|quota| self.binds(quota, &owner));
            let priority = binding.map(|quota| quota.priority).max().unwrap_or(0);
            prop_assert_eq!(self.bench.engine.priority_of(session), priority);
            prop_assert_eq!(self.bench.request(session, Request::ListQuotas), Some(expected));
        }
        Ok(())
    }
}
