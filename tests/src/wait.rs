//! Waiting for what another process does, with a deadline in place of a guess.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Longest wait for anything that a daemon or a client should do at once.
pub const WAIT: Duration = Duration::from_secs(10);
/// Between two looks.
const REST: Duration = Duration::from_millis(5);

/// Looks again and again until `look` finds what is awaited.
///
/// # Panics
/// With what was seen last, when [`WAIT`] is over.
pub fn until<T, S: Debug>(what: &str, look: impl FnMut() -> Result<T, S>) -> T {
    until_within(WAIT, what, look)
}

/// Like [`until`], for what may take longer.
///
/// # Panics
/// With what was seen last, when `wait` is over.
pub fn until_within<T, S: Debug>(
    wait: Duration,
    what: &str,
    mut look: impl FnMut() -> Result<T, S>,
) -> T {
    let end = Instant::now() + wait;
    loop {
        match look() {
            Ok(found) => return found,
            Err(seen) if Instant::now() >= end => panic!("{what}: still {seen:?} after {wait:?}"),
            Err(_) => std::thread::park_timeout(REST),
        }
    }
}
