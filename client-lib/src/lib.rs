//! Client library of Lapis: more GPU memory than the card has.
//!
//! A program [connects](Client::connect_default) to `lapisd`, [allocates](Client::allocate) memory or
//! [opens](Client::open_path) part of a model file, and [maps](Client::map) ranges of it: while a [`Mapping`] lives,
//! its bytes are in VRAM, at an address that never changes. What will be mapped next can be
//! [prefetched](Client::prefetch), or [planned](Client::plan) once and for all, and how it will be used can be
//! [advised](Client::advise). Everything blocks, and
//! everything may be used from several threads at once.
//!
//! Where the daemon's device is a CUDA device, the bytes are in the GPU's memory: a mapping gives their
//! [device address](Mapping::device_ptr) for kernels and [copies](Mapping::copy_to_host) them for the CPU, and can end
//! [after a stream](Mapping::unmap_after) instead of waiting for the GPU. NVIDIA's driver is found at run time, when the
//! first allocation is made.
//!
//! ```no_run
//! let client = lapis::Client::connect_default()?;
//! let memory = client.allocate(64 << 20)?;
//! let mut mapping = memory.map(0..4096, lapis::Access::Overwrite)?;
//! mapping.bytes_mut(0).fill(7);
//! mapping.unmap()?;
//! # Ok::<(), lapis::Error>(())
//! ```

mod admin;
mod advice;
mod allocation;
mod client;
mod connect;
mod connection;
#[doc(hidden)]
pub mod cuda;
mod drains;
mod error;
mod events;
mod frames;
mod mapping;
mod memory;
pub mod model;
mod plan;
mod session;
#[cfg(test)]
mod testing;

pub use lapis_proto::code::Code;
pub use lapis_proto::ids::SessionId;
pub use lapis_proto::message::{
    Access, AccessPattern, Advice, Counters, CurvePoint, DeviceKind, HopStats, Quota, QuotaSubject,
    QuotaUse, Recency, Refused, SessionSet, Stats, Tier, TierStats, Welcome, WorkingSets,
};

pub use advice::{FLUSH_WAIT_DEFAULT, PrefetchOptions};
pub use allocation::Allocation;
pub use client::{Client, MAP_WAIT_DEFAULT};
pub use connect::{ConnectOptions, default_socket};
pub use cuda::driver::{CallFailed, DriverError};
pub use cuda::error::CudaError;
pub use error::{Error, ProtocolError};
pub use mapping::{MapStats, Mapping};
pub use plan::{PLANS_MAX, Plan, Recorded, Recording, Step};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks. A thread that panicked under one of our locks can't have left it half-changed: what is done under them
/// doesn't panic, and the daemon checks every request.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The README's example, so that it compiles for as long as it is there.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[derive(Debug)]
pub struct Readme;
