//! Error codes, as numbers: the driver may return any.

/// A `CUresult` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) u32);

/// What a driver call does before it becomes a number.
pub(crate) type Outcome<T = ()> = Result<T, Code>;

pub(crate) const SUCCESS: u32 = 0;
pub(crate) const INVALID_VALUE: Code = Code(1);
pub(crate) const OUT_OF_MEMORY: Code = Code(2);
pub(crate) const NOT_INITIALIZED: Code = Code(3);
pub(crate) const NO_DEVICE: Code = Code(100);
pub(crate) const INVALID_DEVICE: Code = Code(101);
pub(crate) const INVALID_CONTEXT: Code = Code(201);
pub(crate) const OPERATING_SYSTEM: Code = Code(304);
pub(crate) const INVALID_HANDLE: Code = Code(400);
pub(crate) const NOT_FOUND: Code = Code(500);
pub(crate) const NOT_READY: Code = Code(600);
pub(crate) const ILLEGAL_ADDRESS: Code = Code(700);
pub(crate) const CONTEXT_IS_DESTROYED: Code = Code(709);
pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Code = Code(712);
pub(crate) const HOST_MEMORY_NOT_REGISTERED: Code = Code(713);
pub(crate) const NOT_PERMITTED: Code = Code(800);
pub(crate) const NOT_SUPPORTED: Code = Code(801);
pub(crate) const UNKNOWN: Code = Code(999);

impl Code {
    /// Whether `cuda.h` says of it that all further work returns it, and that the process must go.
    pub(crate) fn is_sticky(self) -> bool {
        matches!(self.0, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 810 | 911)
    }
}

/// `Ok` when the condition holds, else the code.
pub(crate) fn require(condition: bool, code: Code) -> Outcome {
    if condition { Ok(()) } else { Err(code) }
}
