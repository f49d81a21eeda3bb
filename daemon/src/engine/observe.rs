//! What sessions use again and again: a sample of the chunks that each one maps, from which its working set and the hits
//! of VRAM of any size are told.

use lapis_proto::message::{
    AccessPattern, CURVE_POINTS_MAX, CurvePoint, Recency, SessionSet, WORKING_SETS_MAX, WorkingSets,
};

use super::Engine;
use super::allocator::Span;
use super::event::Reply;
use super::ids::{BackingId, PageRef, SessionId};
use super::session::Session;
use crate::policy::duel::Leader;
use crate::policy::mrc::Curve;

/// Chunks of a session that are followed: right to a few hundredths, and 50 KiB.
const SAMPLES_MAX: usize = 512;
/// Time back to which a working set is told, microseconds.
const WINDOWS_US: [u64; 3] = [10_000_000, 60_000_000, 600_000_000];
/// Sizes of a session's curve, beside that of VRAM: equal parts of all that it uses.
const CURVE_PARTS: u32 = 20;

const _: () = assert!((CURVE_PARTS as usize) < CURVE_POINTS_MAX);

impl Engine {
    /// A session's map is admitted.
    pub(super) fn observe(&mut self, session: SessionId, spans: &[Span]) {
        let (now, chunk) = (self.now, self.recommender.chunk_pages());
        let Some(state) = self.sessions.get_mut(&session) else { return };
        let curve = state.curve.get_or_insert_with(|| Box::new(Curve::new(SAMPLES_MAX)));
        let mut last = None;
        for span in spans {
            let end = span.first + span.count;
            for first in (span.first / chunk * chunk..end).step_by(chunk as usize) {
                let at = PageRef { backing: span.backing, index: first };
                let unit = self.recommender.unit(at);
                // Ranges that meet in a chunk use it once.
                if last.replace(unit) != Some(unit) {
                    let pages = self.table.backing(span.backing).pages_count();
                    curve.access(unit, chunk.min(pages - first), now);
                }
            }
        }
    }

    /// A session gives an allocation up: the number of what is behind it may be another one's soon.
    pub(super) fn forget_observed(&mut self, session: SessionId, backing: BackingId) {
        let state = self.sessions.get_mut(&session);
        if let Some(curve) = state.and_then(|state| state.curve.as_mut()) {
            curve.forget_where(|unit| unit >> 32 == u64::from(backing.0));
        }
    }

    pub(super) fn working_sets(&self, asking: SessionId, of: Option<SessionId>) -> Reply {
        let asker = self.session(asking);
        let seen = |(id, session): &(&SessionId, &Session)| {
            let may = asker.admin || session.domain == asker.domain;
            may && !session.lingering && of.is_none_or(|of| of == **id)
        };
        let sessions = self.sessions.iter().filter(seen).take(WORKING_SETS_MAX);
        Reply::WorkingSets(Box::new(WorkingSets {
            leader: match self.recommender.leader() {
                Leader::Lirs => Recency::Lirs,
                Leader::Gap => Recency::Gap,
                Leader::Lru => Recency::Lru,
            },
            sessions: sessions.map(|(id, session)| self.working_set(*id, session)).collect(),
        }))
    }

    fn working_set(&self, id: SessionId, session: &Session) -> SessionSet {
        let pages = session.allocations.iter().map(|allocation| {
            u64::from(self.table.backing(self.allocations[allocation].backing).pages_count())
        });
        let pattern = self.pattern(id);
        let curve = session.curve.as_ref();
        let window = |us: u64| curve.map_or(0, |c| c.working_set(self.now.saturating_sub(us)));
        SessionSet {
            session: id,
            uid: session.domain.0,
            pages: pages.sum(),
            pattern,
            windows: WINDOWS_US.map(window),
            counters: session.counters,
            curve: curve.map_or_else(Vec::new, |curve| self.points(curve, pattern)),
        }
    }

    fn pattern(&self, session: SessionId) -> AccessPattern {
        let steps = |declared: bool| {
            let own = self.plans_of(session).filter(|(_, plan)| plan.number.is_some() == declared);
            own.map(|(_, plan)| plan.steps_count()).reduce(u32::saturating_add)
        };
        match (steps(true), steps(false)) {
            (Some(steps), _) => AccessPattern::Planned { steps },
            (None, Some(steps)) => AccessPattern::Cycle { steps },
            (None, None) => AccessPattern::None,
        }
    }

    /// Hits by size, ascending.
    fn points(&self, curve: &Curve, pattern: AccessPattern) -> Vec<CurvePoint> {
        let used = curve.working_set(0);
        let parts = u64::from(CURVE_PARTS);
        let mut sizes: Vec<u64> =
            (1..=parts).map(|part| used.saturating_mul(part).div_ceil(parts)).collect();
        sizes.push(u64::from(self.vram.capacity()));
        sizes.sort_unstable();
        sizes.dedup();
        let most = curve.hit_ratio(u64::MAX);
        let hits = |pages: u64| {
            let recency = curve.hit_ratio(pages);
            match pattern {
                AccessPattern::None => recency,
                // Of a round, MIN keeps as much as fits; what was never used before is no hit.
                AccessPattern::Planned { .. } | AccessPattern::Cycle { .. } => {
                    recency.max(most * (pages as f64 / used.max(1) as f64).min(1.0))
                }
            }
        };
        sizes
            .into_iter()
            .map(|pages| CurvePoint { pages, hits_per_million: millionths(hits(pages)) })
            .collect()
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a cast of a float stops at the ends of the target"
)]
fn millionths(ratio: f64) -> u32 {
    (ratio * 1e6).round() as u32
}

#[cfg(test)]
mod tests;
