//! Thin owners of kernel objects that have no better home.

pub mod descriptors;
pub(crate) mod direct;
pub mod memory;
pub mod peer;
pub mod waker;
pub mod watch;
