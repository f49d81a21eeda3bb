//! Error codes on the wire. Below 64: *refusals*, the client asked for what it can't have. From 64 on: *faults*,
//! the world failed. A bug has no code: the daemon asserts.

use bincode::{Decode, Encode};

/// Why a request failed. Numbers are frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Encode, Decode)]
#[non_exhaustive]
pub enum Code {
    /// The message breaks the protocol: fields out of range, wrong state, wrong kind of descriptor.
    BadRequest,
    /// No such allocation in this session; `object` is its id.
    UnknownAllocation,
    /// No such mapping in this session; `object` is its id.
    UnknownMapping,
    /// Pages outside the allocation; `object` is its id, `asked` the end page, `limit` its pages.
    OutOfRange,
    /// Write access to a file-backed allocation.
    ReadOnly,
    /// More pages than can ever be mapped at once; `asked` and `limit` in pages.
    OverCapacity,
    /// The tiers below can't hold another allocation of this size; in bytes.
    OutOfMemory,
    /// The wait ended first; `asked`, `in_use` and `limit` in pages.
    TimedOut,
    /// No protocol version in common; `asked` is the client's highest, `limit` the daemon's.
    VersionUnsupported,
    /// The peer's credentials don't allow this.
    NotPermitted,
    /// A count limit of the session or daemon is met.
    TooMany,
    /// A mapping still holds pages of the allocation; `object` is the allocation.
    InUse,
    /// The descriptor isn't a readable regular file.
    NotAFile,
    /// The daemon is stopping.
    ShuttingDown,
    /// The daemon or device can't do this.
    Unsupported,
    /// The file isn't the one that was opened any more; `object` is the byte offset of the read.
    FileChanged,
    /// The file ended before the bytes asked for; `object` is the byte offset of the read.
    FileTruncated,
    /// Reading or writing failed; `object` is the byte offset, `asked` the errno.
    Io,
    /// The spilled bytes of a page don't match their checksum; `object` is the page.
    DataLost,
    /// The GPU failed and the daemon restarts.
    DeviceLost,
}
