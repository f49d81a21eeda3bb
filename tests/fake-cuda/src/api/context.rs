//! Primary contexts, and which one is current. Others are not made: `cuCtxCreate` is not supported.
#![expect(unsafe_code, reason = "exports symbols")]

use crate::call::{Out, exports};
use crate::code::{INVALID_CONTEXT, INVALID_VALUE, Outcome};
use crate::driver::Driver;

exports! {
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, device: i32) = retain;
    fn cuDevicePrimaryCtxRelease_v2(device: i32) = release;
    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) = state;
    fn cuCtxGetCurrent(context: Out<u64>) = current;
    fn cuCtxSetCurrent(context: u64) = set_current;
    fn cuCtxPushCurrent_v2(context: u64) = push;
    fn cuCtxPopCurrent_v2(context: Out<u64>) = pop;
    fn cuCtxGetDevice(device: Out<i32>) = device;
    fn cuCtxSynchronize() = synchronize;
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) = priorities;
}

fn retain(context: Out<u64>, device: i32) -> Outcome {
    context.check()?;
    let driver = Driver::get()?;
    let device = driver.device(device)?;
    device.unbroken()?;
    device.retain(driver);
    context.put(device.context_handle())
}

fn release(device: i32) -> Outcome {
    let driver = Driver::get()?;
    driver.device(device)?.release(driver)
}

fn state(device: i32, flags: Out<u32>, active: Out<i32>) -> Outcome {
    let device = Driver::get()?.device(device)?;
    flags.put(0)?;
    active.put(i32::from(device.is_retained()))
}

fn current(context: Out<u64>) -> Outcome {
    let driver = Driver::get()?;
    context.put(Driver::top()?.map_or(0, |ordinal| driver.devices[ordinal].context_handle()))
}

/// Puts a context in the place of the current one; null takes the current one away.
fn set_current(context: u64) -> Outcome {
    let driver = Driver::get()?;
    let ordinal = match context {
        0 => None,
        handle => Some(driver.context(handle)?.ordinal),
    };
    Driver::with_stack(|stack| {
        stack.pop();
        stack.extend(ordinal);
    })
}

fn push(context: u64) -> Outcome {
    let ordinal = Driver::get()?.context(context)?.ordinal;
    Driver::with_stack(|stack| stack.push(ordinal))
}

fn pop(context: Out<u64>) -> Outcome {
    let driver = Driver::get()?;
    let ordinal = Driver::with_stack(Vec::pop)?.ok_or(INVALID_CONTEXT)?;
    if !context.wanted() {
        return Ok(());
    }
    context.put(driver.devices[ordinal].context_handle())
}

fn device(device: Out<i32>) -> Outcome {
    let ordinal = Driver::top()?.ok_or(INVALID_CONTEXT)?;
    device.put(i32::try_from(ordinal).map_err(|_| INVALID_VALUE)?)
}

fn synchronize() -> Outcome {
    let (driver, device) = Driver::current()?;
    driver.synchronize(device)
}

fn priorities(least: Out<i32>, greatest: Out<i32>) -> Outcome {
    Driver::current()?;
    for end in [least, greatest] {
        if end.wanted() {
            end.put(0)?;
        }
    }
    Ok(())
}
