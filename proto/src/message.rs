//! The messages, one struct each. A message's kind is its number in the header; its body is the struct.
//!
//! Every request is answered exactly once, by the reply named in its documentation or by [`Refused`].

mod admin;
mod plan;
mod stats;
mod working_set;

use bincode::{Decode, Encode};

use crate::code::Code;
use crate::ids::{AllocationId, MappingId, SessionId, VramFrame};
pub use crate::kind::{Kind, Message};
pub use admin::{
    ListQuotas, QUOTAS_MAX, Quota, QuotaSubject, QuotaUse, Quotas, SetQuota, SetTier, Tier,
};
pub use plan::{PLAN_STEPS_MAX, PLAN_USES_MAX, PLANS_PER_SESSION_MAX, PlanStep, PlanUse, SetPlan};
pub use stats::{Counters, HopStats, Stat, Stats, TierStats};
pub use working_set::{
    AccessPattern, CURVE_POINTS_MAX, CurvePoint, Recency, SessionSet, WORKING_SETS_MAX, WorkingSet,
    WorkingSets,
};

/// Ranges in one request.
pub const RANGES_PER_REQUEST_MAX: usize = 1024;
/// Pages in one `Map`, so that its reply stays far below the body limit.
pub const PAGES_PER_MAP_MAX: u32 = 65_536;
/// Bytes of a client's name in `Hello`.
pub const CLIENT_NAME_BYTES_MAX: usize = 64;

/// Opens a session. Reply: [`Welcome`], or [`Refused`] with `VersionUnsupported` and the connection closes.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Hello {
    /// Lowest protocol version the client speaks.
    pub version_min: u16,
    /// Highest protocol version the client speaks.
    pub version_max: u16,
    /// Feature bits the client knows; unknown bits are ignored.
    pub features: u64,
    /// Name for the daemon's log, at most [`CLIENT_NAME_BYTES_MAX`] bytes.
    pub client_name: String,
}

/// What kind of device backs the VRAM frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub enum DeviceKind {
    /// VRAM frames are memfds in host memory.
    Sim,
    /// VRAM frames are CUDA allocation handles.
    Cuda,
}

/// The session is open.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Welcome {
    /// The version both sides speak from here on.
    pub version: u16,
    /// Feature bits both sides know.
    pub features: u64,
    /// This session's id.
    pub session: SessionId,
    /// Bytes of a page and of a frame; a power of two.
    pub page_size: u64,
    /// VRAM frames in all.
    pub vram_frames: u32,
    /// Most pages that mappings of all sessions may hold at once.
    pub mapped_pages_max: u32,
    /// Kind of device.
    pub device: DeviceKind,
    /// The GPU's UUID; zeros on sim.
    pub device_uuid: [u8; 16],
    /// VRAM and RAM are one memory: pages are read to where the device uses them.
    pub unified: bool,
    /// The daemon's version, for people.
    pub daemon_version: String,
}

/// Reserves an anonymous allocation: starts as zeros, private to the session. Reply: [`Allocated`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Allocate {
    /// Bytes, at least 1; rounded up to whole pages.
    pub size: u64,
}

/// Allocates `length` bytes of a file from `offset` on, read-only. Carries the open file as its one descriptor;
/// the daemon reads through that descriptor as it is (opened with `O_DIRECT` or not). Reply: [`Allocated`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct OpenFile {
    /// First byte, anywhere in the file.
    pub offset: u64,
    /// Bytes, at least 1; `offset + length` may not pass the file's end.
    pub length: u64,
}

/// An allocation exists.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Allocated {
    /// Its id.
    pub allocation: AllocationId,
    /// Its pages.
    pub pages: u32,
}

/// Gives an allocation up. Refused with `InUse` while a mapping holds any of its pages. Reply: [`Done`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Free {
    /// Which.
    pub allocation: AllocationId,
}

/// Consecutive pages of one allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct PageRange {
    /// Of which allocation.
    pub allocation: AllocationId,
    /// First page.
    pub first: u32,
    /// How many, at least 1.
    pub count: u32,
}

/// What a mapping is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub enum Access {
    /// Only reads. Writing through such a mapping is a client bug.
    Read,
    /// Reads and writes; the old bytes are there.
    Write,
    /// Writes every byte before it reads any; the old bytes need not be there.
    Overwrite,
}

/// Asks for ranges in VRAM, all or nothing. Reply: [`Mapped`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Map {
    /// At least 1, at most [`RANGES_PER_REQUEST_MAX`]; [`PAGES_PER_MAP_MAX`] pages in all.
    pub ranges: Vec<PageRange>,
    /// For what.
    pub access: Access,
    /// Microseconds to wait before `TimedOut`; 0 means: only if it needs no waiting for others.
    pub wait_us: u64,
}

/// The ranges are in VRAM until `Unmap`.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Mapped {
    /// Its id.
    pub mapping: MappingId,
    /// One frame a page, in the order of the request's ranges.
    pub frames: Vec<VramFrame>,
    /// Pages that were in VRAM when the request came.
    pub hits_vram: u32,
    /// Pages that came from RAM.
    pub hits_ram: u32,
    /// Microseconds from the request's arrival to this reply.
    pub waited_us: u64,
}

/// Ends mappings; the client touches the pages no more. Reply: [`Done`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Unmap {
    /// Which, at most [`RANGES_PER_REQUEST_MAX`].
    pub mappings: Vec<MappingId>,
}

/// Says that these ranges will be mapped soon, in this order. Reply: [`Done`], at once.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Prefetch {
    /// At least 1, at most [`RANGES_PER_REQUEST_MAX`].
    pub ranges: Vec<PageRange>,
    /// Higher ones go first; 0 is the usual.
    pub priority: u8,
    /// Microseconds after which a page that is not under way yet is not worth fetching any more; 0: never.
    pub within_us: u64,
}

/// Takes prefetches of these ranges back, as far as they have not begun; what came already may be evicted like any
/// other page. Reply: [`Done`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct CancelPrefetch {
    /// At least 1, at most [`RANGES_PER_REQUEST_MAX`].
    pub ranges: Vec<PageRange>,
}

/// How a client is going to use a range. To be fetched soon is said by [`Prefetch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub enum Advice {
    /// Nothing is known: the default.
    Normal,
    /// Once, in order: a page is the first to go after its use.
    Sequential,
    /// In no order: the page used longest ago goes first.
    Random,
    /// Often: other pages go first.
    Keep,
    /// No more for a long time: the pages go first.
    DontNeed,
}

/// Advises how ranges will be used; the bytes stay as they are. Reply: [`Done`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Advise {
    /// At least 1, at most [`RANGES_PER_REQUEST_MAX`].
    pub ranges: Vec<PageRange>,
    /// How.
    pub advice: Advice,
}

/// Writes pages of anonymous allocations down to the spill, where they have no copy yet; they stay where they are as
/// well. Pages that are mapped for writing are refused with `InUse`. Reply: [`Done`] once all are written.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Flush {
    /// At least 1, at most [`RANGES_PER_REQUEST_MAX`].
    pub ranges: Vec<PageRange>,
    /// Microseconds to wait before `TimedOut`; what is written by then stays written.
    pub wait_us: u64,
}

/// The client has unmapped and closed every frame it imported and will send nothing more. Reply: [`Done`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Bye {}

/// The client holds these frames no more: unmapped, closed. Answers the [`Revoke`] event. Reply: [`Done`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Revoked {
    /// Which.
    pub frames: Vec<VramFrame>,
}

/// The request succeeded and has nothing else to say.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Done {}

/// The request failed. Nothing of it was done, where the request's documentation doesn't say otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Refused {
    /// What kind of failure.
    pub code: Code,
    /// The object meant: an allocation, mapping, byte offset, ... as `code` says; 0 if none.
    pub object: u64,
    /// What was asked for, in the unit that `code` says.
    pub asked: u64,
    /// How much of the limit is in use.
    pub in_use: u64,
    /// The limit that was met.
    pub limit: u64,
    /// The same for people: what, which, why, what to do.
    pub message: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} ({:?})", self.message, self.code)
    }
}

impl std::error::Error for Refused {}

/// Descriptors of frames that this client has not imported yet, in the order of `frames`. Sent before the
/// [`Mapped`] that names them, with the same request id; more than one may come.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Frames {
    /// One per descriptor.
    pub frames: Vec<VramFrame>,
}

/// Event: the daemon needs these frames back. The client drains its work, unmaps and closes them, then sends
/// [`Revoked`]. Only frames that no mapping of the client holds are asked for.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Revoke {
    /// Which.
    pub frames: Vec<VramFrame>,
}
