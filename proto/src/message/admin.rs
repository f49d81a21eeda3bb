//! Messages of administration: sizes of tiers, quotas.

use bincode::{Decode, Encode};

/// Quotas of a daemon, so that [`Quotas`] always fits into a message.
pub const QUOTAS_MAX: usize = 1024;

/// A tier of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub enum Tier {
    /// Frames of the device.
    Vram,
    /// Pinned frames of the host.
    Ram,
    /// The spill.
    Nvme,
}

/// Changes how much of a tier is used, up to the size it was started with. Pages move out of the way; none is lost.
/// For root and administrators. Reply: [`Done`](super::Done) once the tier has this size.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct SetTier {
    /// Which.
    pub tier: Tier,
    /// Bytes; whole pages are used.
    pub size: u64,
    /// Microseconds to wait for mappings to end before `TimedOut`; the tier goes on shrinking then.
    pub wait_us: u64,
}

/// Whom a quota binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub enum QuotaSubject {
    /// Every session for itself.
    EachSession,
    /// Every user for himself who has no quota of his own.
    EachUid,
    /// All sessions of a user together.
    Uid(u32),
    /// All sessions of a group together, by the peer's primary group.
    Gid(u32),
}

/// Limits for a subject, in bytes. RAM and spill are limited together: a page moves between them as need be, and
/// separate limits could leave an evicted page with nowhere to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Quota {
    /// Whom.
    pub subject: QuotaSubject,
    /// Most VRAM that its pages may hold, mapped or not.
    pub vram_max: Option<u64>,
    /// VRAM that its pages are not evicted from for others.
    pub vram_reserved: u64,
    /// Most bytes of anonymous allocations.
    pub anonymous_max: Option<u64>,
    /// Maps of a subject with a higher one are served first; 0 is the usual.
    pub priority: u8,
}

impl Quota {
    /// A quota that limits, reserves and prefers nothing, to be filled in; as it is, it takes the subject's away.
    #[must_use]
    pub const fn none(subject: QuotaSubject) -> Quota {
        Quota { subject, vram_max: None, vram_reserved: 0, anonymous_max: None, priority: 0 }
    }

    /// Whether it limits, reserves and prefers nothing.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Quota::none(self.subject)
    }
}

/// Sets or replaces a quota; one without limits, reserve and priority takes it away. For root and administrators.
/// Reply: [`Done`](super::Done).
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct SetQuota {
    /// Which.
    pub quota: Quota,
}

/// Asks for all quotas. Reply: [`Quotas`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct ListQuotas {}

/// A quota and how much of it is used. For `EachSession` and `EachUid`: by the asking session, its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct QuotaUse {
    /// The quota.
    pub quota: Quota,
    /// Bytes of VRAM held.
    pub vram_used: u64,
    /// Bytes of VRAM mapped.
    pub vram_mapped: u64,
    /// Bytes of anonymous allocations.
    pub anonymous_used: u64,
}

/// Answer to [`ListQuotas`].
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cfg_attr(test, derive(wincode::SchemaWrite, wincode::SchemaRead))]
pub struct Quotas {
    /// In order of subject.
    pub quotas: Vec<QuotaUse>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_that_does_nothing_is_none() {
        let none = Quota::none(QuotaSubject::Uid(7));
        assert!(none.is_none());
        assert!(!Quota { vram_max: Some(0), ..none }.is_none());
        assert!(!Quota { vram_reserved: 1, ..none }.is_none());
        assert!(!Quota { anonymous_max: Some(0), ..none }.is_none());
        assert!(!Quota { priority: 1, ..none }.is_none());
    }
}
