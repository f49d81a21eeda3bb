//! Copies past the cache: a page is read once and written once, and what it would push out of the cache is worth more.
#![expect(unsafe_code, reason = "vector loads and stores")]

/// Copies `source` to `target`, which is as long and begins at a multiple of 32 bytes.
///
/// # Safety
/// `target` is writable for `source.len()` bytes, which nobody else reads or writes meanwhile and which do not
/// overlap `source`.
pub(super) unsafe fn copy(source: &[u8], target: *mut u8) {
    debug_assert!(target.addr().is_multiple_of(32), "{target:p}");
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && source.len().is_multiple_of(128) {
        // SAFETY: the processor has AVX2, checked just now; the rest is this function's own contract.
        return unsafe { copy_avx2(source, target) };
    }
    // SAFETY: this function's contract is copy_nonoverlapping's.
    unsafe { source.as_ptr().copy_to_nonoverlapping(target, source.len()) }
}

/// # Safety
/// As [`copy`], and the processor has AVX2, and the length is a multiple of 128.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn copy_avx2(source: &[u8], target: *mut u8) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    let (mut from, mut to) = (source.as_ptr(), target);
    for _ in 0..source.len() / 128 {
        // SAFETY: `from` and `to` are advanced together, 128 bytes for each of length / 128 rounds, so the four loads
        // and stores of a round stay inside. Loads may be unaligned; `to` is a multiple of 32 at the start and stays
        // one.
        unsafe {
            let lanes: [_; 4] =
                std::array::from_fn(|i| _mm256_loadu_si256(from.add(32 * i).cast()));
            for (i, lane) in lanes.into_iter().enumerate() {
                _mm256_stream_si256(to.add(32 * i).cast(), lane);
            }
            (from, to) = (from.add(128), to.add(128));
        }
    }
    // Streamed stores are weakly ordered: whoever is told that the copy is done must see it.
    _mm_sfence();
}
