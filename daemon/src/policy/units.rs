//! Numbers units densely, so that directories can keep what they know of them in arrays.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::{Slot, Unit};

/// Units and the slots that they have.
#[derive(Debug, Default)]
pub(crate) struct Units {
    /// For looking up only: its order depends on nothing outside, but means nothing either.
    slots: HashMap<Unit, Slot, BuildHasherDefault<Mix>>,
    /// By slot.
    units: Vec<Unit>,
    free: Vec<Slot>,
}

impl Units {
    pub(crate) fn slot(&self, unit: Unit) -> Option<Slot> {
        self.slots.get(&unit).copied()
    }

    /// The unit with a slot, or the one that had it last.
    pub(crate) fn unit(&self, slot: Slot) -> Option<Unit> {
        self.units.get(slot as usize).copied()
    }

    /// The unit's slot, a new one if it has none. None when there are as many units as can be numbered.
    pub(crate) fn enter(&mut self, unit: Unit) -> Option<Slot> {
        if let Some(slot) = self.slot(unit) {
            return Some(slot);
        }
        let slot = match self.free.pop() {
            Some(slot) => {
                self.units[slot as usize] = unit;
                slot
            }
            None => {
                let slot =
                    Slot::try_from(self.units.len()).ok().filter(|slot| *slot < Slot::MAX)?;
                self.units.push(unit);
                slot
            }
        };
        self.slots.insert(unit, slot);
        Some(slot)
    }

    /// The unit is gone; its slot will be another's.
    pub(crate) fn leave(&mut self, unit: Unit) -> Option<Slot> {
        let slot = self.slots.remove(&unit)?;
        self.free.push(slot);
        Some(slot)
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }
}

/// A hash of one number. Ids are given by the daemon, not by clients: nobody can make them collide.
#[derive(Debug, Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let mixed = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_dense_and_used_again() {
        let mut units = Units::default();
        assert_eq!([7, u64::MAX, 7].map(|unit| units.enter(unit)), [Some(0), Some(1), Some(0)]);
        assert_eq!((units.leave(7), units.leave(7), units.slot(7)), (Some(0), None, None));
        assert_eq!((units.enter(5), units.unit(0), units.unit(2)), (Some(0), Some(5), None));
        assert_eq!(units.len(), 2);
    }
}
