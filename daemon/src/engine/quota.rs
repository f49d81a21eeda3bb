//! Quotas: most VRAM, reserved VRAM, most anonymous memory, and priority, for users, groups and sessions.
//!
//! A quota binds an *instance*: one user, one group or one session. What an instance uses is summed over backings, and
//! only while there are quotas: without any, nothing here costs anything.
//!
//! A limit goes before a reserve: whom a limit binds together make room for one another, reserved or not.

use lapis_proto::code::Code;
use lapis_proto::message::{QUOTAS_MAX, Quota, QuotaSubject, QuotaUse, Refused};

use super::Engine;
use super::allocator::Span;
use super::event::Reply;
use super::ids::{BackingId, Domain, PageRef, SessionId};
use super::maps::distinct_pages;
use super::policy::order::Order;
use super::refusal;

/// Whom pages are charged to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// The user.
    pub domain: Domain,
    /// The group of whoever made the allocation, or opened the file first.
    pub gid: u32,
    /// The session, unless the pages are shared.
    pub session: Option<SessionId>,
}

/// One user, one group or one session that a quota binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instance {
    Uid(Domain),
    Gid(u32),
    Session(SessionId),
}

impl Instance {
    pub(super) fn owns(self, owner: &Owner) -> bool {
        match self {
            Self::Uid(domain) => owner.domain == domain,
            Self::Gid(gid) => owner.gid == gid,
            Self::Session(session) => owner.session == Some(session),
        }
    }
}

/// What an instance uses, in pages.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    vram: u64,
    /// Those of VRAM that are on their way down.
    leaving: u64,
    pinned: u64,
    anonymous: u64,
}

/// Why a map may not be admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    /// It may.
    Enough,
    /// VRAM is mapped by others, or reserved for them.
    TierFull,
    /// Its own quota is used up.
    QuotaFull,
}

impl Engine {
    fn owner_of_session(&self, id: SessionId) -> Owner {
        let session = self.session(id);
        Owner { domain: session.domain, gid: session.gid, session: Some(id) }
    }

    pub(super) fn owner(&self, backing: BackingId) -> Owner {
        self.table.backing(backing).owner
    }

    /// The quotas that bind an owner, each with whom of them it binds.
    fn quotas_of(&self, owner: Owner) -> impl Iterator<Item = (Instance, &Quota)> {
        self.quotas.values().filter_map(move |quota| {
            let own = QuotaSubject::Uid(owner.domain.0);
            let instance = match quota.subject {
                QuotaSubject::EachSession => owner.session.map(Instance::Session),
                QuotaSubject::EachUid => {
                    (!self.quotas.contains_key(&own)).then_some(Instance::Uid(owner.domain))
                }
                QuotaSubject::Uid(uid) => {
                    (uid == owner.domain.0).then_some(Instance::Uid(owner.domain))
                }
                QuotaSubject::Gid(gid) => (gid == owner.gid).then_some(Instance::Gid(gid)),
            };
            instance.map(|instance| (instance, quota))
        })
    }

    fn used_by(&self, instance: Instance) -> Use {
        let mut total = Use::default();
        for (_, backing) in self.table.iter().filter(|(_, backing)| instance.owns(&backing.owner)) {
            total.vram += u64::from(backing.in_vram);
            total.leaving += u64::from(backing.leaving);
            total.pinned += u64::from(backing.pinned);
            if !backing.file_backed() {
                total.anonymous += u64::from(backing.pages_count());
            }
        }
        total
    }

    fn pages(&self, bytes: u64) -> u64 {
        bytes / self.limits.page_size
    }

    /// The highest priority that a session's quotas give it.
    pub(super) fn priority_of(&self, session: SessionId) -> u8 {
        if self.quotas.is_empty() {
            return 0;
        }
        let owner = self.owner_of_session(session);
        self.quotas_of(owner).map(|(_, quota)| quota.priority).max().unwrap_or(0)
    }

    fn over_quota(&self, asked: u64, in_use: u64, limit: u64, what: &str) -> Refused {
        let page = self.limits.page_size;
        let message = format!(
            "the quota allows {} bytes {what}, {} are in use, {} are asked for; free some, or have an \
             administrator raise it",
            limit * page,
            in_use * page,
            asked * page
        );
        Refused {
            asked: asked * page,
            in_use: in_use * page,
            limit: limit * page,
            ..refusal::plain(Code::OverQuota, &message)
        }
    }

    /// Refuses an anonymous allocation beyond a quota.
    pub(super) fn check_anonymous(&self, session: SessionId, pages: u64) -> Result<(), Refused> {
        if self.quotas.is_empty() {
            return Ok(());
        }
        for (instance, quota) in self.quotas_of(self.owner_of_session(session)) {
            let Some(limit) = quota.anonymous_max.map(|bytes| self.pages(bytes)) else { continue };
            let used = self.used_by(instance).anonymous;
            if used + pages > limit {
                return Err(self.over_quota(pages, used, limit, "of anonymous memory"));
            }
        }
        Ok(())
    }

    /// Refuses a map that can never be admitted under the quotas there are.
    pub(super) fn check_mapped(&self, spans: &[Span], asked: u64) -> Result<(), Refused> {
        if self.quotas.is_empty() {
            return Ok(());
        }
        for (instance, limit) in self.vram_limits(spans) {
            let own = distinct_pages(&self.spans_of(instance, spans));
            if own > limit {
                let in_use = self.used_by(instance).pinned;
                return Err(self.over_quota(own, in_use, limit, "of VRAM"));
            }
        }
        let cap = u64::from(self.mapped_pages_max());
        let reserved = self.reserved_for_others(spans, false);
        if asked + reserved > cap {
            let limit = u32::try_from(cap.saturating_sub(reserved)).unwrap_or(u32::MAX);
            let refuse =
                if asked > cap { refusal::over_capacity } else { refusal::over_unreserved };
            return Err(refuse(asked, limit));
        }
        Ok(())
    }

    /// Whom quotas of VRAM bind of those that the spans' pages are charged to, each with how many pages it may have.
    fn vram_limits(&self, spans: &[Span]) -> Vec<(Instance, u64)> {
        let mut owners: Vec<Owner> = Vec::new();
        for span in spans {
            let owner = self.owner(span.backing);
            if !owners.contains(&owner) {
                owners.push(owner);
            }
        }
        let quotas = owners.into_iter().flat_map(|owner| self.quotas_of(owner));
        quotas.filter_map(|(own, quota)| Some((own, self.pages(quota.vram_max?)))).collect()
    }

    /// The spans whose pages an instance is charged.
    fn spans_of(&self, instance: Instance, spans: &[Span]) -> Vec<Span> {
        let own = |span: &&Span| instance.owns(&self.owner(span.backing));
        spans.iter().filter(own).copied().collect()
    }

    /// Pages reserved for instances that not all of the spans' pages are charged to: no page of theirs will make room
    /// for such a span. With `unused`, only those not mapped by them.
    fn reserved_for_others(&self, spans: &[Span], unused: bool) -> u64 {
        let owns_all =
            |instance: Instance| spans.iter().all(|span| instance.owns(&self.owner(span.backing)));
        let others = self.reserving().filter(|(instance, _)| !owns_all(*instance));
        others
            .map(|(instance, reserved)| {
                let pinned = if unused { self.used_by(instance).pinned } else { 0 };
                reserved.saturating_sub(pinned)
            })
            .sum()
    }

    /// Pages reserved for all instances together.
    pub(super) fn reserved_pages(&self) -> u64 {
        self.reserving().map(|(_, reserved)| reserved).sum()
    }

    /// Frames that are spoken for: of pages that are mapped or admitted, and unused reserves.
    pub(super) fn promised_pages(&self) -> u64 {
        let unused = self
            .reserving()
            .map(|(instance, reserved)| reserved.saturating_sub(self.used_by(instance).pinned));
        u64::from(self.table.pinned) + unused.sum::<u64>()
    }

    /// Whether more frames are spoken for than there are: a reserve was made, or VRAM shrank, after maps had been
    /// admitted. They come first then.
    pub(super) fn is_overpromised(&self) -> bool {
        // Frames that are asked back and may still come are as good as there.
        let kept = u64::from(self.vram.revoking_count() - self.revocations_awaited());
        !self.quotas.is_empty() && self.promised_pages() + kept > self.vram_in_use()
    }

    /// Instances with reserved pages.
    fn reserving(&self) -> impl Iterator<Item = (Instance, u64)> {
        self.quotas.values().filter(|quota| quota.vram_reserved > 0).filter_map(|quota| {
            let instance = match quota.subject {
                QuotaSubject::Uid(uid) => Instance::Uid(Domain(uid)),
                QuotaSubject::Gid(gid) => Instance::Gid(gid),
                // Refused when set: nobody can say how many there will be.
                QuotaSubject::EachSession | QuotaSubject::EachUid => return None,
            };
            Some((instance, self.pages(quota.vram_reserved)))
        })
    }

    /// Whether a map that pins `new_pins` more pages may be admitted now.
    pub(super) fn room_for(&self, spans: &[Span], new_pins: u32) -> Room {
        let cap = u64::from(self.mapped_pages_max());
        let lost = self.vram.revoking_count() + self.lost_to(self.owner(spans[0].backing).domain);
        let taken = u64::from(self.table.pinned) + u64::from(lost) + u64::from(new_pins);
        if self.quotas.is_empty() {
            return if taken <= cap { Room::Enough } else { Room::TierFull };
        }
        for (instance, limit) in self.vram_limits(spans) {
            let own = u64::from(self.new_pins(&self.spans_of(instance, spans)));
            if own > 0 && self.used_by(instance).pinned + own > limit {
                return Room::QuotaFull;
            }
        }
        if taken + self.reserved_for_others(spans, true) <= cap {
            Room::Enough
        } else {
            Room::TierFull
        }
    }

    /// The instance whose VRAM is used up, if there is one: the page may only take a frame of its own. What was
    /// admitted before its quota was lowered is filled all the same.
    pub(super) fn vram_used_up(&self, at: PageRef) -> Option<Instance> {
        if self.quotas.is_empty() {
            return None;
        }
        let full = |(instance, quota): (Instance, &Quota)| {
            let limit = self.pages(quota.vram_max?);
            let used = self.used_by(instance);
            (used.vram >= limit && used.pinned <= limit).then_some(instance)
        };
        self.quotas_of(self.owner(at.backing)).find_map(full)
    }

    /// The best victim of an instance.
    pub(super) fn victim_of(&self, instance: Instance) -> Option<PageRef> {
        let own = |at: PageRef| instance.owns(&self.owner(at.backing));
        let moment = self.moment();
        let best = |order: &Order| order.farthest_where(&moment, own).map(|found| found.at);
        let protected = || self.table.protected.farthest_where(self.clock, own).map(|(_, at)| at);
        let evictable = best(&self.table.cheap).or_else(|| best(&self.table.evictable));
        evictable.or_else(protected).or_else(|| best(&self.table.kept))
    }

    /// Instances whose pages may not be evicted for this page: they hold no more than is reserved for them.
    pub(super) fn guarded_from(&self, at: PageRef) -> Vec<Instance> {
        if self.quotas.is_empty() {
            return Vec::new();
        }
        let owner = self.owner(at.backing);
        let no_more_than = |instance, reserved| {
            let used = self.used_by(instance);
            used.vram - used.leaving <= reserved
        };
        self.reserving()
            .filter(|(instance, reserved)| {
                !instance.owns(&owner) && no_more_than(*instance, *reserved)
            })
            .map(|(instance, _)| instance)
            .collect()
    }

    pub(super) fn is_guarded(&self, at: PageRef, guarded: &[Instance]) -> bool {
        let owner = self.owner(at.backing);
        guarded.iter().any(|instance| instance.owns(&owner))
    }

    pub(super) fn set_quota(&mut self, session: SessionId, quota: Quota) -> Result<Reply, Refused> {
        self.require_admin(session)?;
        self.put_quota(quota)?;
        Ok(Reply::Done)
    }

    pub(super) fn require_admin(&self, session: SessionId) -> Result<(), Refused> {
        if self.session(session).admin {
            return Ok(());
        }
        let message = "only root and members of the administrators' group may do this";
        Err(refusal::plain(Code::NotPermitted, message))
    }

    /// Sets a quota, or takes it away if it limits nothing. What is over a new limit already is not taken back at
    /// once: it goes as its owner maps other pages.
    ///
    /// # Errors
    /// `BadRequest`: a reserve for an unknown number of instances; `OverCapacity`: more reserved than can be mapped;
    /// `TooMany` quotas.
    pub fn put_quota(&mut self, quota: Quota) -> Result<(), Refused> {
        let each = matches!(quota.subject, QuotaSubject::EachSession | QuotaSubject::EachUid);
        if each && quota.vram_reserved > 0 {
            let message = "VRAM can be reserved for a user or a group, not for each of them";
            return Err(refusal::plain(Code::BadRequest, message));
        }
        let others = self.quotas.values().filter(|other| other.subject != quota.subject);
        let reserved: u64 = others.map(|other| self.pages(other.vram_reserved)).sum();
        let asked = self.pages(quota.vram_reserved).saturating_add(reserved);
        let cap = self.mapped_pages_max();
        if asked > u64::from(cap) {
            return Err(refusal::over_reserved(asked, cap));
        }
        if quota.is_none() {
            self.quotas.remove(&quota.subject);
        } else {
            let count = self.quotas.len();
            if count >= QUOTAS_MAX && !self.quotas.contains_key(&quota.subject) {
                return Err(refusal::too_many("quota", count as u64, QUOTAS_MAX as u64));
            }
            self.quotas.insert(quota.subject, quota);
        }
        self.bounds_changed = true;
        Ok(())
    }

    pub(super) fn list_quotas(&self, session: SessionId) -> Reply {
        let owner = self.owner_of_session(session);
        let page = self.limits.page_size;
        let report = |quota: &Quota| {
            let instance = match quota.subject {
                QuotaSubject::EachSession => Instance::Session(session),
                QuotaSubject::EachUid => Instance::Uid(owner.domain),
                QuotaSubject::Uid(uid) => Instance::Uid(Domain(uid)),
                QuotaSubject::Gid(gid) => Instance::Gid(gid),
            };
            let used = self.used_by(instance);
            QuotaUse {
                quota: *quota,
                vram_used: used.vram * page,
                vram_mapped: used.pinned * page,
                anonymous_used: used.anonymous * page,
            }
        };
        Reply::Quotas(self.quotas.values().map(report).collect())
    }
}

#[cfg(test)]
mod naive;
#[cfg(test)]
mod tests;
