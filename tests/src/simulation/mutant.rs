//! Planted bugs: each is switched on alone, in the simulated parts around the engine, to prove that the checks see it.
//! (Bugs inside the engine are planted by hand: see `docs/testing.md`.)

macro_rules! mutants {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal,)*) => {
        /// A bug to plant.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Mutant {
            $($(#[doc = $doc])* $name,)*
        }

        impl Mutant {
            /// Every one.
            pub const ALL: &[Mutant] = &[$(Mutant::$name,)*];

            /// Its name on the command line.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Mutant::$name => $text,)*
                }
            }
        }
    };
}

mutants! {
    /// Store: a spilled page is handed out without a look at its checksum.
    ChecksumIgnored = "checksum-ignored",
    /// Store: what follows a file's last bytes in the frame is not zeroed.
    TailNotZeroed = "tail-not-zeroed",
    /// Store: the last byte of a file's tail is not read.
    TailShort = "tail-short",
    /// Store: a page lands at byte 0 of its frame, wherever it begins in the file.
    ReadUnshifted = "read-unshifted",
    /// Store: half a read counts as the whole.
    ShortReadTaken = "short-read-taken",
    /// Store: pages are written to the slot beside theirs.
    WrongSlot = "wrong-slot",
    /// Store: a write to the spill is reported and not made.
    SpillWriteLost = "spill-write-lost",
    /// Store: a file that changed is read as if it had not.
    FileChangeIgnored = "file-change-ignored",
    /// Store: files are never closed.
    FileLeaked = "file-leaked",
    /// Device: a page leaves VRAM without being copied, so what was written is lost.
    DownWithoutCopy = "down-without-copy",
    /// Device: copies up from byte 0 of the frame.
    UpUnshifted = "up-unshifted",
    /// Device: a frame that should be zeros keeps its old bytes.
    ZeroSkipped = "zero-skipped",
    /// Device: half a page is copied.
    UpHalf = "up-half",
    /// Transfers: a completion comes before its bytes.
    CompletionEarly = "completion-early",
    /// Transfers: a completion is lost, so nobody is woken.
    CompletionLost = "completion-lost",
    /// Transfers: a completion is delivered twice.
    CompletionTwice = "completion-twice",
    /// Transfers: a failed operation counts as done.
    FailureTakenAsDone = "failure-taken-as-done",
    /// Server: a reply is not sent.
    ReplyDropped = "reply-dropped",
    /// Server: a reply is sent twice.
    ReplyTwice = "reply-twice",
    /// Server: frames go to another session than the one they are for.
    ExportAstray = "export-astray",
    /// Server: frames follow the reply that names them.
    ExportAfterReply = "export-after-reply",
    /// Server: a client that was asked for a frame is taken to have given it back.
    RevokeAssumed = "revoke-assumed",
    /// Server: a closed connection is taken for a dead process.
    HangupTakenForDeath = "hangup-taken-for-death",
    /// Server: everybody is taken for an administrator.
    EverybodyAdministers = "everybody-administers",
    /// Device: a frame is reported to have its memory again, and has none.
    RestoreLost = "restore-lost",
    /// Server: the engine is never told that a deadline passed.
    TickLost = "tick-lost",
}

impl Mutant {
    /// The one of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|mutant| mutant.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for mutant in Mutant::ALL {
            assert_eq!(Mutant::from_name(mutant.name()), Some(*mutant));
        }
        assert_eq!(Mutant::from_name("none"), None);
    }
}
