//! Whether the daemon is alive, which a restart could mend if not, and whether it is ready for clients.

use std::time::Duration;

use super::board::Phase;

/// The reactor turns twice a second.
const SILENT_MAX: Duration = Duration::from_secs(5);
/// Transfers under way of which none ends: no map that needs one is granted.
const STALLED_READY_MAX: Duration = Duration::from_secs(10);
/// Longer than disks take to recover from a reset.
const STALLED_ALIVE_MAX: Duration = Duration::from_secs(60);

/// What is known of the daemon's well-being.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signs {
    /// What it does.
    pub phase: Phase,
    /// Since the reactor last turned.
    pub silent: Duration,
    /// Since a transfer last ended, while some are under way.
    pub stalled: Duration,
}

/// An answer, with the reason when it is no.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// The daemon works: `/healthz`.
    pub alive: Result<(), String>,
    /// It serves clients: `/readyz`.
    pub ready: Result<(), String>,
}

impl Health {
    /// What these signs mean.
    #[must_use]
    pub fn of(signs: Signs) -> Health {
        let both = |reason: String| Health { alive: Err(reason.clone()), ready: Err(reason) };
        let not_ready = |reason: &str| Health { alive: Ok(()), ready: Err(reason.to_owned()) };
        match signs.phase {
            Phase::Lost => return both("the device is lost; the daemon ends".to_owned()),
            Phase::Starting => return not_ready("the daemon starts: its tiers are being made"),
            Phase::Stopping => return not_ready("the daemon is stopping"),
            Phase::Serving => {}
        }
        if signs.silent > SILENT_MAX {
            let seconds = signs.silent.as_secs();
            return both(format!("the reactor hangs: it has not turned for {seconds} s"));
        }
        let seconds = signs.stalled.as_secs();
        let stalled = format!(
            "transfers are under way and none has ended for {seconds} s: the device or a disk hangs"
        );
        if signs.stalled > STALLED_ALIVE_MAX {
            return both(stalled);
        }
        if signs.stalled > STALLED_READY_MAX {
            return not_ready(&stalled);
        }
        Health { alive: Ok(()), ready: Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Alive, ready, and a word of the reason.
    fn health(phase: Phase, silent: u64, stalled: u64) -> (bool, bool, String) {
        let [silent, stalled] = [silent, stalled].map(Duration::from_secs);
        let health = Health::of(Signs { phase, silent, stalled });
        let reason = health.ready.clone().err().unwrap_or_default();
        (health.alive.is_ok(), health.ready.is_ok(), reason)
    }

    #[test]
    fn each_sign_turns_what_it_should() {
        let (alive, ready, reason) = health(Phase::Starting, 1000, 0);
        assert!(alive && !ready && reason.contains("starts"), "{reason}");
        assert_eq!(health(Phase::Serving, 5, 10), (true, true, String::new()));
        let (alive, ready, reason) = health(Phase::Serving, 6, 0);
        assert!(!alive && !ready && reason.contains("not turned for 6 s"), "{reason}");
        let (alive, ready, reason) = health(Phase::Serving, 0, 11);
        assert!(alive && !ready && reason.contains("none has ended for 11 s"), "{reason}");
        let (alive, ready, reason) = health(Phase::Serving, 0, 61);
        assert!(!alive && !ready && reason.contains("61 s"), "{reason}");
        let (alive, ready, reason) = health(Phase::Stopping, 9, 0);
        assert!(alive && !ready && reason.contains("stopping"), "{reason}");
        let (alive, ready, reason) = health(Phase::Lost, 0, 0);
        assert!(!alive && !ready && reason.contains("lost"), "{reason}");
    }
}
