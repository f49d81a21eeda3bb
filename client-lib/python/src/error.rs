//! Our errors as Python's: the classes are those of `lapis/_errors.py`.

use lapis::{Error, Refused};
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::prelude::*;

/// An exception of the class that this error has in Python.
pub(crate) fn raise(error: &Error) -> PyErr {
    let numbers = match error {
        Error::Refused(Refused { object, asked, in_use, limit, .. }) => {
            [*object, *asked, *in_use, *limit]
        }
        Error::OutOfRange { start, end, size } => [*start, *end, 0, *size],
        Error::TooLarge { asked, limit, .. } => [0, *asked, 0, *limit],
        _ => [0; 4],
    };
    Python::attach(|py| make(py, kind(error), &error.to_string(), error.is_retryable(), numbers))
}

/// An exception of a class that only Python has.
pub(crate) fn closed(what: &str) -> PyErr {
    Python::attach(|py| make(py, "Closed", &format!("the {what} is closed"), false, [0; 4]))
}

/// What keeps a view from being had, or a mapping from ending.
pub(crate) fn buffer(message: impl Into<String>) -> PyErr {
    PyBufferError::new_err(message.into())
}

fn make(py: Python<'_>, kind: &str, message: &str, retryable: bool, numbers: [u64; 4]) -> PyErr {
    let [object, asked, in_use, limit] = numbers;
    let made = py
        .import("lapis._errors")
        .and_then(|module| module.getattr(kind))
        .and_then(|class| class.call1((message, retryable, object, asked, in_use, limit)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        // The package isn't whole; what happened is still told.
        Err(_) => PyRuntimeError::new_err(format!("{kind}: {message}")),
    }
}

/// The name of the class.
fn kind(error: &Error) -> &'static str {
    use lapis::Code;
    match error {
        Error::Refused(refused) => match refused.code {
            Code::BadRequest => "BadRequest",
            Code::UnknownAllocation | Code::UnknownMapping => "Refused",
            Code::OutOfRange => "OutOfRange",
            Code::ReadOnly => "ReadOnly",
            Code::OverCapacity => "OverCapacity",
            Code::OutOfMemory => "OutOfMemory",
            Code::TimedOut => "TimedOut",
            Code::VersionUnsupported => "VersionUnsupported",
            Code::NotPermitted => "NotPermitted",
            Code::TooMany => "TooMany",
            Code::InUse => "InUse",
            Code::NotAFile => "NotAFile",
            Code::ShuttingDown => "ShuttingDown",
            Code::Unsupported => "Unsupported",
            Code::OverQuota => "OverQuota",
            Code::FileChanged => "FileChanged",
            Code::FileTruncated => "FileTruncated",
            Code::Io => "IoFailed",
            Code::DataLost => "DataLost",
            Code::DeviceLost => "DeviceLost",
            _ => "Refused",
        },
        Error::Connect { .. } => "ConnectFailed",
        Error::NotLapis { .. } => "NotLapis",
        Error::Protocol(_) => "ProtocolFailed",
        Error::Disconnected => "Disconnected",
        Error::Forked => "Forked",
        Error::Io { .. } => "SystemFailed",
        Error::Open { .. } => "OpenFailed",
        Error::Model(_) => "ModelFailed",
        Error::Cuda(_) => "CudaFailed",
        Error::OnDevice => "OnDevice",
        Error::ReadOnly => "ReadOnly",
        Error::OutOfRange { .. } => "OutOfRange",
        Error::Conflict { .. } => "Conflict",
        Error::TooLarge { .. } => "TooLarge",
        Error::Foreign { .. } => "Foreign",
        Error::Unsupported { .. } => "Unsupported",
        _ => "Error",
    }
}
