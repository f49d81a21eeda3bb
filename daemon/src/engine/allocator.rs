//! Allocations: admission, sharing of files, release.
//!
//! No overcommit: an anonymous allocation is admitted only if RAM and the spill can hold it and all others with VRAM
//! empty, so a page that must leave VRAM always finds room.

use lapis_proto::code::Code;
use lapis_proto::message::{PageRange, Refused};

use super::Engine;
use super::event::{Command, Outbox, Reply};
use super::ids::{AllocationId, BackingId, FileId, PageRef, SessionId, Tag};
use super::page::Motion;
use super::page_table::{FileKey, Source};
use super::quota::Owner;
use super::refusal;
use super::session::Session;
use crate::store::{ALIGNMENT, FileIdentity};

/// A client's contiguous range of pages.
#[derive(Debug)]
pub struct Allocation {
    /// Whose.
    pub session: SessionId,
    /// Its pages.
    pub backing: BackingId,
    /// Mappings, granted or waited for, that name it.
    pub mapped: u32,
}

/// A checked range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// Of which backing.
    pub backing: BackingId,
    /// First page.
    pub first: u32,
    /// Pages.
    pub count: u32,
    /// Through which allocation.
    pub allocation: AllocationId,
}

impl Span {
    /// Its pages in order.
    pub fn pages(self) -> impl Iterator<Item = PageRef> {
        (self.first..self.first + self.count)
            .map(move |index| PageRef { backing: self.backing, index })
    }
}

impl Engine {
    pub(super) fn allocate(&mut self, session: SessionId, size: u64) -> Result<Reply, Refused> {
        let pages = self.pages_for(size)?;
        let limit = self.anonymous_pages_max();
        if u64::from(pages) > limit.saturating_sub(self.anonymous_pages) {
            return Err(refusal::out_of_memory(
                u64::from(pages),
                self.anonymous_pages,
                limit,
                self.limits.page_size,
            ));
        }
        self.check_anonymous(session, u64::from(pages))?;
        let id = self.new_allocation_id(session)?;
        let &Session { domain, gid, .. } = self.session(session);
        let owner = Owner { domain, gid, session: Some(session) };
        let backing = self.table.add(Source::Anonymous(id), owner, pages);
        self.anonymous_pages += u64::from(pages);
        Ok(self.register(session, id, backing, pages))
    }

    pub(super) fn open_file(
        &mut self,
        session: SessionId,
        file: FileId,
        identity: FileIdentity,
        range: (u64, u64),
        outbox: &mut Outbox,
    ) -> Result<Reply, Refused> {
        let (offset, length) = range;
        let result = self.open_checked(session, file, identity, (offset, length));
        let kept = matches!(result, Ok((_, true)));
        if !kept {
            outbox.push(Command::CloseFile(file));
        }
        result.map(|(reply, _)| reply)
    }

    /// Whether the store's file is kept comes with the reply.
    fn open_checked(
        &mut self,
        session: SessionId,
        file: FileId,
        identity: FileIdentity,
        (offset, length): (u64, u64),
    ) -> Result<(Reply, bool), Refused> {
        if self.limits.unified && !offset.is_multiple_of(ALIGNMENT) {
            let message = format!(
                "on a unified device a file is read in place: the offset must be a multiple of {ALIGNMENT}, not {offset}"
            );
            return Err(refusal::plain(Code::BadRequest, &message));
        }
        let end = offset.checked_add(length).filter(|end| *end <= identity.size);
        if end.is_none() {
            let message = format!(
                "{length} bytes from byte {offset} on are asked for, the file has {} bytes",
                identity.size
            );
            return Err(Refused {
                object: offset,
                asked: length,
                limit: identity.size,
                ..refusal::plain(Code::OutOfRange, &message)
            });
        }
        let pages = self.pages_for(length)?;
        let id = self.new_allocation_id(session)?;
        let &Session { domain, gid, .. } = self.session(session);
        let key = FileKey { domain, identity, offset, length };
        if let Some(backing) = self.files.get(&key).copied() {
            self.table.backing_mut(backing).references += 1;
            return Ok((self.register(session, id, backing, pages), false));
        }
        let backing =
            self.table.add(Source::File { file, key }, Owner { domain, gid, session: None }, pages);
        self.files.insert(key, backing);
        Ok((self.register(session, id, backing, pages), true))
    }

    fn pages_for(&self, size: u64) -> Result<u32, Refused> {
        if size == 0 {
            return Err(refusal::plain(
                Code::BadRequest,
                "an allocation of 0 bytes has no address: ask for at least 1 byte",
            ));
        }
        let pages = size.div_ceil(self.limits.page_size);
        let left = self.limits.pages_max.saturating_sub(self.table.pages);
        match u32::try_from(pages) {
            Ok(pages) if u64::from(pages) <= left => Ok(pages),
            _ => Err(Refused {
                asked: pages,
                in_use: self.table.pages,
                limit: self.limits.pages_max,
                ..refusal::plain(
                    Code::TooMany,
                    &format!(
                        "{pages} more pages do not fit the daemon's page table: {} of {} are taken; \
                         free allocations or raise pages_max",
                        self.table.pages, self.limits.pages_max
                    ),
                )
            }),
        }
    }

    fn new_allocation_id(&mut self, session: SessionId) -> Result<AllocationId, Refused> {
        let count = self.session(session).allocations.len();
        let limit = self.limits.allocations_per_session_max;
        if count >= limit as usize {
            return Err(refusal::too_many(
                "this session's allocation",
                count as u64,
                u64::from(limit),
            ));
        }
        self.last_id += 1;
        Ok(AllocationId(self.last_id))
    }

    fn register(
        &mut self,
        session: SessionId,
        id: AllocationId,
        backing: BackingId,
        pages: u32,
    ) -> Reply {
        self.allocations.insert(id, Allocation { session, backing, mapped: 0 });
        self.session_mut(session).allocations.insert(id);
        Reply::Allocated { allocation: id, pages }
    }

    /// Checks ranges of one request against the session's allocations.
    pub(super) fn resolve(
        &self,
        session: SessionId,
        ranges: &[PageRange],
    ) -> Result<Vec<Span>, Refused> {
        let resolve_one = |range: &PageRange| {
            let id = range.allocation;
            let allocation = self
                .allocations
                .get(&id)
                .filter(|allocation| allocation.session == session)
                .ok_or_else(|| refusal::unknown_allocation(id))?;
            let pages = self.table.backing(allocation.backing).pages_count();
            let end = u64::from(range.first) + u64::from(range.count);
            if range.count == 0 || end > u64::from(pages) {
                return Err(refusal::out_of_range(id, end, pages));
            }
            let (first, count) = (range.first, range.count);
            Ok(Span { backing: allocation.backing, first, count, allocation: id })
        };
        ranges.iter().map(resolve_one).collect()
    }

    pub(super) fn free(
        &mut self,
        session: SessionId,
        id: AllocationId,
        outbox: &mut Outbox,
    ) -> Result<Reply, Refused> {
        let allocation = self
            .allocations
            .get(&id)
            .filter(|allocation| allocation.session == session)
            .ok_or_else(|| refusal::unknown_allocation(id))?;
        if allocation.mapped > 0 {
            return Err(refusal::in_use(id));
        }
        self.release_allocation(id, outbox);
        Ok(Reply::Done)
    }

    /// Ends an allocation; its pages go as soon as nothing pins or moves them.
    pub(super) fn release_allocation(&mut self, id: AllocationId, outbox: &mut Outbox) {
        let allocation = self.allocations.remove(&id).expect("checked by the caller");
        if let Some(session) = self.sessions.get_mut(&allocation.session) {
            session.allocations.remove(&id);
        }
        self.end_in_plans(allocation.session, allocation.backing);
        self.forget_observed(allocation.session, allocation.backing);
        let backing = self.table.backing_mut(allocation.backing);
        backing.references -= 1;
        if backing.references > 0 {
            return;
        }
        if let Source::File { key, .. } = backing.source {
            // Nobody may join it any more: its pages are going.
            self.files.remove(&key);
        }
        let pages = self.table.backing(allocation.backing).pages_count();
        for index in 0..pages {
            self.empty_if_idle(PageRef { backing: allocation.backing, index });
        }
        self.remove_if_idle(allocation.backing, outbox);
    }

    /// Gives a page's frames back, unless something pins or moves it.
    pub(super) fn empty_if_idle(&mut self, at: PageRef) {
        if let Motion::NeedRam { target } = self.table.page(at).motion {
            self.cancel_fill(at, target);
        }
        let page = self.table.page(at);
        if page.pins > 0 || page.motion != Motion::Still {
            return;
        }
        let (vram, ram, slot) = self.table.update(at, |page| {
            page.prefetched = false;
            page.flushing = false;
            (page.vram.take(), page.ram.take(), page.slot.take())
        });
        let domain = self.table.backing(at.backing).domain;
        if let Some(frame) = vram {
            self.vram.put(domain, frame);
        }
        if let Some(frame) = ram {
            self.ram.put(frame.0);
        }
        if let Some(slot) = slot {
            self.slots.put(slot.0);
        }
    }

    /// Removes a backing that nobody refers to once its last page is idle.
    pub(super) fn remove_if_idle(&mut self, id: BackingId, outbox: &mut Outbox) {
        let backing = self.table.backing(id);
        if backing.references > 0 || backing.busy > 0 {
            return;
        }
        let backing = self.table.remove(id);
        self.forget_recommended(id, backing.pages_count());
        match backing.source {
            Source::Anonymous(_) => self.anonymous_pages -= u64::from(backing.pages_count()),
            Source::File { file, .. } => outbox.push(Command::CloseFile(file)),
        }
    }

    pub(super) fn next_tag(&mut self) -> Tag {
        self.last_tag += 1;
        Tag(self.last_tag)
    }
}

#[cfg(test)]
mod tests;
