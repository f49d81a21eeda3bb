//! From the steps of a plan to its segments.

use std::cell::Cell;

use super::{Segment, Use};
use crate::engine::allocator::Span;
use crate::engine::ids::{BackingId, PageRef};

/// Where spans begin and end: what lies between two neighbours is used as a whole.
pub(super) fn cuts<'a>(spans: impl Iterator<Item = &'a Span>) -> Vec<(BackingId, u32)> {
    let ends = |span: &Span| [(span.backing, span.first), (span.backing, span.first + span.count)];
    let mut cuts: Vec<_> = spans.flat_map(ends).collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}

/// One segment per cut, up to the next; those that nothing uses have no pages.
pub(super) fn segments(cuts: &[(BackingId, u32)], uses: &[(usize, Use)]) -> Vec<Segment> {
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
