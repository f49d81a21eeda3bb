//! Counters of the daemon.

use lapis::{Client, Counters, HopStats, Stats, TierStats};

use crate::client::lapis_client;
use crate::code::lapis_code;
use crate::{arguments, guard, handles};

/// One tier, in bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_tier {
    /// Size.
    pub capacity: u64,
    /// Holding a page.
    pub used: u64,
    /// May not be moved now.
    pub pinned: u64,
    /// The longest run of free frames.
    pub free_run_longest: u64,
    /// Whether it doesn't take what it should: 0 or 1.
    pub degraded: u64,
}

/// What was moved from one tier to another.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_hop {
    /// Pages.
    pub pages: u64,
    /// Bytes.
    pub bytes: u64,
    /// Failed transfers.
    pub errors: u64,
}

/// Counters since the daemon started, or since this client connected.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_counters {
    /// Model files to RAM.
    pub file_to_ram: lapis_hop,
    /// Spill to RAM.
    pub spill_to_ram: lapis_hop,
    /// RAM to VRAM.
    pub ram_to_vram: lapis_hop,
    /// VRAM to RAM.
    pub vram_to_ram: lapis_hop,
    /// RAM to spill.
    pub ram_to_spill: lapis_hop,
    /// Mapped pages that were in VRAM.
    pub hits_vram: u64,
    /// Mapped pages that were in RAM.
    pub hits_ram: u64,
    /// Mapped pages that came from a file or the spill.
    pub misses: u64,
    /// Mapped pages that had never been written.
    pub zero_fills: u64,
    /// Maps that were granted.
    pub maps: u64,
    /// Microseconds that they waited.
    pub stalled_us: u64,
    /// Prefetched pages that a map then used.
    pub prefetch_useful: u64,
    /// Prefetched pages that came too late.
    pub prefetch_late: u64,
    /// Prefetched pages that were evicted before any use.
    pub prefetch_wasted: u64,
}

/// The daemon's counters.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_stats {
    /// VRAM.
    pub vram: lapis_tier,
    /// RAM.
    pub ram: lapis_tier,
    /// NVMe.
    pub nvme: lapis_tier,
    /// Open connections of all clients.
    pub sessions: u32,
    /// Live allocations of all clients.
    pub allocations: u32,
    /// Live mappings of all clients.
    pub mappings: u32,
    /// Frames kept out of use because a client may still write them.
    pub quarantined_frames: u32,
    /// Of this client.
    pub session: lapis_counters,
    /// Of all clients.
    pub total: lapis_counters,
}

/// The daemon's counters, as of now. size: sizeof(lapis_stats).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_client_stats(
    client: *const lapis_client,
    out: *mut lapis_stats,
    size: usize,
) -> lapis_code {
    guard(|| {
        let client = handles::get::<Client, _>(client)?;
        let stats = of(&client.stats()?);
        // SAFETY: the caller's promise.
        unsafe { arguments::put(out, size, stats) }
    })
}

fn of(stats: &Stats) -> lapis_stats {
    lapis_stats {
        vram: tier(stats.vram),
        ram: tier(stats.ram),
        nvme: tier(stats.nvme),
        sessions: stats.sessions,
        allocations: stats.allocations,
        mappings: stats.mappings,
        quarantined_frames: stats.quarantined_frames,
        session: counters(&stats.session),
        total: counters(&stats.total),
    }
}

fn tier(tier: TierStats) -> lapis_tier {
    let TierStats { capacity, used, pinned, free_run_longest, degraded } = tier;
    lapis_tier { capacity, used, pinned, free_run_longest, degraded: u64::from(degraded) }
}

fn hop(HopStats { pages, bytes, errors }: HopStats) -> lapis_hop {
    lapis_hop { pages, bytes, errors }
}

fn counters(counters: &Counters) -> lapis_counters {
    lapis_counters {
        file_to_ram: hop(counters.file_to_ram),
        spill_to_ram: hop(counters.spill_to_ram),
        ram_to_vram: hop(counters.ram_to_vram),
        vram_to_ram: hop(counters.vram_to_ram),
        ram_to_spill: hop(counters.ram_to_spill),
        hits_vram: counters.hits_vram,
        hits_ram: counters.hits_ram,
        misses: counters.misses,
        zero_fills: counters.zero_fills,
        maps: counters.maps,
        stalled_us: counters.stalled_us,
        prefetch_useful: counters.prefetch_useful,
        prefetch_late: counters.prefetch_late,
        prefetch_wasted: counters.prefetch_wasted,
    }
}
