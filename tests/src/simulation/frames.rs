//! What VRAM frames hold, as far as it can be told from outside.

use std::collections::BTreeMap;

use lapisd::engine::event::Hop;
use lapisd::engine::ids::{Domain, VramFrame};

/// The past of all frames.
#[derive(Debug)]
pub(super) struct Frames {
    unified: bool,
    events: u64,
    /// Whose client mapped a frame last, unless a hop has filled it since.
    left_by: BTreeMap<VramFrame, Domain>,
    /// In which event a frame was filled.
    filled: BTreeMap<VramFrame, u64>,
}

impl Frames {
    /// Nobody has used any.
    #[must_use]
    pub(super) fn new(unified: bool) -> Self {
        Self { unified, events: 0, left_by: BTreeMap::new(), filled: BTreeMap::new() }
    }

    /// One event more is handled; its number.
    pub(super) fn next_event(&mut self) -> u64 {
        self.events += 1;
        self.events
    }

    /// The number of the present event.
    #[must_use]
    pub(super) fn event(&self) -> u64 {
        self.events
    }

    /// A hop ended well.
    pub(super) fn moved(&mut self, hop: Hop) {
        let frame = match hop {
            Hop::Up { target, .. }
            | Hop::Zero { target }
            | Hop::Release { target }
            | Hop::Restore { target } => target,
            // Its frames are those of VRAM.
            Hop::ReadFile { target, .. } | Hop::ReadSpill { target, .. } if self.unified => {
                VramFrame(target.0)
            }
            Hop::ReadFile { .. }
            | Hop::ReadSpill { .. }
            | Hop::WriteSpill { .. }
            | Hop::Down { .. } => return,
        };
        self.left_by.remove(&frame);
        self.filled.insert(frame, self.events);
    }

    /// A client maps a frame.
    pub(super) fn mapped(&mut self, frame: VramFrame, domain: Domain) {
        let old = self.left_by.insert(frame, domain);
        let others = old.filter(|old| *old != domain);
        assert!(
            others.is_none(),
            "{frame:?} is mapped in {domain:?} with what {others:?} left there"
        );
    }

    /// Whether a frame holds the same page since before an event.
    #[must_use]
    pub(super) fn filled_before(&self, frame: VramFrame, event: u64) -> bool {
        self.filled.get(&frame).is_none_or(|filled| *filled < event)
    }
}
