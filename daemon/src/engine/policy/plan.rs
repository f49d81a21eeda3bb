//! A plan: the order in which a session is going to map pages, where it is in that order, when it will use each page,
//! and whether a page has to be fetched now to be there in time.
//!
//! Ids and numbers only. Pages that are always used together make a *segment*. Steps are counted through all cycles:
//! step `n` is step `n % steps` of its cycle, and the *cursor* is the step that the session is at.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;

use lapis_proto::message::Access;

use crate::engine::allocator::Span;
use crate::engine::ids::{BackingId, PageRef, SessionId};

/// Names a plan in force; never reused. 0 stands for no plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PlanId(pub u32);

/// Pages that no plan speaks for.
pub const NO_PLAN: PlanId = PlanId(0);

/// The key of a page that its plan uses no more.
pub const NEVER_AGAIN: u64 = 1 << 62;
/// Added to the key of a page whose next use overwrites it: its bytes are of no use to the plan.
pub const OVERWRITTEN: u64 = 1 << 61;

/// Segments of all steps of a plan together, each as often as it is used.
pub const PIECES_MAX: usize = 4 * lapis_proto::message::PLAN_USES_MAX;

/// Steps ahead that a map may be without a doubt that the session skipped the ones between.
const NEAR: u64 = 4;
/// Steps that are looked at for what to fetch.
const LOOKAHEAD: u64 = 1024;
/// A backlog counts as half as large again as it is: transfers and compute are not that regular.
const MARGIN_NUMERATOR: u64 = 3;
const MARGIN_DENOMINATOR: u64 = 2;
/// What a step takes before one was seen, microseconds.
const PACE_US_AT_FIRST: u64 = 1000;

/// Pages that are used by the same steps.
#[derive(Debug)]
struct Segment {
    first: PageRef,
    count: u32,
    /// Of `Plan::uses`.
    uses: Range<usize>,
    /// Pages of which nothing is to be fetched.
    held: u32,
    /// Pages that have neither a VRAM frame nor a copy in RAM.
    below: u32,
    /// Pages from here on are looked at first for one to fetch.
    hint: Cell<u32>,
}

/// A step that uses a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Use {
    step: u32,
    overwrites: bool,
}

#[derive(Debug)]
struct Step {
    /// Of `Plan::pieces`.
    pieces: Range<usize>,
    /// From being granted to the next step, microseconds; `None` before it was seen.
    compute_us: Option<u64>,
}

/// Where a page's copies are, as far as a plan counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// It has a VRAM frame, filled or being filled, or can't be fetched: there is nothing to do.
    pub vram: bool,
    /// It has a copy in RAM.
    pub ram: bool,
}

impl Place {
    fn is_below(self) -> bool {
        !self.vram && !self.ram
    }
}

/// What a transfer takes, nanoseconds per page.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pace {
    /// RAM to VRAM.
    pub up_ns: u64,
    /// File or spill to RAM.
    pub read_ns: u64,
}

/// What there is to fetch ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// This step's next missing page, now. The more late, the more urgent: nanoseconds.
    Now {
        /// Which step.
        step: u64,
        /// By how much.
        late_ns: u64,
    },
    /// Nothing before this time, microseconds.
    At(u64),
    /// Nothing until the session moves on.
    Nothing,
}

/// See the module.
#[derive(Debug)]
pub struct Plan {
    /// Whose.
    pub session: SessionId,
    /// The session's number for it; `None`: nobody declared it, it was learned.
    pub number: Option<u32>,
    /// What its waiting costs, beside that of others: twice the weight, half as far away.
    pub weight: u64,
    cyclic: bool,
    segments: Vec<Segment>,
    uses: Vec<Use>,
    steps: Vec<Step>,
    /// Segments of each step, in its order.
    pieces: Vec<usize>,
    cursor: u64,
    /// A step far from the cursor that the last map was for: if the next one follows, the session is there.
    doubt: Option<u64>,
    /// When the step at the cursor was first mapped, and what its maps waited.
    arrived_us: Option<u64>,
    waited_us: u64,
    /// A map of the step at the cursor waits.
    waits: bool,
    /// Microseconds between steps, on average.
    pace_us: u64,
    /// Pages that have no VRAM frame.
    missing: u64,
}

/// Why a plan can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyPieces;

impl Plan {
    /// A plan of steps, each with what it uses for what.
    ///
    /// # Errors
    /// When the ranges cut each other into more than [`PIECES_MAX`] pieces.
    pub fn new(
        (session, number): (SessionId, Option<u32>),
        cyclic: bool,
        steps: &[Vec<(Span, Access)>],
    ) -> Result<Plan, TooManyPieces> {
        let cuts = cuts(steps.iter().flatten().map(|(span, _)| span));
        let place = |backing, page| cuts.partition_point(|cut| *cut < (backing, page));
        let mut pieces = Vec::new();
        let mut plan_steps = Vec::with_capacity(steps.len());
        let mut uses = Vec::new();
        for (number, step) in (0_u32..).zip(steps) {
            let start = pieces.len();
            for (span, access) in step {
                let range =
                    place(span.backing, span.first)..place(span.backing, span.first + span.count);
                if pieces.len() + range.len() > PIECES_MAX {
                    return Err(TooManyPieces);
                }
                for piece in range {
                    let overwrites = *access == Access::Overwrite;
                    pieces.push(piece);
                    uses.push((piece, Use { step: number, overwrites }));
                }
            }
            plan_steps.push(Step { pieces: start..pieces.len(), compute_us: None });
        }
        // A step that reads a page and overwrites it counts as reading it: `false` comes first.
        uses.sort_unstable();
        uses.dedup_by_key(|(piece, use_)| (*piece, use_.step));
        let segments = segments(&cuts, &uses);
        let missing = segments.iter().map(|segment| u64::from(segment.count)).sum();
        Ok(Plan {
            session,
            number,
            weight: 1,
            cyclic,
            segments,
            uses: uses.into_iter().map(|(_, use_)| use_).collect(),
            steps: plan_steps,
            pieces,
            cursor: 0,
            doubt: None,
            arrived_us: None,
            waited_us: 0,
            waits: false,
            pace_us: PACE_US_AT_FIRST,
            missing,
        })
    }

    /// The backings that it speaks of.
    #[must_use]
    pub fn backings(&self) -> BTreeSet<BackingId> {
        self.segments.iter().filter(|s| s.count > 0).map(|s| s.first.backing).collect()
    }

    /// Has the session be at a step, of the first cycle.
    pub fn start_at(&mut self, step: u64, now: u64) {
        self.cursor = step;
        self.arrived_us = Some(now);
        self.waits = true;
    }

    /// The step that the session is at.
    #[must_use]
    pub fn cursor(&self) -> u64 {
        self.cursor
    }

    /// Its steps.
    #[must_use]
    pub fn steps_count(&self) -> u32 {
        u32::try_from(self.steps.len()).unwrap_or(u32::MAX)
    }

    /// All its pages.
    pub fn pages(&self) -> impl Iterator<Item = PageRef> {
        self.segments.iter().flat_map(pages_of)
    }

    /// The pages that steps use, each once however many of them use it.
    #[must_use]
    pub fn pages_of_steps(&self, steps: Range<u64>) -> Vec<PageRef> {
        // All there are, once round.
        let count = (steps.end - steps.start).min(self.steps.len() as u64);
        let pieces = (steps.start..steps.start + count).flat_map(|step| self.pieces_of(step));
        let pieces: BTreeSet<usize> = pieces.copied().collect();
        pieces.into_iter().flat_map(|piece| pages_of(&self.segments[piece])).collect()
    }

    /// When it uses a page, `from` this step on: a number that is larger the later that is. `None` for a page that it
    /// doesn't speak of.
    #[must_use]
    pub fn key(&self, at: PageRef, from: u64) -> Option<u64> {
        Some(match self.next(self.find(at)?, from) {
            Some((step, Use { overwrites: false, .. })) => step,
            Some((step, Use { overwrites: true, .. })) => OVERWRITTEN + step,
            None => NEVER_AGAIN,
        })
    }

    /// Nanoseconds from `now` to a use, as far as anyone can say, by weight.
    #[must_use]
    pub fn eta_ns(&self, key: u64, now: u64) -> u64 {
        let steps = key.saturating_sub(self.cursor);
        let ahead = steps.saturating_mul(self.pace_us.max(1));
        let since = self.arrived_us.map_or(0, |arrived| now.saturating_sub(arrived));
        // A session that does nothing comes to nothing.
        let idle = if since > self.pace_us.saturating_mul(2 * NEAR) { since } else { 0 };
        ahead.saturating_add(idle).saturating_mul(1000) / self.weight.max(1)
    }

    /// A map for this span comes: moves the cursor. Answers which steps are over.
    pub fn follow(&mut self, span: &Span, now: u64) -> Range<u64> {
        let nothing = self.cursor..self.cursor;
        // Steps that follow one another may share the page where they meet: the end that is used later tells, unless
        // it is one that was used before and comes again in the next cycle.
        let ends = [span.first, span.first + (span.count - 1)];
        let next_of = |index| {
            let segment = self.find(PageRef { backing: span.backing, index })?;
            self.next(segment, self.cursor).map(|(step, _)| step)
        };
        let near = |from: u64, step: u64| (from..=from + NEAR).contains(&step);
        let steps = ends.into_iter().filter_map(next_of);
        let nearest = steps.clone().filter(|step| near(self.cursor, *step)).max();
        let Some(step) = nearest.or_else(|| steps.min()) else { return nothing };
        let follows = |doubt| doubt < step && near(doubt, step);
        let is_there = nearest.is_some() || self.doubt.is_some_and(follows);
        if !is_there {
            self.doubt = Some(step);
            return nothing;
        }
        self.doubt = None;
        if step == self.cursor {
            self.arrived_us.get_or_insert(now);
            self.waits = true;
            return nothing;
        }
        if let Some(arrived) = self.arrived_us {
            self.step_took(now.saturating_sub(arrived), step - self.cursor);
        }
        (self.arrived_us, self.waited_us, self.waits) = (Some(now), 0, true);
        let over = self.cursor..step;
        self.cursor = step;
        over
    }

    /// From the first map of the step at the cursor to that of the next.
    fn step_took(&mut self, spacing_us: u64, steps: u64) {
        let compute = spacing_us.saturating_sub(self.waited_us);
        let index = self.index(self.cursor);
        let known = &mut self.steps[index].compute_us;
        *known = Some(known.map_or(compute, |old| {
            // A pause is no step.
            let compute = compute.min(4 * old.max(PACE_US_AT_FIRST));
            (old + compute) / 2
        }));
        let spacing = (spacing_us / steps.max(1)).min(16 * self.pace_us.max(PACE_US_AT_FIRST));
        self.pace_us = (7 * self.pace_us + spacing) / 8;
    }

    /// A map of the step at the cursor is granted.
    pub fn granted(&mut self, waited_us: u64) {
        self.waited_us = self.waited_us.saturating_add(waited_us);
        self.waits = false;
    }

    /// A page's copies changed places.
    pub fn count(&mut self, at: PageRef, before: Place, after: Place) {
        let Some(index) = self.find(at) else { return };
        let segment = &mut self.segments[index];
        segment.held = segment.held + u32::from(after.vram) - u32::from(before.vram);
        segment.below = segment.below + u32::from(after.is_below()) - u32::from(before.is_below());
        self.missing = self.missing + u64::from(!after.vram) - u64::from(!before.vram);
    }

    /// Speaks of a backing's pages no more.
    pub fn forget(&mut self, backing: BackingId) {
        for segment in self.segments.iter_mut().filter(|s| s.first.backing == backing) {
            self.missing -= u64::from(segment.count - segment.held);
            (segment.count, segment.held, segment.below) = (0, 0, 0);
        }
    }

    /// What to fetch: a page is due when the transfers up to some step, with a margin, take as long as is left until
    /// that step. No more than `pages_max` pages are looked ahead: VRAM holds no more.
    #[must_use]
    pub fn due(&self, now: u64, pace: Pace, pages_max: u64) -> Due {
        if self.missing == 0 {
            return Due::Nothing;
        }
        let left_ns = self.compute_left_us(now).saturating_mul(1000);
        let mut slack_ns = left_ns;
        let (mut missing, mut below, mut pages) = (0_u64, 0_u64, 0_u64);
        let mut first = None;
        let mut earliest: Option<u64> = None;
        for step in self.steps_ahead() {
            if step > self.cursor + 1 {
                slack_ns = slack_ns.saturating_add(self.compute_us(step - 1).saturating_mul(1000));
            }
            for piece in self.pieces_of(step) {
                let segment = &self.segments[*piece];
                match self.next(*piece, self.cursor) {
                    Some((next, use_)) if next == step && !use_.overwrites => {}
                    _ => continue,
                }
                pages += u64::from(segment.count);
                missing += u64::from(segment.count - segment.held);
                below += u64::from(segment.below);
            }
            if missing > 0 {
                let first = *first.get_or_insert(step);
                let ups = missing.saturating_mul(pace.up_ns);
                let backlog = ups.max(below.saturating_mul(pace.read_ns));
                let backlog = backlog.saturating_mul(MARGIN_NUMERATOR) / MARGIN_DENOMINATOR;
                let slack = if step == self.cursor { 0 } else { slack_ns };
                if backlog >= slack {
                    return Due::Now { step: first, late_ns: backlog - slack };
                }
                let left = slack - backlog;
                earliest = Some(earliest.map_or(left, |earliest: u64| earliest.min(left)));
            }
            if pages > pages_max {
                break;
            }
        }
        // Only what is left of this step goes by with time; the steps after it wait for the session to move on.
        match earliest.filter(|early| *early <= left_ns) {
            Some(early) => Due::At(now.saturating_add(early / 1000).saturating_add(1)),
            None => Due::Nothing,
        }
    }

    /// The first page of a step that `is_missing`.
    #[must_use]
    pub fn next_missing(&self, step: u64, is_missing: impl Fn(PageRef) -> bool) -> Option<PageRef> {
        for piece in self.pieces_of(step) {
            let segment = &self.segments[*piece];
            if segment.held == segment.count {
                continue;
            }
            let (backing, first) = (segment.first.backing, segment.first.index);
            let hint = segment.hint.get().min(segment.count);
            let order = (hint..segment.count).chain(0..hint);
            for offset in order {
                let at = PageRef { backing, index: first + offset };
                if is_missing(at) {
                    segment.hint.set(offset);
                    return Some(at);
                }
            }
        }
        None
    }

    /// Counts of a page's segment, to be checked: pages, with VRAM frames, with no copy above the spill.
    #[must_use]
    pub fn counts(&self) -> Vec<(Range<u32>, BackingId, u32, u32)> {
        let one = |segment: &Segment| {
            let first = segment.first;
            (first.index..first.index + segment.count, first.backing, segment.held, segment.below)
        };
        self.segments.iter().map(one).collect()
    }

    fn steps_ahead(&self) -> impl Iterator<Item = u64> {
        let steps = self.steps.len() as u64;
        let end = if self.cyclic { self.cursor + steps } else { steps };
        self.cursor..end.min(self.cursor + LOOKAHEAD)
    }

    /// What is left of the step at the cursor, microseconds.
    fn compute_left_us(&self, now: u64) -> u64 {
        match self.arrived_us {
            Some(arrived) if !self.waits => {
                let done = now.saturating_sub(arrived).saturating_sub(self.waited_us);
                self.compute_us(self.cursor).saturating_sub(done)
            }
            _ => 0,
        }
    }

    fn compute_us(&self, step: u64) -> u64 {
        self.steps[self.index(step)].compute_us.unwrap_or(0)
    }

    fn index(&self, step: u64) -> usize {
        usize::try_from(step % self.steps.len() as u64).expect("below the number of steps")
    }

    fn pieces_of(&self, step: u64) -> &[usize] {
        &self.pieces[self.steps[self.index(step)].pieces.clone()]
    }

    fn find(&self, at: PageRef) -> Option<usize> {
        let behind = self.segments.partition_point(|segment| segment.first <= at);
        let index = behind.checked_sub(1)?;
        let segment = &self.segments[index];
        let inside = segment.first.backing == at.backing
            && at.index - segment.first.index < segment.count
            && !segment.uses.is_empty();
        inside.then_some(index)
    }

    /// The first use of a segment `from` this step on.
    fn next(&self, segment: usize, from: u64) -> Option<(u64, Use)> {
        let uses = &self.uses[self.segments[segment].uses.clone()];
        let steps = self.steps.len() as u64;
        let (cycle, place) = if self.cyclic { (from / steps, from % steps) } else { (0, from) };
        let later = uses.partition_point(|use_| u64::from(use_.step) < place);
        if let Some(use_) = uses.get(later) {
            return Some((cycle * steps + u64::from(use_.step), *use_));
        }
        let first = uses.first().filter(|_| self.cyclic)?;
        Some(((cycle + 1) * steps + u64::from(first.step), *first))
    }
}

fn pages_of(segment: &Segment) -> impl Iterator<Item = PageRef> + use<> {
    let PageRef { backing, index } = segment.first;
    (index..index + segment.count).map(move |index| PageRef { backing, index })
}

/// Where spans begin and end: what lies between two neighbours is used as a whole.
fn cuts<'a>(spans: impl Iterator<Item = &'a Span>) -> Vec<(BackingId, u32)> {
    let ends = |span: &Span| [(span.backing, span.first), (span.backing, span.first + span.count)];
    let mut cuts: Vec<_> = spans.flat_map(ends).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// One segment per cut, up to the next; those that nothing uses have no pages.
fn segments(cuts: &[(BackingId, u32)], uses: &[(usize, Use)]) -> Vec<Segment> {
    let mut start = 0;
    let one = |(index, (backing, first)): (usize, &(BackingId, u32))| {
        let end = start + uses[start..].iter().take_while(|(piece, _)| *piece == index).count();
        let range = std::mem::replace(&mut start, end)..end;
        let next = cuts.get(index + 1).filter(|(next, _)| next == backing);
        let count = next.filter(|_| !range.is_empty()).map_or(0, |(_, next)| next - first);
        Segment {
            first: PageRef { backing: *backing, index: *first },
            count,
            uses: range,
            held: 0,
            below: count,
            hint: Cell::new(0),
        }
    };
    cuts.iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests;
