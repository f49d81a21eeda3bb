//! What operators see: numbers for Prometheus, and whether the daemon is well.
//!
//! The reactor writes its numbers on a [`Board`] when somebody asks for them, and says there twice a second that it turns.
//! A thread of its own answers HTTP from the board ([`endpoint`]): it waits for the reactor a moment and no longer, so
//! it answers while the device, or the reactor, hangs. Nothing here is on the path of a request but additions.

mod board;
pub mod endpoint;
mod exposition;
mod health;
mod http;
mod process;
mod requests;
mod snapshot;

pub use board::{Board, DeviceFacts, Phase};
pub use exposition::text;
pub use health::Health;
pub use requests::{RequestCounts, Unanswered};
pub use snapshot::{ConnectionCounts, Snapshot};
