//! The exported functions. Each file begins with their C signatures.

mod context;
mod controls;
mod copy;
mod device;
mod event;
mod host;
mod init;
mod memory;
mod stream;
mod vmm;

/// Names of all functions that do something.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    [
        context::NAMES,
        copy::NAMES,
        device::NAMES,
        event::NAMES,
        host::NAMES,
        init::NAMES,
        memory::NAMES,
        stream::NAMES,
        vmm::NAMES,
    ]
    .into_iter()
    .flatten()
    .copied()
}
