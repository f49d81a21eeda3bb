//! Plans, and recordings that become plans.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use lapis::{Access, Allocation, Client, Plan, Recording, Step};

use crate::allocation::lapis_allocation;
use crate::client::lapis_client;
use crate::code::lapis_code;
use crate::last::Failure;
use crate::{arguments, guard, handles};

/// A plan in force.
#[derive(Debug)]
pub struct lapis_plan {
    _opaque: [u8; 0],
}

/// What a client maps, being recorded.
#[derive(Debug)]
pub struct lapis_recording {
    _opaque: [u8; 0],
}

/// Bytes of an allocation, with what they are mapped for.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_use {
    /// Which allocation.
    pub allocation: *const lapis_allocation,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub length: u64,
    /// What for: a lapis_access.
    pub access: c_int,
}

/// What is mapped together.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_step {
    /// Ranges.
    pub uses: *const lapis_use,
    /// How many.
    pub count: usize,
}

type OwnedStep = Vec<(Arc<Allocation>, Range<u64>, Access)>;

/// Declares in which order ranges are going to be mapped: once, or if cyclic over and over. Returns at once; the first
/// steps are fetched from then on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_plan_set(
    client: *const lapis_client,
    steps: *const lapis_step,
    count: usize,
    cyclic: bool,
    out: *mut *mut lapis_plan,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let steps = unsafe { arguments::array(steps, count, "steps") }?;
        // SAFETY: the caller's promise.
        let owned = steps.iter().map(|step| unsafe { step_of(step) });
        let owned = owned.collect::<Result<Vec<OwnedStep>, Failure>>()?;
        let steps: Vec<Step<'_>> = owned.iter().map(borrow).collect();
        let plan = client.plan(&steps, cyclic)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(plan)) };
        Ok(())
    })
}

fn borrow(step: &OwnedStep) -> Step<'_> {
    step.iter().map(|(one, bytes, access)| (one.as_ref(), bytes.clone(), *access)).collect()
}

/// # Safety
/// The step's uses must be as many as it says.
unsafe fn step_of(step: &lapis_step) -> Result<OwnedStep, Failure> {
    // SAFETY: the caller's promise.
    let uses = unsafe { arguments::array(step.uses, step.count, "a step's uses") }?;
    let one = |each: &lapis_use| {
        let allocation = handles::get(each.allocation)?;
        let access = arguments::access(each.access)?;
        Ok((allocation, arguments::bytes(each.offset, each.length), access))
    };
    uses.iter().map(one).collect()
}

/// Takes a plan back.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_plan_end(plan: *mut lapis_plan) -> lapis_code {
    guard(|| handles::close::<Plan, _>(plan).map(drop))
}

/// Takes down what this client maps from now on, in order, on all threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_record(
    client: *const lapis_client,
    out: *mut *mut lapis_recording,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(client.record())) };
        Ok(())
    })
}

/// Ends a recording, and declares that the same will be mapped again: once, or if cyclic over and over. The recording is
/// closed whatever is returned, except LAPIS_BUSY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_recording_plan(
    recording: *mut lapis_recording,
    cyclic: bool,
    out: *mut *mut lapis_plan,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let recording = handles::end::<Recording, _>(recording)?;
        let recording = recording.ok_or_else(|| {
            Failure::new(lapis_code::LAPIS_BAD_HANDLE, "NULL where a lapis_recording belongs")
        })?;
        let plan = recording.finish().plan(cyclic)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(plan)) };
        Ok(())
    })
}

/// Forgets a recording.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_recording_drop(recording: *mut lapis_recording) -> lapis_code {
    guard(|| handles::close::<Recording, _>(recording).map(drop))
}
