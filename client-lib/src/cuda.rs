//! CUDA, without which everything here builds and runs: the driver is found at run time.
//!
//! [`driver`] is public for the daemon, which shares it; it is no part of this library's interface. The rest is the
//! client's: the [`gpu`] that the daemon's frames are on, and the [`area`] of addresses where they are mapped.

pub(crate) mod area;
pub mod driver;
pub(crate) mod error;
pub(crate) mod gpu;
#[cfg(test)]
mod tests;
