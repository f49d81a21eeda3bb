//! What root and administrators may change while the daemon runs: sizes of tiers, quotas.

use std::time::Duration;

use lapis_proto::message::{Done, ListQuotas, Quota, QuotaUse, Quotas, SetQuota, SetTier, Tier};

use crate::client::{Client, micros};
use crate::error::Error;

impl Client {
    /// Changes how much of a tier is used, up to the size that the daemon was started with. Waits up to `wait` for
    /// mappings that are in the way; after that the tier goes on shrinking by itself.
    ///
    /// # Errors
    /// [`Error::Refused`], e.g. with [`crate::Code::NotPermitted`] unless this user administers the daemon,
    /// [`crate::Code::OutOfMemory`] when what is allocated would not fit any more, or [`crate::Code::TimedOut`].
    pub fn set_tier(&self, tier: Tier, bytes: u64, wait: Duration) -> Result<(), Error> {
        let request = SetTier { tier, size: bytes, wait_us: micros(wait) };
        let Done {} = self.session.connection().call(&request, None)?;
        Ok(())
    }

    /// Sets the quota of its subject, in place of the one it has. [`Quota::none`] takes that away.
    ///
    /// # Errors
    /// [`Error::Refused`], e.g. with [`crate::Code::NotPermitted`] unless this user administers the daemon, or
    /// [`crate::Code::OverCapacity`] when more would be reserved than there is.
    pub fn set_quota(&self, quota: Quota) -> Result<(), Error> {
        let Done {} = self.session.connection().call(&SetQuota { quota }, None)?;
        Ok(())
    }

    /// All quotas and how much of each is used; of those for each session or user, by this one.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Disconnected`], [`Error::Forked`].
    pub fn quotas(&self) -> Result<Vec<QuotaUse>, Error> {
        let Quotas { quotas } = self.session.connection().call(&ListQuotas {}, None)?;
        Ok(quotas)
    }
}

#[cfg(test)]
mod tests {
    use lapis_proto::kind::Kind;
    use lapis_proto::message::QuotaSubject;

    use super::*;
    use crate::Code;
    use crate::testing::{refused, scripted};

    #[test]
    fn a_tier_is_set_with_its_wait_and_a_refusal_is_told() {
        let (client, daemon) = scripted(4, |mut peer, _events| {
            let request = peer.receive().expect("a tier");
            peer.reply(request.request, &Done {});
            let other = peer.receive().expect("a tier");
            peer.reply(other.request, &refused(Code::NotPermitted));
            while peer.receive().is_some() {}
            [request.decode::<SetTier>(), other.decode()]
        });
        client.set_tier(Tier::Ram, 3 << 30, Duration::from_millis(5)).expect("set");
        let error = client.set_tier(Tier::Nvme, 0, Duration::MAX).expect_err("refused");
        assert_eq!(error.code(), Some(Code::NotPermitted));
        drop(client);
        assert_eq!(
            daemon.join().expect("no panic"),
            [
                SetTier { tier: Tier::Ram, size: 3_221_225_472, wait_us: 5000 },
                SetTier { tier: Tier::Nvme, size: 0, wait_us: u64::MAX },
            ]
        );
    }

    #[test]
    fn quotas_are_set_and_listed() {
        let quota = Quota { vram_max: Some(7), ..Quota::none(QuotaSubject::Uid(5)) };
        let used = QuotaUse { quota, vram_used: 3, vram_mapped: 2, anonymous_used: 1 };
        let (client, daemon) = scripted(4, move |mut peer, _events| {
            let request = peer.receive().expect("a quota");
            peer.reply(request.request, &Done {});
            let list = peer.receive().expect("a question");
            assert_eq!(list.kind, Kind::ListQuotas);
            peer.reply(list.request, &Quotas { quotas: vec![used] });
            while peer.receive().is_some() {}
            request.decode::<SetQuota>()
        });
        client.set_quota(quota).expect("set");
        assert_eq!(client.quotas().expect("listed"), [used]);
        drop(client);
        assert_eq!(daemon.join().expect("no panic"), SetQuota { quota });
    }
}
