//! Reads that fail: one that may do better the next time is tried again, at once and twice; then, and if it can't do
//! better, whoever waits for its page is told.

use lapis_proto::code::Code;
use lapisd::engine::event::{Hop, TransferFault};

/// Times that a read is made.
const READS_MAX: u8 = 3;

/// Reads that failed.
#[derive(Debug, Default)]
pub(super) struct Retries {
    /// Those under way again, and how often they have failed.
    failed: Vec<(Hop, u8)>,
    /// To be made again in this event.
    due: Option<Hop>,
    /// Failed for good in this event.
    pub(super) lost: Option<Hop>,
    /// The same, until somebody has been told: then others may have room, and ask for it anew.
    given_up: Option<Hop>,
}

fn same_source(one: Hop, other: Hop) -> bool {
    match (one, other) {
        (Hop::ReadFile { file, offset, .. }, Hop::ReadFile { file: f, offset: o, .. }) => {
            (file, offset) == (f, o)
        }
        (Hop::ReadSpill { slot, .. }, Hop::ReadSpill { slot: other, .. }) => slot == other,
        _ => false,
    }
}

impl Retries {
    /// An event is about to be handled.
    pub(super) fn next_event(&mut self) {
        self.lost = None;
        self.given_up = None;
    }

    /// A hop ended.
    pub(super) fn completed(&mut self, hop: Hop, result: &Result<u64, TransferFault>) {
        if !matches!(hop, Hop::ReadFile { .. } | Hop::ReadSpill { .. }) {
            return;
        }
        let before = self.failed.iter().position(|(failed, _)| *failed == hop);
        let failures = before.map_or(0, |index| self.failed.swap_remove(index).1) + 1;
        let Err(fault) = result else { return };
        let may_pass = matches!(fault.wire().0, Code::Io | Code::DataLost);
        if may_pass && failures < READS_MAX {
            self.failed.push((hop, failures));
            self.due = Some(hop);
        } else {
            self.lost = Some(hop);
            self.given_up = Some(hop);
        }
    }

    /// Somebody is told something.
    pub(super) fn replied(&mut self) {
        self.given_up = None;
    }

    /// A hop is commanded.
    pub(super) fn started(&mut self, hop: Hop) {
        if self.due == Some(hop) {
            self.due = None;
        }
        let again = self.given_up.is_some_and(|read| same_source(read, hop));
        assert!(!again, "{hop:?} failed for good, and is made again");
    }

    /// The event was handled.
    pub(super) fn check(&self) {
        assert!(self.due.is_none(), "{:?} failed, and is not tried again", self.due);
    }
}
