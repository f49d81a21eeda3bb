//! The Lapis daemon as a library: what `lapisd` runs and what `lapisctl --embedded` starts inside itself.
//!
//! A request's path: [`server`] reads it from a socket, [`engine`] decides, [`transfer`] moves pages through
//! [`store`] and [`device`], [`server`] sends the reply. [`reactor`] drives all of them on one thread.

pub mod config;
pub mod device;
pub mod engine;
pub mod log;
pub mod metrics;
pub mod paced;
pub mod policy;
pub mod reactor;
mod reload;
pub mod server;
pub mod store;
pub mod sys;
pub mod transfer;
