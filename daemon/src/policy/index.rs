//! A guess at when a unit is used again, where no plan says it: how often units like it were used again at its age.
//!
//! Each unit has a *scale*, the interval at which it is expected back: the last one or the one before, whichever is a
//! good guess, or else their mean. Its *age* is the time since its last use, in scales. Units are classed by scale and by
//! how well their intervals were guessed before, and per class and age it is counted how many were used (events) of how many
//! could have been (exposure). Units that weren't used count as exposed: without that, dead ones look alive.
//!
//! The *worth* of a unit is its Gittins index: the largest rate of hits that keeping it for some time could bring. For
//! a unit with a period it is one over the time until it is due, for a random one its rate, for a dead one nothing.

use super::Slot;
use hazard::{Class, bin};

mod hazard;

/// Classes of scales, by their powers of two.
const OCTAVES: usize = 32;
/// Classes of units of one scale: by how well their intervals can be guessed.
const KINDS: usize = 4;
/// Accesses between two looks at what was counted, at least.
const EPOCH_MIN: u32 = 128;
/// Most units looked at on an access to count their exposure.
const SWEEP_MAX: usize = 4;
/// What the last interval weighs in the mean.
const MEAN_STEP: f32 = 0.25;
/// An interval counts as at most so many means: one that was much longer says that something else came between.
const FAR: f32 = 10.0;
/// An interval was guessed well if it was within this share of the guess.
const WELL: f32 = 0.125;
/// Counts of a class that are enough for its past to be halved.
const COUNTS_MIN: f32 = 2000.0;

#[derive(Debug, Clone, Copy, Default)]
struct Record {
    /// Whether it was ever used.
    known: bool,
    /// Intervals well guessed in a row, up to 2.
    trust: u8,
    /// Whether the last interval but one was the better guess: above 0.
    choice: i8,
    /// Intervals seen, up to 2.
    intervals: u8,
    class: u16,
    /// When it was used last.
    last: u32,
    /// Up to which age its exposure is counted, in accesses.
    counted: u32,
    latest: f32,
    earlier: f32,
    mean: f32,
    scale: f32,
}

/// What is known of units and of their classes.
#[derive(Debug)]
pub struct Index {
    records: Vec<Record>,
    classes: Vec<Class>,
    clock: u32,
    /// Units that the cache has.
    capacity: u32,
    /// Accesses since the last look at what was counted.
    since: u32,
    sweep: usize,
}

impl Index {
    /// One that has seen nothing, for a cache of so many units.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        let classes = (0..=OCTAVES * KINDS).map(|class| Class::new(class == 0)).collect();
        let capacity = capacity.max(1);
        Self { records: Vec::new(), classes, clock: 0, capacity, since: 0, sweep: 0 }
    }

    /// The cache has so many units now.
    pub fn set_capacity(&mut self, capacity: u32) {
        self.capacity = capacity.max(1);
    }

    /// A unit is used.
    pub fn observe(&mut self, slot: Slot) {
        self.clock = self.clock.wrapping_add(1);
        if self.records.len() <= slot as usize {
            self.records.resize(slot as usize + 1, Record::default());
        }
        let mut record = self.records[slot as usize];
        if record.known {
            let age = self.count(slot);
            let class = &mut self.classes[usize::from(record.class)];
            class.event(age as f32 / record.scale);
            record.learn(age as f32);
        }
        record.known = true;
        (record.last, record.counted) = (self.clock, 0);
        (record.scale, record.class) = record.class(self.capacity as f32);
        self.records[slot as usize] = record;
        self.advance();
    }

    /// A unit is gone; its slot may become another's.
    pub fn forget(&mut self, slot: Slot) {
        if let Some(record) = self.records.get_mut(slot as usize) {
            *record = Record::default();
        }
    }

    /// What a unit is worth to keep: hits an access.
    #[must_use]
    pub fn worth(&self, slot: Slot) -> f32 {
        let Some(record) = self.records.get(slot as usize).filter(|record| record.known) else {
            return 0.0;
        };
        let age = self.clock.wrapping_sub(record.last) as f32 / record.scale;
        self.classes[usize::from(record.class)].worth(age) / record.scale
    }

    fn epoch(&self) -> u32 {
        (self.capacity / 2).max(EPOCH_MIN)
    }

    /// Counts the exposure of a unit up to now. Its age in accesses.
    fn count(&mut self, slot: Slot) -> u32 {
        let record = &mut self.records[slot as usize];
        let age = self.clock.wrapping_sub(record.last);
        let (from, to) = (record.counted as f32 / record.scale, age as f32 / record.scale);
        self.classes[usize::from(record.class)].expose(from, to);
        record.counted = age;
        age
    }

    /// Counts the exposure of some units, so that all have their turn in an epoch, and at its end looks at the counts.
    fn advance(&mut self) {
        let share = self.records.len() / self.epoch() as usize + 1;
        for _ in 0..share.min(SWEEP_MAX) {
            self.sweep = if self.sweep + 1 < self.records.len() { self.sweep + 1 } else { 0 };
            if self.records[self.sweep].known {
                self.count(Slot::try_from(self.sweep).unwrap_or(Slot::MAX));
            }
        }
        self.since += 1;
        if self.since >= self.epoch() {
            self.since = 0;
            let enough = (4.0 * self.capacity as f32).max(COUNTS_MIN);
            self.classes.iter_mut().for_each(|class| class.settle(enough));
        }
    }
}

impl Record {
    /// The interval that was expected.
    fn guess(&self) -> f32 {
        if self.choice > 0 { self.earlier } else { self.latest }
    }

    /// It was used after an interval.
    fn learn(&mut self, interval: f32) {
        if self.intervals == 0 {
            (self.mean, self.latest, self.earlier) = (interval, interval, interval);
            self.intervals = 1;
            return;
        }
        let guess = self.guess();
        let well = (interval - guess).abs() <= guess * WELL;
        self.trust = if well { (self.trust + 1).min(2) } else { 0 };
        let (latest, earlier) = ((interval - self.latest).abs(), (interval - self.earlier).abs());
        if earlier < latest {
            self.choice = (self.choice + 1).min(2);
        } else if latest < earlier {
            self.choice = (self.choice - 1).max(-2);
        }
        self.mean += MEAN_STEP * (interval.min(self.mean * FAR) - self.mean);
        (self.earlier, self.latest) = (self.latest, interval);
        self.intervals = 2;
    }

    /// Its scale, and the class that it counts in.
    fn class(&self, capacity: f32) -> (f32, u16) {
        if self.intervals == 0 {
            return (capacity, 0);
        }
        let scale = if self.trust == 2 { self.guess() } else { self.mean }.max(1.0);
        let kind = match (self.trust, self.intervals) {
            (0, 1) => 0,
            (0, _) => 1,
            (1, _) => 2,
            (_, _) => 3,
        };
        let class = 1 + bin::octave(scale).min(OCTAVES - 1) * KINDS + kind;
        (scale, u16::try_from(class).unwrap_or(0))
    }
}
