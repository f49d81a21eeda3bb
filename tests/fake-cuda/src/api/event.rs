//! Events, and sharing them between processes.
#![expect(unsafe_code, reason = "exports symbols")]

use std::sync::Arc;

use crate::abi::{EVENT_DISABLE_TIMING, EVENT_FLAGS, EVENT_INTERPROCESS, IpcEventHandle};
use crate::call::{Out, exports};
use crate::code::{INVALID_HANDLE, INVALID_VALUE, NOT_READY, Outcome, require};
use crate::driver::Driver;
use crate::event::Event;
use crate::work::Work;

exports! {
    fn cuEventCreate(event: Out<u64>, flags: u32) = create;
    fn cuEventDestroy_v2(event: u64) = destroy;
    fn cuEventRecord(event: u64, stream: u64) = record;
    fn cuEventQuery(event: u64) = query;
    fn cuEventSynchronize(event: u64) = synchronize;
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) = elapsed;
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) = elapsed;
    fn cuIpcGetEventHandle(handle: Out<IpcEventHandle>, event: u64) = handle_of;
    fn cuIpcOpenEventHandle(event: Out<u64>, handle: IpcEventHandle) = open;
}

fn create(event: Out<u64>, flags: u32) -> Outcome {
    let (driver, device) = Driver::current()?;
    event.check()?;
    require(flags & !EVENT_FLAGS == 0, INVALID_VALUE)?;
    let timed = flags & EVENT_DISABLE_TIMING == 0;
    require(flags & EVENT_INTERPROCESS == 0 || !timed, INVALID_VALUE)?;
    let made = Event::create(&driver.config.directory, device.ordinal, flags)?;
    event.put(insert(driver, made))
}

fn insert(driver: &Driver, event: Event) -> u64 {
    let mut tables = driver.tables();
    let number = tables.number();
    tables.events.insert(number, Arc::new(event));
    number
}

/// A record that is under way still completes.
fn destroy(event: u64) -> Outcome {
    let gone = Driver::get()?.tables().events.remove(&event);
    gone.map(drop).ok_or(INVALID_HANDLE)
}

/// The event, if the context it belongs to is unbroken.
fn find(driver: &Driver, event: u64) -> Outcome<Arc<Event>> {
    let found = driver.tables().events.get(&event).cloned().ok_or(INVALID_HANDLE)?;
    driver.devices[found.device].unbroken()?;
    Ok(found)
}

fn record(event: u64, stream: u64) -> Outcome {
    let (driver, device) = Driver::current()?;
    let event = find(driver, event)?;
    let stream = driver.stream(device, stream)?;
    require(event.device == stream.device, INVALID_HANDLE)?;
    let generation = event.record();
    driver.submit(&stream, Work::Record { event, generation });
    Ok(())
}

fn query(event: u64) -> Outcome {
    let driver = Driver::get()?;
    let event = find(driver, event)?;
    require(event.is_complete(event.recorded()), NOT_READY)
}

fn synchronize(event: u64) -> Outcome {
    let driver = Driver::get()?;
    let event = find(driver, event)?;
    let device = &driver.devices[event.device];
    event.wait(event.recorded(), || device.fault().is_some());
    device.unbroken()
}

fn elapsed(milliseconds: Out<f32>, start: u64, end: u64) -> Outcome {
    let driver = Driver::get()?;
    let (start, end) = (find(driver, start)?, find(driver, end)?);
    for event in [&start, &end] {
        let timed = event.flags & EVENT_DISABLE_TIMING == 0;
        require(timed && event.recorded() > 0, INVALID_HANDLE)?;
    }
    for event in [&start, &end] {
        require(event.is_complete(event.recorded()), NOT_READY)?;
    }
    let nanoseconds = i128::from(end.stamp()) - i128::from(start.stamp());
    milliseconds.put(nanoseconds as f32 / 1e6)
}

fn handle_of(handle: Out<IpcEventHandle>, event: u64) -> Outcome {
    let driver = Driver::get()?;
    let event = find(driver, event)?;
    handle.put(event.handle(driver.devices[event.device].physical)?)
}

fn open(event: Out<u64>, handle: IpcEventHandle) -> Outcome {
    let (driver, _) = Driver::current()?;
    event.check()?;
    let ordinal = |physical| driver.ordinal(physical);
    let opened = Event::open(&driver.config.directory, &handle, ordinal)?;
    event.put(insert(driver, opened))
}
