//! A run's trace: every event and command in one number, so that two runs can be told to be the same; printed on demand.

use std::fmt::{self, Write};

/// FNV-1a over the text of all that happened.
#[derive(Debug)]
pub(super) struct Trace {
    hash: u64,
    print: bool,
}

impl Trace {
    /// Nothing yet.
    #[must_use]
    pub(super) fn new(print: bool) -> Self {
        Self { hash: 0xcbf2_9ce4_8422_2325, print }
    }

    /// Something happened.
    pub(super) fn note(&mut self, now: u64, what: &dyn fmt::Debug) {
        if self.print {
            println!("{now:>12} {what:?}");
        }
        write!(self, "{now} {what:?}").expect("hashing can't fail");
    }

    /// A number for all of it.
    #[must_use]
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }
}

impl Write for Trace {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Ok(())
    }
}
