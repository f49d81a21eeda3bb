//! The engine: every decision, no I/O.
#![forbid(unsafe_code)]

pub mod ids;
