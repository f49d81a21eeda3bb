//! What each request may be answered with: the documented refusals, as plainly as they can be written down.

use lapis_proto::code::Code;
use lapis_proto::message::{
    Access, Flush, Map, PAGES_PER_MAP_MAX, PageRange, PlanUse, Quota, QuotaSubject,
    RANGES_PER_REQUEST_MAX, SetPlan, SetTier, Tier,
};
use lapisd::engine::event::Request;
use lapisd::engine::ids::{MappingId, SessionId, VramFrame};

use super::ledger::{Ledger, PageId, Session};
use super::tiers::mapped_of;

/// What a reply may be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// What was asked for, or a refusal with one of these codes.
    Grant(Vec<Code>),
    /// A refusal with one of these codes.
    Refuse(Vec<Code>),
}

impl Verdict {
    /// Whether it may be what was asked for.
    #[must_use]
    pub(super) fn may_be_granted(&self) -> bool {
        matches!(self, Self::Grant(_))
    }

    /// Whether it may be a refusal with this code.
    #[must_use]
    pub(super) fn allows(&self, code: Code) -> bool {
        match self {
            Self::Grant(codes) | Self::Refuse(codes) => codes.contains(&code),
        }
    }

    /// A refusal if there is any reason for one; one for `others` either way.
    fn of(mut reasons: Vec<Code>, others: &[Code]) -> Self {
        let refuse = !reasons.is_empty();
        reasons.extend(others);
        if refuse { Self::Refuse(reasons) } else { Self::Grant(reasons) }
    }
}

/// Decides on a request of an open session.
#[must_use]
pub(super) fn judge(ledger: &Ledger, id: SessionId, body: &Request, device_lost: bool) -> Verdict {
    let session = ledger.session(id).expect("the caller looked it up");
    if session.said_bye {
        return Verdict::Refuse(vec![Code::BadRequest]);
    }
    let lost = || Verdict::Refuse(vec![Code::DeviceLost]);
    match body {
        Request::Allocate { .. }
        | Request::OpenFile { .. }
        | Request::Map(_)
        | Request::Prefetch(_)
        | Request::Flush(_)
        | Request::SetTier(_)
            if device_lost =>
        {
            lost()
        }
        Request::Allocate { size } => allocate(ledger, id, session, *size),
        Request::OpenFile { identity, offset, length, .. } => {
            open_file(ledger, session, identity.size, *offset, *length)
        }
        Request::Free(allocation) => {
            let mut reasons = Vec::new();
            if !session.allocations.contains_key(allocation) {
                reasons.push(Code::UnknownAllocation);
            }
            let names = |ranges: &[PageRange]| ranges.iter().any(|r| r.allocation == *allocation);
            let mapped = session.mappings.values().any(|mapping| names(&mapping.ranges));
            if mapped || ledger.waiting(id).any(names) {
                reasons.push(Code::InUse);
            }
            Verdict::of(reasons, &[])
        }
        Request::Map(request) => map(ledger, id, session, request),
        Request::Unmap(ids) => {
            let known = |id: &MappingId| session.mappings.contains_key(id);
            let twice = (1..ids.len()).any(|index| ids[..index].contains(&ids[index]));
            let bad = twice || !ids.iter().all(known);
            Verdict::of(if bad { vec![Code::UnknownMapping] } else { Vec::new() }, &[])
        }
        Request::Prefetch(named) => Verdict::of(ranges(session, &named.ranges), &[]),
        Request::CancelPrefetch(named) => Verdict::of(ranges(session, named), &[]),
        Request::Advise(named) => Verdict::of(ranges(session, &named.ranges), &[]),
        Request::SetPlan(plan) => set_plan(session, plan),
        Request::Flush(request) => flush(ledger, session, request),
        Request::SetQuota(quota) => set_quota(ledger, session, quota),
        Request::SetTier(request) => set_tier(ledger, session, request),
        Request::Stat | Request::ListQuotas | Request::WorkingSet(_) => {
            Verdict::of(Vec::new(), &[])
        }
        Request::Bye => {
            let busy = !session.mappings.is_empty() || ledger.waits(id);
            Verdict::of(if busy { vec![Code::InUse] } else { Vec::new() }, &[])
        }
        Request::Revoked(frames) => {
            let mapped = |frame: &VramFrame| {
                session.mappings.values().any(|mapping| mapping.frames.contains(frame))
            };
            let lies = frames.iter().any(mapped);
            Verdict::of(if lies { vec![Code::InUse] } else { Vec::new() }, &[])
        }
    }
}

fn allocate(ledger: &Ledger, id: SessionId, session: &Session, size: u64) -> Verdict {
    let pages = size.div_ceil(ledger.limits.page_size);
    let mut reasons = allocation_reasons(ledger, session, pages);
    if anonymous_pages(ledger) + pages > anonymous_max(ledger) {
        reasons.push(Code::OutOfMemory);
    }
    if !ledger.shares.allow_anonymous(ledger.owner(id), &ledger.anonymous(), pages) {
        reasons.push(Code::OverQuota);
    }
    // Pages of allocations that are gone may still be in use.
    Verdict::of(reasons, &[Code::OutOfMemory, Code::OverQuota, Code::TooMany])
}

fn anonymous_pages(ledger: &Ledger) -> u64 {
    ledger.anonymous().iter().map(|(_, pages)| u64::from(*pages)).sum()
}

fn anonymous_max(ledger: &Ledger) -> u64 {
    let (ram, slots) = ledger.tiers.below();
    ledger.limits.anonymous_pages_of(ram, slots)
}

fn flush(ledger: &Ledger, session: &Session, flush: &Flush) -> Verdict {
    let mut reasons = ranges(session, &flush.ranges);
    if reasons.is_empty() {
        let named = |id: &lapisd::engine::ids::AllocationId, page: u32| {
            let of =
                |r: &PageRange| r.allocation == *id && (r.first..r.first + r.count).contains(&page);
            flush.ranges.iter().any(of) && !session.allocations[id].file
        };
        let written = session.mappings.values().filter(|held| held.access != Access::Read);
        let mut pages = written.flat_map(|held| &held.ranges).flat_map(|range| {
            (range.first..range.first + range.count).map(|page| (range.allocation, page))
        });
        if pages.any(|(id, page)| named(&id, page)) {
            reasons.push(Code::InUse);
        }
    }
    // A map that is admitted and not granted yet writes too; nobody knows here which pages have been written to.
    let mut others = vec![Code::InUse, Code::TimedOut];
    if ledger.limits.spill_slots == 0 {
        others.push(Code::Unsupported);
    }
    Verdict::of(reasons, &others)
}

fn set_quota(ledger: &Ledger, session: &Session, quota: &Quota) -> Verdict {
    let mut reasons = Vec::new();
    if !session.admin {
        reasons.push(Code::NotPermitted);
    }
    let each = matches!(quota.subject, QuotaSubject::EachSession | QuotaSubject::EachUid);
    if each && quota.vram_reserved > 0 {
        reasons.push(Code::BadRequest);
    }
    if ledger.shares.reserved_with(Some(quota)) > u64::from(ledger.tiers.mapped_max()) {
        reasons.push(Code::OverCapacity);
    }
    Verdict::of(reasons, &[])
}

fn set_tier(ledger: &Ledger, session: &Session, set: &SetTier) -> Verdict {
    let mut reasons = Vec::new();
    if !session.admin {
        reasons.push(Code::NotPermitted);
    }
    let Some((tier, frames)) = ledger.tiers.asked(set) else {
        reasons.push(Code::BadRequest);
        return Verdict::Refuse(reasons);
    };
    let reserved = ledger.shares.reserved_with(None);
    if tier == Tier::Vram && reserved > u64::from(mapped_of(frames)) {
        reasons.push(Code::OverCapacity);
    }
    let (ram, slots) = match (tier, ledger.tiers.below()) {
        (Tier::Vram, below) => below,
        (Tier::Ram, (_, slots)) => (frames, slots),
        (Tier::Nvme, (ram, _)) => (ram, frames),
    };
    if anonymous_pages(ledger) > ledger.limits.anonymous_pages_of(ram, slots) {
        reasons.push(Code::OutOfMemory);
    }
    Verdict::of(reasons, &[Code::OutOfMemory, Code::TimedOut])
}

/// Why distinct pages can't be mapped together as things are now, whoever waits for whom.
#[must_use]
pub(super) fn impossible(ledger: &Ledger, pages: &[PageId]) -> Vec<Code> {
    let mut reasons = Vec::new();
    let cap = u64::from(ledger.tiers.mapped_max());
    let reserved = ledger.shares.reserved_for_others(pages);
    if pages.len() as u64 + reserved > cap {
        reasons.push(Code::OverCapacity);
    }
    if !ledger.shares.allow_mapped(pages) {
        reasons.push(Code::OverQuota);
    }
    reasons
}

fn open_file(ledger: &Ledger, session: &Session, size: u64, offset: u64, length: u64) -> Verdict {
    let mut reasons = Vec::new();
    if ledger.limits.unified && !offset.is_multiple_of(4096) {
        reasons.push(Code::BadRequest);
    }
    if offset.checked_add(length).is_none_or(|end| end > size) {
        reasons.push(Code::OutOfRange);
    }
    reasons.extend(allocation_reasons(ledger, session, length.div_ceil(ledger.limits.page_size)));
    Verdict::of(reasons, &[Code::TooMany])
}

fn allocation_reasons(ledger: &Ledger, session: &Session, pages: u64) -> Vec<Code> {
    let limits = &ledger.limits;
    let mut reasons = Vec::new();
    if pages == 0 {
        reasons.push(Code::BadRequest);
    }
    let full = session.allocations.len() >= limits.allocations_per_session_max as usize;
    if full || pages > limits.pages_max {
        reasons.push(Code::TooMany);
    }
    reasons
}

/// Why ranges can't be had at all.
fn ranges(session: &Session, ranges: &[PageRange]) -> Vec<Code> {
    let mut reasons = Vec::new();
    if ranges.is_empty() || ranges.len() > RANGES_PER_REQUEST_MAX {
        reasons.push(Code::BadRequest);
    }
    if ranges.iter().map(|range| u64::from(range.count)).sum::<u64>() > u64::from(PAGES_PER_MAP_MAX)
    {
        reasons.push(Code::OverCapacity);
    }
    for range in ranges {
        match session.allocations.get(&range.allocation) {
            None => reasons.push(Code::UnknownAllocation),
            Some(allocation) => {
                let end = u64::from(range.first) + u64::from(range.count);
                if range.count == 0 || end > u64::from(allocation.pages) {
                    reasons.push(Code::OutOfRange);
                }
            }
        }
    }
    reasons
}

fn set_plan(session: &Session, plan: &SetPlan) -> Verdict {
    let mut reasons = Vec::new();
    for step in &plan.steps {
        if step.uses.is_empty() {
            reasons.push(Code::BadRequest);
        }
        let alone = |used: &PlanUse| ranges(session, &[used.range]);
        // There is no limit to the pages of a plan.
        let not_too_many = |code: &Code| *code != Code::OverCapacity;
        reasons.extend(step.uses.iter().flat_map(alone).filter(not_too_many));
    }
    Verdict::of(reasons, &[Code::TooMany])
}

fn map(ledger: &Ledger, id: SessionId, session: &Session, map: &Map) -> Verdict {
    let limits = &ledger.limits;
    let mut reasons = ranges(session, &map.ranges);
    if reasons.is_empty() {
        let allocation = |range: &PageRange| session.allocations[&range.allocation];
        let writes = map.access != Access::Read;
        if writes && map.ranges.iter().any(|range| allocation(range).file) {
            reasons.push(Code::ReadOnly);
        }
        reasons.extend(impossible(ledger, &Ledger::pages_of(session, &map.ranges)));
        let held = session.mappings.len() + ledger.maps_waiting(id);
        if held >= limits.mappings_per_session_max as usize {
            reasons.push(Code::TooMany);
        }
    }
    // Faults are told in the moment they happen: the ledger sees to them.
    let others: &[Code] = if reasons.is_empty() { &[Code::TimedOut] } else { &[] };
    Verdict::of(reasons, others)
}
