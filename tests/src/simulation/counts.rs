//! Transfers and maps as they really happened, to compare with the engine's counters.

use std::collections::BTreeMap;

use lapis_proto::code::Code;
use lapis_proto::message::{HopStats, Mapped, Stats};
use lapisd::engine::event::{Hop, TransferFault};
use lapisd::engine::ids::{RamFrame, Tag, VramFrame};

use super::served::Served;

/// Sums since the start.
#[derive(Debug)]
pub(super) struct Counts {
    page_size: u64,
    /// Hops of one kind at once.
    depth: usize,
    flying: BTreeMap<Tag, Hop>,
    hops: BTreeMap<&'static str, HopStats>,
    /// Bytes of the page in a frame that are not padding.
    in_ram: BTreeMap<RamFrame, u64>,
    in_vram: BTreeMap<VramFrame, u64>,
    served: Served,
    checksum_errors: u64,
    /// Codes of the faults that have been brought about.
    faults: Vec<Code>,
}

fn name(hop: Hop) -> &'static str {
    match hop {
        Hop::ReadFile { .. } => "file to RAM",
        Hop::ReadSpill { .. } => "spill to RAM",
        Hop::WriteSpill { .. } => "RAM to spill",
        Hop::Up { .. } => "RAM to VRAM",
        Hop::Down { .. } => "VRAM to RAM",
        Hop::Zero { .. } => "zeros to VRAM",
        Hop::Release { .. } => "released",
        Hop::Restore { .. } => "restored",
    }
}

/// What a hop is one of that are bounded together.
fn queue(hop: Hop) -> Option<&'static str> {
    match hop {
        Hop::ReadFile { .. } | Hop::ReadSpill { .. } => Some("reads"),
        Hop::WriteSpill { .. } => Some("writes"),
        Hop::Down { .. } => Some("pages on their way down"),
        Hop::Up { .. } | Hop::Zero { .. } | Hop::Release { .. } | Hop::Restore { .. } => None,
    }
}

impl Counts {
    /// Nothing yet.
    #[must_use]
    pub(super) fn new(page_size: u64, depth: u32) -> Self {
        Self {
            page_size,
            depth: depth as usize,
            flying: BTreeMap::new(),
            hops: BTreeMap::new(),
            in_ram: BTreeMap::new(),
            in_vram: BTreeMap::new(),
            served: Served::default(),
            checksum_errors: 0,
            faults: Vec::new(),
        }
    }

    /// Transfers by kind.
    pub(super) fn hops(&self) -> impl Iterator<Item = (&'static str, HopStats)> {
        self.hops.iter().map(|(name, stats)| (*name, *stats))
    }

    /// From here on transfers may fail with these codes.
    pub(super) fn expect_faults(&mut self, codes: &[Code]) {
        self.faults = codes.to_vec();
    }

    /// Whether no transfer is under way.
    #[must_use]
    pub(super) fn nothing_moves(&self) -> bool {
        self.flying.is_empty()
    }

    pub(super) fn started(&mut self, tag: Tag, hop: Hop) {
        let old = self.flying.insert(tag, hop);
        assert!(old.is_none(), "{tag:?} is used twice");
        let Some(kind) = queue(hop) else { return };
        let others = self.flying.values().filter(|other| queue(**other) == Some(kind)).count();
        assert!(others <= self.depth, "{others} {kind} at once, {} at most", self.depth);
    }

    pub(super) fn completed(&mut self, tag: Tag, result: &Result<u64, TransferFault>) -> Hop {
        let hop = self.flying.remove(&tag).expect("transfers end once");
        let bytes = match hop {
            Hop::ReadFile { length, target, .. } => {
                self.in_ram.insert(target, u64::from(length));
                u64::from(length)
            }
            Hop::ReadSpill { target, .. } => {
                self.in_ram.insert(target, self.page_size);
                self.page_size
            }
            Hop::WriteSpill { .. } => self.page_size,
            Hop::Up { source, target, .. } => {
                self.in_vram.insert(target, self.in_ram[&source]);
                self.in_ram[&source]
            }
            Hop::Down { source, target } => {
                // Only anonymous pages go down, also from frames that no hop has filled for them.
                self.in_ram.insert(target, self.page_size);
                self.in_vram.insert(source, self.page_size);
                self.page_size
            }
            // No page's bytes; what fails here no client is told.
            Hop::Release { .. } | Hop::Restore { .. } => {
                self.hops.entry(name(hop)).or_default().pages += 1;
                return hop;
            }
            Hop::Zero { target } => {
                self.in_vram.insert(target, self.page_size);
                self.page_size
            }
        };
        let stats = self.hops.entry(name(hop)).or_default();
        match result {
            Ok(_) => {
                stats.pages += 1;
                stats.bytes += bytes;
            }
            Err(fault) => {
                stats.errors += 1;
                let (code, _) = fault.wire();
                self.checksum_errors += u64::from(code == Code::DataLost);
                assert!(self.faults.contains(&code), "{fault}, and nothing went wrong");
            }
        }
        hop
    }

    pub(super) fn map_granted(&mut self, mapped: &Mapped) {
        self.served.add(mapped);
    }

    /// Compares with what the engine says; `own` is what the asking session's maps came to.
    pub(super) fn check(&self, stats: &Stats, own: &Served) {
        let total = &stats.total;
        let said = [
            ("file to RAM", total.file_to_ram),
            ("spill to RAM", total.spill_to_ram),
            ("RAM to spill", total.ram_to_spill),
            ("RAM to VRAM", total.ram_to_vram),
            ("VRAM to RAM", total.vram_to_ram),
            ("zeros to VRAM", total.zeroed),
        ];
        for (name, said) in said {
            let found = self.hops.get(name).copied().unwrap_or_default();
            assert!(said == found, "{name}: the engine says {said:?}, it was {found:?}");
        }
        let (said, found) = (total.checksum_errors, self.checksum_errors);
        assert!(said == found, "checksum errors: {said}, it was {found}");
        self.served.check(total, "all");
        own.check(&stats.session, "a session");
    }
}
