//! Numbers of errors.

use lapis::{Code, Error};

/// Why a call failed. Below 64 the daemon or this library refused it: the request can't be granted as it is. From 64 to 127
/// something failed at the daemon. From 1000 on it failed in this process. Numbers are frozen; there will be more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum lapis_code {
    /// It did not fail.
    LAPIS_OK = 0,
    /// The message breaks the protocol.
    LAPIS_BAD_REQUEST = 1,
    /// No such allocation.
    LAPIS_UNKNOWN_ALLOCATION = 2,
    /// No such mapping.
    LAPIS_UNKNOWN_MAPPING = 3,
    /// Bytes outside an allocation, a range, a tensor or a file; or no such range, layer or tensor.
    LAPIS_OUT_OF_RANGE = 4,
    /// Writing what can only be read.
    LAPIS_READ_ONLY = 5,
    /// More than can ever be mapped at once.
    LAPIS_OVER_CAPACITY = 6,
    /// The tiers can't hold another allocation of this size.
    LAPIS_OUT_OF_MEMORY = 7,
    /// The wait ended first.
    LAPIS_TIMED_OUT = 8,
    /// Client and daemon have no protocol version in common.
    LAPIS_VERSION_UNSUPPORTED = 9,
    /// This user may not do that.
    LAPIS_NOT_PERMITTED = 10,
    /// A count limit of the session or the daemon is met.
    LAPIS_TOO_MANY = 11,
    /// A mapping still holds pages of the allocation.
    LAPIS_IN_USE = 12,
    /// The descriptor isn't one of a readable regular file.
    LAPIS_NOT_A_FILE = 13,
    /// The daemon is stopping.
    LAPIS_SHUTTING_DOWN = 14,
    /// The daemon, the device or this library can't do this.
    LAPIS_UNSUPPORTED = 15,
    /// A quota is met.
    LAPIS_OVER_QUOTA = 16,
    /// The file isn't the one that was opened any more.
    LAPIS_FILE_CHANGED = 64,
    /// The file ended before the bytes asked for.
    LAPIS_FILE_TRUNCATED = 65,
    /// Reading or writing failed.
    LAPIS_IO = 66,
    /// Spilled bytes don't match their checksum.
    LAPIS_DATA_LOST = 67,
    /// The GPU failed, and the daemon restarts.
    LAPIS_DEVICE_LOST = 68,
    /// No daemon at the socket.
    LAPIS_CONNECT = 1000,
    /// Something else than lapisd is at the socket.
    LAPIS_NOT_LAPIS = 1001,
    /// The daemon broke the protocol; the connection is closed.
    LAPIS_PROTOCOL = 1002,
    /// The daemon is gone. Bytes that are mapped stay readable; connect anew for anything else.
    LAPIS_DISCONNECTED = 1003,
    /// The handle is of the process that this one was forked from.
    LAPIS_FORKED = 1004,
    /// A system call failed in this process.
    LAPIS_SYSTEM = 1005,
    /// A file can't be opened.
    LAPIS_OPEN = 1006,
    /// A model's files can't be used.
    LAPIS_MODEL = 1007,
    /// The GPU's memory can't be used by this process.
    LAPIS_CUDA = 1008,
    /// The bytes are in a GPU's memory, out of the CPU's reach.
    LAPIS_ON_DEVICE = 1009,
    /// A live mapping of this process has some of the bytes, and one of the two writes.
    LAPIS_CONFLICT = 1010,
    /// More in one request than the protocol can carry.
    LAPIS_TOO_LARGE = 1011,
    /// A handle of another connection.
    LAPIS_FOREIGN = 1012,
    /// No handle, or one that was closed, or one of another kind.
    LAPIS_BAD_HANDLE = 1013,
    /// Another thread is in a call with this handle.
    LAPIS_BUSY = 1014,
    /// A NULL where something must be, a text that isn't UTF-8, a number that means nothing.
    LAPIS_BAD_ARGUMENT = 1015,
    /// A fault of this library. Please report it.
    LAPIS_BUG = 1016,
}

impl lapis_code {
    /// The daemon's, by the same number.
    pub(crate) fn of(code: Code) -> lapis_code {
        match code {
            Code::BadRequest => Self::LAPIS_BAD_REQUEST,
            Code::UnknownAllocation => Self::LAPIS_UNKNOWN_ALLOCATION,
            Code::UnknownMapping => Self::LAPIS_UNKNOWN_MAPPING,
            Code::OutOfRange => Self::LAPIS_OUT_OF_RANGE,
            Code::ReadOnly => Self::LAPIS_READ_ONLY,
            Code::OverCapacity => Self::LAPIS_OVER_CAPACITY,
            Code::OutOfMemory => Self::LAPIS_OUT_OF_MEMORY,
            Code::TimedOut => Self::LAPIS_TIMED_OUT,
            Code::VersionUnsupported => Self::LAPIS_VERSION_UNSUPPORTED,
            Code::NotPermitted => Self::LAPIS_NOT_PERMITTED,
            Code::TooMany => Self::LAPIS_TOO_MANY,
            Code::InUse => Self::LAPIS_IN_USE,
            Code::NotAFile => Self::LAPIS_NOT_A_FILE,
            Code::ShuttingDown => Self::LAPIS_SHUTTING_DOWN,
            Code::Unsupported => Self::LAPIS_UNSUPPORTED,
            Code::OverQuota => Self::LAPIS_OVER_QUOTA,
            Code::FileChanged => Self::LAPIS_FILE_CHANGED,
            Code::FileTruncated => Self::LAPIS_FILE_TRUNCATED,
            Code::Io => Self::LAPIS_IO,
            Code::DataLost => Self::LAPIS_DATA_LOST,
            Code::DeviceLost => Self::LAPIS_DEVICE_LOST,
            // The tests compare the two for every code that there is.
            _ => Self::LAPIS_UNSUPPORTED,
        }
    }

    /// What this library found itself has the daemon's code where the daemon has one for it.
    pub(crate) fn of_error(error: &Error) -> lapis_code {
        match error {
            Error::Refused(refused) => Self::of(refused.code),
            Error::Connect { .. } => Self::LAPIS_CONNECT,
            Error::NotLapis { .. } => Self::LAPIS_NOT_LAPIS,
            Error::Protocol(_) => Self::LAPIS_PROTOCOL,
            Error::Disconnected => Self::LAPIS_DISCONNECTED,
            Error::Forked => Self::LAPIS_FORKED,
            Error::Io { .. } => Self::LAPIS_SYSTEM,
            Error::Open { .. } => Self::LAPIS_OPEN,
            Error::Model(_) => Self::LAPIS_MODEL,
            Error::Cuda(_) => Self::LAPIS_CUDA,
            Error::OnDevice => Self::LAPIS_ON_DEVICE,
            Error::ReadOnly => Self::LAPIS_READ_ONLY,
            Error::OutOfRange { .. } => Self::LAPIS_OUT_OF_RANGE,
            Error::Conflict { .. } => Self::LAPIS_CONFLICT,
            Error::TooLarge { .. } => Self::LAPIS_TOO_LARGE,
            Error::Foreign { .. } => Self::LAPIS_FOREIGN,
            Error::Unsupported { .. } => Self::LAPIS_UNSUPPORTED,
            // A new kind of error gets its own number here; until then it isn't taken for another.
            _ => Self::LAPIS_BUG,
        }
    }
}
