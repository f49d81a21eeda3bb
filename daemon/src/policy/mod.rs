//! What to keep when not everything fits: policies over ids and numbers, one algorithm a file.
//!
//! A [`Directory`] is what a policy would keep in a cache of a given capacity: metadata only, no bytes. The replacement
//! that the daemon follows is made of several, and they are compared on traces by `lapisctl replay`.
//!
//! The unit of a policy is a chunk of at most 16 consecutive pages of one allocation; its *weight* is its pages.
//! Directories know units by [`Slot`], a small dense number, so that what they know of a unit is one array element.
//! Nothing here has a clock, and what is random comes from a seed: the same accesses give the same answers.
#![forbid(unsafe_code)]

use std::fmt::Debug;

pub mod adapt;
pub mod arc;
pub mod duel;
pub mod gap;
mod held;
pub mod index;
pub mod learned;
pub mod lirs;
mod list;
pub mod lru;
pub mod mrc;
pub mod opt;
pub mod patterns;
pub mod s3fifo;
#[cfg(test)]
mod tests;
mod units;

/// A chunk of pages, by an id of whoever uses a policy.
pub type Unit = u64;

/// The number of a unit in a directory. Numbers are dense: a directory's memory is proportional to the largest.
pub type Slot = u32;

/// What a policy would keep in a cache of a given capacity.
///
/// What it holds after [`Directory::access`] is what it held before and the unit, less the units that it lets go. The
/// unit itself is let go only if it is larger than the cache. All that is held fits in the capacity, always.
pub trait Directory: Debug {
    /// A unit of `weight` pages is used (0 counts as 1). Units that it lets go are appended to `out`. Whether it was held.
    fn access(&mut self, slot: Slot, weight: u32, out: &mut Vec<Slot>) -> bool;

    /// Whether the unit is held.
    fn contains(&self, slot: Slot) -> bool;

    /// The unit is gone for good, and its slot may become another's.
    fn forget(&mut self, slot: Slot);

    /// The capacity becomes so many pages. Units that it lets go are appended to `out`.
    fn resize(&mut self, capacity: u64, out: &mut Vec<Slot>);

    /// Pages of all units held.
    fn used(&self) -> u64;
}
