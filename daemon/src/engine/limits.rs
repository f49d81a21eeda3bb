//! Every bound of the engine, in one place.

/// RAM frames that only a page leaving VRAM may take, so that VRAM can always be emptied.
pub const RAM_RESERVE_MAX: u32 = 8;
/// RAM frames, beside those kept for leaving pages, that anonymous pages can't all fill: one to read into.
pub const RAM_READS_MIN: u32 = 1;
/// Pages that one session may have queued for prefetch; later hints are dropped.
pub const PREFETCH_PAGES_MAX: usize = 65_536;
/// Accesses, as a multiple of the VRAM tier, after which an unused prefetched page is protected no more.
pub const PREFETCH_EXPIRES_AFTER_TIERS: u64 = 4;
/// Microseconds that a client has to give a frame back before whoever needs one looks elsewhere: a client that lives
/// takes one or two milliseconds, and while a stopped one is waited for, nobody is served.
pub const REVOKE_WAIT_US: u64 = 250_000;
/// VRAM frames that get their memory at once: copies stand in line behind them, and each takes the driver most of a
/// millisecond.
pub const RESTORES_MAX: usize = 8;
/// Times that a failed read is tried again before whoever waits for it is told.
pub const READ_RETRIES: u8 = 2;
/// Microseconds without writes to the spill after one failed.
pub const SPILL_REST_US: u64 = 1_000_000;

/// Sizes and bounds that the configuration sets.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of a page, a power of two.
    pub page_size: u64,
    /// VRAM frames.
    pub vram_frames: u32,
    /// RAM frames; 0 on a unified device.
    pub ram_frames: u32,
    /// VRAM is the host's own memory: files and the spill are read into its frames and written from them, and there
    /// is no RAM tier. RAM frame number n is VRAM frame number n, in hops that name one.
    pub unified: bool,
    /// Spill slots; 0: no spill.
    pub spill_slots: u32,
    /// Reads in flight, and likewise writes, and pages leaving VRAM.
    pub depth: u32,
    /// Open sessions.
    pub sessions_max: u32,
    /// Allocations of one session.
    pub allocations_per_session_max: u32,
    /// Mappings of one session, granted or waited for.
    pub mappings_per_session_max: u32,
    /// Requests of one session that wait for their reply.
    pub waiting_per_session_max: u32,
    /// Longest wait of a map, microseconds; longer ones are cut.
    pub map_wait_us_max: u64,
    /// Pages of all allocations together: bounds the metadata.
    pub pages_max: u64,
}

impl Limits {
    /// Small limits for tests.
    #[must_use]
    pub fn small(vram_frames: u32, ram_frames: u32, spill_slots: u32) -> Self {
        Self {
            page_size: 4096,
            vram_frames,
            ram_frames,
            unified: false,
            spill_slots,
            depth: 4,
            sessions_max: 64,
            allocations_per_session_max: 64,
            mappings_per_session_max: 64,
            waiting_per_session_max: 64,
            map_wait_us_max: 60_000_000,
            pages_max: 1 << 20,
        }
    }

    /// Pages that mappings of all sessions may hold at once with so many VRAM frames: a sixteenth, at least one frame,
    /// stays free to move others through.
    #[must_use]
    pub fn mapped_pages_of(vram_frames: u32) -> u32 {
        vram_frames.saturating_sub((vram_frames / 16).max(1))
    }

    /// Pages on their way to VRAM beyond which a plan fetches no other: each takes up a frame of VRAM and often one of
    /// RAM, and small tiers have better uses for them.
    #[must_use]
    pub fn planned_moving_max(&self) -> u32 {
        let ram = if self.unified { u32::MAX } else { self.ram_frames };
        self.depth.min(self.vram_frames / 8).min(ram / 8).max(1)
    }

    /// Copies to VRAM under way beyond which a plan starts no other: each takes up a frame, and a map that comes waits
    /// for them. Three keep a link busy, one of them while the daemon looks elsewhere.
    #[must_use]
    pub fn ups_ahead(&self) -> u32 {
        (self.vram_frames / 1024).clamp(3, 8)
    }

    /// RAM frames that only a page leaving VRAM may take.
    #[must_use]
    pub fn ram_reserve(&self) -> u32 {
        (self.ram_frames / 4).clamp(1, RAM_RESERVE_MAX)
    }

    /// Pages that anonymous allocations may have: what so many RAM frames and spill slots hold when VRAM holds
    /// nothing, and still let pages leave VRAM and be read. On a unified device each needs a slot.
    #[must_use]
    pub fn anonymous_pages_of(&self, ram_frames: u32, spill_slots: u32) -> u64 {
        if self.unified {
            return u64::from(spill_slots);
        }
        let kept = self.ram_reserve() + RAM_READS_MIN;
        u64::from(ram_frames.saturating_sub(kept)) + u64::from(spill_slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_leave_room_to_move() {
        let limits = Limits::small(8, 16, 0);
        assert_eq!(Limits::mapped_pages_of(8), 7);
        assert_eq!(limits.ram_reserve(), 4);
        assert_eq!(limits.anonymous_pages_of(16, 0), 11);
        let large = Limits::small(256, 1024, 100);
        assert_eq!(Limits::mapped_pages_of(256), 240);
        assert_eq!(large.ram_reserve(), 8);
        assert_eq!(large.anonymous_pages_of(1024, 100), 1115);
    }
}
