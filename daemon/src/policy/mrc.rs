//! How many hits a cache of any size would have, and how much is used in a while: from a sample of units.
//!
//! SHARDS (Waldspurger et al., FAST'15) with a fixed number of samples: units are followed whose hash is below a threshold; when
//! there are too many, the one with the largest hash is given up and the threshold becomes its hash. The distance between two uses of a
//! unit, in pages of units used in between, is that among the samples over the share of units that are followed; LRU hits
//! when that fits. Memory is bounded by the number of samples, and an access that isn't followed costs a hash.

use std::collections::{BTreeMap, BTreeSet};

use super::Unit;

/// Steps of the curve for each power of two of the size.
const STEPS: usize = 8;
/// Steps there are: sizes up to 2^48 pages.
const BUCKETS: usize = 48 * STEPS;
/// All hashes.
const HASHES: f64 = 18_446_744_073_709_551_616.0;

#[derive(Debug, Clone, Copy)]
struct Sample {
    hash: u64,
    weight: u32,
    /// Its place in the order of last uses.
    place: usize,
    /// When it was used last, by the caller's clock.
    used: u64,
}

/// A miss-ratio curve and working sets of a stream of accesses.
#[derive(Debug)]
pub struct Curve {
    samples_max: usize,
    samples: BTreeMap<Unit, Sample>,
    by_hash: BTreeSet<(u64, Unit)>,
    /// Units with hashes below it are followed; all while there are few.
    threshold: Option<u64>,
    order: Order,
    /// By distance in steps: accesses that came back after it, as if all units had been followed at today's share.
    distances: Vec<f64>,
    /// Accesses to units followed that weren't known, counted the same way.
    first: f64,
    /// All accesses.
    accesses: u64,
}

impl Curve {
    /// One that follows at most so many units (at least 1).
    #[must_use]
    pub fn new(samples_max: usize) -> Self {
        let samples_max = samples_max.max(1);
        Self {
            samples_max,
            samples: BTreeMap::new(),
            by_hash: BTreeSet::new(),
            threshold: None,
            order: Order::new(samples_max),
            distances: vec![0.0; BUCKETS],
            first: 0.0,
            accesses: 0,
        }
    }

    /// A unit of `weight` pages (0 counts as 1) is used, at a time of the caller's clock.
    pub fn access(&mut self, unit: Unit, weight: u32, now: u64) {
        self.accesses = self.accesses.saturating_add(1);
        let hash = mix(unit);
        if self.threshold.is_some_and(|threshold| hash >= threshold) {
            return;
        }
        let weight = weight.max(1);
        match self.samples.get(&unit).copied() {
            Some(sample) => {
                self.order.remove(sample.place, sample.weight);
                // It fits where it and what was used since fit.
                let pages = self.order.after(sample.place) + u64::from(weight);
                let step = step(pages as f64 / self.share(), f64::ceil);
                self.distances[step] += 1.0;
            }
            None => {
                self.first += 1.0;
                self.by_hash.insert((hash, unit));
            }
        }
        if self.order.is_full() {
            self.renumber(unit);
        }
        let place = self.order.push(weight);
        self.samples.insert(unit, Sample { hash, weight, place, used: now });
        if self.samples.len() > self.samples_max {
            self.follow_fewer();
        }
    }

    /// A unit is gone for good.
    pub fn forget(&mut self, unit: Unit) {
        if let Some(sample) = self.samples.remove(&unit) {
            self.order.remove(sample.place, sample.weight);
            self.by_hash.remove(&(sample.hash, unit));
        }
    }

    /// Those among the units followed that `are_gone` are so for good.
    pub fn forget_where(&mut self, are_gone: impl Fn(Unit) -> bool) {
        let gone: Vec<Unit> = self.samples.keys().copied().filter(|unit| are_gone(*unit)).collect();
        gone.into_iter().for_each(|unit| self.forget(unit));
    }

    /// The share of accesses that an LRU cache of so many pages would have hit, from 0 to 1.
    #[must_use]
    pub fn hit_ratio(&self, pages: u64) -> f64 {
        let expected = self.accesses as f64 * self.share();
        let last = step(pages as f64, f64::floor);
        let hits: f64 = self.distances[..=last].iter().sum();
        // Units that are used a lot are followed or not by chance. What they make too many or too few of
        // are hits at short distances (SHARDS-adj).
        let adjust = expected - self.first - self.distances.iter().sum::<f64>();
        if expected > 0.0 && pages > 0 { ((hits + adjust) / expected).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Pages of the units used at or after a time of the caller's clock.
    #[must_use]
    pub fn working_set(&self, since: u64) -> u64 {
        let recent = self.samples.values().filter(|sample| sample.used >= since);
        let pages: f64 = recent.map(|sample| f64::from(sample.weight)).sum::<f64>() / self.share();
        whole(pages)
    }

    /// Accesses seen.
    #[must_use]
    pub fn accesses(&self) -> u64 {
        self.accesses
    }

    /// The share of units that are followed.
    fn share(&self) -> f64 {
        self.threshold.map_or(1.0, |threshold| threshold.max(1) as f64 / HASHES)
    }

    /// Gives up the unit with the largest hash, and counts what was counted as at the new share.
    fn follow_fewer(&mut self) {
        let Some((hash, unit)) = self.by_hash.last().copied() else { return };
        let old = self.share();
        self.threshold = Some(hash);
        let scale = self.share() / old;
        self.distances.iter_mut().for_each(|count| *count *= scale);
        self.first *= scale;
        self.forget(unit);
    }

    /// Moves places together, since the last one is taken. `leaving` is in no place.
    fn renumber(&mut self, leaving: Unit) {
        let mut by_place: Vec<(usize, Unit, u32)> = Vec::with_capacity(self.samples.len());
        by_place
            .extend(self.samples.iter().map(|(unit, sample)| (sample.place, *unit, sample.weight)));
        by_place.sort_unstable();
        self.order.clear();
        for (_, unit, weight) in by_place.into_iter().filter(|entry| entry.1 != leaving) {
            let place = self.order.push(weight);
            if let Some(sample) = self.samples.get_mut(&unit) {
                sample.place = place;
            }
        }
    }
}

/// Pages in order of last use, with sums over the end of the order (a Fenwick tree).
#[derive(Debug)]
struct Order {
    tree: Vec<u64>,
    /// Places given out.
    len: usize,
    sum: u64,
}

impl Order {
    fn new(samples_max: usize) -> Self {
        // Four times as many places as samples: places are moved together seldom.
        Self { tree: vec![0; samples_max.saturating_mul(4).max(16)], len: 0, sum: 0 }
    }

    fn clear(&mut self) {
        self.tree.fill(0);
        (self.len, self.sum) = (0, 0);
    }

    fn is_full(&self) -> bool {
        self.len == self.tree.len()
    }

    fn push(&mut self, weight: u32) -> usize {
        let place = self.len;
        self.len += 1;
        self.sum += u64::from(weight);
        self.change(place, |sum| sum + u64::from(weight));
        place
    }

    fn remove(&mut self, place: usize, weight: u32) {
        self.sum -= u64::from(weight);
        self.change(place, |sum| sum - u64::from(weight));
    }

    fn change(&mut self, place: usize, change: impl Fn(u64) -> u64) {
        let mut at = place;
        while let Some(sum) = self.tree.get_mut(at) {
            *sum = change(*sum);
            at |= at + 1;
        }
    }

    /// Pages in places after one.
    fn after(&self, place: usize) -> u64 {
        let (mut before, mut end) = (0, place + 1);
        while end > 0 {
            before += self.tree[end - 1];
            end &= end - 1;
        }
        self.sum - before
    }
}

/// The step of the curve that a number of pages is in: distances are rounded up, sizes down.
fn step(pages: f64, round: fn(f64) -> f64) -> usize {
    let steps = round(pages.max(1.0).log2() * STEPS as f64);
    usize::try_from(whole(steps)).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// A number without its fraction; none is below 0.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast of a float stops at the ends of the target"
)]
fn whole(number: f64) -> u64 {
    number as u64
}

/// A hash of an id: neighbours are followed or not independently.
fn mix(unit: Unit) -> u64 {
    let mixed = (unit ^ (unit >> 30)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::lru::Lru;
    use super::super::{Directory, Slot, patterns};
    use super::*;

    fn curve(samples: usize, trace: &[Slot]) -> Curve {
        let mut curve = Curve::new(samples);
        for (now, slot) in trace.iter().enumerate() {
            curve.access(u64::from(*slot), 1, now as u64);
        }
        curve
    }

    fn exact(pages: u64, trace: &[Slot]) -> f64 {
        let (mut lru, mut out) = (Lru::new(pages), Vec::new());
        let hits = trace.iter().filter(|slot| lru.access(**slot, 1, &mut out)).count();
        hits as f64 / trace.len() as f64
    }

    /// The mean difference between the curve and LRU, at sizes at the ends of steps.
    fn error(curve: &Curve, trace: &[Slot]) -> f64 {
        let sizes = [64u64, 128, 256, 512, 1024, 2048, 4096, 8192];
        let off = |pages: u64| (curve.hit_ratio(pages) - exact(pages, trace)).abs();
        sizes.into_iter().map(off).sum::<f64>() / sizes.len() as f64
    }

    proptest! {
        #[test]
        fn with_all_units_followed_the_curve_is_that_of_lru(
            trace in proptest::collection::vec(0..100u32, 1..600),
        ) {
            let curve = curve(100, &trace);
            for pages in [1u64, 2, 4, 8, 16, 32, 64, 128] {
                let (guess, exact) = (curve.hit_ratio(pages), exact(pages, &trace));
                prop_assert!((guess - exact).abs() < 1e-9, "{pages}: {guess} {exact}");
            }
            let since = trace.len() as u64 / 2;
            let distinct: BTreeSet<_> = trace[trace.len() / 2..].iter().collect();
            prop_assert_eq!(curve.working_set(since), distinct.len() as u64);
        }

        #[test]
        fn nothing_breaks_it_and_it_stays_small(
            samples in 0..20usize,
            ops in proptest::collection::vec((0..12u32, 0..200u64, any::<u32>(), any::<u64>()), 0..400),
        ) {
            let mut curve = Curve::new(samples);
            for (what, unit, weight, now) in ops {
                match what {
                    0 => curve.forget(unit),
                    1 => curve.access(now, weight, now),
                    _ => curve.access(unit, weight, now),
                }
                prop_assert!(curve.samples.len() <= samples.max(1));
                prop_assert_eq!(curve.samples.len(), curve.by_hash.len());
                let ratio = curve.hit_ratio(now);
                prop_assert!((0.0..=1.0).contains(&ratio), "{ratio}");
                prop_assert!(curve.working_set(u64::MAX) <= curve.working_set(0));
            }
        }
    }

    #[test]
    fn a_sample_says_nearly_the_same() {
        let mut random = 1u64;
        let mut skewed = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let octave = (random >> 40) % 14;
            u32::try_from((1 << octave) + (random >> 20) % (1 << octave)).unwrap()
        };
        let trace: Vec<Slot> = (0..200_000).map(|_| skewed()).collect();
        let sampled = curve(2000, &trace);
        assert!(sampled.share() < 0.2, "{}", sampled.share());
        let off = error(&sampled, &trace);
        assert!(off < 0.02, "{off}");
        let distinct: BTreeSet<_> = trace[100_000..].iter().collect();
        let set = sampled.working_set(100_000) as f64 / distinct.len() as f64;
        assert!((0.9..1.1).contains(&set), "{set}");
    }

    #[test]
    fn the_steps_of_a_cycle_and_of_kv_caches_are_where_they_are() {
        for name in ["cycle", "cycle-kv-zipf", "experts"] {
            let trace = patterns::make(name, 40).unwrap().accesses;
            let off = error(&curve(300, &trace), &trace);
            assert!(off < 0.04, "{name}: {off}");
        }
    }

    #[test]
    fn pages_count_not_units() {
        let mut curve = Curve::new(100);
        (0..400).for_each(|at| curve.access(at % 4, 16, at));
        assert_eq!((curve.hit_ratio(63), curve.hit_ratio(64)), (0.0, 0.99));
        assert_eq!((curve.working_set(398), curve.accesses()), (32, 400));
        curve.forget(3);
        assert_eq!((curve.working_set(0), curve.working_set(400)), (48, 0));
    }
}
