//! The native half of the Python package `lapis`: what `python/lapis/__init__.pyi` documents.
//!
//! It owns the rule that no view of mapped bytes outlives its mapping: a [mapping](mapping) counts what was exported of
//! it, and doesn't end before that is zero. The interpreter's lock is released around every call that waits.

mod client;
mod convert;
mod dlpack;
mod error;
mod mapping;
mod model;
mod tensor;

use pyo3::prelude::*;

/// See `lapis`.
#[pymodule]
mod _lapis {
    #[pymodule_export]
    use crate::client::{Allocation, Client, Plan, Recording};
    #[pymodule_export]
    use crate::mapping::Mapping;
    #[pymodule_export]
    use crate::model::Model;
    #[pymodule_export]
    use crate::tensor::Tensor;
}
