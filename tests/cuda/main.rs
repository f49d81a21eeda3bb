//! `lapisd` on the fake CUDA driver: which device it takes, what it says when there is none, and that a driver that
//! hangs or breaks holds up nothing else.
#![expect(clippy::unwrap_used, reason = "a test fails where its set-up fails")]

mod broken;
mod choice;
mod filling;
mod process;
mod user;
