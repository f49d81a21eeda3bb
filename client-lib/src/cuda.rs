//! CUDA, without which everything here builds and runs: the driver is found at run time.
//!
//! [`driver`] is public for the daemon, which shares it; it is no part of this library's interface.

pub mod driver;
