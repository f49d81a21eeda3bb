//! Frames with real bytes. An operation claims its frames while it is in flight; two claims that don't go together are
//! a bug of whoever handed the frames out.

/// What a frame holds until something is written to it, and while something is being written.
const POISON: u8 = 0xA5;

/// Who uses a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claim {
    None,
    Readers(u32),
    Writer,
}

/// The frames of one tier.
#[derive(Debug)]
pub(super) struct Frames {
    tier: &'static str,
    bytes: Vec<Vec<u8>>,
    claims: Vec<Claim>,
}

impl Frames {
    /// `count` poisoned frames of `size` bytes.
    #[must_use]
    pub(super) fn new(tier: &'static str, count: u32, size: usize) -> Self {
        let bytes: Vec<_> = (0..count).map(|_| vec![POISON; size]).collect();
        Self { tier, claims: vec![Claim::None; bytes.len()], bytes }
    }

    /// An operation begins to read a frame.
    ///
    /// # Panics
    /// If one writes it.
    pub(super) fn claim_read(&mut self, frame: u32) {
        let tier = self.tier;
        let claim = &mut self.claims[frame as usize];
        *claim = match *claim {
            Claim::None => Claim::Readers(1),
            Claim::Readers(count) => Claim::Readers(count + 1),
            Claim::Writer => panic!("{tier} frame {frame} is read while it is written"),
        };
    }

    /// An operation begins to write a frame, whose bytes are undefined until it ends.
    ///
    /// # Panics
    /// If another uses it.
    pub(super) fn claim_write(&mut self, frame: u32) {
        let claim = &mut self.claims[frame as usize];
        assert_eq!(*claim, Claim::None, "{} frame {frame} is written while in use", self.tier);
        *claim = Claim::Writer;
        self.poison(frame);
    }

    /// An operation ends.
    ///
    /// # Panics
    /// If nothing claimed it.
    pub(super) fn release(&mut self, frame: u32) {
        let tier = self.tier;
        let claim = &mut self.claims[frame as usize];
        *claim = match *claim {
            Claim::None => panic!("{tier} frame {frame} was not claimed"),
            Claim::Readers(1) | Claim::Writer => Claim::None,
            Claim::Readers(count) => Claim::Readers(count - 1),
        };
    }

    /// Makes its bytes garbage.
    pub(super) fn poison(&mut self, frame: u32) {
        self.bytes[frame as usize].fill(POISON);
    }

    /// Its bytes.
    #[must_use]
    pub(super) fn bytes(&self, frame: u32) -> &[u8] {
        &self.bytes[frame as usize]
    }

    /// Its bytes, to write.
    pub(super) fn bytes_mut(&mut self, frame: u32) -> &mut [u8] {
        &mut self.bytes[frame as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_a_write_poisons() {
        let mut frames = Frames::new("RAM", 2, 4);
        frames.bytes_mut(0).fill(1);
        frames.claim_read(0);
        frames.claim_read(0);
        frames.release(0);
        frames.release(0);
        frames.claim_write(0);
        assert_eq!(frames.bytes(0), [0xA5; 4]);
        frames.release(0);
    }

    #[test]
    #[should_panic(expected = "RAM frame 1 is written while in use")]
    fn two_writers_are_a_bug() {
        let mut frames = Frames::new("RAM", 2, 4);
        frames.claim_write(1);
        frames.claim_write(1);
    }

    #[test]
    #[should_panic(expected = "RAM frame 1 is read while it is written")]
    fn reading_what_is_written_is_a_bug() {
        let mut frames = Frames::new("RAM", 2, 4);
        frames.claim_write(1);
        frames.claim_read(1);
    }
}
