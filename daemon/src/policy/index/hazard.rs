//! How often units of one class were used again, by age; and what that makes them worth.

use bin::BINS;

/// Exposure is taken for granted up to this share of a bin's width.
const EXPECTED_FIRST: f32 = 0.5;
const EXPECTED: f32 = 64.0;

/// Bins of ages: eight for each power of two from 1/16 to 64, one below and one above.
pub(super) mod bin {
    /// Bins there are.
    pub(crate) const BINS: usize = 82;
    /// The first bin's end as the bits of an `f32`, less those that place an age within its bin.
    const FIRST: u32 = (1.0f32 / 16.0).to_bits() >> 20;

    /// The power of two of a scale of at least 1.
    pub(crate) fn octave(scale: f32) -> usize {
        ((scale.to_bits() >> 23) as usize).saturating_sub(127)
    }

    /// The bin of an age, and where in it from 0 to 1 (0 in the last, which has no end).
    pub(crate) fn of(age: f32) -> (usize, f32) {
        let bits = age.max(0.0).to_bits();
        let Some(bin) = (bits >> 20).checked_sub(FIRST) else { return (0, age.max(0.0) * 16.0) };
        let bin = bin as usize + 1;
        if bin >= BINS - 1 {
            return (BINS - 1, 0.0);
        }
        (bin, (bits & 0xf_ffff) as f32 / 1_048_576.0)
    }

    /// Where a bin begins.
    pub(crate) fn start(bin: usize) -> f32 {
        let bin = u32::try_from(bin).unwrap_or(0);
        if bin == 0 { 0.0 } else { f32::from_bits((FIRST + bin - 1) << 20) }
    }

    /// The width of a bin; of the last, which has no end, as if it doubled the age.
    pub(crate) fn width(bin: usize) -> f32 {
        if bin + 1 < BINS { start(bin + 1) - start(bin) } else { 64.0 }
    }
}

/// The counts of a class.
#[derive(Debug, Clone)]
pub(super) struct Class {
    /// Whether its units were used once.
    first: bool,
    changed: bool,
    events: [f32; BINS],
    exposure: [f32; BINS],
    /// Exposure that isn't in `exposure` yet: by bin, how many more units than in the bin before lived through all of it.
    whole: [f32; BINS + 1],
    /// What a unit is worth at the beginning of each bin, times its scale.
    worth: [f32; BINS],
}

impl Class {
    pub(super) fn new(first: bool) -> Self {
        let (counts, whole) = ([0.0; BINS], [0.0; BINS + 1]);
        let worth = counts;
        let mut class =
            Self { first, changed: true, events: counts, exposure: counts, whole, worth };
        class.weigh();
        class
    }

    /// A unit was used at an age.
    pub(super) fn event(&mut self, age: f32) {
        self.events[bin::of(age).0] += 1.0;
        self.changed = true;
    }

    /// A unit lived from one age to another.
    pub(super) fn expose(&mut self, from: f32, to: f32) {
        let ((first, _), (last, _)) = (bin::of(from), bin::of(to));
        self.changed = true;
        if first >= last {
            self.exposure[last] += (to - from).max(0.0);
            return;
        }
        self.exposure[first] += bin::start(first + 1) - from;
        self.exposure[last] += to - bin::start(last);
        self.whole[first + 1] += 1.0;
        self.whole[last] -= 1.0;
    }

    /// What a unit of an age is worth, times its scale.
    pub(super) fn worth(&self, age: f32) -> f32 {
        let (at, within) = bin::of(age);
        let (this, next) = (self.worth[at], self.worth[(at + 1).min(BINS - 1)]);
        this + (next - this) * within
    }

    /// Looks at what was counted; if that is enough, the past counts half from now on.
    pub(super) fn settle(&mut self, enough: f32) {
        if !self.changed {
            return;
        }
        self.changed = false;
        let mut living = 0.0;
        for at in 0..BINS {
            living += self.whole[at];
            self.exposure[at] += living * bin::width(at);
        }
        self.whole = [0.0; BINS + 1];
        let sum: f32 = self.events.iter().chain(&self.exposure).sum();
        if sum > enough {
            self.events.iter_mut().chain(&mut self.exposure).for_each(|count| *count /= 2.0);
        }
        self.weigh();
    }

    /// Uses a unit of time at an age, as counted and as expected before anything is.
    fn hazard(&self, at: usize) -> f32 {
        let middle = bin::start(at) + bin::width(at) / 2.0;
        let (rate, share) = if self.first { (0.1, EXPECTED_FIRST) } else { (1.0, EXPECTED) };
        let (rate, exposure) = (rate / (middle + 0.25), share * bin::width(at));
        (self.events[at] + rate * exposure) / (self.exposure[at] + exposure)
    }

    /// Of all times to keep a unit, the one that brings the most hits in its time.
    fn weigh(&mut self) {
        let mut lives = [(0.0, 0.0); BINS];
        for (at, life) in lives.iter_mut().enumerate() {
            let (hazard, width) = (self.hazard(at), bin::width(at));
            let lives_on = (-hazard * width).exp();
            let time = if hazard * width > 1e-4 { (1.0 - lives_on) / hazard } else { width };
            *life = (lives_on, time);
        }
        for from in 0..BINS {
            let (mut alive, mut time, mut best) = (1.0f32, 0.0f32, 0.0f32);
            for (lives_on, spent) in &lives[from..] {
                time += alive * spent;
                alive *= lives_on;
                best = best.max((1.0 - alive) / time);
                if alive < 1e-3 {
                    break;
                }
            }
            self.worth[from] = best;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_an_eighth_of_an_octave() {
        assert_eq!(bin::of(0.0), (0, 0.0));
        assert_eq!(bin::of(1.0 / 32.0), (0, 0.5));
        assert_eq!(bin::of(1.0 / 16.0), (1, 0.0));
        assert_eq!(bin::of(1.0), (33, 0.0));
        assert_eq!(bin::of(1.1875), (34, 0.5));
        assert_eq!(bin::of(64.0), (81, 0.0));
        assert_eq!(bin::of(f32::MAX), (81, 0.0));
        assert_eq!(bin::of(f32::NAN), (0, 0.0));
        assert_eq!((bin::start(33), bin::width(33)), (1.0, 0.125));
        assert_eq!((bin::start(81), bin::width(80)), (64.0, 4.0));
        assert_eq!((bin::octave(1.0), bin::octave(0.5), bin::octave(1000.0)), (0, 0, 9));
    }

    #[test]
    fn units_with_a_period_are_worth_more_the_sooner_they_are_due() {
        let mut class = Class::new(false);
        for _ in 0..10_000 {
            class.expose(0.0, 1.0);
            class.event(1.0);
        }
        class.settle(f32::MAX);
        let (young, due, late) = (class.worth(0.1), class.worth(0.98), class.worth(2.0));
        assert!((0.7..1.2).contains(&young), "{young}");
        assert!(due > 5.0, "{due}");
        assert!(late < young, "{late}");
    }

    #[test]
    fn units_that_are_never_used_again_are_worth_little() {
        let mut class = Class::new(true);
        (0..1000).for_each(|_| class.expose(0.0, 10.0));
        class.settle(f32::MAX);
        assert!(class.worth(0.5) < 0.01);
    }

    #[test]
    fn the_past_is_halved_when_it_is_enough() {
        let mut class = Class::new(true);
        class.event(0.0);
        class.expose(0.0, 1.0);
        class.settle(1.0);
        assert_eq!((class.events[0], class.exposure[0]), (0.5, 1.0 / 32.0));
    }
}
