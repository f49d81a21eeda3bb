//! Identifiers that cross the wire. Each is opaque to clients and never reused while the daemon runs.

use bincode::{Decode, Encode};

/// A client's contiguous range of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct AllocationId(pub u64);

/// A client's right to touch ranges in VRAM, held from `map` to `unmap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct MappingId(pub u64);

/// One client connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct SessionId(pub u64);

/// Chosen by the client, echoed in the reply; 0 marks an event that answers no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct RequestId(pub u64);

/// Index of a VRAM frame, stable for the daemon's life. A client keeps what it imported by this index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct VramFrame(pub u32);
