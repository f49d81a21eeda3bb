//! Harness shared by the tests of Lapis as a whole: real binaries, real files, real processes.

pub mod binaries;
pub mod bytes;
pub mod daemon;
pub mod device;
pub mod fixtures;
pub mod fleet;
pub mod good;
pub mod held;
pub mod peer;
pub mod random;
pub mod scrape;
pub mod simulation;
pub mod victim;
pub mod wait;
pub mod worker;
