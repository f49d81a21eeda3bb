//! Refusals: what the engine says no with, each naming the object, the numbers and what to do.

use lapis_proto::code::Code;
use lapis_proto::message::Refused;

use super::event::TransferFault;
use super::ids::{AllocationId, MappingId};

/// A refusal without numbers.
#[must_use]
pub fn plain(code: Code, message: &str) -> Refused {
    Refused { code, object: 0, asked: 0, in_use: 0, limit: 0, message: message.to_owned() }
}

pub(super) fn device_lost() -> Refused {
    plain(Code::DeviceLost, "the device is lost; reconnect once the daemon has restarted")
}

pub(super) fn unknown_allocation(id: AllocationId) -> Refused {
    let message =
        format!("allocation {} does not exist in this session: was it freed already?", id.0);
    Refused { object: id.0, ..plain(Code::UnknownAllocation, &message) }
}

pub(super) fn unknown_mapping(id: MappingId) -> Refused {
    let message = format!("mapping {} does not exist in this session: was it ended already?", id.0);
    Refused { object: id.0, ..plain(Code::UnknownMapping, &message) }
}

pub(super) fn out_of_range(id: AllocationId, end: u64, pages: u32) -> Refused {
    let message = format!("allocation {} has {pages} pages, the range ends at page {end}", id.0);
    Refused {
        object: id.0,
        asked: end,
        limit: u64::from(pages),
        ..plain(Code::OutOfRange, &message)
    }
}

pub(super) fn over_capacity(asked: u64, limit: u32) -> Refused {
    let message = format!(
        "{asked} pages can never be mapped at once: at most {limit} pages fit in VRAM; map in parts"
    );
    Refused { asked, limit: u64::from(limit), ..plain(Code::OverCapacity, &message) }
}

pub(super) fn over_unreserved(asked: u64, limit: u32) -> Refused {
    let message = format!(
        "{asked} pages can never be mapped at once: at most {limit} pages of VRAM are not reserved for others; map in \
         parts, or have an administrator lower their reserves"
    );
    Refused { asked, limit: u64::from(limit), ..plain(Code::OverCapacity, &message) }
}

pub(super) fn over_reserved(asked: u64, limit: u32) -> Refused {
    let message = format!(
        "{asked} pages of VRAM would be reserved by quotas, but at most {limit} could be mapped: reserve less, or \
         give VRAM more"
    );
    Refused { asked, limit: u64::from(limit), ..plain(Code::OverCapacity, &message) }
}

pub(super) fn out_of_memory(asked: u64, in_use: u64, limit: u64, page_size: u64) -> Refused {
    let message = format!(
        "an anonymous allocation of {asked} pages does not fit: RAM and spill hold {limit} pages of \
         {page_size} bytes, {in_use} are taken; free some, or raise ram or nvme"
    );
    Refused {
        asked: asked.saturating_mul(page_size),
        in_use: in_use.saturating_mul(page_size),
        limit: limit.saturating_mul(page_size),
        ..plain(Code::OutOfMemory, &message)
    }
}

pub(super) fn timed_out(asked: u64, in_use: u32, limit: u32, waiting_for: &str) -> Refused {
    let message = format!(
        "the wait for {asked} pages ended: {in_use} of {limit} mappable pages are mapped; waited for \
         {waiting_for}; unmap some, or wait longer"
    );
    Refused {
        asked,
        in_use: u64::from(in_use),
        limit: u64::from(limit),
        ..plain(Code::TimedOut, &message)
    }
}

pub(super) fn too_many(what: &str, in_use: u64, limit: u64) -> Refused {
    let message = format!("this would be {what} number {}: the limit is {limit}", in_use + 1);
    Refused { asked: 1, in_use, limit, ..plain(Code::TooMany, &message) }
}

pub(super) fn in_use(id: AllocationId) -> Refused {
    let message = format!("allocation {} is still mapped: unmap it first", id.0);
    Refused { object: id.0, ..plain(Code::InUse, &message) }
}

pub(super) fn fault(page: u32, fault: &TransferFault) -> Refused {
    let (code, offset) = fault.wire();
    // Where in the spill it lay is nothing that a client could know.
    let object = if code == Code::DataLost { u64::from(page) } else { offset };
    let asked = match fault {
        TransferFault::Store(crate::store::StoreFault::Io { errno, .. }) => {
            u64::try_from(*errno as i32).unwrap_or(0)
        }
        _ => 0,
    };
    let message = format!("page {page}: {fault}; {}", fault.advice());
    Refused { object, asked, ..plain(code, &message) }
}
