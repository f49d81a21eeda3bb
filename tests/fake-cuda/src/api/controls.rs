//! What only the fake has: faults on demand, and gates.
#![expect(unsafe_code, reason = "exports symbols")]

use std::ffi::c_char;

use crate::call::{In, exports};
use crate::code::{INVALID_VALUE, Outcome, require};
use crate::driver::Driver;
use crate::faults;
use crate::ledger;

exports! {
    fn fakeCudaFail(symbol: In<c_char>, after: u64, code: u32, times: u64) = fail;
    fn fakeCudaClearFaults() = clear;
    fn fakeCudaPause(device: i32) = pause;
    fn fakeCudaResume(device: i32) = resume;
}

const _: fn() -> &'static [&'static str] = || NAMES;

/// The first `after` calls of the symbol pass, the next `times` fail.
fn fail(symbol: In<c_char>, after: u64, code: u32, times: u64) -> Outcome {
    require(faults::add(&symbol.text()?, after, code, times), INVALID_VALUE)
}

fn clear() -> Outcome {
    faults::clear();
    Ok(())
}

/// Stops the queues of a device, in every process. Work that is running goes on to its end.
fn pause(device: i32) -> Outcome {
    let device = Driver::get()?.device(device)?;
    device.gate.shut().map_err(|error| ledger::said(device.ledger.directory(), &error))
}

fn resume(device: i32) -> Outcome {
    let device = Driver::get()?.device(device)?;
    device.gate.open().map_err(|error| ledger::said(device.ledger.directory(), &error))
}
