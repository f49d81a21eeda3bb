//! The numbers of one moment.

use super::requests::RequestCounts;
use crate::engine::stats::Observation;

/// How connections began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// A session was opened.
    pub opened: u64,
    /// The daemon told the client why not.
    pub refused: u64,
    /// It said nothing in time, or went away.
    pub failed: u64,
}

/// All numbers of one moment.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// When, on the board's clock, microseconds.
    pub taken_us: u64,
    /// When, on the engine's clock, microseconds.
    pub engine_us: u64,
    /// The engine's.
    pub engine: Observation,
    /// Requests answered.
    pub requests: RequestCounts,
    /// Connections.
    pub connections: ConnectionCounts,
    /// Hops that have no place in the store's queue, and in the device's.
    pub waiting: (u64, u64),
}
