//! What Python passes, checked.

use std::ops::Range;
use std::time::Duration;

use lapis::{Access, Advice};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::client::Allocation;

/// Seconds, which may be infinite.
pub(crate) fn seconds(seconds: f64, name: &str) -> PyResult<Duration> {
    if seconds == f64::INFINITY {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| PyValueError::new_err(format!("{name} is {seconds}: {error}")))
}

pub(crate) fn access(name: &str) -> PyResult<Access> {
    match name {
        "read" => Ok(Access::Read),
        "write" => Ok(Access::Write),
        "overwrite" => Ok(Access::Overwrite),
        _ => Err(PyValueError::new_err(format!(
            "access is {name:?}: it can be \"read\", \"write\" or \"overwrite\""
        ))),
    }
}

pub(crate) fn advice(name: &str) -> PyResult<Advice> {
    match name {
        "normal" => Ok(Advice::Normal),
        "sequential" => Ok(Advice::Sequential),
        "random" => Ok(Advice::Random),
        "keep" => Ok(Advice::Keep),
        "dont_need" => Ok(Advice::DontNeed),
        _ => Err(PyValueError::new_err(format!(
            "advice is {name:?}: it can be \"normal\", \"sequential\", \"random\", \"keep\" or \"dont_need\""
        ))),
    }
}

/// Ranges of bytes of allocations, which this keeps.
pub(crate) type Ranges = Vec<(lapis::Allocation, Range<u64>)>;

/// One range or several: an allocation, for all of it, or `(allocation, start, stop)`.
pub(crate) fn ranges(given: &Bound<'_, PyAny>) -> PyResult<Ranges> {
    if let Some(one) = range(given)? {
        return Ok(vec![one]);
    }
    given
        .try_iter()
        .map_err(|_| bad_range())?
        .map(|item| range(&item?)?.ok_or_else(bad_range))
        .collect()
}

fn range(given: &Bound<'_, PyAny>) -> PyResult<Option<(lapis::Allocation, Range<u64>)>> {
    if let Ok(allocation) = given.cast::<Allocation>() {
        let allocation = allocation.get().open()?;
        let all = 0..allocation.size();
        return Ok(Some((allocation, all)));
    }
    let Ok((allocation, start, stop)) = given.extract::<(Bound<'_, PyAny>, u64, u64)>() else {
        return Ok(None);
    };
    let Ok(allocation) = allocation.cast::<Allocation>() else { return Ok(None) };
    Ok(Some((allocation.get().open()?, start..stop)))
}

fn bad_range() -> PyErr {
    PyTypeError::new_err(
        "a range is an Allocation, or (allocation, start, stop) with numbers from 0 on",
    )
}

pub(crate) fn borrow(ranges: &Ranges) -> Vec<(&lapis::Allocation, Range<u64>)> {
    ranges.iter().map(|(allocation, range)| (allocation, range.clone())).collect()
}
