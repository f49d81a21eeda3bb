//! Thin owners of kernel objects that have no better home.

pub mod descriptors;
pub(crate) mod direct;
pub mod memory;
#[cfg(test)]
mod model;
pub mod peer;
mod sync;
pub mod systemd;
pub mod waker;
pub mod watch;
pub(crate) mod workers;
#[cfg(test)]
mod workers_tests;
