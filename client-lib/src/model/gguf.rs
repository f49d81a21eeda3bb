//! Reader of GGUF headers, versions 2 and 3, little-endian.
//!
//! ```text
//! magic "GGUF", version u32, tensor count u64, entry count u64
//! entries: key text, type u32, value        text = length u64, bytes
//! tensors: name text, dimension count u32, dimensions u64.., type u32, offset u64
//! padding to the alignment
//! data: each tensor at its offset from here, aligned
//! ```
//!
//! Every count is held against the bytes that are left before anything is allocated for it, and arrays (the
//! vocabulary is most of a header) are passed over without being kept.

use std::collections::BTreeSet;

use super::dtype::Dtype;
use super::error::{Defect, ModelError, shortened};
use super::source::{Cursor, Source};
use super::{Metadata, NAME_BYTES_MAX, Parsed, TENSORS_MAX, Tensor};

/// First bytes of every GGUF file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";
/// Most metadata entries.
pub const ENTRIES_MAX: u64 = 65_536;
/// Most bytes before the data.
pub const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Largest `general.alignment`.
pub const ALIGNMENT_MAX: u32 = 1 << 20;
/// Alignment of a file that does not say.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Dimensions of a ggml tensor.
const RANK_MAX: u32 = 4;
/// Arrays within arrays.
const ARRAY_DEPTH_MAX: u32 = 4;
/// Longest key; the format's own limit.
const KEY_BYTES_MAX: u64 = 65_535;
/// Longest text value that is kept as metadata.
const TEXT_KEPT_BYTES_MAX: u64 = 64 << 10;
/// Least bytes of an entry: length of an empty key, type, one byte.
const ENTRY_BYTES_MIN: u64 = 13;
/// Least bytes of a tensor: length of an empty name, rank 0, type, offset.
const TENSOR_BYTES_MIN: u64 = 24;

const TYPE_BOOL: u32 = 7;
const TYPE_TEXT: u32 = 8;
const TYPE_ARRAY: u32 = 9;

/// Reads and checks the header. The tensors come back in the order of their bytes.
pub(super) fn read(source: &Source) -> Result<Parsed, ModelError> {
    let mut cursor = Cursor::new(source, HEADER_BYTES_MAX);
    if &cursor.array::<4>("the magic")? != MAGIC {
        return Err(source.malformed(0, Defect::Magic));
    }
    match cursor.u32("the version")? {
        2 | 3 => {}
        version if matches!(version.swap_bytes(), 1..=3) => {
            return Err(source.malformed(4, Defect::BigEndian));
        }
        version => return Err(source.malformed(4, Defect::Version { version })),
    }
    let tensor_count =
        count(&mut cursor, "the number of tensors", TENSOR_BYTES_MIN, TENSORS_MAX as u64)?;
    let entry_count =
        count(&mut cursor, "the number of metadata entries", ENTRY_BYTES_MIN, ENTRIES_MAX)?;

    let mut entries = Entries {
        metadata: Metadata::default(),
        alignment: ALIGNMENT_DEFAULT,
        keys: BTreeSet::new(),
    };
    for _ in 0..entry_count {
        entries.read_one(&mut cursor)?;
    }
    let mut raw = Vec::new();
    for _ in 0..tensor_count {
        raw.push(RawTensor::read(&mut cursor)?);
    }
    let header_end = cursor.position();
    // At most the header's limit plus the alignment's: no overflow.
    let data_offset = header_end.next_multiple_of(entries.alignment);
    let tensors = place(source, raw, data_offset, entries.alignment)?;
    let end = tensors.iter().map(|tensor| tensor.range.end).max();
    // A file without tensors may end without the padding.
    let data = end.map_or(header_end..header_end, |end| data_offset..end);
    Ok(Parsed { data, tensors, metadata: entries.metadata })
}

/// A count of things that take at least `bytes_min` each, of which there are at most `most`.
fn count(
    cursor: &mut Cursor<'_>,
    what: &'static str,
    bytes_min: u64,
    most: u64,
) -> Result<u64, ModelError> {
    let at = cursor.malformed_at();
    let count = cursor.u64(what)?;
    let limit = most.min(cursor.remaining() / bytes_min);
    if count > limit {
        return Err(at(Defect::OverLimit { what, value: count, limit }));
    }
    Ok(count)
}

fn text(cursor: &mut Cursor<'_>, what: &'static str, limit: u64) -> Result<String, ModelError> {
    let at = cursor.malformed_at();
    let length = cursor.u64(what)?;
    if length > limit {
        return Err(at(Defect::OverLimit { what, value: length, limit }));
    }
    let bytes = cursor.bytes(length, what)?;
    String::from_utf8(bytes).map_err(|_| at(Defect::NotText { what }))
}

/// The metadata entries as they are read.
struct Entries {
    metadata: Metadata,
    alignment: u64,
    keys: BTreeSet<String>,
}

impl Entries {
    fn read_one(&mut self, cursor: &mut Cursor<'_>) -> Result<(), ModelError> {
        let at = cursor.malformed_at();
        let key = text(cursor, "a metadata key", KEY_BYTES_MAX)?;
        let kind = cursor.u32("the type of a metadata value")?;
        let value_at = cursor.malformed_at();
        if key == "general.alignment" {
            let value = if kind == 4 { cursor.u32("general.alignment")? } else { 0 };
            if !value.is_power_of_two() || value > ALIGNMENT_MAX {
                let limit = ALIGNMENT_MAX.into();
                return Err(value_at(Defect::Alignment { value: value.into(), limit }));
            }
            self.alignment = value.into();
            self.metadata.insert(&key, &value.to_string());
        } else {
            match kind {
                TYPE_TEXT => self.read_text(cursor, &key)?,
                TYPE_ARRAY => skip_array(cursor, &key, 1)?,
                _ => {
                    let Some(value) = scalar(cursor, kind)? else {
                        return Err(value_at(Defect::UnknownValueType {
                            key: shortened(&key),
                            number: kind,
                        }));
                    };
                    self.metadata.insert(&key, &value);
                }
            }
        }
        if let Some(name) = self.keys.replace(key) {
            return Err(at(Defect::Duplicate { what: "metadata key", name: shortened(&name) }));
        }
        Ok(())
    }

    /// Texts are not always UTF-8 in real files, so a value that is not is kept with replacement characters.
    fn read_text(&mut self, cursor: &mut Cursor<'_>, key: &str) -> Result<(), ModelError> {
        let length = cursor.u64("a metadata text")?;
        if length > TEXT_KEPT_BYTES_MAX {
            self.metadata.incomplete = true;
            return cursor.skip(length, "a metadata text");
        }
        let bytes = cursor.bytes(length, "a metadata text")?;
        self.metadata.insert(key, &String::from_utf8_lossy(&bytes));
        Ok(())
    }
}

/// Bytes of a value of fixed size.
fn scalar_bytes(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | TYPE_BOOL => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// A value of fixed size, written out; `None` for a kind that is none.
fn scalar(cursor: &mut Cursor<'_>, kind: u32) -> Result<Option<String>, ModelError> {
    const WHAT: &str = "a metadata value";
    Ok(Some(match kind {
        0 => u8::from_le_bytes(cursor.array(WHAT)?).to_string(),
        1 => i8::from_le_bytes(cursor.array(WHAT)?).to_string(),
        2 => u16::from_le_bytes(cursor.array(WHAT)?).to_string(),
        3 => i16::from_le_bytes(cursor.array(WHAT)?).to_string(),
        4 => cursor.u32(WHAT)?.to_string(),
        5 => i32::from_le_bytes(cursor.array(WHAT)?).to_string(),
        6 => f32::from_le_bytes(cursor.array(WHAT)?).to_string(),
        TYPE_BOOL => (cursor.array(WHAT)? != [0u8]).to_string(),
        10 => cursor.u64(WHAT)?.to_string(),
        11 => i64::from_le_bytes(cursor.array(WHAT)?).to_string(),
        12 => f64::from_le_bytes(cursor.array(WHAT)?).to_string(),
        _ => return Ok(None),
    }))
}

/// Passes over an array. The recursion is bounded by [`ARRAY_DEPTH_MAX`], the loops by the bytes left.
fn skip_array(cursor: &mut Cursor<'_>, key: &str, depth: u32) -> Result<(), ModelError> {
    const WHAT: &str = "a metadata array";
    if depth > ARRAY_DEPTH_MAX {
        let (value, limit) = (depth.into(), ARRAY_DEPTH_MAX.into());
        let what = "the depth of arrays within arrays";
        return Err(cursor.malformed_at()(Defect::OverLimit { what, value, limit }));
    }
    let at = cursor.malformed_at();
    let kind = cursor.u32(WHAT)?;
    let element_bytes = match kind {
        TYPE_TEXT => 8,
        TYPE_ARRAY => 12,
        _ => match scalar_bytes(kind) {
            Some(bytes) => bytes,
            None => return Err(at(Defect::UnknownValueType { key: shortened(key), number: kind })),
        },
    };
    let length = count(cursor, "the length of a metadata array", element_bytes, u64::MAX)?;
    match kind {
        TYPE_TEXT => {
            for _ in 0..length {
                let bytes = cursor.u64(WHAT)?;
                cursor.skip(bytes, WHAT)?;
            }
        }
        TYPE_ARRAY => {
            for _ in 0..length {
                skip_array(cursor, key, depth + 1)?;
            }
        }
        // `count` has bounded the product.
        _ => cursor.skip(length * element_bytes, WHAT)?,
    }
    Ok(())
}

/// A tensor as the header has it.
struct RawTensor {
    name: String,
    dtype: Dtype,
    /// Slowest dimension first.
    shape: Vec<u64>,
    bytes: u64,
    /// From the start of the data.
    start: u64,
    /// Where its description is in the file.
    described_at: u64,
}

impl RawTensor {
    fn read(cursor: &mut Cursor<'_>) -> Result<RawTensor, ModelError> {
        let described_at = cursor.position();
        let at = cursor.malformed_at();
        let name = text(cursor, "a tensor's name", NAME_BYTES_MAX as u64)?;
        let rank = cursor.u32("the rank of a tensor")?;
        if rank > RANK_MAX {
            let (what, limit) = ("the rank of a tensor", RANK_MAX.into());
            return Err(at(Defect::OverLimit { what, value: rank.into(), limit }));
        }
        let mut shape = Vec::new();
        for _ in 0..rank {
            shape.push(cursor.u64("a dimension of a tensor")?);
        }
        let number = cursor.u32("the type of a tensor")?;
        let start = cursor.u64("the offset of a tensor")?;
        let Some(dtype) = Dtype::from_ggml(number) else {
            return Err(at(Defect::UnknownGgmlType { tensor: name, number }));
        };
        let (block, _) = dtype.block();
        // Rows are quantised one by one, so it is the fastest dimension that must be whole blocks.
        if !shape.first().unwrap_or(&1).is_multiple_of(block) {
            return Err(at(Defect::PartialBlock { tensor: name, dtype: dtype.name(), block }));
        }
        let elements =
            shape.iter().try_fold(1u64, |product, dimension| product.checked_mul(*dimension));
        let Some(bytes) = elements.and_then(|elements| dtype.bytes(elements)) else {
            return Err(at(Defect::ShapeOverflow { tensor: name }));
        };
        shape.reverse();
        Ok(RawTensor { name, dtype, shape, bytes, start, described_at })
    }
}

/// Checks where the tensors lie: aligned, inside the file, no two sharing a byte, no name twice.
fn place(
    source: &Source,
    mut raw: Vec<RawTensor>,
    data_offset: u64,
    alignment: u64,
) -> Result<Vec<Tensor>, ModelError> {
    let mut names = BTreeSet::new();
    for tensor in &raw {
        if !names.insert(tensor.name.as_str()) {
            let defect = Defect::Duplicate { what: "tensor", name: tensor.name.clone() };
            return Err(source.malformed(tensor.described_at, defect));
        }
    }
    // An empty tensor may share its start with the one after it.
    raw.sort_by(|a, b| (a.start, a.bytes, &a.name).cmp(&(b.start, b.bytes, &b.name)));
    let mut placed: Vec<Tensor> = Vec::with_capacity(raw.len());
    for tensor in raw {
        let fail = |defect| Err(source.malformed(tensor.described_at, defect));
        if !tensor.start.is_multiple_of(alignment) {
            return fail(Defect::Misaligned {
                tensor: tensor.name,
                start: tensor.start,
                alignment,
            });
        }
        let Some(start) = data_offset.checked_add(tensor.start) else {
            return fail(Defect::ShapeOverflow { tensor: tensor.name });
        };
        let Some(end) = start.checked_add(tensor.bytes) else {
            return fail(Defect::ShapeOverflow { tensor: tensor.name });
        };
        if end > source.size() {
            return fail(Defect::OutOfRange { tensor: tensor.name, end, size: source.size() });
        }
        if let Some(previous) = placed.last()
            && start < previous.range.end
        {
            let other = previous.name.clone();
            return fail(Defect::Overlap { tensor: tensor.name, other });
        }
        let range = start..end;
        placed.push(Tensor {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            shard: 0,
            range,
        });
    }
    Ok(placed)
}

#[cfg(test)]
mod tests;
