//! The naive model of the tiers' sizes: what they should be, and which VRAM frames have no memory.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::{SetTier, Stats, Tier};
use lapisd::engine::event::Hop;
use lapisd::engine::ids::VramFrame;
use lapisd::engine::limits::Limits;

/// Sizes in frames, by tier.
#[derive(Debug)]
pub(super) struct Tiers {
    page_size: u64,
    full: [u32; 3],
    ram_reserve: u32,
    target: [u32; 3],
    /// The tier has had this size since it was reported to have it.
    settled: [bool; 3],
    /// A change that is being decided on.
    candidate: Option<(usize, u32)>,
    /// VRAM frames that are out of use, and whether they are being made anew.
    parked: BTreeMap<VramFrame, bool>,
    /// Those whose memory is being released.
    releasing: BTreeSet<VramFrame>,
    vram_was_full: bool,
}

/// Pages that may be mapped at once in so many frames: all but a sixteenth of them, and but one at least.
#[must_use]
pub(super) fn mapped_of(frames: u32) -> u32 {
    let kept = if frames < 32 { 1 } else { frames / 16 };
    frames.saturating_sub(kept)
}

fn index(tier: Tier) -> usize {
    match tier {
        Tier::Vram => 0,
        Tier::Ram => 1,
        Tier::Nvme => 2,
    }
}

impl Tiers {
    /// All that is configured, but for VRAM frames that have no memory yet.
    #[must_use]
    pub(super) fn new(limits: &Limits, frames_ready: u32) -> Self {
        let full = [limits.vram_frames, limits.ram_frames, limits.spill_slots];
        Self {
            page_size: limits.page_size,
            full,
            ram_reserve: limits.ram_reserve(),
            target: full,
            settled: [true; 3],
            candidate: None,
            parked: (frames_ready..limits.vram_frames).map(|n| (VramFrame(n), false)).collect(),
            releasing: BTreeSet::new(),
            vram_was_full: frames_ready == limits.vram_frames,
        }
    }

    /// The size of a tier that is or will be, with a change that is being decided on.
    fn target(&self, tier: usize) -> u32 {
        match self.candidate {
            Some((changing, frames)) if changing == tier => frames,
            _ => self.target[tier],
        }
    }

    /// Pages that may be mapped.
    #[must_use]
    pub(super) fn mapped_max(&self) -> u32 {
        mapped_of(self.target(0))
    }

    /// Frames of RAM and slots of the spill.
    #[must_use]
    pub(super) fn below(&self) -> (u32, u32) {
        (self.target(1), self.target(2))
    }

    /// The frames that a change asks for, if the tier can have so many.
    #[must_use]
    pub(super) fn asked(&self, set: &SetTier) -> Option<(Tier, u32)> {
        let tier = index(set.tier);
        let least = [2, 2 * self.ram_reserve + 2, 0][tier];
        let frames = u32::try_from(set.size / self.page_size).ok()?;
        (least..=self.full[tier]).contains(&frames).then_some((set.tier, frames))
    }

    /// A change is asked for.
    pub(super) fn consider(&mut self, set: &SetTier) {
        self.candidate = self.asked(set).map(|(tier, frames)| (index(tier), frames));
    }

    /// It is refused.
    pub(super) fn forget(&mut self) {
        self.candidate = None;
    }

    /// It is not refused by the end of the event.
    pub(super) fn decide(&mut self) {
        if let Some((tier, frames)) = self.candidate.take() {
            self.settled[tier] &= self.target[tier] == frames;
            self.vram_was_full &= tier != 0;
            self.target[tier] = frames;
        }
    }

    /// The daemon says that a tier has its size.
    pub(super) fn reached(&mut self, tier: Tier, mapped: usize) {
        self.decide();
        let tier = index(tier);
        self.settled[tier] = true;
        if tier == 0 {
            let out = (self.full[0] - self.target[0]) as usize;
            let parked = self.parked.len();
            assert!(parked == out, "{parked} VRAM frames are out of use, it should be {out}");
            let releasing = self.releasing.first();
            assert!(releasing.is_none(), "{releasing:?} has its memory still");
            assert!(mapped <= self.target[0] as usize, "{mapped} pages are mapped of {out}");
        }
    }

    /// A hop is commanded.
    pub(super) fn started(&mut self, hop: Hop) {
        match hop {
            Hop::Release { target } => {
                let old = self.parked.insert(target, false);
                assert!(old.is_none(), "{target:?} is released twice");
                self.releasing.insert(target);
            }
            Hop::Restore { target } => {
                let old = self.parked.insert(target, true);
                assert!(old == Some(false), "{target:?} is restored and was not released");
            }
            Hop::Up { target, .. } | Hop::Zero { target } => self.assert_in_use(target),
            Hop::Down { source, .. } => self.assert_in_use(source),
            Hop::ReadFile { .. } | Hop::ReadSpill { .. } | Hop::WriteSpill { .. } => {}
        }
    }

    /// A frame's memory is released, or could not be.
    pub(super) fn released(&mut self, frame: VramFrame) {
        self.releasing.remove(&frame);
    }

    /// Whether no frame of VRAM has ever been taken out of use.
    #[must_use]
    pub(super) fn vram_was_always_full(&self) -> bool {
        self.vram_was_full && !matches!(self.candidate, Some((0, _)))
    }

    /// A frame has its memory again, or it could not be had: then the tier stays smaller.
    pub(super) fn restored(&mut self, frame: VramFrame, well: bool) {
        self.parked.remove(&frame);
        if !well {
            self.parked.insert(frame, false);
            let out = self.parked.values().filter(|restoring| !**restoring).count();
            let most = self.full[0] - u32::try_from(out).expect("few");
            self.settled[0] &= self.target[0] <= most;
            self.target[0] = self.target[0].min(most);
        }
    }

    /// A frame is used.
    pub(super) fn assert_in_use(&self, frame: VramFrame) {
        assert!(!self.parked.contains_key(&frame), "{frame:?} is used and has no memory");
    }

    /// What the daemon says of its tiers.
    pub(super) fn check(&self, stats: &Stats) {
        let parked = u32::try_from(self.parked.len()).expect("few");
        for (tier, said) in [&stats.vram, &stats.ram, &stats.nvme].into_iter().enumerate() {
            let bytes = |frames: u32| u64::from(frames) * self.page_size;
            let (least, most) = match tier {
                0 => (self.full[0] - parked, self.full[0] - parked),
                _ if self.settled[tier] => (self.target[tier], self.target[tier]),
                _ => (self.target[tier], self.full[tier]),
            };
            let sizes = bytes(least)..=bytes(most);
            assert!(sizes.contains(&said.capacity), "tier {tier}: {said:?}, not {sizes:?}");
            assert!(said.used <= said.capacity, "tier {tier}: {said:?}");
            // Pages that maps are admitted for are pinned before they have a frame.
            assert!(said.pinned <= bytes(self.full[tier]), "tier {tier}: {said:?}");
        }
    }
}
