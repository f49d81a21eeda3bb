//! Free frames against naive models: sets of slots, and one place a frame.

use proptest::prelude::*;

use super::super::cases::{check, pick};
use super::*;

#[derive(Debug, Clone)]
enum SlotOp {
    Take,
    Put(usize),
    PutLast(usize),
}

fn slot_op() -> impl Strategy<Value = SlotOp> {
    prop_oneof![
        3 => Just(SlotOp::Take),
        2 => any::<usize>().prop_map(SlotOp::Put),
        1 => any::<usize>().prop_map(SlotOp::PutLast),
    ]
}

/// What was put back is taken before what was never used, lowest first, and that before what was put back to be last.
#[derive(Debug)]
struct NaiveSlots {
    unused: BTreeSet<u32>,
    back: BTreeSet<u32>,
    last: BTreeSet<u32>,
    taken: BTreeSet<u32>,
}

fn run_slots(capacity: u32, ops: Vec<SlotOp>) -> Result<(), TestCaseError> {
    let mut slots = FreeSlots::new(capacity);
    let (back, last, taken) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    let mut naive = NaiveSlots { unused: (0..capacity).collect(), back, last, taken };
    for op in ops {
        match op {
            SlotOp::Take => match slots.take() {
                None => prop_assert_eq!(naive.taken.len(), capacity as usize),
                Some(slot) => {
                    let lowest = naive.unused.first() == Some(&slot);
                    let right = if naive.back.is_empty() {
                        lowest || (naive.unused.is_empty() && naive.last.contains(&slot))
                    } else {
                        naive.back.contains(&slot)
                    };
                    prop_assert!(right, "slot {} is taken, {:?}", slot, naive);
                    for set in [&mut naive.unused, &mut naive.back, &mut naive.last] {
                        set.remove(&slot);
                    }
                    prop_assert!(naive.taken.insert(slot), "slot {} is given twice", slot);
                }
            },
            SlotOp::Put(number) => {
                let Some(slot) = pick(naive.taken.iter().copied(), number) else { continue };
                slots.put(slot);
                naive.taken.remove(&slot);
                naive.back.insert(slot);
            }
            SlotOp::PutLast(number) => {
                let Some(slot) = pick(naive.taken.iter().copied(), number) else { continue };
                slots.put_last(slot);
                naive.taken.remove(&slot);
                naive.last.insert(slot);
            }
        }
        let mut free: Vec<_> = slots.iter().collect();
        free.sort_unstable();
        let expected: Vec<_> = (0..capacity).filter(|slot| !naive.taken.contains(slot)).collect();
        prop_assert_eq!(&free, &expected);
        prop_assert_eq!(slots.free() as usize, expected.len());
        prop_assert_eq!(slots.capacity(), capacity);
    }
    Ok(())
}

#[test]
fn slots_are_given_once_and_in_order() {
    let cases = (0_u32..8, prop::collection::vec(slot_op(), 0..60));
    check(1000, &cases, |(capacity, ops)| run_slots(capacity, ops));
}

#[derive(Debug, Clone)]
enum FrameOp {
    Take(u32),
    TakeForeign(u32),
    TakeSeen,
    TakeUnseen,
    Put(u32, usize),
    Revoke(usize),
    Revoked(usize),
    UnseenAgain(usize),
}

fn frame_op() -> impl Strategy<Value = FrameOp> {
    let (domain, number) = (0_u32..3, any::<usize>());
    prop_oneof![
        4 => domain.clone().prop_map(FrameOp::Take),
        1 => domain.clone().prop_map(FrameOp::TakeForeign),
        1 => Just(FrameOp::TakeSeen),
        1 => Just(FrameOp::TakeUnseen),
        4 => (domain, number).prop_map(|(domain, number)| FrameOp::Put(domain, number)),
        2 => number.prop_map(FrameOp::Revoke),
        2 => number.prop_map(FrameOp::Revoked),
        1 => number.prop_map(FrameOp::UnseenAgain),
    ]
}

/// Where a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Unseen,
    Seen(Domain),
    Taken,
    Revoking,
}

struct Frames {
    real: VramFrames,
    naive: Vec<Place>,
}

impl Frames {
    fn at(&self, wanted: impl Fn(Place) -> bool) -> Vec<VramFrame> {
        let found = (0_u32..).zip(&self.naive).filter(|(_, place)| wanted(**place));
        found.map(|(frame, _)| VramFrame(frame)).collect()
    }

    fn pick(&self, wanted: Place, number: usize) -> Option<VramFrame> {
        pick(self.at(|place| place == wanted), number)
    }

    /// A frame was taken that may have been in any place that was `wanted`.
    fn taken(
        &mut self,
        frame: Option<VramFrame>,
        wanted: impl Fn(Place) -> bool,
    ) -> Result<(), TestCaseError> {
        let candidates = self.at(wanted);
        match frame {
            None => prop_assert!(candidates.is_empty(), "none of {:?}", candidates),
            Some(frame) => {
                prop_assert!(candidates.contains(&frame), "{:?}, not of {:?}", frame, candidates);
                self.naive[frame.0 as usize] = Place::Taken;
            }
        }
        Ok(())
    }

    fn run(&mut self, op: &FrameOp) -> Result<(), TestCaseError> {
        let seen = |place| matches!(place, Place::Seen(_));
        match *op {
            FrameOp::Take(domain) => {
                let own = Place::Seen(Domain(domain));
                let has_own = self.naive.contains(&own);
                let taken = self.real.take(Domain(domain));
                if let Some((_, says_own)) = taken {
                    prop_assert_eq!(says_own, has_own);
                }
                let wanted = if has_own { own } else { Place::Unseen };
                self.taken(taken.map(|(frame, _)| frame), |place| place == wanted)?;
            }
            FrameOp::TakeForeign(domain) => {
                let own = Place::Seen(Domain(domain));
                // Odd ones don't come back.
                let even = |frame: VramFrame| frame.0.is_multiple_of(2);
                let taken = self.real.take_foreign(Domain(domain), even);
                let foreign = |place: Place| seen(place) && place != own;
                let places = self.naive.iter().enumerate();
                let there = places
                    .filter(|(index, place)| index.is_multiple_of(2) && foreign(**place))
                    .count()
                    > 0;
                prop_assert_eq!(taken.is_some(), there);
                prop_assert!(taken.is_none_or(|(_, frame)| even(frame)));
                if taken.is_some() {
                    self.taken_from(taken, foreign)?;
                }
            }
            FrameOp::TakeSeen => {
                let taken = self.real.take_seen();
                self.taken_from(taken, seen)?;
            }
            FrameOp::TakeUnseen => {
                let taken = self.real.take_unseen();
                self.taken(taken, |place| place == Place::Unseen)?;
            }
            FrameOp::Put(domain, number) => {
                let Some(frame) = self.pick(Place::Taken, number) else { return Ok(()) };
                self.real.put(Domain(domain), frame);
                self.naive[frame.0 as usize] = Place::Seen(Domain(domain));
            }
            FrameOp::Revoke(number) => {
                let Some(frame) = self.pick(Place::Taken, number) else { return Ok(()) };
                self.real.revoke(frame);
                self.naive[frame.0 as usize] = Place::Revoking;
            }
            FrameOp::Revoked(number) => {
                // Of any frame: one that is not being revoked stays where it is.
                let Some(frame) = pick(self.at(|_| true), number) else { return Ok(()) };
                self.real.revoked(frame);
                if self.naive[frame.0 as usize] == Place::Revoking {
                    self.naive[frame.0 as usize] = Place::Unseen;
                }
            }
            FrameOp::UnseenAgain(number) => {
                let Some(frame) = self.pick(Place::Taken, number) else { return Ok(()) };
                self.real.unseen_again(frame);
                self.naive[frame.0 as usize] = Place::Unseen;
            }
        }
        self.compare()
    }

    /// As [`Self::taken`]; the frame comes with whose it was.
    fn taken_from(
        &mut self,
        taken: Option<(Domain, VramFrame)>,
        wanted: impl Fn(Place) -> bool,
    ) -> Result<(), TestCaseError> {
        if let Some((owner, frame)) = taken {
            prop_assert_eq!(self.naive[frame.0 as usize], Place::Seen(owner));
        }
        self.taken(taken.map(|(_, frame)| frame), wanted)
    }

    fn compare(&self) -> Result<(), TestCaseError> {
        let free = self.at(|place| matches!(place, Place::Unseen | Place::Seen(_)));
        let revoking = self.at(|place| place == Place::Revoking);
        let mut listed: Vec<_> = self.real.iter().collect();
        listed.sort_unstable();
        prop_assert_eq!(self.real.free() as usize, free.len());
        prop_assert_eq!(listed, free);
        prop_assert_eq!(self.real.has_unseen(), self.naive.contains(&Place::Unseen));
        prop_assert_eq!(self.real.revoking_count() as usize, revoking.len());
        for frame in self.at(|_| true) {
            prop_assert_eq!(self.real.is_revoking(frame), revoking.contains(&frame));
        }
        prop_assert_eq!(self.real.revoking().collect::<Vec<_>>(), revoking);
        prop_assert_eq!(self.real.capacity() as usize, self.naive.len());
        Ok(())
    }
}

#[test]
fn a_frame_is_in_one_place_and_only_its_domain_sees_it() {
    let cases = (0_u32..8, prop::collection::vec(frame_op(), 0..80));
    check(1000, &cases, |(capacity, ops)| {
        let naive = vec![Place::Unseen; capacity as usize];
        let mut frames = Frames { real: VramFrames::new(capacity), naive };
        ops.iter().try_for_each(|op| frames.run(op))
    });
}
