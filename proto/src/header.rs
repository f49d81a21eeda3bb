//! The fixed header in front of every body, checked before anything is allocated for it.
//!
//! ```text
//! byte  0        4         6      8          12         14         16           24
//!       | magic  | version | kind | body_len | fd_count | reserved | request_id |
//!       | u32    | u16     | u16  | u32      | u16      | u16 = 0  | u64        |   all little-endian
//! ```

use crate::fds::FDS_PER_MESSAGE_MAX;
use crate::ids::RequestId;
use crate::message::Kind;
use crate::message::{PAGES_PER_MAP_MAX, PageRange, RANGES_PER_REQUEST_MAX};
use crate::version::{VERSION, VERSION_MIN, VERSION_OF_HANDSHAKE};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 24;
/// Most bytes of a body.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// Most bytes of a frame: header and body.
pub const FRAME_BYTES_MAX: usize = HEADER_BYTES + BODY_BYTES_MAX;
/// First bytes of every frame: `LPS1`.
pub const MAGIC: [u8; 4] = *b"LPS1";

const _: () = assert!(HEADER_BYTES == 4 + 2 + 2 + 4 + 2 + 2 + 8);
const _: () = assert!(BODY_BYTES_MAX <= u32::MAX as usize);
// The longest request and the longest reply fit, with room for their other fields.
const _: () = assert!(RANGES_PER_REQUEST_MAX * size_of::<PageRange>() + 64 <= BODY_BYTES_MAX);
const _: () = assert!(PAGES_PER_MAP_MAX as usize * 4 + 64 <= BODY_BYTES_MAX);

/// A header whose fields are known to be in range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Protocol version that the body is written in.
    pub version: u16,
    /// What the body is.
    pub kind: Kind,
    /// Bytes of the body, at most [`BODY_BYTES_MAX`].
    pub body_len: u32,
    /// Descriptors that come with the frame, within [`Kind::fds`].
    pub fd_count: u16,
    /// The request that this is, or answers.
    pub request: RequestId,
}

/// The bytes are not a header. The connection can't be read any further.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not our protocol.
    #[error("not a Lapis message: it starts with {found:02x?}, not with LPS1")]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// A version we don't speak.
    #[error(
        "message of protocol version {found}, expected {VERSION_MIN} to {VERSION} (handshake: {VERSION_OF_HANDSHAKE})"
    )]
    Version {
        /// Its version.
        found: u16,
    },
    /// A kind we don't know.
    #[error("unknown message kind {found}")]
    Kind {
        /// Its number.
        found: u16,
    },
    /// The body is too long.
    #[error("{kind:?} with a body of {found} bytes; at most {BODY_BYTES_MAX} are allowed")]
    BodyTooLong {
        /// Of this kind.
        kind: Kind,
        /// Its bytes.
        found: u32,
    },
    /// More or fewer descriptors than the kind carries.
    #[error("{kind:?} with {found} descriptors; it carries {} to {}", kind.fds().start(), kind.fds().end())]
    FdCount {
        /// Of this kind.
        kind: Kind,
        /// Its descriptors.
        found: u16,
    },
    /// The reserved bytes aren't zero.
    #[error("{kind:?} with reserved header bytes {found:#06x}, expected 0")]
    Reserved {
        /// Of this kind.
        kind: Kind,
        /// Their value.
        found: u16,
    },
}

impl Header {
    /// The version that a message of this kind is sent with.
    #[must_use]
    pub const fn version_of(kind: Kind) -> u16 {
        if kind.is_handshake() { VERSION_OF_HANDSHAKE } else { VERSION }
    }

    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.kind.number().to_le_bytes());
        bytes[8..12].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.fd_count.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.request.0.to_le_bytes());
        bytes
    }

    /// Reads a header and checks every field.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, HeaderError> {
        let [m0, m1, m2, m3, v0, v1, k0, k1, b0, b1, b2, b3, f0, f1, r0, r1, request @ ..] = *bytes;
        let magic = [m0, m1, m2, m3];
        if magic != MAGIC {
            return Err(HeaderError::Magic { found: magic });
        }
        let version = u16::from_le_bytes([v0, v1]);
        if !(VERSION_MIN..=VERSION).contains(&version) && version != VERSION_OF_HANDSHAKE {
            return Err(HeaderError::Version { found: version });
        }
        let number = u16::from_le_bytes([k0, k1]);
        let kind = Kind::from_u16(number).ok_or(HeaderError::Kind { found: number })?;
        if kind.is_handshake() && version != VERSION_OF_HANDSHAKE {
            return Err(HeaderError::Version { found: version });
        }
        let body_len = u32::from_le_bytes([b0, b1, b2, b3]);
        if usize::try_from(body_len).map_or(true, |length| length > BODY_BYTES_MAX) {
            return Err(HeaderError::BodyTooLong { kind, found: body_len });
        }
        let fd_count = u16::from_le_bytes([f0, f1]);
        if fd_count > FDS_PER_MESSAGE_MAX || !kind.fds().contains(&fd_count) {
            return Err(HeaderError::FdCount { kind, found: fd_count });
        }
        let reserved = u16::from_le_bytes([r0, r1]);
        if reserved != 0 {
            return Err(HeaderError::Reserved { kind, found: reserved });
        }
        Ok(Header {
            version,
            kind,
            body_len,
            fd_count,
            request: RequestId(u64::from_le_bytes(request)),
        })
    }

    /// Bytes of the body.
    #[must_use]
    pub fn body_bytes(&self) -> usize {
        // Bounded by BODY_BYTES_MAX, so it fits wherever the crate compiles.
        usize::try_from(self.body_len).unwrap_or(BODY_BYTES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frozen() -> [u8; HEADER_BYTES] {
        [b'L', b'P', b'S', b'1', 1, 0, 17, 0, 0x10, 0, 0, 0, 1, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1]
    }

    fn with(at: usize, value: &[u8]) -> Result<Header, HeaderError> {
        let mut bytes = frozen();
        bytes[at..at + value.len()].copy_from_slice(value);
        Header::decode(&bytes)
    }

    #[test]
    fn bytes_are_frozen() {
        let header = Header {
            version: 1,
            kind: Kind::OpenFile,
            body_len: 16,
            fd_count: 1,
            request: RequestId(0x0102_0304_0506_0708),
        };
        assert_eq!(header.encode(), frozen());
        assert_eq!(Header::decode(&frozen()), Ok(header));
    }

    #[test]
    fn each_field_is_checked() {
        let kind = Kind::OpenFile;
        assert_eq!(with(0, b"HTTP"), Err(HeaderError::Magic { found: *b"HTTP" }));
        assert_eq!(with(4, &[0, 0]), Err(HeaderError::Version { found: 0 }));
        assert_eq!(with(4, &[2, 0]), Err(HeaderError::Version { found: 2 }));
        assert_eq!(with(6, &[0, 0]), Err(HeaderError::Kind { found: 0 }));
        assert_eq!(with(6, &[255, 255]), Err(HeaderError::Kind { found: 65535 }));
        assert_eq!(with(8, &[0, 0, 16, 0]).map(|h| h.body_bytes()), Ok(1 << 20));
        assert_eq!(
            with(8, &[1, 0, 16, 0]),
            Err(HeaderError::BodyTooLong { kind, found: 1_048_577 })
        );
        assert_eq!(with(8, &[255; 4]), Err(HeaderError::BodyTooLong { kind, found: u32::MAX }));
        assert_eq!(with(12, &[0, 0]), Err(HeaderError::FdCount { kind, found: 0 }));
        assert_eq!(with(12, &[2, 0]), Err(HeaderError::FdCount { kind, found: 2 }));
        assert_eq!(with(14, &[0, 1]), Err(HeaderError::Reserved { kind, found: 256 }));
    }

    #[test]
    fn descriptor_bounds_follow_the_kind() {
        let frames = |count: u16| {
            let mut bytes = frozen();
            bytes[6..8].copy_from_slice(&[96, 0]);
            bytes[12..14].copy_from_slice(&count.to_le_bytes());
            Header::decode(&bytes).map(|header| header.fd_count)
        };
        assert_eq!(frames(253), Ok(253));
        assert_eq!(frames(254), Err(HeaderError::FdCount { kind: Kind::Frames, found: 254 }));
        assert_eq!(frames(0), Err(HeaderError::FdCount { kind: Kind::Frames, found: 0 }));
    }

    #[test]
    fn kinds_have_the_numbers_they_were_given() {
        let numbers: Vec<u16> = Kind::ALL.iter().map(|kind| kind.number()).collect();
        assert_eq!(numbers[..2], [1, 2]);
        assert_eq!(numbers[2..18], (16..=31).collect::<Vec<u16>>());
        assert_eq!(numbers[18..], [32, 64, 65, 66, 67, 68, 69, 70, 96, 97]);
        assert!(Kind::ALL.iter().all(|kind| Kind::from_u16(kind.number()) == Some(*kind)));
    }
}
