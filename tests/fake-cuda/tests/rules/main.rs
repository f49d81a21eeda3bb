//! Every rule that the fake driver keeps, by calls through function pointers that were looked up in the shared library.
//!
//! The state of a driver is that of its process, so each test runs in a process of its own.

mod abi;
mod alone;
mod api;
mod contexts;
mod controls;
mod copies;
mod events;
mod gpu;
mod host;
mod processes;
mod sharing;
mod streams;
mod vmm;
