//! Streams.
#![expect(unsafe_code, reason = "exports symbols")]

use std::ffi::c_void;
use std::sync::Arc;

use crate::abi::{HostFunction, STREAM_LEGACY, STREAM_NON_BLOCKING};
use crate::call::{Out, exports};
use crate::code::{INVALID_HANDLE, INVALID_VALUE, NOT_READY, Outcome, require};
use crate::driver::{Device, Driver};
use crate::stream::{Kind, Stream};
use crate::work::Work;

exports! {
    fn cuStreamCreate(stream: Out<u64>, flags: u32) = create;
    fn cuStreamCreateWithPriority(stream: Out<u64>, flags: u32, priority: i32) = create_with_priority;
    fn cuStreamDestroy_v2(stream: u64) = destroy;
    fn cuStreamSynchronize(stream: u64) = synchronize;
    fn cuStreamQuery(stream: u64) = query;
    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) = wait_event;
    fn cuLaunchHostFunc(stream: u64, function: Option<HostFunction>, data: *mut c_void) = call;
}

fn create(stream: Out<u64>, flags: u32) -> Outcome {
    let (driver, device) = Driver::current()?;
    stream.check()?;
    require(flags <= STREAM_NON_BLOCKING, INVALID_VALUE)?;
    let kind = if flags == 0 { Kind::Blocking } else { Kind::NonBlocking };
    let started = Stream::start(driver, device.ordinal, kind);
    let mut tables = driver.tables();
    let number = tables.number();
    tables.streams.insert(number, started);
    stream.put(number)
}

/// Priorities mean nothing here.
fn create_with_priority(stream: Out<u64>, flags: u32, _priority: i32) -> Outcome {
    create(stream, flags)
}

/// What is queued is still done. The null stream can't be destroyed.
fn destroy(stream: u64) -> Outcome {
    let (driver, device) = Driver::current()?;
    require(stream != 0 && stream != STREAM_LEGACY, INVALID_HANDLE)?;
    driver.stream(device, stream)?;
    let gone = driver.tables().streams.remove(&stream).ok_or(INVALID_HANDLE)?;
    gone.close();
    Ok(())
}

/// The streams whose work counts as this stream's: for the null stream, all blocking ones too.
fn with_others(driver: &Driver, device: &Device, stream: Arc<Stream>) -> Vec<Arc<Stream>> {
    match stream.kind {
        Kind::Blocking | Kind::NonBlocking => vec![stream],
        Kind::Null => {
            let mut all = driver.streams(device);
            all.retain(|other| other.kind != Kind::NonBlocking);
            all
        }
    }
}

fn synchronize(stream: u64) -> Outcome {
    let (driver, device) = Driver::current()?;
    for stream in with_others(driver, device, driver.stream(device, stream)?) {
        stream.wait(stream.submitted(), || device.fault())?;
    }
    device.unbroken()
}

fn query(stream: u64) -> Outcome {
    let (driver, device) = Driver::current()?;
    let streams = with_others(driver, device, driver.stream(device, stream)?);
    require(streams.iter().all(|stream| stream.is_idle()), NOT_READY)?;
    // The last work may have broken the context.
    device.unbroken()
}

fn wait_event(stream: u64, event: u64, flags: u32) -> Outcome {
    let (driver, device) = Driver::current()?;
    // CU_EVENT_WAIT_EXTERNAL (1) is for captures.
    require(flags == 0, INVALID_VALUE)?;
    let stream = driver.stream(device, stream)?;
    let event = driver.tables().events.get(&event).cloned().ok_or(INVALID_HANDLE)?;
    let generation = event.recorded();
    if !event.is_complete(generation) {
        driver.submit(&stream, Work::WaitFor { event, generation });
    }
    Ok(())
}

fn call(stream: u64, function: Option<HostFunction>, data: *mut c_void) -> Outcome {
    let (driver, device) = Driver::current()?;
    let function = function.ok_or(INVALID_VALUE)?;
    let stream = driver.stream(device, stream)?;
    driver.submit(&stream, Work::Call { function, data: data as usize });
    Ok(())
}
