//! Where every choice of a run comes from: a seed, split into streams so that one part drawing more numbers does not
//! change what another part draws.

/// xorshift64*, seeded through splitmix64.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

fn splitmix(mut state: u64) -> u64 {
    state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

impl Random {
    /// One stream of a seed.
    #[must_use]
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        Self(splitmix(splitmix(seed) ^ stream.rotate_left(32)) | 1)
    }

    /// The next 64 bits.
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below `n`, which is at least 1.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }

    /// A number from `low` to `high`, both included.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// The same for pages, frames and the like.
    pub(super) fn between_u32(&mut self, low: u32, high: u32) -> u32 {
        let number = self.between(u64::from(low), u64::from(high));
        u32::try_from(number).expect("not above a u32")
    }

    /// The same for indexes.
    pub(super) fn index(&mut self, len: usize) -> usize {
        let number = self.below(u64::try_from(len).expect("64 bits at most"));
        usize::try_from(number).expect("below a usize")
    }

    /// True once in `n` times; never for 0.
    pub(super) fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.below(n) == 0
    }

    /// One of them.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.index(items.len())]
    }

    /// One of them, if there are any.
    pub(super) fn pick_any<T: Copy>(
        &mut self,
        mut items: impl Iterator<Item = T> + Clone,
    ) -> Option<T> {
        let count = items.clone().count();
        if count == 0 { None } else { items.nth(self.index(count)) }
    }

    /// Fills with bytes that no other fill repeats.
    pub(super) fn fill(&mut self, bytes: &mut [u8]) {
        let (words, tail) = bytes.as_chunks_mut::<8>();
        for word in words {
            *word = self.next().to_le_bytes();
        }
        let last = self.next().to_le_bytes();
        let len = tail.len();
        tail.copy_from_slice(&last[..len]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_one_seed_differ_and_each_repeats() {
        let draw = |seed, stream| {
            let mut random = Random::new(seed, stream);
            [random.next(), random.next()]
        };
        assert_eq!(draw(7, 1), draw(7, 1));
        assert_ne!(draw(7, 1), draw(7, 2));
        assert_ne!(draw(7, 1), draw(8, 1));
    }

    #[test]
    fn choices_stay_inside_their_bounds() {
        let mut random = Random::new(3, 0);
        let mut seen = [0; 4];
        for _ in 0..1000 {
            let number = random.between(2, 5);
            assert!((2..=5).contains(&number));
            seen[usize::try_from(number - 2).unwrap()] += 1;
            assert!(!random.one_in(0));
        }
        assert!(seen.iter().all(|count| *count > 150), "{seen:?}");
    }
}
