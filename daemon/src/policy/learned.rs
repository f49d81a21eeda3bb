//! The plan that nobody declared: finds where in its history the present repeats, and reads on from there.
//!
//! The history is a ring of accesses. While accesses go on as they did after the *cursor*, the plan holds; when they don't, the
//! latest place where the last three were the same is looked up. The plan is *certified* when enough of it came true.
//!
//! ```text
//!            cursor, where the present was before           head, the present
//!               v                                              v
//!   ... a b c d e | f g h a b x y z ...           ... a b c d e |  next: f, g, h, ...
//! ```

use super::Slot;

/// Most accesses remembered: a cycle that is longer is not found.
const RING_MAX: u64 = 1 << 18;
/// Accesses in a row that must have come as planned, at least.
const RUN_MIN: u64 = 16;
/// The share of a period that must have come as planned, as a divisor.
const RUN_SHARE: u64 = 4;
/// What an access weighs in the rate of success.
const SUCCESS_STEP: f32 = 0.02;
/// The rate of success that a plan must have.
const SUCCESS_MIN: f32 = 0.6;
/// Accesses that may be left out before the place is looked up anew.
const SKIPS_MAX: u64 = 8;
/// Uses of a unit that are looked at to find the next one.
const USES_MAX: u32 = 16;

/// An access of the past.
#[derive(Debug, Clone, Copy)]
struct Seen {
    slot: Slot,
    /// Accesses since the unit was used before; 0 if it wasn't, or too long ago.
    before: u32,
}

/// A model of accesses that repeat.
#[derive(Debug)]
pub struct Learned {
    /// The access with number `n` is at `n % RING_MAX`.
    ring: Vec<Seen>,
    /// Accesses seen.
    head: u64,
    /// By slot: the number of its last access and 1, or 0.
    last: Vec<u64>,
    /// By hash of three accesses: the number of the last of them and 1, or 0.
    contexts: Vec<u64>,
    /// The access of the past that the last one is taken to repeat.
    cursor: Option<u64>,
    run: u64,
    success: f32,
}

impl Default for Learned {
    fn default() -> Self {
        Self::new()
    }
}

impl Learned {
    /// One that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self {
            ring: Vec::new(),
            head: 0,
            last: Vec::new(),
            contexts: vec![0; 64],
            cursor: None,
            run: 0,
            success: 0.0,
        }
    }

    /// A unit is used.
    pub fn observe(&mut self, slot: Slot) {
        let came = self.follow(slot);
        let step = if came { 1.0 - self.success } else { -self.success };
        self.success += SUCCESS_STEP * step;
        self.record(slot);
        if let Some(context) = self.context(self.head - 1) {
            if self.cursor.is_none() || (!came && self.run == 0) {
                self.cursor = self.look_up(context);
            }
            self.contexts[context] = self.head;
        }
    }

    /// A unit is gone; its slot may become another's.
    pub fn forget(&mut self, slot: Slot) {
        if let Some(last) = self.last.get_mut(slot as usize) {
            *last = 0;
        }
    }

    /// Whether what comes next is known well enough to rely on.
    #[must_use]
    pub fn certified(&self) -> bool {
        self.run >= RUN_MIN && self.run >= self.period() / RUN_SHARE && self.success > SUCCESS_MIN
    }

    /// Accesses from one round to the next; 0 if nothing repeats.
    #[must_use]
    pub fn period(&self) -> u64 {
        self.cursor.map_or(0, |cursor| self.head - 1 - cursor)
    }

    /// Accesses from now to the next use of a unit, if the plan is certified and has one.
    #[must_use]
    pub fn next_use(&self, slot: Slot) -> Option<u64> {
        if !self.certified() {
            return None;
        }
        self.due(slot)
    }

    /// The units that the plan has next, soonest first, for one round; none if it isn't certified.
    pub fn upcoming(&self) -> impl Iterator<Item = Slot> + '_ {
        let cursor = self.cursor.filter(|_| self.certified());
        let numbers = cursor.map_or(0..0, |cursor| cursor + 1..self.head);
        numbers.filter_map(|number| self.seen(number)).map(|seen| seen.slot)
    }

    /// [`Learned::next_use`] whether or not the plan is certified.
    pub(crate) fn due(&self, slot: Slot) -> Option<u64> {
        let cursor = self.cursor?;
        let period = self.period();
        let mut number = self.last.get(slot as usize)?.checked_sub(1)?;
        let (mut this, mut earlier) = (None, None);
        for _ in 0..USES_MAX {
            if number > cursor {
                this = Some(number - cursor);
            } else if number + period > cursor {
                earlier = Some(number + period - cursor);
            } else {
                break;
            }
            let Some(seen) = self.seen(number) else { break };
            if seen.before == 0 {
                break;
            }
            number = number.saturating_sub(u64::from(seen.before));
        }
        let this = this?;
        Some(earlier.map_or(this, |earlier| this.min(earlier)))
    }

    /// Goes on after the cursor, if the access is one that was near there. Whether it was the very next.
    fn follow(&mut self, slot: Slot) -> bool {
        let Some(cursor) = self.cursor else { return false };
        for skipped in 0..=SKIPS_MAX {
            let next = cursor + 1 + skipped;
            if self.seen(next).is_none_or(|seen| seen.slot != slot) {
                continue;
            }
            self.cursor = Some(next);
            if skipped == 0 {
                self.run += 1;
            } else {
                self.run /= 2;
            }
            return skipped == 0;
        }
        self.run = 0;
        false
    }

    fn record(&mut self, slot: Slot) {
        if self.last.len() <= slot as usize {
            self.last.resize(slot as usize + 1, 0);
        }
        let last = std::mem::replace(&mut self.last[slot as usize], self.head + 1);
        let before = if last == 0 { 0 } else { self.head + 1 - last };
        let before = if before < RING_MAX { u32::try_from(before).unwrap_or(0) } else { 0 };
        let seen = Seen { slot, before };
        if self.head < RING_MAX {
            self.ring.push(seen);
        } else {
            self.ring[place(self.head)] = seen;
        }
        self.head += 1;
        if self.contexts.len() < self.ring.len().saturating_mul(2) {
            self.grow();
        }
    }

    /// Makes place for more contexts: half full at most, so that one is seldom overwritten by another.
    fn grow(&mut self) {
        self.contexts = vec![0; self.contexts.len().saturating_mul(2)];
        for number in 0..self.head {
            if let Some(context) = self.context(number) {
                self.contexts[context] = number + 1;
            }
        }
    }

    /// An access by its number, if it is remembered.
    fn seen(&self, number: u64) -> Option<Seen> {
        let remembered = number < self.head && self.head - number <= RING_MAX;
        if remembered { self.ring.get(place(number)).copied() } else { None }
    }

    /// The three accesses that end with one.
    fn three(&self, number: u64) -> Option<[Slot; 3]> {
        let slot = |number| self.seen(number).map(|seen| seen.slot);
        Some([slot(number.checked_sub(2)?)?, slot(number - 1)?, slot(number)?])
    }

    /// Where the three accesses that end with one are found among the contexts.
    fn context(&self, number: u64) -> Option<usize> {
        let three = self.three(number)?;
        let mix = |hash: u64, slot| (hash ^ u64::from(slot)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = three.into_iter().fold(0, |hash, slot| mix(hash, slot).rotate_left(29));
        usize::try_from(hash % self.contexts.len() as u64).ok()
    }

    /// The latest place in the past where the last three accesses were the same.
    fn look_up(&self, context: usize) -> Option<u64> {
        let number = self.contexts[context].checked_sub(1)?;
        let same = self.three(number)? == self.three(self.head - 1)?;
        same.then_some(number)
    }
}

/// Where an access is in the ring.
fn place(number: u64) -> usize {
    usize::try_from(number % RING_MAX).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learn(accesses: impl Iterator<Item = Slot>) -> Learned {
        let mut learned = Learned::new();
        accesses.for_each(|slot| learned.observe(slot));
        learned
    }

    #[test]
    fn a_cycle_is_known_a_quarter_into_its_second_round() {
        let after = |accesses| learn((0..accesses).map(|at| at % 400));
        assert!(!after(400 + 100).certified());
        let learned = after(400 + 110);
        assert!(learned.certified());
        assert_eq!(learned.period(), 400);
        assert_eq!(learned.next_use(110), Some(1));
        assert_eq!(learned.next_use(109), Some(400));
        assert_eq!(learned.next_use(50), Some(341));
        assert_eq!(learned.next_use(400), None);
        let next: Vec<Slot> = learned.upcoming().take(3).collect();
        assert_eq!(next, [110, 111, 112]);
        assert_eq!(learned.upcoming().count(), 400);
    }

    #[test]
    fn nothing_is_known_where_nothing_repeats() {
        let learned = learn(0..5000);
        assert_eq!(
            (learned.certified(), learned.period(), learned.next_use(4999)),
            (false, 0, None)
        );
        assert_eq!(learned.upcoming().next(), None);
    }

    #[test]
    fn a_back_and_forth_is_known_by_what_was_used_before() {
        let round = || (0..100).chain((0..100).rev());
        let learned = learn((0..5).flat_map(|_| round()).chain(0..80));
        assert!(learned.certified());
        assert_eq!(learned.next_use(80), Some(1));
        assert_eq!(learned.next_use(79), Some(41));
        assert_eq!(learned.next_use(0), Some(120));
    }

    #[test]
    fn what_is_forgotten_is_not_awaited() {
        let mut learned = learn((0..1000).map(|at| at % 100));
        learned.forget(5);
        learned.forget(1 << 30);
        assert_eq!((learned.next_use(5), learned.next_use(6)), (None, Some(7)));
    }

    #[test]
    fn the_ring_goes_round() {
        let learned = learn((0..3 * RING_MAX).map(|at| u32::try_from(at % 1000).unwrap()));
        let at = u32::try_from(3 * RING_MAX % 1000).unwrap();
        assert!(learned.certified());
        assert_eq!((learned.next_use(at), learned.next_use(at + 10)), (Some(1), Some(11)));
    }
}
