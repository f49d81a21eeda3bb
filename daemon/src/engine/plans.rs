//! Plans of sessions: in force, followed by their maps, and fetched by ahead of time.
//!
//! A page stands in the order of the plan that uses it soonest, of all that speak of it. It is looked up anew when it
//! is mapped, when its plan's cursor passes it, and when plans come or go.

use lapis_proto::code::Code;
use lapis_proto::message::{
    Access, PAGES_PER_MAP_MAX, PLAN_STEPS_MAX, PLAN_USES_MAX, PLANS_PER_SESSION_MAX, PlanStep,
    PlanUse, Refused, SetPlan,
};

use super::Engine;
use super::allocator::Span;
use super::event::{Outbox, Reply};
use super::ids::{BackingId, PageRef, SessionId};
use super::page::Motion;
use super::placement::Need;
use super::policy::learner::Lesson;
use super::policy::next_use::predict;
use super::policy::order::Moment;
use super::policy::plan::{Due, NO_PLAN, PIECES_MAX, Pace, Plan, PlanId};
use super::refusal;
use super::room::{Frame, MayGo};

impl Engine {
    /// What "from now on" means.
    pub(super) fn moment(&self) -> Moment<'_> {
        Moment {
            clock: self.clock,
            access_ns: self.access_ns,
            now: self.now,
            plans: self.table.plans(),
        }
    }

    /// Learns what an access takes.
    pub(super) fn count_accesses(&mut self, spans: &[Span]) {
        let pages: u64 = spans.iter().map(|span| u64::from(span.count)).sum();
        let passed = self.now.saturating_sub(std::mem::replace(&mut self.accessed_us, self.now));
        let each_ns = passed.saturating_mul(1000) / pages.max(1);
        // A pause is no access.
        let each_ns = each_ns.min(self.access_ns.saturating_mul(64).max(1_000_000));
        self.access_ns = ((7 * self.access_ns + each_ns) / 8).max(1);
    }

    /// The plan that uses a page soonest, and when. The session that maps it now is past that use of its own plan.
    pub(super) fn planned_use(
        &self,
        at: PageRef,
        using: Option<SessionId>,
    ) -> Option<(PlanId, u64)> {
        let plans = &self.table.backing(at.backing).plans;
        let use_of = |id: &PlanId| {
            let plan = &self.table.plans()[id];
            let from = plan.cursor() + u64::from(using == Some(plan.session));
            let key = plan.key(at, from)?;
            Some((plan.eta_ns(key, self.now), *id, key))
        };
        let soonest = plans.iter().filter_map(use_of).min()?;
        Some((soonest.1, soonest.2))
    }

    pub(super) fn set_plan(&mut self, session: SessionId, set: &SetPlan) -> Result<Reply, Refused> {
        let steps = self.check_plan(session, set)?;
        let old = self
            .plans_of(session)
            .find(|(_, plan)| plan.number == Some(set.plan))
            .map(|(id, _)| id);
        let count = self.plans_of(session).filter(|(_, plan)| plan.number.is_some()).count();
        if old.is_none() && !steps.is_empty() && count >= PLANS_PER_SESSION_MAX {
            let limit = PLANS_PER_SESSION_MAX as u64;
            return Err(refusal::too_many("this session's plan", count as u64, limit));
        }
        let new = if steps.is_empty() {
            None
        } else {
            let plan = Plan::new((session, Some(set.plan)), set.cyclic, &steps).map_err(|_| {
                let message = format!(
                    "the plan's ranges overlap in more than {PIECES_MAX} pieces: name whole layers, or fewer steps"
                );
                refusal::plain(Code::TooMany, &message)
            })?;
            Some(plan)
        };
        let id = self.last_plan.checked_add(1).ok_or_else(|| {
            let message =
                "the daemon has seen too many plans: it names no more before it is restarted";
            refusal::plain(Code::TooMany, message)
        })?;
        if let Some(old) = old {
            self.end_plan(old);
        }
        if let Some(plan) = new {
            // What it says goes before what was learned.
            self.unlearn(session);
            self.start_plan(PlanId(id), plan);
        }
        Ok(Reply::Done)
    }

    fn check_plan(
        &self,
        session: SessionId,
        set: &SetPlan,
    ) -> Result<Vec<Vec<(Span, Access)>>, Refused> {
        let uses: usize = set.steps.iter().map(|step| step.uses.len()).sum();
        if set.steps.len() > PLAN_STEPS_MAX || uses > PLAN_USES_MAX {
            let message = format!(
                "a plan has at most {PLAN_STEPS_MAX} steps and {PLAN_USES_MAX} uses, this one has {} and {uses}",
                set.steps.len()
            );
            return Err(refusal::plain(Code::TooMany, &message));
        }
        if set.steps.iter().any(|step| step.uses.is_empty()) {
            let message = "a step of a plan uses at least one range";
            return Err(refusal::plain(Code::BadRequest, message));
        }
        let resolve = |used: &PlanUse| {
            let spans = self.resolve(session, &[used.range])?;
            let span = *spans.first().expect("one range resolves to one span");
            Ok((span, used.access))
        };
        let steps: Vec<Vec<_>> = set
            .steps
            .iter()
            .map(|step| step.uses.iter().map(resolve).collect())
            .collect::<Result<_, _>>()?;
        let pages =
            |step: &PlanStep| step.uses.iter().map(|used| u64::from(used.range.count)).sum::<u64>();
        let most = set.steps.iter().map(pages).max().unwrap_or(0);
        if most > u64::from(PAGES_PER_MAP_MAX) {
            // What a map costs is bounded by the pages of the steps that it ends.
            let message = format!(
                "a step of a plan has at most {PAGES_PER_MAP_MAX} pages, one of this one has {most}"
            );
            return Err(refusal::plain(Code::TooMany, &message));
        }
        Ok(steps)
    }

    pub(super) fn plans_of(&self, session: SessionId) -> impl Iterator<Item = (PlanId, &Plan)> {
        let own = move |(_, plan): &(&PlanId, &Plan)| plan.session == session;
        self.table.plans().iter().filter(own).map(|(id, plan)| (*id, plan))
    }

    fn start_plan(&mut self, id: PlanId, mut plan: Plan) {
        plan.weight = u64::from(self.priority_of(plan.session)) + 1;
        self.last_plan = id.0;
        let pages: Vec<_> = plan.pages().collect();
        self.table.add_plan(id, plan);
        pages.into_iter().for_each(|at| self.place_by_plans(at));
    }

    fn end_plan(&mut self, id: PlanId) {
        let Some(plan) = self.table.remove_plan(id) else { return };
        let pages: Vec<_> = plan.pages().collect();
        pages.into_iter().for_each(|at| self.place_by_plans(at));
    }

    /// A session is going.
    pub(super) fn end_plans(&mut self, session: SessionId) {
        let plans: Vec<_> = self.plans_of(session).map(|(id, _)| id).collect();
        plans.into_iter().for_each(|id| self.end_plan(id));
    }

    /// A session gives an allocation up: its plans speak of the pages behind it no more.
    pub(super) fn end_in_plans(&mut self, session: SessionId, backing: BackingId) {
        let learner = self.sessions.get(&session).and_then(|session| session.learner.as_ref());
        if learner.is_some_and(|learner| learner.knows(backing)) {
            self.unlearn(session);
        }
        let plans: Vec<_> = self.plans_of(session).map(|(id, _)| id).collect();
        let mut told = false;
        for id in plans {
            if !self.table.backing(backing).plans.contains(&id) {
                continue;
            }
            self.table.forget_in_plan(id, backing);
            told = true;
        }
        let pages = if told { self.table.backing(backing).pages_count() } else { 0 };
        (0..pages).for_each(|index| self.place_by_plans(PageRef { backing, index }));
    }

    /// Puts a page in the order where it belongs now.
    fn place_by_plans(&mut self, at: PageRef) {
        let planned = self.planned_use(at, None);
        let page = self.table.page(at);
        let (plan, next_use) = match planned {
            Some(planned) => planned,
            None if page.plan == NO_PLAN => return,
            None => {
                let pages = self.table.backing(at.backing).pages_count();
                (NO_PLAN, predict(page.last_use, self.clock.max(page.last_use), pages))
            }
        };
        if (plan, next_use) != (page.plan, page.next_use) {
            self.table.update(at, |page| (page.plan, page.next_use) = (plan, next_use));
        }
    }

    /// A session maps these spans: its plans' cursors move.
    pub(super) fn follow_plans(
        &mut self,
        session: SessionId,
        spans: &[Span],
        access: Access,
        now: u64,
    ) {
        let plans: Vec<_> = self.plans_of(session).map(|(id, _)| id).collect();
        for id in plans {
            for span in spans {
                let Some(plan) = self.table.plan_mut(id) else { continue };
                let over = plan.follow(span, now);
                // Others than its own stand by a use that is still to come.
                let pages = plan.pages_of_steps(over);
                let own = pages.into_iter().filter(|at| self.table.page(*at).plan == id);
                own.collect::<Vec<_>>().into_iter().for_each(|at| self.place_by_plans(at));
            }
        }
        self.learn(session, spans, access, now);
    }

    /// Learns from a map of a session that declares nothing. While all there is fits in VRAM there is nothing to know.
    fn learn(&mut self, session: SessionId, spans: &[Span], access: Access, now: u64) {
        let declares = self.plans_of(session).any(|(_, plan)| plan.number.is_some());
        if declares || self.table.pages <= u64::from(self.vram.capacity()) {
            return;
        }
        let learner = self.session_mut(session).learner.get_or_insert_default();
        match learner.map(spans, access) {
            Lesson::Nothing => {}
            Lesson::Over => self.end_plans(session),
            Lesson::Cycle(steps) => {
                // Nothing is lost by not planning.
                let Some(id) = self.last_plan.checked_add(1) else { return };
                if let Ok(mut plan) = Plan::new((session, None), true, &steps) {
                    plan.start_at(steps.len() as u64 - 1, now);
                    self.start_plan(PlanId(id), plan);
                }
            }
        }
    }

    /// Forgets what a session did, and what was learned from it.
    fn unlearn(&mut self, session: SessionId) {
        if let Some(state) = self.sessions.get_mut(&session) {
            state.learner = None;
        }
        let learned = self.plans_of(session).find(|(_, plan)| plan.number.is_none());
        if let Some(id) = learned.map(|(id, _)| id) {
            self.end_plan(id);
        }
    }

    /// A map of a session is granted.
    pub(super) fn plans_granted(&mut self, session: SessionId, waited_us: u64) {
        let plans: Vec<_> = self.plans_of(session).map(|(id, _)| id).collect();
        for id in plans {
            if let Some(plan) = self.table.plan_mut(id) {
                plan.granted(waited_us);
            }
        }
    }

    /// Starts fetches that plans make due: no more at a time than keep the links busy, so that a map that comes waits
    /// for little.
    pub(super) fn fetch_planned(&mut self, now: u64, outbox: &mut Outbox) {
        self.planned_at = None;
        if self.table.plans().is_empty() {
            return;
        }
        while self.prefetches_moving < self.limits.depth {
            let Some((id, step)) = self.most_urgent(now) else { return };
            let Some(at) = self.next_missing(id, step) else { return };
            if self.table.page(at).ram.is_some()
                && self.up_link.in_flight() >= self.limits.ups_ahead()
            {
                return;
            }
            let plan = &self.table.plans()[&id];
            let may_go = MayGo::UnusedFor(plan.eta_ns(step, now));
            let Frame::Got(frame, _) = self.vram_frame(at, may_go, self.limits.depth, now, outbox)
            else {
                return;
            };
            self.prefetch_tick = self.clock.max(self.prefetch_tick + 1);
            let tick = self.prefetch_tick;
            self.table.update(at, |page| {
                page.prefetched = true;
                page.prefetched_at = tick;
                // Another plan may have wanted it sooner once, and come to nothing.
                (page.plan, page.next_use) = (id, step);
            });
            self.start_fill(at, frame, Need::Prefetch, outbox);
        }
    }

    /// The plan with the latest fetch, and its first step that misses pages.
    fn most_urgent(&mut self, now: u64) -> Option<(PlanId, u64)> {
        let pace = Pace { up_ns: self.up_link.page_ns(), read_ns: self.read_link.page_ns() };
        let pages_max = u64::from(self.mapped_pages_max());
        let mut most = None;
        for (id, plan) in self.table.plans() {
            match plan.due(now, pace, pages_max) {
                Due::Now { step, late_ns } => most = most.max(Some((late_ns, *id, step))),
                Due::At(at) => {
                    self.planned_at = Some(self.planned_at.map_or(at, |earlier| earlier.min(at)));
                }
                Due::Nothing => {}
            }
        }
        most.map(|(_, id, step)| (id, step))
    }

    /// A page of a step that has no VRAM frame and that nothing moves.
    fn next_missing(&self, id: PlanId, step: u64) -> Option<PageRef> {
        self.table.plans()[&id].next_missing(step, |at| {
            let page = self.table.page(at);
            !page.place().vram && page.motion == Motion::Still && page.pins == 0
        })
    }
}
