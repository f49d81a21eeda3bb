//! Reader of safetensors headers.
//!
//! ```text
//! 0        8                     8 + length
//! | length | JSON, space padded  | data ...                     | end of file
//!            "name": {dtype, shape, data_offsets: [a, b]}, a and b from the start of the data
//! ```
//!
//! The safetensors crate supplies the dtypes and the last word on a header, but not the walk through the JSON: its
//! own wants the complete file in memory, keeps the last of two entries with one name, and takes memory of many
//! times the header's size for a hostile one.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use ::safetensors::tensor::{Metadata as UpstreamHeader, TensorInfo};
use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{Deserializer, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use super::dtype::Dtype;
use super::error::{Defect, ModelError, shortened};
use super::source::Source;
use super::{DIMENSIONS_MAX, Metadata, NAME_BYTES_MAX, Parsed, TENSORS_MAX, Tensor};

/// Longest header in bytes, the limit of the safetensors library itself.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes before the JSON: its length.
const PREFIX_BYTES: u64 = 8;

/// Reads and checks the header. The tensors come back in the order of their bytes.
pub(super) fn read(source: &Source) -> Result<Parsed, ModelError> {
    let prefix = source.read(0, PREFIX_BYTES, "the header's length")?;
    let length = prefix.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    if length > HEADER_BYTES_MAX {
        let defect = Defect::OverLimit {
            what: "the header's length",
            value: length,
            limit: HEADER_BYTES_MAX,
        };
        return Err(source.malformed(0, defect));
    }
    let json = source.read(PREFIX_BYTES, length, "the header")?;
    if json.first() != Some(&b'{') {
        return Err(source.malformed(PREFIX_BYTES, Defect::NotAnObject));
    }
    let header = walk(&json).map_err(|(at, defect)| source.malformed(PREFIX_BYTES + at, defect))?;
    drop(json);

    let data_offset = PREFIX_BYTES + length;
    let data_length = source.size() - data_offset;
    let mut entries: Vec<(String, Entry)> = header.entries.into_iter().collect();
    entries.sort_by_key(|(_, entry)| entry.offsets);
    let at = |offset: u64| data_offset.saturating_add(offset);
    check_layout(&entries, data_length).map_err(|(offset, defect)| match defect {
        Defect::OutOfRange { tensor, end, .. } => source.malformed(
            at(offset),
            Defect::OutOfRange { tensor, end: at(end), size: source.size() },
        ),
        other => source.malformed(at(offset), other),
    })?;
    check_upstream(&entries).map_err(|defect| source.malformed(PREFIX_BYTES, defect))?;

    let tensors = entries
        .into_iter()
        .map(|(name, entry)| Tensor {
            name,
            dtype: entry.dtype,
            shape: entry.shape,
            shard: 0,
            range: at(entry.offsets.0)..at(entry.offsets.1),
        })
        .collect();
    Ok(Parsed { data: data_offset..source.size(), tensors, metadata: header.metadata })
}

/// One tensor as the header describes it.
#[derive(Debug)]
struct Entry {
    dtype: Dtype,
    shape: Vec<u64>,
    offsets: (u64, u64),
}

#[derive(Debug, Default)]
struct Header {
    entries: BTreeMap<String, Entry>,
    metadata: Metadata,
}

/// Tensors follow one another without hole or overlap, each with just the bytes that its shape makes, and the last
/// ends the file. Offsets in the error are from the start of the data.
fn check_layout(entries: &[(String, Entry)], data_length: u64) -> Result<(), (u64, Defect)> {
    let mut next = 0;
    let mut previous = "";
    for (name, entry) in entries {
        let (start, end) = entry.offsets;
        let fail = |defect| Err((start, defect));
        if end < start {
            return fail(Defect::Reversed { tensor: name.clone() });
        }
        if end > data_length {
            return fail(Defect::OutOfRange { tensor: name.clone(), end, size: data_length });
        }
        if start < next {
            return fail(Defect::Overlap { tensor: name.clone(), other: previous.to_owned() });
        }
        if start > next {
            return Err((next, Defect::Hole { tensor: name.clone(), bytes: start - next }));
        }
        let computed =
            tensor_bytes(name, entry.dtype, &entry.shape).map_err(|defect| (start, defect))?;
        if computed != end - start {
            return fail(Defect::SizeMismatch {
                tensor: name.clone(),
                stated: end - start,
                computed,
            });
        }
        next = end;
        previous = name;
    }
    if next < data_length {
        return Err((next, Defect::TrailingBytes { bytes: data_length - next }));
    }
    Ok(())
}

fn tensor_bytes(name: &str, dtype: Dtype, shape: &[u64]) -> Result<u64, Defect> {
    let overflow = || Defect::ShapeOverflow { tensor: name.to_owned() };
    let elements = shape
        .iter()
        .try_fold(1u64, |product, dimension| product.checked_mul(*dimension))
        .ok_or_else(overflow)?;
    let (block, _) = dtype.block();
    if !elements.is_multiple_of(block) {
        return Err(Defect::PartialBlock { tensor: name.to_owned(), dtype: dtype.name(), block });
    }
    dtype.bytes(elements).ok_or_else(overflow)
}

/// The library's own check, so that no file is read here that other programs refuse.
fn check_upstream(entries: &[(String, Entry)]) -> Result<(), Defect> {
    let narrow = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let infos = entries
        .iter()
        .filter_map(|(name, entry)| {
            let info = TensorInfo {
                dtype: entry.dtype.to_safetensors()?,
                shape: entry.shape.iter().copied().map(narrow).collect(),
                data_offsets: (narrow(entry.offsets.0), narrow(entry.offsets.1)),
            };
            Some((name.clone(), info))
        })
        .collect();
    UpstreamHeader::new(None, infos).map(drop).map_err(Defect::Upstream)
}

/// Walks the JSON. The offset in the error is from its start.
fn walk(json: &[u8]) -> Result<Header, (u64, Defect)> {
    let mut found = None;
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let walked = deserializer
        .deserialize_map(HeaderVisitor { defect: &mut found })
        .and_then(|header| deserializer.end().map(|()| header));
    walked.map_err(|error| (json_offset(json, &error), found.unwrap_or(Defect::Json(error))))
}

/// Where in the text an error is, in bytes.
pub(super) fn json_offset(json: &[u8], error: &serde_json::Error) -> u64 {
    let line_start = match error.line() {
        0 | 1 => 0,
        line => {
            let mut breaks = json.iter().enumerate().filter(|(_, byte)| **byte == b'\n');
            breaks.nth(line - 2).map_or(0, |(at, _)| at + 1)
        }
    };
    u64::try_from(line_start + error.column().saturating_sub(1)).unwrap_or(0)
}

/// Visits the header's one object; leaves what it objects to in `defect`, since a JSON error carries only text.
struct HeaderVisitor<'a> {
    defect: &'a mut Option<Defect>,
}

impl HeaderVisitor<'_> {
    fn refuse<E: serde::de::Error>(&mut self, defect: Defect) -> E {
        let error = E::custom(&defect);
        *self.defect = Some(defect);
        error
    }

    fn entry<E: serde::de::Error>(&mut self, name: &str, raw: RawEntry<'_>) -> Result<Entry, E> {
        let named: StrDeserializer<'_, serde::de::value::Error> =
            raw.dtype.as_ref().into_deserializer();
        let dtype = ::safetensors::Dtype::deserialize(named).ok().and_then(Dtype::from_safetensors);
        let Some(dtype) = dtype else {
            let dtype = shortened(&raw.dtype);
            return Err(self.refuse(Defect::UnknownDtype { tensor: name.to_owned(), dtype }));
        };
        Ok(Entry { dtype, shape: raw.shape.0, offsets: raw.data_offsets })
    }
}

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with an entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header::default();
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if metadata_seen {
                    return Err(self.refuse(Defect::Duplicate { what: "key", name }));
                }
                metadata_seen = true;
                header.metadata = map.next_value::<Option<Metadata>>()?.unwrap_or_default();
                continue;
            }
            if name.len() > NAME_BYTES_MAX {
                let value = u64::try_from(name.len()).unwrap_or(u64::MAX);
                let what = "the length of a tensor's name";
                return Err(self.refuse(Defect::OverLimit {
                    what,
                    value,
                    limit: NAME_BYTES_MAX as u64,
                }));
            }
            if header.entries.len() == TENSORS_MAX {
                let (what, limit) = ("the number of tensors", TENSORS_MAX as u64);
                return Err(self.refuse(Defect::OverLimit { what, value: limit + 1, limit }));
            }
            let raw = map.next_value::<RawEntry<'de>>()?;
            let entry = self.entry(&name, raw)?;
            if header.entries.contains_key(&name) {
                return Err(self.refuse(Defect::Duplicate { what: "tensor", name }));
            }
            header.entries.insert(name, entry);
        }
        Ok(header)
    }
}

/// An entry before its dtype is looked up. Unknown fields are passed over, as the library does.
#[derive(Debug, Deserialize)]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A shape of at most [`DIMENSIONS_MAX`] dimensions.
#[derive(Debug)]
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct ShapeVisitor;
        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an array of at most {DIMENSIONS_MAX} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = seq.next_element()? {
                    if shape.len() == DIMENSIONS_MAX {
                        return Err(A::Error::invalid_length(DIMENSIONS_MAX + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

/// Bounded text of a header's `__metadata__`.
impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Metadata, D::Error> {
        struct MetadataVisitor;
        impl<'de> Visitor<'de> for MetadataVisitor {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut metadata = Metadata::default();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    metadata.insert(&key, &value);
                }
                Ok(metadata)
            }
        }
        deserializer.deserialize_map(MetadataVisitor)
    }
}

#[cfg(test)]
mod tests;
