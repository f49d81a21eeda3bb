//! What goes into the engine and what comes out of it.

use lapis_proto::code::Code;
use lapis_proto::message::{
    Advise, Flush, Map, Mapped, PageRange, Prefetch, Quota, QuotaUse, Refused, SetPlan, SetTier,
    Stats, WorkingSets,
};

use super::ids::{
    AllocationId, Domain, FileId, MappingId, RamFrame, RequestId, SessionId, SpillSlot, Tag,
    VramFrame,
};
use crate::device::DeviceFault;
use crate::store::{FileIdentity, StoreFault};

/// Something happened.
#[derive(Debug)]
pub enum Event {
    /// A client said hello.
    SessionOpened {
        /// Its new id.
        session: SessionId,
        /// Its trust domain.
        domain: Domain,
        /// Its primary group.
        gid: u32,
        /// May change tiers and quotas.
        admin: bool,
    },
    /// A client asks for something.
    Request {
        /// Who.
        session: SessionId,
        /// The client's id for it.
        request: RequestId,
        /// What.
        body: Request,
    },
    /// The connection is gone. The process may live and still touch what it has mapped.
    SessionClosed {
        /// Whose.
        session: SessionId,
    },
    /// The process behind a closed connection is gone.
    ProcessDied {
        /// Whose.
        session: SessionId,
    },
    /// A transfer ended.
    TransferDone {
        /// As commanded.
        tag: Tag,
        /// The page's checksum for a spill write, 0 otherwise.
        result: Result<u64, TransferFault>,
    },
    /// A deadline may have passed.
    Tick,
}

/// A request, already checked for syntax.
#[derive(Debug)]
pub enum Request {
    /// An anonymous allocation of this many bytes.
    Allocate {
        /// Bytes.
        size: u64,
    },
    /// A file-backed allocation. The store knows the file under this id already.
    OpenFile {
        /// The store's id; closed by command if another session has the same file open.
        file: FileId,
        /// What the file was when it came.
        identity: FileIdentity,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Give up an allocation.
    Free(AllocationId),
    /// Ranges in VRAM.
    Map(Map),
    /// End mappings.
    Unmap(Vec<MappingId>),
    /// Ranges that will be mapped soon.
    Prefetch(Prefetch),
    /// Ranges that won't be after all.
    CancelPrefetch(Vec<PageRange>),
    /// What the client will map, in order.
    SetPlan(SetPlan),
    /// How ranges will be used.
    Advise(Advise),
    /// Ranges to be written to the spill.
    Flush(Flush),
    /// A quota, for administrators.
    SetQuota(Quota),
    /// All quotas.
    ListQuotas,
    /// A tier's size, for administrators.
    SetTier(SetTier),
    /// Counters.
    Stat,
    /// Working sets of all sessions, or of this one.
    WorkingSet(Option<SessionId>),
    /// The client holds no frame any more.
    Bye,
    /// The client gave these frames back.
    Revoked(Vec<VramFrame>),
}

/// The answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// To `Allocate` and `OpenFile`.
    Allocated {
        /// The new allocation.
        allocation: AllocationId,
        /// Its pages.
        pages: u32,
    },
    /// To whatever has nothing else to say.
    Done,
    /// To `Map`.
    Mapped(Mapped),
    /// To `Stat`.
    Stats(Box<Stats>),
    /// To `ListQuotas`.
    Quotas(Vec<QuotaUse>),
    /// To `WorkingSet`.
    WorkingSets(Box<WorkingSets>),
    /// To any: no.
    Refused(Box<Refused>),
}

/// One movement of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hop {
    /// File to RAM.
    ReadFile {
        /// Which file.
        file: FileId,
        /// Byte offset of the page.
        offset: u64,
        /// Bytes of it; zeros follow.
        length: u32,
        /// Target.
        target: RamFrame,
    },
    /// Spill to RAM.
    ReadSpill {
        /// Source.
        slot: SpillSlot,
        /// What the bytes must hash to.
        checksum: u64,
        /// Target.
        target: RamFrame,
    },
    /// RAM to spill.
    WriteSpill {
        /// Source.
        source: RamFrame,
        /// Target.
        slot: SpillSlot,
    },
    /// RAM to VRAM.
    Up {
        /// Source.
        source: RamFrame,
        /// Where the page begins in it.
        shift: u32,
        /// Target.
        target: VramFrame,
    },
    /// VRAM to RAM.
    Down {
        /// Source.
        source: VramFrame,
        /// Target.
        target: RamFrame,
    },
    /// Zeros to VRAM.
    Zero {
        /// Target.
        target: VramFrame,
    },
    /// Gives a VRAM frame's memory back to the system.
    Release {
        /// Which.
        target: VramFrame,
    },
    /// Gives a VRAM frame memory again.
    Restore {
        /// Which.
        target: VramFrame,
    },
}

/// Something to do. Order matters within one session.
#[derive(Debug)]
pub enum Command {
    /// Send a reply.
    Reply {
        /// To whom.
        session: SessionId,
        /// To which request.
        request: RequestId,
        /// What.
        reply: Reply,
    },
    /// Send descriptors of frames, ahead of the reply to this request.
    Export {
        /// To whom.
        session: SessionId,
        /// For which request.
        request: RequestId,
        /// Which.
        frames: Vec<VramFrame>,
    },
    /// Ask a client to give frames back.
    Revoke {
        /// Whom.
        session: SessionId,
        /// Which.
        frames: Vec<VramFrame>,
    },
    /// Move a page.
    Transfer {
        /// Comes back in `TransferDone`.
        tag: Tag,
        /// How.
        hop: Hop,
    },
    /// Forget a file.
    CloseFile(FileId),
}

/// Commands of one or more events, in order.
pub type Outbox = Vec<Command>;

/// Why a transfer failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TransferFault {
    /// In the store.
    #[error(transparent)]
    Store(#[from] StoreFault),
    /// In the device.
    #[error(transparent)]
    Device(#[from] DeviceFault),
}

impl TransferFault {
    /// Code and object (a byte offset) to tell the client.
    #[must_use]
    pub fn wire(&self) -> (Code, u64) {
        match self {
            Self::Store(StoreFault::Io { offset, .. }) => (Code::Io, *offset),
            Self::Store(StoreFault::Truncated { offset, .. }) => (Code::FileTruncated, *offset),
            Self::Store(StoreFault::Changed { offset }) => (Code::FileChanged, *offset),
            Self::Store(StoreFault::Checksum { offset }) => (Code::DataLost, *offset),
            Self::Store(StoreFault::NotRegular | StoreFault::NotReadable) => (Code::NotAFile, 0),
            Self::Device(_) => (Code::DeviceLost, 0),
        }
    }

    /// What the client can do about it.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Store(StoreFault::Io { .. }) => {
                "check the disk (dmesg); the map may be tried again"
            }
            Self::Store(StoreFault::Truncated { .. } | StoreFault::Changed { .. }) => {
                "open the file again to see its present bytes"
            }
            Self::Store(StoreFault::NotRegular | StoreFault::NotReadable) => {
                "pass a regular file that is open for reading"
            }
            Self::Store(StoreFault::Checksum { .. }) => {
                "the page's bytes are gone; free the allocation and compute them again"
            }
            Self::Device(_) => "reconnect once the daemon has restarted",
        }
    }
}
