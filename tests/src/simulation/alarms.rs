//! What the engine has to wake up for, beside the deadlines of requests.

use std::collections::{BTreeMap, BTreeSet};

use lapisd::engine::ids::VramFrame;
use lapisd::engine::limits::{REVOKE_WAIT_US, SPILL_REST_US};

/// Times at which something ends by itself.
#[derive(Debug, Default)]
pub(super) struct Alarms {
    /// Frames asked back: from then on nobody waits for them.
    asked_back: BTreeMap<VramFrame, u64>,
    /// Frames that did not come back in time.
    overdue: BTreeSet<VramFrame>,
    /// From then on the spill is written again.
    spill_rests_until: u64,
}

impl Alarms {
    /// Whether a frame did not come back in time.
    #[must_use]
    pub(super) fn is_overdue(&self, frame: VramFrame, now: u64) -> bool {
        self.overdue.contains(&frame) || self.asked_back.get(&frame).is_some_and(|due| *due <= now)
    }

    /// Frames that are asked back.
    pub(super) fn frames(&self) -> impl Iterator<Item = VramFrame> {
        self.asked_back.keys().chain(&self.overdue).copied()
    }

    /// A client is asked for a frame.
    pub(super) fn asked_back(&mut self, frame: VramFrame, now: u64) {
        self.asked_back.entry(frame).or_insert(now.saturating_add(REVOKE_WAIT_US));
    }

    /// A write to the spill failed.
    pub(super) fn write_failed(&mut self, now: u64) {
        self.spill_rests_until = now.saturating_add(SPILL_REST_US);
    }

    /// The engine wants its next tick then; whether somebody has a frame still says `held`.
    pub(super) fn check(&mut self, now: u64, tick: Option<u64>, held: impl Fn(VramFrame) -> bool) {
        let late = self.asked_back.iter().filter(|(_, due)| **due <= now);
        self.overdue.extend(late.map(|(frame, _)| *frame));
        self.overdue.retain(|frame| held(*frame));
        self.asked_back.retain(|frame, due| *due > now && held(*frame));
        let spill = Some(self.spill_rests_until).filter(|due| *due > now);
        let frames = self.asked_back.values().min().copied();
        for (due, what) in [(spill, "the spill rests"), (frames, "frames are asked back")] {
            let comes = due.is_none_or(|due| tick.is_some_and(|tick| tick <= due));
            assert!(comes, "{what} until {due:?}, and the next tick is at {tick:?}");
        }
    }

    /// Whether nobody keeps a frame, or is asked for one, and the spill does not rest.
    #[must_use]
    pub(super) fn are_silent(&self, now: u64) -> bool {
        self.asked_back.is_empty() && self.overdue.is_empty() && self.spill_rests_until <= now
    }
}
