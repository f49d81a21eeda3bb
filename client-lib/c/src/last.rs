//! The last error of each thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};

use lapis::{Error, Refused};

use crate::code::lapis_code;
use crate::{arguments, guard};

/// What is known of a failure. Numbers that mean nothing for it are 0.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_error {
    /// What the call returned.
    pub code: lapis_code,
    /// Whether the same call may succeed later: after LAPIS_DISCONNECTED only on a new connection.
    pub retryable: bool,
    /// What went wrong with what, and what to do; never NULL. It lasts until the next failure on this thread.
    pub message: *const c_char,
    /// Which allocation, mapping or byte it is about.
    pub object: u64,
    /// How much was asked for.
    pub asked: u64,
    /// How much of it is in use.
    pub in_use: u64,
    /// How much there can be.
    pub limit: u64,
}

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    code: lapis_code,
    retryable: bool,
    message: String,
    numbers: [u64; 4],
}

impl Failure {
    pub(crate) fn new(code: lapis_code, message: impl Into<String>) -> Failure {
        let retryable = code == lapis_code::LAPIS_BUSY;
        Failure { code, retryable, message: message.into(), numbers: [0; 4] }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Failure {
        Failure::new(lapis_code::LAPIS_BAD_ARGUMENT, message)
    }

    /// A panic, which is our fault.
    pub(crate) fn bug(panic: &(dyn Any + Send)) -> Failure {
        let said = panic.downcast_ref::<&str>().copied();
        let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        let said = said.unwrap_or("it says nothing");
        Failure::new(
            lapis_code::LAPIS_BUG,
            format!("a fault of liblapis: {said}; please report it"),
        )
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let numbers = match &error {
            Error::Refused(Refused { object, asked, in_use, limit, .. }) => {
                [*object, *asked, *in_use, *limit]
            }
            Error::OutOfRange { start, end, size } => [*start, *end, 0, *size],
            Error::TooLarge { asked, limit, .. } => [0, *asked, 0, *limit],
            Error::Conflict { allocation, .. } | Error::Foreign { allocation } => {
                [*allocation, 0, 0, 0]
            }
            _ => [0; 4],
        };
        Failure {
            code: lapis_code::of_error(&error),
            retryable: error.is_retryable(),
            message: error.to_string(),
            numbers,
        }
    }
}

thread_local! {
    static LAST: RefCell<Option<(Failure, CString)>> = const { RefCell::new(None) };
}

/// Keeps a failure as this thread's last. Returns its code.
pub(crate) fn keep(failure: Failure) -> lapis_code {
    let code = failure.code;
    let text: Vec<u8> = failure.message.bytes().filter(|byte| *byte != 0).collect();
    let text = CString::new(text).unwrap_or_default();
    // In a thread that is ending there is nobody left to read it.
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some((failure, text)));
    code
}

/// What went wrong in the last call that failed on this thread, and what to do; empty if none has. Calls that succeed
/// leave it. It lasts until the next failure on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_last_message() -> *const c_char {
    last().message
}

/// The last failure of a call on this thread; with LAPIS_OK if none has failed. size: sizeof(lapis_error).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_last_error(out: *mut lapis_error, size: usize) -> lapis_code {
    // SAFETY: the caller's promise.
    guard(|| unsafe { arguments::put(out, size, last()) })
}

pub(crate) fn last() -> lapis_error {
    let none = lapis_error {
        code: lapis_code::LAPIS_OK,
        retryable: false,
        message: c"".as_ptr(),
        object: 0,
        asked: 0,
        in_use: 0,
        limit: 0,
    };
    let read = |last: &RefCell<Option<(Failure, CString)>>| {
        last.borrow().as_ref().map(|(failure, text)| {
            let [object, asked, in_use, limit] = failure.numbers;
            let Failure { code, retryable, .. } = *failure;
            lapis_error { code, retryable, message: text.as_ptr(), object, asked, in_use, limit }
        })
    };
    LAST.try_with(read).ok().flatten().unwrap_or(none)
}
