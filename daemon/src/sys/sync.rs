//! What code is built from that threads share: the standard library's. The tests build the same files a second time,
//! on a model checker's (`model.rs`).

pub(crate) use std::sync::atomic::{AtomicU32, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::{Builder, JoinHandle};
