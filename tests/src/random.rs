//! Choices that a seed determines.

/// xorshift64*.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The choices of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // A state of zero would stay zero; multiplying spreads seeds that follow one another.
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// One of `0..count`.
    pub fn below(&mut self, count: u64) -> u64 {
        (self.any() >> 16) % count
    }

    /// One of `0..count`.
    pub fn index(&mut self, count: usize) -> usize {
        let index = self.below(u64::try_from(count).expect("no slice is longer"));
        usize::try_from(index).expect("below a usize")
    }

    /// Whether this is the one time in `count`.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}
