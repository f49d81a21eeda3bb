//! The C interface of the client library: `client-lib/include/lapis.h` is generated from it.
//!
//! It owns the [handles] that C code has in place of our types, and the [last error](last) of each thread; all else
//! is passed on to the client library. It must never unwind into its caller, nor follow a handle: a handle is a name
//! in a table, so that one that was closed is told from one that wasn't.

#![expect(unsafe_code, reason = "reads and writes what its callers' pointers point to")]
#![expect(non_camel_case_types, reason = "the types are spelt as in C")]
#![expect(
    clippy::missing_safety_doc,
    reason = "the header says once for all what pointers must be"
)]

mod advice;
mod allocation;
mod arguments;
mod client;
mod code;
mod handles;
mod last;
mod mapping;
mod model;
mod plan;
mod stats;

pub use advice::{lapis_advise, lapis_cancel_prefetch, lapis_flush, lapis_prefetch};
pub use allocation::{
    lapis_allocate, lapis_allocation, lapis_allocation_free, lapis_allocation_id,
    lapis_allocation_size, lapis_open_file, lapis_open_path,
};
pub use arguments::{LAPIS_WAIT_DEFAULT, lapis_access, lapis_advice, lapis_range};
pub use client::{
    lapis_client, lapis_client_close, lapis_client_info, lapis_connect, lapis_connect_with,
    lapis_device, lapis_info, lapis_options, lapis_version,
};
pub use code::lapis_code;
pub use last::{lapis_error, lapis_last_error, lapis_last_message};
pub use mapping::{
    lapis_map, lapis_map_stats, lapis_mapping, lapis_mapping_bytes, lapis_mapping_bytes_mut,
    lapis_mapping_copy_from_host, lapis_mapping_copy_to_host, lapis_mapping_count,
    lapis_mapping_device_ptr, lapis_mapping_stats, lapis_mapping_tensor, lapis_unmap,
    lapis_unmap_after,
};
pub use model::{
    lapis_layer, lapis_model, lapis_model_close, lapis_model_find, lapis_model_layer,
    lapis_model_layers, lapis_model_map_layer, lapis_model_map_tensor, lapis_model_plan,
    lapis_model_prefetch_layer, lapis_model_tensor, lapis_model_tensors, lapis_open_model,
    lapis_tensor,
};
pub use plan::{
    lapis_plan, lapis_plan_end, lapis_plan_set, lapis_record, lapis_recording,
    lapis_recording_drop, lapis_recording_plan, lapis_step, lapis_use,
};
pub use stats::{lapis_client_stats, lapis_counters, lapis_hop, lapis_stats, lapis_tier};

/// Turns the result of a call into its code, and keeps its error for [`lapis_last_error`]. Stops panics.
fn guard(call: impl FnOnce() -> Result<(), last::Failure>) -> lapis_code {
    // What a panic leaves half-done is behind the client library's own locks, which allow for that.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
    match result.unwrap_or_else(|panic| Err(last::Failure::bug(panic.as_ref()))) {
        Ok(()) => lapis_code::LAPIS_OK,
        Err(failure) => last::keep(failure),
    }
}

#[cfg(test)]
mod tests;
