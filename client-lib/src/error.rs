//! What can go wrong for a client.

use std::io;
use std::path::PathBuf;

use lapis_proto::code::Code;
use lapis_proto::codec::CodecError;
use lapis_proto::frame::FrameError;
use lapis_proto::kind::Kind;
use lapis_proto::message::Refused;

use crate::cuda::error::CudaError;
use crate::model::ModelError;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No connection to the daemon's socket.
    #[error("can't connect to {}: {source}; {hint}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// Something listens on the socket, but it doesn't answer as lapisd does.
    #[error("{} isn't answered by lapisd: {source}; set LAPIS_SOCKET to the daemon's socket", path.display())]
    NotLapis {
        /// The socket.
        path: PathBuf,
        /// What it sent instead.
        source: ProtocolError,
    },
    /// The daemon refused the request, or failed at it. Nothing of it was done.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The daemon broke the protocol; the connection is closed.
    #[error("the daemon broke the protocol: {0}; install the same release of client and daemon")]
    Protocol(#[from] ProtocolError),
    /// A system call of this process failed.
    #[error("{call} failed: {source}{}", hint_for(call, source))]
    Io {
        /// The call.
        call: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A file can't be opened.
    #[error("can't open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A model's files can't be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The GPU's memory can't be used by this process.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Bytes that are in a device's memory, out of the CPU's reach.
    #[error(
        "the bytes are in the memory of a CUDA device, where the CPU can't reach them: use their device address, or \
         copy them to the host"
    )]
    OnDevice,
    /// Bytes that were mapped only for reading.
    #[error(
        "the mapping is only for reading: map the bytes with Access::Write or Access::Overwrite"
    )]
    ReadOnly,
    /// The daemon is gone. Bytes of existing mappings stay readable; connect anew for anything else.
    #[error("the connection to lapisd is closed; connect again once the daemon is back")]
    Disconnected,
    /// This process was forked after the connection was made.
    #[error("the connection belongs to the parent process; connect again in the child")]
    Forked,
    /// Bytes outside an allocation.
    #[error("bytes {start}..{end} are outside the allocation of {size} bytes")]
    OutOfRange {
        /// First byte asked for.
        start: u64,
        /// End asked for.
        end: u64,
        /// Bytes of the allocation.
        size: u64,
    },
    /// Bytes that another mapping of this process writes, or that this one would write while another reads them.
    #[error(
        "bytes {start}..{end} of allocation {allocation} overlap a live mapping of this process and one of the two \
         writes: drop the other first"
    )]
    Conflict {
        /// The allocation.
        allocation: u64,
        /// First byte asked for.
        start: u64,
        /// End asked for.
        end: u64,
    },
    /// More in one request than the protocol can carry.
    #[error("{asked} {unit} in one mapping; at most {limit} are possible: map fewer at a time")]
    TooLarge {
        /// How many.
        asked: u64,
        /// Of what.
        unit: &'static str,
        /// At most.
        limit: u64,
    },
    /// An allocation of another client.
    #[error("allocation {allocation} belongs to another connection")]
    Foreign {
        /// Which.
        allocation: u64,
    },
    /// This library can't do that with this daemon.
    #[error("{what} is not supported by this client library")]
    Unsupported {
        /// What.
        what: &'static str,
    },
}

/// How the daemon broke the protocol.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The stream can't be cut into messages.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A body can't be read, or a request can't be written.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The stream ended before the answer.
    #[error("it closed the connection before it answered")]
    Closed,
    /// A message that answers nothing.
    #[error("a {kind:?} for request {request}, which isn't waiting for one")]
    Unsolicited {
        /// Its kind.
        kind: Kind,
        /// The request it names.
        request: u64,
    },
    /// The wrong number of frames.
    #[error("{found} frames where {expected} belong")]
    FrameCount {
        /// Given.
        found: usize,
        /// Expected.
        expected: usize,
    },
    /// A frame index outside the tier, sent twice, or never sent.
    #[error("frame {frame} {what}")]
    Frames {
        /// Which.
        frame: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A page held by a live mapping would move.
    #[error("page {page} moved to frame {found} while a mapping holds it at frame {held}")]
    Moved {
        /// The page.
        page: u32,
        /// Where it is.
        held: u32,
        /// Where the daemon says it is.
        found: u32,
    },
    /// A number in `Welcome` that makes no sense.
    #[error("a page size of {found} bytes")]
    PageSize {
        /// Given.
        found: u64,
    },
    /// Not as many pages as were asked for.
    #[error("an allocation of {found} pages where {expected} belong")]
    Pages {
        /// Given.
        found: u32,
        /// Expected.
        expected: u64,
    },
}

impl Error {
    /// The daemon's code, if the daemon refused.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Refused(refused) => Some(refused.code),
            _ => None,
        }
    }

    /// Whether the same call may succeed later: for some of these only on a new connection.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Refused(refused) => refused.code.is_retryable(),
            Error::Connect { source, .. } => source.kind() != io::ErrorKind::PermissionDenied,
            Error::Cuda(error) => error.is_retryable(),
            Error::Disconnected | Error::Conflict { .. } => true,
            Error::NotLapis { .. }
            | Error::Protocol(_)
            | Error::Io { .. }
            | Error::Open { .. }
            | Error::Model(_)
            | Error::OnDevice
            | Error::ReadOnly
            | Error::Forked
            | Error::OutOfRange { .. }
            | Error::TooLarge { .. }
            | Error::Foreign { .. }
            | Error::Unsupported { .. } => false,
        }
    }
}

/// What to do about a failed system call, where that is known.
fn hint_for(call: &str, source: &io::Error) -> &'static str {
    match (call, source.raw_os_error()) {
        ("mmap" | "mprotect", Some(libc::ENOMEM)) => {
            "; raise the sysctl vm.max_map_count: each mapped page takes one of its entries"
        }
        ("recvmsg", _) => "; raise the limit of open files: each VRAM frame in use takes one",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_object_and_the_way_out() {
        let error = Error::OutOfRange { start: 5, end: 20, size: 10 };
        assert_eq!(error.to_string(), "bytes 5..20 are outside the allocation of 10 bytes");
        let error = Error::Io { call: "mmap", source: io::Error::from_raw_os_error(libc::ENOMEM) };
        assert!(error.to_string().ends_with("each mapped page takes one of its entries"));
        let error = Error::Io { call: "fstat", source: io::Error::from_raw_os_error(libc::EBADF) };
        assert_eq!(error.to_string(), "fstat failed: Bad file descriptor (os error 9)");
    }

    #[test]
    fn refusals_keep_their_code() {
        let refused = |code| {
            let message = "no room".to_owned();
            Error::from(Refused { code, object: 1, asked: 2, in_use: 3, limit: 4, message })
        };
        assert_eq!(refused(Code::TimedOut).code(), Some(Code::TimedOut));
        assert_eq!(refused(Code::TimedOut).to_string(), "no room (TimedOut)");
        assert!(refused(Code::TimedOut).is_retryable());
        assert!(!refused(Code::ReadOnly).is_retryable());
        assert!(Error::Disconnected.is_retryable());
        assert_eq!(Error::Forked.code(), None);
    }
}
