//! Models, their layers and tensors.

use std::ffi::{CString, c_char};

use lapis::Client;
use lapis::model::{Dtype, Model, TensorSlice};

use crate::client::lapis_client;
use crate::code::lapis_code;
use crate::last::Failure;
use crate::mapping::{Mapped, lapis_mapping};
use crate::plan::lapis_plan;
use crate::{arguments, guard, handles};

/// A model file or several, opened: safetensors or GGUF.
#[derive(Debug)]
pub struct lapis_model {
    _opaque: [u8; 0],
}

/// Tensors that are used together. What it points to lasts as long as its model.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_layer {
    /// Such as "model.layers.3"; "embeddings" comes first, "head" last.
    pub name: *const c_char,
    /// Its tensors, by their number in the model.
    pub tensors: *const usize,
    /// How many.
    pub tensor_count: usize,
    /// Bytes of all of them.
    pub bytes: u64,
}

/// One tensor. What it points to lasts as long as its model.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct lapis_tensor {
    /// Its name, unique in the model.
    pub name: *const c_char,
    /// Type of its elements, as the file's format spells it, such as "F32", "BF16" or "Q4_K".
    pub dtype: *const c_char,
    /// Its dimensions, slowest first.
    pub shape: *const u64,
    /// How many.
    pub dimensions: usize,
    /// Bytes of all its elements.
    pub bytes: u64,
    /// Elements of a block, the least number of them that has whole bytes.
    pub block_elements: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
}

/// A model with its names as C has them.
#[derive(Debug)]
pub(crate) struct Opened {
    model: Model,
    layers: Vec<CString>,
    tensors: Vec<(CString, CString)>,
}

impl Opened {
    fn new(model: Model) -> Opened {
        let layers = model.layers().iter().map(|layer| text(&layer.name)).collect();
        let named = |name: &str, dtype: Dtype| (text(name), text(dtype.name()));
        let tensors = model.tensors().iter().map(|tensor| named(&tensor.name, tensor.dtype));
        Opened { tensors: tensors.collect(), layers, model }
    }
}

/// A NUL in a file's name for a tensor ends it for C.
fn text(name: &str) -> CString {
    let bytes: Vec<u8> = name.bytes().take_while(|byte| *byte != 0).collect();
    CString::new(bytes).unwrap_or_default()
}

fn absent(what: &str, index: usize, count: usize) -> Failure {
    let message = format!("{what} {index} of a model that has {count}");
    Failure::new(lapis_code::LAPIS_OUT_OF_RANGE, message)
}

/// Opens a .safetensors file, a .safetensors.index.json with its shards, a .gguf file, or a directory that has one of these.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_open_model(
    client: *const lapis_client,
    path: *const c_char,
    out: *mut *mut lapis_model,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let client = handles::get::<Client, _>(client)?;
        // SAFETY: the caller's promise.
        let path = unsafe { arguments::path(path, "path") }?;
        let opened = Opened::new(client.open_model(path)?);
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(opened)) };
        Ok(())
    })
}

/// How many layers it has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_layers(
    model: *const lapis_model,
    out: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        let opened = handles::get::<Opened, _>(model)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(opened.layers.len()) };
        Ok(())
    })
}

/// How many tensors it has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_tensors(
    model: *const lapis_model,
    out: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        let opened = handles::get::<Opened, _>(model)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(opened.tensors.len()) };
        Ok(())
    })
}

/// One of its layers, in the order of execution. size: sizeof(lapis_layer).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_layer(
    model: *const lapis_model,
    layer: usize,
    out: *mut lapis_layer,
    size: usize,
) -> lapis_code {
    guard(|| {
        let opened = handles::get::<Opened, _>(model)?;
        let count = opened.layers.len();
        let found = opened.model.layers().get(layer).zip(opened.layers.get(layer));
        let (found, name) = found.ok_or_else(|| absent("layer", layer, count))?;
        let found = lapis_layer {
            name: name.as_ptr(),
            tensors: found.tensors.as_ptr(),
            tensor_count: found.tensors.len(),
            bytes: found.bytes(),
        };
        // SAFETY: the caller's promise.
        unsafe { arguments::put(out, size, found) }
    })
}

/// One of its tensors. size: sizeof(lapis_tensor).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_tensor(
    model: *const lapis_model,
    tensor: usize,
    out: *mut lapis_tensor,
    size: usize,
) -> lapis_code {
    guard(|| {
        let opened = handles::get::<Opened, _>(model)?;
        let count = opened.tensors.len();
        let found = opened.model.tensors().get(tensor).zip(opened.tensors.get(tensor));
        let (found, (name, dtype)) = found.ok_or_else(|| absent("tensor", tensor, count))?;
        let (block_elements, block_bytes) = found.dtype.block();
        let found = lapis_tensor {
            name: name.as_ptr(),
            dtype: dtype.as_ptr(),
            shape: found.shape.as_ptr(),
            dimensions: found.shape.len(),
            bytes: found.bytes(),
            block_elements,
            block_bytes,
        };
        // SAFETY: the caller's promise.
        unsafe { arguments::put(out, size, found) }
    })
}

/// The number of the tensor with this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_find(
    model: *const lapis_model,
    name: *const c_char,
    out: *mut usize,
) -> lapis_code {
    guard(|| {
        let out = arguments::target(out, "out")?;
        let opened = handles::get::<Opened, _>(model)?;
        // SAFETY: the caller's promise.
        let name = unsafe { arguments::text(name, "name") }?;
        let found = opened.model.files().find(name).ok_or_else(|| {
            let message = format!("the model has no tensor {name:?}");
            Failure::new(lapis_code::LAPIS_OUT_OF_RANGE, message)
        })?;
        // SAFETY: the caller's promise.
        unsafe { out.write(found) };
        Ok(())
    })
}

/// Brings all tensors of a layer to VRAM, one range each; lapis_mapping_tensor says which. Empty tensors have none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_map_layer(
    model: *const lapis_model,
    layer: usize,
    wait_us: u64,
    out: *mut *mut lapis_mapping,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let opened = handles::get::<Opened, _>(model)?;
        let count = opened.layers.len();
        if layer >= count {
            return Err(absent("layer", layer, count));
        }
        let mapped = opened.model.map_layer(layer, arguments::wait(wait_us))?;
        let (mapping, slices) = mapped.into_parts();
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(Mapped::new(mapping, slices, false))) };
        Ok(())
    })
}

/// Brings bytes of one tensor to VRAM: length of them from its byte offset on, or with UINT64_MAX all from there. So a
/// tensor larger than VRAM can be used piece by piece.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_map_tensor(
    model: *const lapis_model,
    tensor: usize,
    offset: u64,
    length: u64,
    wait_us: u64,
    out: *mut *mut lapis_mapping,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let opened = handles::get::<Opened, _>(model)?;
        let count = opened.tensors.len();
        let tensors = opened.model.tensors();
        let found = tensors.get(tensor).ok_or_else(|| absent("tensor", tensor, count))?;
        let size = found.bytes();
        let length = if length == u64::MAX { size.saturating_sub(offset) } else { length };
        let inside = arguments::bytes(offset, length);
        if inside.end > size || inside.start > size {
            let (start, end) = (inside.start, inside.end);
            return Err(lapis::Error::OutOfRange { start, end, size }.into());
        }
        let slice = TensorSlice {
            tensor,
            range: found.range.start + inside.start..found.range.start + inside.end,
            inside,
            shard: found.shard,
        };
        let (mapping, slices) =
            opened.model.map_slices(vec![slice], arguments::wait(wait_us))?.into_parts();
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(Mapped::new(mapping, slices, false))) };
        Ok(())
    })
}

/// Says that a layer will be mapped soon. Returns at once.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_model_prefetch_layer(
    model: *const lapis_model,
    layer: usize,
) -> lapis_code {
    guard(|| {
        let opened = handles::get::<Opened, _>(model)?;
        let count = opened.layers.len();
        if layer >= count {
            return Err(absent("layer", layer, count));
        }
        Ok(opened.model.prefetch_layer(layer)?)
    })
}

/// Declares that the model's layers are going to be mapped in order: once, or if cyclic over and over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lapis_model_plan(
    model: *const lapis_model,
    cyclic: bool,
    out: *mut *mut lapis_plan,
) -> lapis_code {
    guard(|| {
        // SAFETY: the caller's promise.
        let out = unsafe { arguments::handle(out, "out") }?;
        let opened = handles::get::<Opened, _>(model)?;
        let plan = opened.model.plan(cyclic)?;
        // SAFETY: the caller's promise.
        unsafe { out.write(handles::insert(plan)) };
        Ok(())
    })
}

/// Closes a model. Mappings of it stay.
#[unsafe(no_mangle)]
pub extern "C" fn lapis_model_close(model: *mut lapis_model) -> lapis_code {
    guard(|| handles::close::<Opened, _>(model).map(drop))
}
