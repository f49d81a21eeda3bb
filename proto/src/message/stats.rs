//! Counters of the daemon.

use bincode::{Decode, Encode};

/// Asks for counters. Reply: [`Stats`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Stat {}

/// One tier's numbers, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct TierStats {
    /// Size.
    pub capacity: u64,
    /// Holding a page.
    pub used: u64,
    /// May not be moved now: mapped, or source or target of a transfer.
    pub pinned: u64,
    /// The longest run of consecutive free frames. A map never needs one: addresses are the client's own.
    pub free_run_longest: u64,
    /// It does not take what it should: writes failed, or frames are out of use.
    pub degraded: bool,
}

/// One hop's numbers. Counted when a transfer completes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct HopStats {
    /// Pages moved.
    pub pages: u64,
    /// Bytes moved: useful ones, without alignment padding.
    pub bytes: u64,
    /// Failed transfers.
    pub errors: u64,
}

/// Counters since the daemon started, for all sessions together, or since `Hello` for one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Counters {
    /// Model files to RAM.
    pub file_to_ram: HopStats,
    /// Spill to RAM.
    pub spill_to_ram: HopStats,
    /// RAM to VRAM.
    pub ram_to_vram: HopStats,
    /// VRAM to RAM.
    pub vram_to_ram: HopStats,
    /// RAM to spill.
    pub ram_to_spill: HopStats,
    /// Frames filled with zeros.
    pub zeroed: HopStats,
    /// Pages dropped from VRAM without a copy.
    pub dropped_vram: u64,
    /// Pages dropped from RAM without a write.
    pub dropped_ram: u64,
    /// Mapped pages that were in VRAM when asked for.
    pub hits_vram: u64,
    /// Mapped pages that were in RAM when asked for.
    pub hits_ram: u64,
    /// Mapped pages that had to come from a file or the spill.
    pub misses: u64,
    /// Mapped pages that had never been written: zero-filled.
    pub zero_fills: u64,
    /// `Map` requests granted.
    pub maps: u64,
    /// Microseconds that granted maps waited for transfers or for room.
    pub stalled_us: u64,
    /// Pages that a prefetch brought to VRAM and a map then used.
    pub prefetch_useful: u64,
    /// Prefetched pages still under way when a map asked for them.
    pub prefetch_late: u64,
    /// Prefetched pages evicted before any use.
    pub prefetch_wasted: u64,
    /// Reads tried again after they failed.
    pub read_retries: u64,
    /// Spilled pages whose checksum did not match on the way back.
    pub checksum_errors: u64,
}

/// Answer to [`Stat`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Stats {
    /// VRAM tier.
    pub vram: TierStats,
    /// RAM tier.
    pub ram: TierStats,
    /// Spill.
    pub nvme: TierStats,
    /// All sessions.
    pub total: Counters,
    /// The session that asks: its maps and hits; hops are counted in `total` only.
    pub session: Counters,
    /// Open sessions.
    pub sessions: u32,
    /// Live allocations of all sessions.
    pub allocations: u32,
    /// Live mappings of all sessions.
    pub mappings: u32,
    /// Frames kept out of use because a client may still write them.
    pub quarantined_frames: u32,
    /// Bytes of the daemon's page metadata.
    pub metadata_bytes: u64,
}
