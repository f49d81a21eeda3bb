//! Wire protocol between Lapis clients and `lapisd`.
//!
//! A connection is a Unix stream socket that carries *messages*: a fixed [`header`], a body in
//! bincode (fixed-width little-endian integers) read and written by [`codec`], and up to
//! [`fds::FDS_PER_MESSAGE_MAX`] file descriptors sent with `SCM_RIGHTS` by [`fds`]; [`frame`] cuts the stream
//! into messages again. Bulk data never crosses
//! the socket: clients touch VRAM through the frames whose descriptors they are sent.
//!
//! This crate checks *syntax* (lengths, kinds, counts, versions); meaning is the engine's.

pub mod code;
pub mod codec;
pub mod fds;
pub mod frame;
pub mod handshake;
pub mod header;
pub mod ids;
pub mod kind;
pub mod message;
pub mod version;
