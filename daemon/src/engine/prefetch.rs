//! What clients say ahead of time: what they will map, and how they use it. Hints: wrong ones cost speed only.

use std::cmp::Reverse;

use lapis_proto::message::{Advice, Advise, PageRange, Prefetch, Refused};

use super::Engine;
use super::allocator::Span;
use super::event::Reply;
use super::ids::{PageRef, SessionId};
use super::limits::PREFETCH_PAGES_MAX;
use super::maps::check_ranges;
use super::policy::next_use::NEVER;
use super::policy::plan::{NEVER_AGAIN, NO_PLAN};

/// Order of prefetches: by priority, then as they came.
pub(super) type PrefetchKey = (Reverse<u8>, u64);

/// A page to be prefetched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) page: PageRef,
    /// Not worth starting from then on, microseconds.
    pub(super) until_us: u64,
}

impl Engine {
    pub(super) fn prefetch(
        &mut self,
        session: SessionId,
        prefetch: &Prefetch,
        now: u64,
    ) -> Result<Reply, Refused> {
        check_ranges(&prefetch.ranges)?;
        let spans = self.resolve(session, &prefetch.ranges)?;
        let within = if prefetch.within_us == 0 { u64::MAX } else { prefetch.within_us };
        let until_us = now.saturating_add(within);
        for at in spans.into_iter().flat_map(Span::pages) {
            let page = self.table.page(at);
            if page.pins > 0 || page.prefetched {
                continue;
            }
            if self.fill_prefetch.len() >= PREFETCH_PAGES_MAX {
                break;
            }
            self.prefetch_tick = self.clock.max(self.prefetch_tick + 1);
            let tick = self.prefetch_tick;
            let needs_fill = self.table.update(at, |page| {
                page.prefetched = true;
                page.prefetched_at = tick;
                page.prefetch_priority = prefetch.priority;
                page.needs_fill()
            });
            if needs_fill {
                self.queue_prefetch(at, until_us);
            }
        }
        Ok(Reply::Done)
    }

    /// Puts a prefetched page in line.
    pub(super) fn queue_prefetch(&mut self, page: PageRef, until_us: u64) {
        let state = self.table.page(page);
        let key = (Reverse(state.prefetch_priority), state.prefetched_at);
        self.fill_prefetch.insert(key, Wanted { page, until_us });
    }

    pub(super) fn cancel_prefetch(
        &mut self,
        session: SessionId,
        ranges: &[PageRange],
    ) -> Result<Reply, Refused> {
        check_ranges(ranges)?;
        for at in self.resolve(session, ranges)?.into_iter().flat_map(Span::pages) {
            let page = self.table.page(at);
            if page.prefetched {
                self.fill_prefetch.remove(&(Reverse(page.prefetch_priority), page.prefetched_at));
                self.table.update(at, |page| page.prefetched = false);
            }
        }
        Ok(Reply::Done)
    }

    pub(super) fn advise(&mut self, session: SessionId, advise: &Advise) -> Result<Reply, Refused> {
        check_ranges(&advise.ranges)?;
        let never = self.clock + NEVER;
        for at in self.resolve(session, &advise.ranges)?.into_iter().flat_map(Span::pages) {
            self.table.update(at, |page| match advise.advice {
                Advice::DontNeed => {
                    page.advice = Advice::Normal;
                    page.next_use = if page.plan == NO_PLAN { never } else { NEVER_AGAIN };
                }
                advice @ (Advice::Normal
                | Advice::Sequential
                | Advice::Random
                | Advice::Keep
                | Advice::Chain) => {
                    page.advice = advice;
                }
            });
        }
        Ok(Reply::Done)
    }
}
