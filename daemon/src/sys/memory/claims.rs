//! Who owns a frame at this moment: one writer, or any number of readers.
//!
//! An operation in flight holds a claim, so that a frame given to two operations at once, a bug elsewhere, is caught
//! before it becomes a data race.

use super::sync::{Arc, AtomicU32, Ordering};

/// The counter's value while a writer owns the frame; below it, it counts readers.
const EXCLUSIVE: u32 = u32::MAX;

/// One counter per frame.
#[derive(Debug)]
pub struct Claims(Box<[AtomicU32]>);

impl Claims {
    /// `frames` frames that nobody owns.
    #[must_use]
    pub fn new(frames: u32) -> Self {
        Self((0..frames).map(|_| AtomicU32::new(0)).collect())
    }

    fn counter(&self, index: u32) -> Option<&AtomicU32> {
        self.0.get(usize::try_from(index).ok()?)
    }

    fn try_share(&self, index: u32) -> bool {
        let more = |readers: u32| (readers < EXCLUSIVE - 1).then(|| readers + 1);
        self.counter(index).is_some_and(|counter| {
            counter.fetch_update(Ordering::Acquire, Ordering::Relaxed, more).is_ok()
        })
    }

    fn try_own(&self, index: u32) -> bool {
        self.counter(index).is_some_and(|counter| {
            counter.compare_exchange(0, EXCLUSIVE, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })
    }

    fn unshare(&self, index: u32) {
        if let Some(counter) = self.counter(index) {
            counter.fetch_sub(1, Ordering::Release);
        }
    }

    fn disown(&self, index: u32) {
        if let Some(counter) = self.counter(index) {
            counter.store(0, Ordering::Release);
        }
    }
}

/// Something that owns frames and counts who uses them.
pub trait Claimed {
    /// The counters.
    fn claims(&self) -> &Claims;
}

/// The right to read a frame; others may hold it too. Dropping it gives it back.
#[derive(Debug)]
pub struct Shared<T: Claimed> {
    owner: Arc<T>,
    index: u32,
}

impl<T: Claimed> Shared<T> {
    /// The right to read frame `index`, unless it is being written or does not exist.
    #[must_use]
    pub fn new(owner: &Arc<T>, index: u32) -> Option<Self> {
        owner.claims().try_share(index).then(|| Self { owner: Arc::clone(owner), index })
    }

    pub(crate) fn owner(&self) -> &T {
        &self.owner
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }
}

impl<T: Claimed> Drop for Shared<T> {
    fn drop(&mut self) {
        self.owner.claims().unshare(self.index);
    }
}

/// The right to read and write a frame; nobody else holds any. Dropping it gives it back.
#[derive(Debug)]
pub struct Exclusive<T: Claimed> {
    owner: Arc<T>,
    index: u32,
}

impl<T: Claimed> Exclusive<T> {
    /// The right to write frame `index`, unless it is in use or does not exist.
    #[must_use]
    pub fn new(owner: &Arc<T>, index: u32) -> Option<Self> {
        owner.claims().try_own(index).then(|| Self { owner: Arc::clone(owner), index })
    }

    pub(crate) fn owner(&self) -> &T {
        &self.owner
    }

    pub(crate) fn index(&self) -> u32 {
        self.index
    }
}

impl<T: Claimed> Drop for Exclusive<T> {
    fn drop(&mut self) {
        self.owner.claims().disown(self.index);
    }
}
