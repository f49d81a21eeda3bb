//! Generator of checkpoints with the shape of a transformer and reproducible contents, for tests, demonstrations
//! and benchmarks on a machine without a model.

use std::path::Path;

use super::dtype::Dtype;
use super::error::ModelError;
use super::write::{Output, SafetensorsOptions, safetensors_header};

/// Bytes made and written at once.
const CHUNK_BYTES: usize = 1 << 20;
/// The hidden size is a multiple of this, so that every shape has whole blocks of every safetensors type.
const HIDDEN_STEP: u64 = 8;
/// Elements of one layer are about `HIDDEN_SQUARES_X4 / 4` times the square of the hidden size: attention 2.5, MLP
/// 3 times 2.75.
const HIDDEN_SQUARES_X4: u64 = 43;
/// Most layers of a checkpoint.
const LAYERS_MAX: u32 = 10_000;
/// Most bytes of a checkpoint: 256 TiB, so that no size computed from it overflows.
const BYTES_MAX: u64 = 1 << 48;
/// Tenths of the elements that the layers take; embedding and head share the rest.
const LAYERS_TENTHS: u64 = 9;

/// A checkpoint to generate: a safetensors file with Llama's tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoint {
    /// Bytes of all tensors, about: right to a few times the hidden size, and never less than a hidden size of 8
    /// needs (some KiB a layer).
    pub bytes: u64,
    /// Transformer layers; 0 counts as 1.
    pub layers: u32,
    /// Type of the elements; one that safetensors has.
    pub dtype: Dtype,
}

impl Default for Checkpoint {
    /// 512 MiB in 16 layers of BF16.
    fn default() -> Checkpoint {
        Checkpoint { bytes: 512 << 20, layers: 16, dtype: Dtype::BF16 }
    }
}

impl Checkpoint {
    /// Writes the checkpoint to a new file and makes it durable. Takes a few MiB of memory whatever its size.
    pub fn write(&self, path: &Path) -> Result<(), ModelError> {
        let unwritable = |tensor, why| ModelError::Unwritable { path: path.into(), tensor, why };
        if self.dtype.to_safetensors().is_none() {
            let why = "safetensors does not have its dtype";
            return Err(unwritable("model.embed_tokens.weight".to_owned(), why));
        }
        if self.layers > LAYERS_MAX || self.bytes > BYTES_MAX {
            let tensor = format!("model.layers.{}", self.layers);
            return Err(unwritable(tensor, "a checkpoint has at most 10000 layers and 256 TiB"));
        }
        let mut sized = Vec::new();
        for (name, shape) in self.tensors() {
            let elements = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
            match elements.and_then(|elements| self.dtype.bytes(elements)) {
                Some(bytes) => sized.push((name, shape, bytes)),
                None => return Err(unwritable(name, "its size overflows 64 bits")),
            }
        }
        let entries = sized
            .iter()
            .map(|(name, shape, bytes)| (name.as_str(), self.dtype, shape.as_slice(), *bytes));
        let header = safetensors_header(entries, &SafetensorsOptions::default());
        let mut output = Output::create(path)?;
        output.write(&header)?;
        let mut chunk = vec![0; CHUNK_BYTES];
        for (name, _, bytes) in &sized {
            let mut offset = 0;
            while offset < *bytes {
                let length = usize::try_from(bytes - offset).unwrap_or(usize::MAX).min(CHUNK_BYTES);
                Checkpoint::contents(name, offset, &mut chunk[..length]);
                output.write(&chunk[..length])?;
                offset += length as u64;
            }
        }
        output.finish()
    }

    /// The bytes that every generated checkpoint has in the tensor of this name, from byte `offset` of it on.
    pub fn contents(name: &str, offset: u64, out: &mut [u8]) {
        // FNV-1a: tensors differ from one another, so a page delivered for the wrong one is noticed.
        let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        pattern(seed, offset, out);
    }

    /// Names and shapes, in the order of the file.
    fn tensors(&self) -> Vec<(String, Vec<u64>)> {
        let layers = u64::from(self.layers.max(1));
        let (block_elements, block_bytes) = self.dtype.block();
        let elements = self.bytes / block_bytes * block_elements;
        let square = elements / 10 * LAYERS_TENTHS / layers * 4 / HIDDEN_SQUARES_X4;
        let hidden = (square.isqrt() / HIDDEN_STEP * HIDDEN_STEP).max(HIDDEN_STEP);
        let (heads_shared, inner) = (hidden / 4, hidden / 4 * 11);
        let layer_elements = hidden * (2 * hidden + 2 * heads_shared + 3 * inner + 2);
        let rest = elements.saturating_sub(layer_elements.saturating_mul(layers) + hidden);
        let vocabulary = (rest / (2 * hidden)).max(1);

        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden])];
        for layer in 0..layers {
            let mut add =
                |name, shape| tensors.push((format!("model.layers.{layer}.{name}.weight"), shape));
            add("input_layernorm", vec![hidden]);
            add("self_attn.q_proj", vec![hidden, hidden]);
            add("self_attn.k_proj", vec![heads_shared, hidden]);
            add("self_attn.v_proj", vec![heads_shared, hidden]);
            add("self_attn.o_proj", vec![hidden, hidden]);
            add("post_attention_layernorm", vec![hidden]);
            add("mlp.gate_proj", vec![inner, hidden]);
            add("mlp.up_proj", vec![inner, hidden]);
            add("mlp.down_proj", vec![hidden, inner]);
        }
        tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
        tensors.push(("lm_head.weight".to_owned(), vec![vocabulary, hidden]));
        tensors
    }
}

/// Fills `out` with the bytes from `offset` on of an endless stream that `seed` determines.
pub fn pattern(seed: u64, offset: u64, out: &mut [u8]) {
    let mut word = offset / 8;
    let skip = usize::try_from(offset % 8).expect("less than 8");
    let (head, rest) = out.split_at_mut(if skip == 0 { 0 } else { (8 - skip).min(out.len()) });
    if !head.is_empty() {
        let bytes = mixed(seed, word).to_le_bytes();
        head.copy_from_slice(&bytes[skip..skip + head.len()]);
        word += 1;
    }
    let mut words = rest.chunks_exact_mut(8);
    for slot in &mut words {
        slot.copy_from_slice(&mixed(seed, word).to_le_bytes());
        word += 1;
    }
    let tail = words.into_remainder();
    let bytes = mixed(seed, word).to_le_bytes();
    tail.copy_from_slice(&bytes[..tail.len()]);
}

/// Word `index` of the stream: SplitMix64, which can start anywhere.
fn mixed(seed: u64, index: u64) -> u64 {
    let mut word = seed.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests;
