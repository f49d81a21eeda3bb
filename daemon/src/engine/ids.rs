//! Identifiers inside the daemon.

pub use lapis_proto::ids::{AllocationId, MappingId, RequestId, SessionId, VramFrame};

/// A slot of the RAM tier: a page and 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RamFrame(pub u32);

/// A page-sized slot of the spill file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpillSlot(pub u32);

/// A file registered with the store; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u64);

/// Names an operation in flight to the store and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

/// A page: which backing, and which of its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRef {
    /// The backing.
    pub backing: BackingId,
    /// Page index in it.
    pub index: u32,
}

/// What an allocation's pages belong to: the allocation itself, or a file shared by many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackingId(pub u32);

/// A trust domain: the peer's uid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Domain(pub u32);
