//! All addresses of a client, under one lock: the spaces of its allocations and which bytes its mappings claim.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use lapis_proto::ids::{AllocationId, VramFrame};

use crate::allocation::Owned;
use crate::error::Error;
use crate::frames::FrameTable;
use crate::mapping::Space;

/// Pages that may keep their frame while no mapping holds them. Each takes an entry of the process's memory map, of
/// which Linux allows 65,530 by default.
const FRAMED_MAX: usize = 32_768;

/// Pages of an allocation that a mapping holds, and what keeps their addresses.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) allocation: Arc<Owned>,
    pub(crate) pages: Range<usize>,
}

/// Bytes of an allocation that a mapping hands out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) allocation: AllocationId,
    pub(crate) bytes: Range<u64>,
}

impl Claim {
    fn overlaps(&self, other: &Claim) -> bool {
        self.allocation == other.allocation
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    spaces: HashMap<AllocationId, Space>,
    reading: Vec<Claim>,
    writing: Vec<Claim>,
    /// Places with a frame, over all spaces.
    framed: usize,
    /// Frames that the daemon asked for while a mapping held them.
    owed: HashSet<VramFrame>,
}

impl Memory {
    pub(crate) fn insert(&mut self, allocation: AllocationId, space: Space) {
        self.spaces.insert(allocation, space);
    }

    /// Gives the allocation's addresses back.
    pub(crate) fn remove(&mut self, allocation: AllocationId) {
        if let Some(space) = self.spaces.remove(&allocation) {
            self.framed -= space.framed();
        }
    }

    /// Claims bytes, all or none: many may read the same bytes, or one may write them.
    pub(crate) fn claim(&mut self, claims: &[Claim], write: bool) -> Result<(), Error> {
        let readers = if write { self.reading.as_slice() } else { &[] };
        for claim in claims {
            let mut others = readers.iter().chain(&self.writing);
            if others.any(|other| claim.overlaps(other)) {
                return Err(Error::Conflict {
                    allocation: claim.allocation.0,
                    start: claim.bytes.start,
                    end: claim.bytes.end,
                });
            }
        }
        self.claimed(write).extend_from_slice(claims);
        Ok(())
    }

    /// Takes claims back.
    pub(crate) fn unclaim(&mut self, claims: &[Claim], write: bool) {
        let claimed = self.claimed(write);
        for claim in claims {
            if let Some(index) = claimed.iter().rposition(|other| other == claim) {
                claimed.swap_remove(index);
            }
        }
    }

    fn claimed(&mut self, write: bool) -> &mut Vec<Claim> {
        if write { &mut self.writing } else { &mut self.reading }
    }

    /// Maps pages at their places and holds them. On error nothing is held.
    pub(crate) fn hold(
        &mut self,
        allocation: AllocationId,
        pages: Range<usize>,
        frames: &[VramFrame],
        write: bool,
        table: &FrameTable,
    ) -> Result<(), Error> {
        let Some(space) = self.spaces.get_mut(&allocation) else { return Ok(()) };
        let before = space.framed();
        let result = space.hold(pages, frames, write, table);
        self.framed = self.framed + space.framed() - before;
        result
    }

    /// Ends what `hold` began.
    pub(crate) fn release(
        &mut self,
        allocation: AllocationId,
        pages: Range<usize>,
        write: bool,
    ) -> Result<(), Error> {
        let give_up = self.framed > FRAMED_MAX;
        let Some(space) = self.spaces.get_mut(&allocation) else { return Ok(()) };
        let before = space.framed();
        let result = space.release(pages, write, give_up);
        self.framed = self.framed + space.framed() - before;
        result
    }

    /// Unmaps `frames` wherever no mapping holds them, and closes them. Returns those that are gone now; the others
    /// are owed.
    pub(crate) fn revoke(
        &mut self,
        frames: &[VramFrame],
        table: &FrameTable,
    ) -> Result<Vec<VramFrame>, Error> {
        self.owed.extend(frames);
        self.settle(table)
    }

    /// Unmaps and closes the frames that are owed and no mapping holds any more. Returns them.
    pub(crate) fn settle(&mut self, table: &FrameTable) -> Result<Vec<VramFrame>, Error> {
        if self.owed.is_empty() {
            return Ok(Vec::new());
        }
        let mut held = HashSet::new();
        for space in self.spaces.values_mut() {
            let before = space.framed();
            let result = space.revoke(&self.owed, &mut held);
            self.framed = self.framed + space.framed() - before;
            result?;
        }
        let mut gone: Vec<VramFrame> = self.owed.difference(&held).copied().collect();
        gone.sort_unstable();
        table.close(&gone);
        self.owed = held;
        Ok(gone)
    }
}

#[cfg(test)]
mod tests {
    use lapis_proto::message::DeviceKind;

    use super::*;
    use crate::testing::sealed_memfd;

    #[test]
    fn an_owed_frame_goes_when_the_last_of_all_mappings_lets_it_go() {
        let table = FrameTable::new(65536, 2, DeviceKind::Sim);
        let (shared, other) = (VramFrame(0), VramFrame(1));
        table
            .import(&[shared, other], vec![sealed_memfd(65536), sealed_memfd(65536)])
            .expect("good");
        let mut memory = Memory::default();
        // One file that is open twice.
        let (one, two) = (AllocationId(1), AllocationId(2));
        for id in [one, two] {
            memory.insert(id, Space::reserve(2, 65536, None).expect("reserved"));
            memory.hold(id, 0..1, &[shared], false, &table).expect("held");
        }
        memory.hold(one, 1..2, &[other], false, &table).expect("held");

        assert_eq!(memory.revoke(&[shared, other], &table).expect("asked"), []);
        assert_eq!(memory.settle(&table).expect("nothing new"), []);
        memory.release(one, 0..1, false).expect("released");
        assert_eq!(memory.settle(&table).expect("held by the other"), []);
        assert_eq!(memory.framed, 2, "but out of the first place");
        memory.release(two, 0..1, false).expect("released");
        assert_eq!(memory.settle(&table).expect("the last"), [shared]);
        assert!(table.get(shared).is_err());
        table.get(other).expect("still held");
        memory.release(one, 1..2, false).expect("released");
        assert_eq!(memory.settle(&table).expect("the last"), [other]);
        assert_eq!((memory.framed, memory.settle(&table).expect("all is paid")), (0, vec![]));
    }
}
