//! What it costs to follow a session's working set: an access to a chunk while all chunks are followed, which is
//! when it costs most: of more than 512, most are left out by their hash.

use std::time::Instant;

use lapisd::policy::mrc::Curve;

const CHUNKS: u64 = 500;
const SAMPLES: usize = 512;
const ACCESSES: u64 = 1_000_000;

/// Microseconds of an access to a chunk.
pub(crate) fn access_us() -> f64 {
    let mut curve = Curve::new(SAMPLES);
    let mut state = 1_u64;
    let mut touch = |now| {
        // A linear congruential generator.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let unit = (state >> 33) % CHUNKS;
        curve.access(unit, 16, now);
    };
    (0..4 * CHUNKS).for_each(&mut touch);
    let start = Instant::now();
    (0..ACCESSES).for_each(&mut touch);
    start.elapsed().as_secs_f64() * 1e6 / ACCESSES as f64
}
