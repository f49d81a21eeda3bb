//! Thin owners of kernel objects that have no better home.

pub mod memory;
pub mod waker;
