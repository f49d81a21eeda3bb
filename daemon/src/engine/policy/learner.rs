//! Learns a plan from what a session maps: once it repeats itself for long enough, what it did since the last time is
//! what it will do next, over and over.
//!
//! The last maps, three at a time, are looked up in what was mapped before; where they are found, the next map ought
//! to be the one that came next then.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use lapis_proto::message::Access;

use crate::engine::allocator::Span;
use crate::engine::ids::BackingId;

/// Maps that are remembered.
const MAPS_MAX: usize = 4096;
/// Spans of them that are remembered.
const SPANS_MAX: usize = 16_384;
/// Maps that are looked up together.
const CONTEXT: usize = 3;
/// Maps in a row that must come as expected, before anything is expected of the session; and a quarter of the period.
const RUN_MIN: usize = 16;
/// What one map that came otherwise weighs against one that came as expected, and how much of it ends a plan.
const DOUBT_STEP: u32 = 2;
const DOUBT_MAX: u32 = 8;

/// What a map is, as far as it can be the same as another one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Mapped {
    spans: Vec<(BackingId, u32, u32)>,
    access: u8,
}

/// What came of a map.
#[derive(Debug, PartialEq, Eq)]
pub enum Lesson {
    /// Nothing new.
    Nothing,
    /// The session goes through these maps over and over, and is at the last one.
    Cycle(Vec<Vec<(Span, Access)>>),
    /// It doesn't any more.
    Over,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Learner {
    history: VecDeque<(u64, Vec<(Span, Access)>)>,
    spans: usize,
    /// Number of the first map in `history`.
    first: u64,
    /// Numbers of maps, and the other way round.
    kinds: BTreeMap<Mapped, u64>,
    /// The last place where these maps came one after the other.
    places: BTreeMap<[u64; CONTEXT], u64>,
    /// The map that the last one repeats.
    cursor: Option<u64>,
    run: usize,
    /// The cycle that was told, as its number of maps.
    told: Option<u64>,
    doubt: u32,
}

impl Learner {
    /// A map of these spans comes.
    pub fn map(&mut self, spans: &[Span], access: Access) -> Lesson {
        if self.history.len() >= MAPS_MAX || self.spans + spans.len() > SPANS_MAX {
            self.forget_half();
        }
        let kind = self.kind(spans, access);
        let number = self.first + self.history.len() as u64;
        let expected = self.cursor.and_then(|cursor| self.kind_of(cursor + 1));
        let as_expected = expected == Some(kind);
        self.history.push_back((kind, spans.iter().map(|span| (*span, access)).collect()));
        self.spans += spans.len();
        let context = self.context();
        if as_expected {
            self.run += 1;
            self.cursor = self.cursor.map(|cursor| cursor + 1);
            self.doubt = self.doubt.saturating_sub(1);
        } else {
            self.run = 0;
            self.cursor = context.and_then(|context| self.places.get(&context).copied());
            self.doubt += if self.told.is_some() { DOUBT_STEP } else { 0 };
        }
        if let Some(context) = context {
            self.places.insert(context, number);
        }
        self.judge(number)
    }

    /// Whether a cycle has been told that still holds.
    #[must_use]
    pub fn has_told(&self) -> bool {
        self.told.is_some()
    }

    /// Whether any of its maps is of this backing.
    #[must_use]
    pub fn knows(&self, backing: BackingId) -> bool {
        self.history.iter().flat_map(|(_, spans)| spans).any(|(span, _)| span.backing == backing)
    }

    fn judge(&mut self, number: u64) -> Lesson {
        if self.told.is_some() {
            if self.doubt < DOUBT_MAX {
                return Lesson::Nothing;
            }
            (self.told, self.doubt) = (None, 0);
            return Lesson::Over;
        }
        let Some(period) = self.cursor.map(|cursor| number - cursor) else {
            return Lesson::Nothing;
        };
        let Ok(length) = usize::try_from(period) else { return Lesson::Nothing };
        if self.run < RUN_MIN.max(length / 4) || length > self.history.len() {
            return Lesson::Nothing;
        }
        self.told = Some(period);
        let start = self.history.len() - length;
        Lesson::Cycle(self.history.range(start..).map(|(_, spans)| spans.clone()).collect())
    }

    fn kind(&mut self, spans: &[Span], access: Access) -> u64 {
        let access = match access {
            Access::Read => 0,
            Access::Write => 1,
            Access::Overwrite => 2,
        };
        let spans = spans.iter().map(|span| (span.backing, span.first, span.count)).collect();
        let next = self.kinds.len() as u64;
        *self.kinds.entry(Mapped { spans, access }).or_insert(next)
    }

    fn kind_of(&self, number: u64) -> Option<u64> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.history.get(index).map(|(kind, _)| *kind)
    }

    /// The last maps.
    fn context(&self) -> Option<[u64; CONTEXT]> {
        let start = self.history.len().checked_sub(CONTEXT)?;
        let mut kinds = self.history.range(start..).map(|(kind, _)| *kind);
        let mut context = [0; CONTEXT];
        context.iter_mut().for_each(|kind| *kind = kinds.next().unwrap_or(0));
        Some(context)
    }

    /// Drops the older half, and what is known of it only.
    fn forget_half(&mut self) {
        let half = self.history.len().div_ceil(2);
        for (_, spans) in self.history.drain(..half) {
            self.spans -= spans.len();
        }
        self.first += half as u64;
        let first = self.first;
        self.places.retain(|_, place| *place >= first);
        self.cursor = self.cursor.filter(|cursor| *cursor >= first);
        let alive: BTreeSet<u64> = self.history.iter().map(|(kind, _)| *kind).collect();
        if alive.len() * 2 < self.kinds.len() {
            // Numbers stay those of their maps: all begins anew rather than be renumbered.
            *self = Self { first: self.first + self.history.len() as u64, ..Self::default() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ids::AllocationId;

    fn span(first: u32) -> Span {
        Span { backing: BackingId(1), first, count: 2, allocation: AllocationId(1) }
    }

    fn map(learner: &mut Learner, page: u32) -> Lesson {
        learner.map(&[span(page)], Access::Read)
    }

    #[test]
    fn a_cycle_is_told_in_its_second_pass_and_ends_when_it_breaks() {
        let mut learner = Learner::default();
        for page in (0..80).chain(0..17) {
            assert_eq!(map(&mut learner, page), Lesson::Nothing, "{page}");
        }
        let told = (17..80).find_map(|page| match map(&mut learner, page) {
            Lesson::Cycle(steps) => Some((page, steps)),
            _ => None,
        });
        let (page, steps) = told.expect("it repeats itself");
        assert!(page < 25, "{page}");
        assert_eq!(steps.len(), 80);
        assert_eq!(steps[79], [(span(page), Access::Read)]);
        assert_eq!(steps[0], [(span(page + 1), Access::Read)]);
        // One map that is left out is no end; maps of something else are.
        assert_eq!(map(&mut learner, page + 1), Lesson::Nothing);
        for page in page + 3..80 {
            assert_eq!(map(&mut learner, page), Lesson::Nothing);
        }
        let over = (1000..1010).position(|page| map(&mut learner, page) == Lesson::Over);
        assert_eq!(over, Some(3));
        assert!(!learner.has_told());
        assert!(learner.knows(BackingId(1)) && !learner.knows(BackingId(2)));
    }

    #[test]
    fn a_page_that_is_used_twice_in_a_cycle_is_told_apart_by_what_came_before() {
        let mut learner = Learner::default();
        let pass = (0..40).chain((0..40).rev());
        let mut told = None;
        for page in pass.clone().chain(pass) {
            if let Lesson::Cycle(steps) = map(&mut learner, page) {
                told = Some(steps.len());
            }
        }
        assert_eq!(told, Some(80));
    }

    #[test]
    fn what_never_repeats_is_never_told_and_takes_no_more_memory() {
        let mut learner = Learner::default();
        for page in 0..100_000 {
            assert_eq!(map(&mut learner, page), Lesson::Nothing);
            assert!(learner.history.len() <= MAPS_MAX && learner.kinds.len() <= 2 * MAPS_MAX);
            assert!(learner.places.len() <= 2 * MAPS_MAX);
        }
        // Cycles that are too long to be remembered are as if there were none.
        for page in (0..2).flat_map(|_| 0..5000) {
            assert_ne!(map(&mut learner, page), Lesson::Over);
        }
    }
}
