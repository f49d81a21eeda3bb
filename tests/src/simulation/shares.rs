//! The naive model of quotas: who owns which pages, whom each quota binds, and what that allows.

use std::collections::{BTreeMap, BTreeSet};

use lapis_proto::message::{Quota, QuotaSubject, QuotaUse};
use lapisd::engine::ids::{Domain, SessionId};

use super::ledger::PageId;

/// Whom pages are charged to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// The user.
    pub(super) domain: Domain,
    /// The group of whoever came first.
    pub(super) gid: u32,
    /// The session, unless the pages are shared.
    pub(super) session: Option<SessionId>,
}

/// One user, group or session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Uid(u32),
    Gid(u32),
    Session(SessionId),
}

impl Body {
    fn owns(self, owner: Owner) -> bool {
        match self {
            Body::Uid(uid) => owner.domain.0 == uid,
            Body::Gid(gid) => owner.gid == gid,
            Body::Session(session) => owner.session == Some(session),
        }
    }
}

/// Quotas, and what is charged against them.
#[derive(Debug)]
pub(super) struct Shares {
    page_size: u64,
    quotas: BTreeMap<QuotaSubject, Quota>,
    /// Owners of all backings that ever were.
    owners: BTreeMap<u64, Owner>,
    /// Quotas that were seen to be kept, and have not changed since.
    kept: BTreeSet<QuotaSubject>,
    never_set: bool,
}

impl Shares {
    /// No quotas.
    #[must_use]
    pub(super) fn new(page_size: u64) -> Self {
        let (quotas, owners, kept) = Default::default();
        Self { page_size, quotas, owners, kept, never_set: true }
    }

    /// A backing belongs to somebody.
    pub(super) fn charge(&mut self, backing: u64, owner: Owner) {
        self.owners.insert(backing, owner);
    }

    /// Whether there has never been a quota.
    #[must_use]
    pub(super) fn were_never_set(&self) -> bool {
        self.never_set
    }

    /// A quota is set, or taken away.
    pub(super) fn set(&mut self, quota: Quota) {
        self.never_set = false;
        if quota.is_none() {
            self.quotas.remove(&quota.subject);
        } else {
            self.quotas.insert(quota.subject, quota);
        }
        self.kept.remove(&quota.subject);
    }

    fn binding(&self, owner: Owner) -> Vec<(Body, Quota)> {
        let uid = owner.domain.0;
        let own = self.quotas.contains_key(&QuotaSubject::Uid(uid));
        let body = |quota: &Quota| match quota.subject {
            QuotaSubject::EachSession => owner.session.map(Body::Session),
            QuotaSubject::EachUid if own => None,
            QuotaSubject::EachUid => Some(Body::Uid(uid)),
            QuotaSubject::Uid(bound) => (bound == uid).then_some(Body::Uid(uid)),
            QuotaSubject::Gid(bound) => (bound == owner.gid).then_some(Body::Gid(bound)),
        };
        self.quotas.values().filter_map(|quota| body(quota).map(|body| (body, *quota))).collect()
    }

    /// How far ahead of others a session waits.
    pub(super) fn priority(&self, owner: Owner) -> u8 {
        self.binding(owner).into_iter().map(|(_, quota)| quota.priority).max().unwrap_or(0)
    }

    /// Whether some may have to let others pass.
    pub(super) fn limit_vram(&self) -> bool {
        self.quotas.values().any(|quota| quota.vram_max.is_some())
    }

    /// Frames for so many pages, and for what is reserved for users beside what they `have`.
    pub(super) fn promised(&self, pages: &[PageId], have: &[PageId]) -> u64 {
        let unused = self.quotas.values().filter_map(|quota| match quota.subject {
            QuotaSubject::Uid(uid) => {
                let own = self.count(Body::Uid(uid), have.iter().copied());
                Some((quota.vram_reserved / self.page_size).saturating_sub(own))
            }
            // Who is in two of these shares has one page of both: nobody can say how many are kept.
            QuotaSubject::Gid(_) | QuotaSubject::EachSession | QuotaSubject::EachUid => None,
        });
        pages.len() as u64 + unused.sum::<u64>()
    }

    fn count(&self, body: Body, pages: impl Iterator<Item = PageId>) -> u64 {
        pages.filter(|(backing, _)| body.owns(self.owners[backing])).count() as u64
    }

    /// Whether an owner of these anonymous backings, each with its pages, may have more pages.
    pub(super) fn allow_anonymous(&self, owner: Owner, backings: &[(u64, u32)], more: u64) -> bool {
        self.binding(owner).into_iter().all(|(body, quota)| {
            let own = backings.iter().filter(|(backing, _)| body.owns(self.owners[backing]));
            let used: u64 = own.map(|(_, pages)| u64::from(*pages)).sum();
            quota.anonymous_max.is_none_or(|most| used + more <= most / self.page_size)
        })
    }

    /// Whether these distinct pages keep within each quota that binds any of them.
    pub(super) fn allow_mapped(&self, pages: &[PageId]) -> bool {
        pages.iter().all(|(backing, _)| {
            self.binding(self.owners[backing]).into_iter().all(|(body, quota)| {
                let held = self.count(body, pages.iter().copied());
                quota.vram_max.is_none_or(|most| held <= most / self.page_size)
            })
        })
    }

    /// Pages that are kept for whoever does not own all of these.
    pub(super) fn reserved_for_others(&self, pages: &[PageId]) -> u64 {
        let owns_all =
            |body: Body| pages.iter().all(|(backing, _)| body.owns(self.owners[backing]));
        let others = self.quotas.values().filter(|quota| match quota.subject {
            QuotaSubject::Uid(uid) => !owns_all(Body::Uid(uid)),
            QuotaSubject::Gid(gid) => !owns_all(Body::Gid(gid)),
            QuotaSubject::EachSession | QuotaSubject::EachUid => false,
        });
        others.map(|quota| quota.vram_reserved / self.page_size).sum()
    }

    /// Pages that would be kept for somebody with this quota in place of its subject's.
    pub(super) fn reserved_with(&self, quota: Option<&Quota>) -> u64 {
        let subject = quota.map(|quota| quota.subject);
        let others = self.quotas.values().filter(|other| Some(other.subject) != subject);
        others.chain(quota).map(|quota| quota.vram_reserved / self.page_size).sum()
    }

    /// A list of quotas is what was set, and is kept. `mapped` and `anonymous` are what clients hold for
    /// certain, `wanted` what they map or wait for.
    pub(super) fn check_list(
        &mut self,
        asking: Owner,
        list: &[QuotaUse],
        [mapped, wanted]: [&[PageId]; 2],
        anonymous: &[(u64, u32)],
    ) {
        let listed: Vec<_> = list.iter().map(|used| used.quota).collect();
        let expected: Vec<_> = self.quotas.values().copied().collect();
        assert!(listed == expected, "quotas {listed:?} should be {expected:?}");
        for used in list {
            let body = match used.quota.subject {
                QuotaSubject::EachSession => asking.session.map(Body::Session),
                QuotaSubject::EachUid => Some(Body::Uid(asking.domain.0)),
                QuotaSubject::Uid(uid) => Some(Body::Uid(uid)),
                QuotaSubject::Gid(gid) => Some(Body::Gid(gid)),
            };
            let body = body.expect("sessions ask");
            let least = self.count(body, mapped.iter().copied()) * self.page_size;
            assert!(used.vram_mapped >= least, "{used:?}, but {least} bytes are mapped");
            let most = self.count(body, wanted.iter().copied()) * self.page_size;
            assert!(used.vram_mapped <= most, "{used:?}, but {most} bytes are mapped or asked for");
            let own = anonymous.iter().filter(|(backing, _)| body.owns(self.owners[backing]));
            let least = own.map(|(_, pages)| u64::from(*pages)).sum::<u64>() * self.page_size;
            assert!(used.anonymous_used >= least, "{used:?}, but {least} bytes are allocated");
            // Of the others the number depends on who asks.
            if !matches!(used.quota.subject, QuotaSubject::Uid(_) | QuotaSubject::Gid(_)) {
                continue;
            }
            let most = used.quota.vram_max.unwrap_or(u64::MAX) / self.page_size * self.page_size;
            // Maps that were admitted before the quota was set may fill more than it allows.
            if used.vram_used.max(used.vram_mapped) <= most {
                self.kept.insert(used.quota.subject);
            } else {
                let was_kept = self.kept.contains(&used.quota.subject);
                assert!(!was_kept, "{used:?}: more than it may have, and it had less");
            }
        }
    }
}
