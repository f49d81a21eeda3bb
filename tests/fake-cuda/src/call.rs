//! The way in: what every exported function does before and after its own work.
#![expect(unsafe_code, reason = "pointers of C callers")]

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::{INVALID_VALUE, NOT_PERMITTED, Outcome, SUCCESS, UNKNOWN, require};
use crate::config;
use crate::driver::Driver;
use crate::faults;
use crate::gate::Gate;

thread_local! {
    /// Whether this thread runs a host function of a stream.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Exports functions with the C ABI, each by its own name, and lists the names.
macro_rules! exports {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) = $body:ident;)*) => {
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];
        $(
            // SAFETY of the attribute: in the shared library the name is meant to be libcuda's; nothing else defines it.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
                $crate::call::call(stringify!($name), || self::$body($($argument),*))
            }
        )*
    };
}
pub(crate) use exports;

/// Runs the body of the exported function `name`, unless the caller may not call, the driver is wedged, or a fault is due.
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Outcome) -> u32 {
    // A panic must not cross the border; its message is on stderr.
    let done = catch_unwind(AssertUnwindSafe(|| {
        require(!IN_HOST_FUNCTION.get(), NOT_PERMITTED)?;
        // Not for the controls: they must work while everything else is stuck.
        if !name.starts_with("fake") {
            Gate::of_calls(&config::directory()).pass();
            if let Some(code) = faults::take(name) {
                Driver::injected(code);
                return Err(code);
            }
        }
        body()
    }));
    match done.unwrap_or(Err(UNKNOWN)) {
        Ok(()) => SUCCESS,
        Err(code) => code.0,
    }
}

/// Runs a host function, which must not call the driver.
pub(crate) fn as_host_function(body: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    body();
    IN_HOST_FUNCTION.set(false);
}

/// Where a caller wants a result: made by C callers only, who promise that it is null or can be written.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the result; `INVALID_VALUE` for null.
    pub(crate) fn put(self, value: T) -> Outcome {
        require(!self.0.is_null(), INVALID_VALUE)?;
        // SAFETY: not null, so the caller's to be written, as `cuda.h` asks; it need not be aligned.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// `INVALID_VALUE` for null: asked before anything is made that the result would name.
    pub(crate) fn check(self) -> Outcome {
        require(!self.0.is_null(), INVALID_VALUE)
    }

    /// Whether the caller wants it: not null, where null is allowed.
    pub(crate) fn wanted(self) -> bool {
        !self.0.is_null()
    }
}

impl Out<u8> {
    /// Writes as much of the text as `length` has room for, always with a zero at its end.
    pub(crate) fn put_text(self, length: i32, text: &str) -> Outcome {
        let room = usize::try_from(length).map_err(|_| INVALID_VALUE)?;
        require(!self.0.is_null() && room > 0, INVALID_VALUE)?;
        let bytes = &text.as_bytes()[..text.len().min(room - 1)];
        // SAFETY: the caller says that `length` bytes can be written there; this writes at most that many.
        unsafe {
            self.0.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            self.0.add(bytes.len()).write(0);
        }
        Ok(())
    }
}

/// What a caller shows: made by C callers only, who promise that it is null or can be read.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads it; `INVALID_VALUE` for null.
    pub(crate) fn get(self) -> Outcome<T> {
        self.get_nth(0)
    }

    /// Reads an element of an array.
    pub(crate) fn get_nth(self, index: usize) -> Outcome<T> {
        require(!self.0.is_null(), INVALID_VALUE)?;
        // SAFETY: not null, so the caller's to be read, as `cuda.h` asks, up to the count that came with it.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

impl In<libc::c_char> {
    /// Reads a string.
    pub(crate) fn text(self) -> Outcome<String> {
        require(!self.0.is_null(), INVALID_VALUE)?;
        // SAFETY: not null, so a string that ends in zero, as `cuda.h` asks.
        let text = unsafe { std::ffi::CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| INVALID_VALUE)
    }
}
