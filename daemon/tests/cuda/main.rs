//! `lapisd` on the fake CUDA driver: which device it takes, what it says when there is none, and that a driver that
//! hangs or breaks holds up nothing else.

mod broken;
mod choice;
mod process;
