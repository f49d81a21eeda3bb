//! What clients say beside mapping: hints, flushes, and the administrators' quotas and sizes.

use lapis_proto::message::{
    Access, Advice, Advise, Flush, PageRange, PlanStep, PlanUse, Prefetch, Quota, QuotaSubject,
    SetPlan, SetTier, Tier,
};
use lapisd::engine::event::Request;
use lapisd::engine::ids::SessionId;

use super::client::{Ask, Asked};
use super::operations::Operation;
use super::scenario::GROUPS;
use super::world::World;

impl World {
    /// Something about ranges.
    pub(super) fn say(&mut self, operation: Operation, session: SessionId, ranges: Vec<PageRange>) {
        let request = match operation {
            Operation::Cancel => Request::CancelPrefetch(ranges),
            Operation::Advise => {
                let advice = self.random.pick(&[
                    Advice::Normal,
                    Advice::Sequential,
                    Advice::Random,
                    Advice::Keep,
                    Advice::DontNeed,
                    Advice::Chain,
                ]);
                Request::Advise(Advise { ranges, advice })
            }
            Operation::Flush => {
                let wait_us = self.wait_us();
                let asked = Asked::Flush(ranges.clone());
                let flush = Request::Flush(Flush { ranges, wait_us });
                return self.send(session, Ask::Plain(flush), asked);
            }
            _ => {
                let priority = self.random.pick(&[0, 0, 1, 255]);
                let within_us = self.random.pick(&[0, 0, 1, 300, 20_000]);
                Request::Prefetch(Prefetch { ranges, priority, within_us })
            }
        };
        self.send(session, Ask::Plain(request), Asked::Other);
    }

    /// What it will map, as far as anyone knows; sometimes nothing.
    pub(super) fn plan(&mut self, session: SessionId) {
        let count = self.random.below(6);
        let steps: Vec<_> = (0..count).map(|_| self.some_ranges(session, false)).collect();
        let steps: Vec<_> = steps.into_iter().filter(|ranges| !ranges.is_empty()).collect();
        self.plan_of(session, &steps);
    }

    /// A plan of these steps, over and over or once.
    pub(super) fn plan_of(&mut self, session: SessionId, steps: &[Vec<PageRange>]) {
        let access = self.random.pick(&[Access::Read, Access::Write, Access::Overwrite]);
        let step = |ranges: &Vec<PageRange>| {
            let uses = ranges.iter().map(|range| PlanUse { range: *range, access });
            PlanStep { uses: uses.collect() }
        };
        let plan = u32::from(self.random.one_in(3));
        let cyclic = self.random.one_in(2);
        let plan = SetPlan { plan, cyclic, steps: steps.iter().map(step).collect() };
        self.send(session, Ask::Plain(Request::SetPlan(plan)), Asked::Other);
    }

    /// A quota for somebody, often none.
    pub(super) fn set_quota(&mut self, session: SessionId) {
        let page = self.scenario.limits.page_size;
        let seat = self.random.index(self.scenario.seats.len());
        let ranked = self.scenario.ranked;
        let subject = match self.random.between(if ranked { 2 } else { 0 }, 3) {
            0 => QuotaSubject::EachSession,
            1 => QuotaSubject::EachUid,
            2 => QuotaSubject::Uid(self.scenario.seats[seat].domain),
            _ => QuotaSubject::Gid(self.random.pick(&GROUPS)),
        };
        let mut quota = Quota::none(subject);
        if ranked || self.random.one_in(2) {
            let most = u64::from(self.scenario.limits.vram_frames);
            if !ranked {
                quota.vram_max = self.random.one_in(2).then(|| self.random.between(1, most) * page);
            }
            quota.anonymous_max = self.random.one_in(3).then(|| self.random.below(40) * page);
            quota.priority = self.random.pick(&[0, 1, 2, 255]);
            let each = matches!(subject, QuotaSubject::EachSession | QuotaSubject::EachUid);
            if self.random.one_in(if each { 20 } else { 3 }) {
                quota.vram_reserved = self.random.between(1, most) * page;
            }
        }
        self.send(session, Ask::Plain(Request::SetQuota(quota)), Asked::Other);
    }

    /// A tier shrinks, or grows, often to all there is.
    pub(super) fn set_tier(&mut self, session: SessionId) {
        let limits = &self.scenario.limits;
        let (tier, full) = match self.random.below(5) {
            0 | 1 => (Tier::Vram, limits.vram_frames),
            2 | 3 => (Tier::Ram, limits.ram_frames),
            _ => (Tier::Nvme, limits.spill_slots),
        };
        let page = limits.page_size;
        let frames =
            if self.random.one_in(2) { full } else { self.random.between_u32(0, full + 1) };
        let size = u64::from(frames) * page + self.random.below(page);
        let wait_us = self.wait_us();
        let set = Request::SetTier(SetTier { tier, size, wait_us });
        self.send(session, Ask::Plain(set), Asked::SetTier);
    }
}
