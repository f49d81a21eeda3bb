//! What each request may be answered with: the documented refusals, as plainly as they can be written down.

use lapis_proto::code::Code;
use lapis_proto::message::{Access, Map, PAGES_PER_MAP_MAX, PageRange, RANGES_PER_REQUEST_MAX};
use lapisd::engine::event::Request;
use lapisd::engine::ids::{MappingId, SessionId, VramFrame};
use lapisd::engine::limits::Limits;

use super::ledger::{Ledger, Session};

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
            if device_lost =>
        {
            lost()
        }
        Request::Allocate { size } => allocate(ledger, session, *size),
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
        Request::CancelPrefetch(_)
        | Request::Advise(_)
        | Request::Flush(_)
        | Request::SetQuota(_)
        | Request::ListQuotas
        | Request::SetTier(_) => unreachable!("no client of the simulation asks for this"),
        Request::Stat => Verdict::of(Vec::new(), &[]),
        Request::Bye => {
            let busy = !session.mappings.is_empty() || ledger.waiting(id).next().is_some();
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

fn allocate(ledger: &Ledger, session: &Session, size: u64) -> Verdict {
    let limits = &ledger.limits;
    let pages = size.div_ceil(limits.page_size);
    let anonymous: u64 = ledger.allocations().filter(|a| !a.file).map(|a| u64::from(a.pages)).sum();
    let mut reasons = allocation_reasons(ledger, session, pages);
    if anonymous + pages > limits.anonymous_pages_of(limits.ram_frames, limits.spill_slots) {
        reasons.push(Code::OutOfMemory);
    }
    // Pages of allocations that are gone may still be in use.
    Verdict::of(reasons, &[Code::OutOfMemory, Code::TooMany])
}

fn open_file(ledger: &Ledger, session: &Session, size: u64, offset: u64, length: u64) -> Verdict {
    let mut reasons = Vec::new();
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

fn map(ledger: &Ledger, id: SessionId, session: &Session, map: &Map) -> Verdict {
    let limits = &ledger.limits;
    let mut reasons = ranges(session, &map.ranges);
    if reasons.is_empty() {
        let allocation = |range: &PageRange| session.allocations[&range.allocation];
        let writes = map.access != Access::Read;
        if writes && map.ranges.iter().any(|range| allocation(range).file) {
            reasons.push(Code::ReadOnly);
        }
        let mut pages: Vec<_> = map
            .ranges
            .iter()
            .flat_map(|r| (r.first..r.first + r.count).map(|page| (allocation(r).backing, page)))
            .collect();
        pages.sort_unstable();
        pages.dedup();
        if pages.len() > Limits::mapped_pages_of(limits.vram_frames) as usize {
            reasons.push(Code::OverCapacity);
        }
        let held = session.mappings.len() + ledger.waiting(id).count();
        if held >= limits.mappings_per_session_max as usize {
            reasons.push(Code::TooMany);
        }
    }
    // Faults are told in the moment they happen: the ledger sees to them.
    let others: &[Code] = if reasons.is_empty() { &[Code::TimedOut] } else { &[] };
    Verdict::of(reasons, others)
}
