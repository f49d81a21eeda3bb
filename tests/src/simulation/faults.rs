//! What goes wrong in a run, how often, and how often it did.

use lapis_proto::code::Code;

use super::random::Random;

macro_rules! faults {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal,)*) => {
        /// A kind of misfortune.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Fault {
            $($(#[doc = $doc])* $name,)*
        }

        impl Fault {
            /// Every kind.
            pub const ALL: &[Fault] = &[$(Fault::$name,)*];

            /// For people.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Fault::$name => $text,)*
                }
            }
        }
    };
}

faults! {
    /// One operation takes a thousand times as long.
    LatencySpike = "latency spike",
    /// An operation completes before one that was submitted earlier.
    Reordered = "completion out of order",
    /// `EIO` from a model file.
    ReadError = "read error",
    /// `EIO` from the spill, on the way out: half the slot is overwritten.
    SpillWriteError = "spill write error",
    /// `EIO` from the spill, on the way back.
    SpillReadError = "spill read error",
    /// A write that says it is whole and is not.
    TornWrite = "torn spill write",
    /// A bit changes in a spill slot.
    BitFlip = "bit flip in the spill",
    /// A model file is overwritten in place.
    FileChanged = "file changed",
    /// A model file is cut.
    FileTruncated = "file truncated",
    /// The store's or device's queue refuses an operation.
    QueueFull = "queue full",
    /// `ENOSPC` for a while.
    DiskFull = "disk full",
    /// The device is lost for good.
    DeviceLost = "device lost",
    /// The device does not take a frame's memory back.
    ReleaseFailed = "frame not released",
    /// There is no memory for a frame that should be used again.
    RestoreFailed = "frame not restored",
    /// A frame can't be exported: the session is broken off.
    ExportFailed = "export failed",
    /// A client never gives a frame back.
    RevokeIgnored = "revocation ignored",
    /// A client gives a frame back when it no longer counts.
    RevokeLate = "revocation acknowledged late",
    /// A client says it gave back what it still maps or never had.
    RevokeFalse = "revocation acknowledged falsely",
    /// A tick comes late.
    TickLate = "tick late",
    /// Requests on their way are lost with their connection.
    ConnectionReset = "connection reset",
    /// A request is handled after its session was closed.
    LateRequest = "request after the session closed",
    /// A process is seen to die before its connection is seen to close.
    DeathFirst = "death seen before hangup",
    /// A process whose connection is gone lives on and uses its mappings.
    Zombie = "process outlives its connection",
    /// A mapping that its client never ends.
    Leak = "mapping never ended",
}

const KINDS: usize = Fault::ALL.len();

/// Rates and counts.
#[derive(Debug, Clone)]
pub struct Faults {
    one_in: [u64; KINDS],
    counts: [u64; KINDS],
    random: Random,
}

impl Faults {
    /// Rates drawn from the seed; none strikes in a calm run.
    #[must_use]
    pub fn new(seed: u64, calm: bool) -> Self {
        let mut random = Random::new(seed, 0xFA);
        // In a storm everything goes wrong at once; else some kinds, each at its own rate.
        let storm = random.one_in(6);
        let mut one_in = [0; KINDS];
        for kind in Fault::ALL {
            let base = usual_rate(*kind);
            let rate = random.between(base.div_ceil(4), base * 4);
            let on = storm || random.one_in(2);
            if on && !calm {
                one_in[*kind as usize] = rate;
            }
        }
        Self { one_in, counts: [0; KINDS], random }
    }

    /// Whether it happens now; counted if so.
    pub fn strikes(&mut self, fault: Fault) -> bool {
        let strikes = self.random.one_in(self.one_in[fault as usize]);
        self.counts[fault as usize] += u64::from(strikes);
        strikes
    }

    /// It happened without being drawn.
    pub fn count(&mut self, fault: Fault) {
        self.counts[fault as usize] += 1;
    }

    /// It was drawn and could not happen.
    pub fn take_back(&mut self, fault: Fault) {
        self.counts[fault as usize] -= 1;
    }

    /// How often it happened.
    #[must_use]
    pub fn happened(&self, fault: Fault) -> u64 {
        self.counts[fault as usize]
    }

    /// How often each happened, in the order of [`Fault::ALL`].
    #[must_use]
    pub fn counts(&self) -> [u64; KINDS] {
        self.counts
    }

    /// Codes of transfers that failed because of the faults so far.
    #[must_use]
    pub fn codes(&self) -> Vec<Code> {
        let causes: [(Code, &[Fault]); 5] = [
            (
                Code::Io,
                &[Fault::ReadError, Fault::SpillWriteError, Fault::SpillReadError, Fault::DiskFull],
            ),
            (Code::DataLost, &[Fault::TornWrite, Fault::BitFlip]),
            (Code::FileChanged, &[Fault::FileChanged, Fault::FileTruncated]),
            (Code::FileTruncated, &[Fault::FileTruncated]),
            (Code::DeviceLost, &[Fault::DeviceLost]),
        ];
        let happened = |faults: &[Fault]| faults.iter().any(|fault| self.happened(*fault) > 0);
        causes.iter().filter(|(_, faults)| happened(faults)).map(|(code, _)| *code).collect()
    }
}

/// Once in about how many chances.
fn usual_rate(fault: Fault) -> u64 {
    match fault {
        Fault::LatencySpike => 200,
        Fault::Reordered => 0,
        Fault::ReadError | Fault::SpillWriteError | Fault::SpillReadError => 60,
        Fault::TornWrite => 30,
        Fault::BitFlip => 40,
        Fault::FileChanged | Fault::FileTruncated => 150,
        Fault::QueueFull => 10,
        Fault::DiskFull => 100,
        Fault::DeviceLost => 4000,
        Fault::ReleaseFailed | Fault::RestoreFailed => 10,
        Fault::ExportFailed => 200,
        Fault::RevokeIgnored | Fault::RevokeLate | Fault::RevokeFalse => 5,
        Fault::TickLate => 4,
        Fault::ConnectionReset | Fault::LateRequest | Fault::DeathFirst => 3,
        Fault::Zombie => 2,
        Fault::Leak => 400,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calm_run_has_no_faults_and_others_count_theirs() {
        let mut calm = Faults::new(1, true);
        assert!(Fault::ALL.iter().all(|fault| (0..100).all(|_| !calm.strikes(*fault))));
        let mut struck = 0;
        for seed in 0..20 {
            let mut faults = Faults::new(seed, false);
            for _ in 0..1000 {
                struck += u64::from(faults.strikes(Fault::ReadError));
            }
            assert_eq!(faults.happened(Fault::TornWrite), 0);
        }
        assert!(struck > 50, "{struck}");
    }
}
