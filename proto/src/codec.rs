//! Bodies to bytes and back: bincode, fixed-width little-endian integers, with limits both ways.
//!
//! Nothing else in the project calls bincode, so that another codec can take its place; the tests hold one up
//! against it. Message types must not be recursive and must not hold vectors of zero-sized elements: a hostile
//! length would overflow the stack or spin.

use bincode::config::{Configuration, Fixint, Limit, LittleEndian};
use bincode::enc::write::Writer;
use bincode::error::{DecodeError, EncodeError};

use crate::header::{BODY_BYTES_MAX, HEADER_BYTES, Header, HeaderError};
use crate::ids::RequestId;
use crate::message::{Kind, Message, QUOTAS_MAX, QuotaUse};

/// bincode counts bytes in memory, which for every body that comes near [`BODY_BYTES_MAX`] are at most twice those on
/// the wire.
const DECODED_BYTES_MAX: usize = 2 * BODY_BYTES_MAX;
/// A [`QuotaUse`] can take more than that, but a list of them is short.
const _: () = assert!(QUOTAS_MAX * size_of::<QuotaUse>() < BODY_BYTES_MAX);

type Config = Configuration<LittleEndian, Fixint, Limit<DECODED_BYTES_MAX>>;
const CONFIG: Config = bincode::config::standard()
    .with_little_endian()
    .with_fixed_int_encoding()
    .with_limit::<DECODED_BYTES_MAX>();

/// A body can't be written, or bytes aren't the body they should be.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The header would be refused by the peer.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// Encoding failed; nothing was appended.
    #[error("can't encode {kind:?} into at most {BODY_BYTES_MAX} bytes: {source}")]
    Encode {
        /// Of this kind.
        kind: Kind,
        /// Why.
        source: EncodeError,
    },
    /// The bytes don't decode.
    #[error("{length} bytes are not a {kind:?}: {source}")]
    Decode {
        /// Expected kind.
        kind: Kind,
        /// Bytes given.
        length: usize,
        /// Why.
        source: DecodeError,
    },
    /// The body goes on after its last field.
    #[error("{kind:?} of {consumed} bytes in a body of {length}")]
    Trailing {
        /// Expected kind.
        kind: Kind,
        /// Bytes it took.
        consumed: usize,
        /// Bytes given.
        length: usize,
    },
    /// Another kind of message came.
    #[error("expected {expected:?}, got {found:?}")]
    Unexpected {
        /// Expected kind.
        expected: Kind,
        /// Kind in the header.
        found: Kind,
    },
}

/// Appends a whole frame, header and body, to `out`. On error `out` is as it was.
///
/// # Errors
/// [`CodecError::Encode`] when the body is longer than [`BODY_BYTES_MAX`]; [`CodecError::Header`] when the kind
/// doesn't carry `fd_count` descriptors.
pub fn encode<M: Message>(
    request: RequestId,
    message: &M,
    fd_count: u16,
    out: &mut Vec<u8>,
) -> Result<(), CodecError> {
    let kind = M::KIND;
    if !kind.fds().contains(&fd_count) {
        return Err(HeaderError::FdCount { kind, found: fd_count }.into());
    }
    let start = out.len();
    out.resize(start + HEADER_BYTES, 0);
    let result =
        bincode::encode_into_writer(message, BodyWriter { out, room: BODY_BYTES_MAX }, CONFIG);
    let body_bytes = out.len() - start - HEADER_BYTES;
    let body_len = match (result, u32::try_from(body_bytes)) {
        (Ok(()), Ok(body_len)) => body_len,
        (Ok(()), Err(_)) => {
            out.truncate(start);
            return Err(HeaderError::BodyTooLong { kind, found: u32::MAX }.into());
        }
        (Err(source), _) => {
            out.truncate(start);
            return Err(CodecError::Encode { kind, source });
        }
    };
    let header = Header { version: Header::version_of(kind), kind, body_len, fd_count, request };
    out[start..start + HEADER_BYTES].copy_from_slice(&header.encode());
    Ok(())
}

/// Reads a body, which must be exactly `body`.
///
/// # Errors
/// [`CodecError::Decode`] or [`CodecError::Trailing`]. Never allocates more than a small multiple of
/// [`BODY_BYTES_MAX`], whatever lengths the bytes claim.
pub fn decode<M: Message>(body: &[u8]) -> Result<M, CodecError> {
    let kind = M::KIND;
    let length = body.len();
    let (message, consumed) = bincode::decode_from_slice::<M, Config>(body, CONFIG)
        .map_err(|source| CodecError::Decode { kind, length, source })?;
    if consumed != length {
        return Err(CodecError::Trailing { kind, consumed, length });
    }
    Ok(message)
}

/// Appends to a frame and stops before the body passes its limit: bincode itself limits only decoding.
struct BodyWriter<'a> {
    out: &'a mut Vec<u8>,
    room: usize,
}

impl Writer for BodyWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        self.room =
            self.room.checked_sub(bytes.len()).ok_or(EncodeError::Other("the body is too long"))?;
        self.out.extend_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
