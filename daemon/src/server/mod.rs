//! Sessions over sockets: accepting, handshake, framing, peer credentials, limits. Syntax is checked here, meaning in
//! the engine.

pub mod core;
pub mod listener;
pub mod outgoing;
pub mod requests;
pub mod session;
