//! Error codes on the wire, a `u16` each. Below 64: *refusals*, the client asked for what it can't have. From 64
//! on: *faults*, the world failed. A bug has no code: the daemon asserts.

use bincode::de::{Decode, Decoder};
use bincode::enc::{Encode, Encoder};
use bincode::error::{DecodeError, EncodeError};

/// Why a request failed. Numbers are frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
#[cfg_attr(test, wincode(tag_encoding = "u16"))]
#[non_exhaustive]
#[repr(u16)]
pub enum Code {
    /// The message breaks the protocol: fields out of range, wrong state, wrong kind of descriptor.
    #[cfg_attr(test, wincode(tag = 1))]
    BadRequest = 1,
    /// No such allocation in this session; `object` is its id.
    #[cfg_attr(test, wincode(tag = 2))]
    UnknownAllocation = 2,
    /// No such mapping in this session; `object` is its id.
    #[cfg_attr(test, wincode(tag = 3))]
    UnknownMapping = 3,
    /// Pages outside the allocation; `object` is its id, `asked` the end page, `limit` its pages.
    #[cfg_attr(test, wincode(tag = 4))]
    OutOfRange = 4,
    /// Write access to a file-backed allocation.
    #[cfg_attr(test, wincode(tag = 5))]
    ReadOnly = 5,
    /// More pages than can ever be mapped at once; `asked` and `limit` in pages.
    #[cfg_attr(test, wincode(tag = 6))]
    OverCapacity = 6,
    /// The tiers below can't hold another allocation of this size; in bytes.
    #[cfg_attr(test, wincode(tag = 7))]
    OutOfMemory = 7,
    /// The wait ended first; `asked`, `in_use` and `limit` in pages.
    #[cfg_attr(test, wincode(tag = 8))]
    TimedOut = 8,
    /// No protocol version in common; `asked` is the client's highest, `limit` the daemon's.
    #[cfg_attr(test, wincode(tag = 9))]
    VersionUnsupported = 9,
    /// The peer's credentials don't allow this.
    #[cfg_attr(test, wincode(tag = 10))]
    NotPermitted = 10,
    /// A count limit of the session or daemon is met.
    #[cfg_attr(test, wincode(tag = 11))]
    TooMany = 11,
    /// A mapping still holds pages of the allocation; `object` is the allocation.
    #[cfg_attr(test, wincode(tag = 12))]
    InUse = 12,
    /// The descriptor isn't a readable regular file.
    #[cfg_attr(test, wincode(tag = 13))]
    NotAFile = 13,
    /// The daemon is stopping.
    #[cfg_attr(test, wincode(tag = 14))]
    ShuttingDown = 14,
    /// The daemon or device can't do this.
    #[cfg_attr(test, wincode(tag = 15))]
    Unsupported = 15,
    /// A quota is met; `asked`, `in_use` and `limit` in bytes.
    #[cfg_attr(test, wincode(tag = 16))]
    OverQuota = 16,
    /// The file isn't the one that was opened any more; `object` is the byte offset of the read.
    #[cfg_attr(test, wincode(tag = 64))]
    FileChanged = 64,
    /// The file ended before the bytes asked for; `object` is the byte offset of the read.
    #[cfg_attr(test, wincode(tag = 65))]
    FileTruncated = 65,
    /// Reading or writing failed; `object` is the byte offset, `asked` the errno.
    #[cfg_attr(test, wincode(tag = 66))]
    Io = 66,
    /// The spilled bytes of a page don't match their checksum; `object` is the page.
    #[cfg_attr(test, wincode(tag = 67))]
    DataLost = 67,
    /// The GPU failed and the daemon restarts.
    #[cfg_attr(test, wincode(tag = 68))]
    DeviceLost = 68,
}

impl Code {
    /// Every code.
    pub const ALL: &[Code] = &[
        Code::BadRequest,
        Code::UnknownAllocation,
        Code::UnknownMapping,
        Code::OutOfRange,
        Code::ReadOnly,
        Code::OverCapacity,
        Code::OutOfMemory,
        Code::TimedOut,
        Code::VersionUnsupported,
        Code::NotPermitted,
        Code::TooMany,
        Code::InUse,
        Code::NotAFile,
        Code::ShuttingDown,
        Code::Unsupported,
        Code::OverQuota,
        Code::FileChanged,
        Code::FileTruncated,
        Code::Io,
        Code::DataLost,
        Code::DeviceLost,
    ];

    /// Its number on the wire.
    #[must_use]
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// The code with this number, if there is one.
    #[must_use]
    pub fn from_u16(number: u16) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.number() == number)
    }

    /// Whether the world failed, rather than the request being one that can't be granted.
    #[must_use]
    pub const fn is_fault(self) -> bool {
        self.number() >= 64
    }

    /// Whether the same request may succeed later, with nothing changed by the caller.
    #[must_use]
    pub const fn is_retryable(self) -> bool {
        match self {
            Code::TimedOut
            | Code::OutOfMemory
            | Code::TooMany
            | Code::OverQuota
            | Code::ShuttingDown
            | Code::DeviceLost => true,
            Code::BadRequest
            | Code::UnknownAllocation
            | Code::UnknownMapping
            | Code::OutOfRange
            | Code::ReadOnly
            | Code::OverCapacity
            | Code::VersionUnsupported
            | Code::NotPermitted
            | Code::InUse
            | Code::NotAFile
            | Code::Unsupported
            | Code::FileChanged
            | Code::FileTruncated
            | Code::Io
            | Code::DataLost => false,
        }
    }
}

impl Encode for Code {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        self.number().encode(encoder)
    }
}

impl<Context> Decode<Context> for Code {
    fn decode<D: Decoder<Context = Context>>(decoder: &mut D) -> Result<Self, DecodeError> {
        let number = u16::decode(decoder)?;
        Code::from_u16(number).ok_or(DecodeError::Other("unknown error code"))
    }
}

bincode::impl_borrow_decode!(Code);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_frozen_and_split_refusals_from_faults() {
        let numbers: Vec<u16> = Code::ALL.iter().map(|code| code.number()).collect();
        assert_eq!(
            numbers,
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 64, 65, 66, 67, 68]
        );
        assert_eq!(Code::from_u16(8), Some(Code::TimedOut));
        assert_eq!(Code::from_u16(0), None);
        assert!(!Code::Unsupported.is_fault());
        assert!(Code::FileChanged.is_fault());
        assert!(Code::TimedOut.is_retryable());
        assert!(!Code::OverCapacity.is_retryable());
    }
}
