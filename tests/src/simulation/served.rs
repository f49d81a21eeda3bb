//! What maps were served from: what the replies said, to compare with the counters.

use lapis_proto::message::{Counters, Mapped};

/// Sums over granted maps.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Served {
    maps: u64,
    stalled_us: u64,
    pages: u64,
    hits_vram: u64,
    hits_ram: u64,
}

impl Served {
    /// One map more.
    pub(super) fn add(&mut self, mapped: &Mapped) {
        self.maps += 1;
        self.stalled_us += mapped.waited_us;
        self.pages += mapped.frames.len() as u64;
        self.hits_vram += u64::from(mapped.hits_vram);
        self.hits_ram += u64::from(mapped.hits_ram);
    }

    /// Compares with what the engine says, of all sessions or of one.
    pub(super) fn check(&self, said: &Counters, of: &str) {
        let pages = said.hits_vram + said.hits_ram + said.misses + said.zero_fills;
        let (maps, stalled_us) = (said.maps, said.stalled_us);
        let (hits_vram, hits_ram) = (said.hits_vram, said.hits_ram);
        let said = Self { maps, stalled_us, pages, hits_vram, hits_ram };
        assert!(said == *self, "maps of {of}: {said:?}, it was {self:?}");
    }
}
