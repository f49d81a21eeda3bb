//! Reader of the index of a sharded safetensors model: which tensor is in which file.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::error::{Defect, ModelError, shortened};
use super::safetensors::json_offset;
use super::source::Source;
use super::{NAME_BYTES_MAX, SHARDS_MAX, TENSORS_MAX};

/// Longest index in bytes.
pub const INDEX_BYTES_MAX: u64 = 100_000_000;

/// Reads an index: for each shard, by its file name, the tensors it must have.
pub(super) fn read(source: &Source) -> Result<BTreeMap<String, Vec<String>>, ModelError> {
    let size = source.size();
    if size > INDEX_BYTES_MAX {
        let defect =
            Defect::OverLimit { what: "the index's size", value: size, limit: INDEX_BYTES_MAX };
        return Err(source.malformed(0, defect));
    }
    let json = source.read(0, size, "the index")?;
    let document: Document = serde_json::from_slice(&json)
        .map_err(|error| source.malformed(json_offset(&json, &error), Defect::Json(error)))?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (tensor, shard) in document.weight_map.0 {
        let plain = !shard.is_empty()
            && shard != "."
            && shard != ".."
            && !shard.contains(['/', '\\', '\0']);
        if !plain || shard.len() > NAME_BYTES_MAX {
            return Err(source.malformed(0, Defect::ShardName { name: shortened(&shard) }));
        }
        shards.entry(shard).or_default().push(tensor);
        if shards.len() > SHARDS_MAX {
            let (value, limit) = (SHARDS_MAX as u64 + 1, SHARDS_MAX as u64);
            return Err(source
                .malformed(0, Defect::OverLimit { what: "the number of shards", value, limit }));
        }
    }
    Ok(shards)
}

#[derive(Debug, Deserialize)]
struct Document {
    #[serde(default, rename = "metadata")]
    _metadata: Option<IgnoredAny>,
    weight_map: WeightMap,
}

/// Tensor name to shard name, each tensor once.
#[derive(Debug)]
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<WeightMap, D::Error> {
        struct WeightMapVisitor;
        impl<'de> Visitor<'de> for WeightMapVisitor {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor names to file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some((name, shard)) = map.next_entry::<String, String>()? {
                    if name.len() > NAME_BYTES_MAX || tensors.len() == TENSORS_MAX {
                        return Err(A::Error::custom(format_args!(
                            "more than {TENSORS_MAX} tensors, or a name of more than {NAME_BYTES_MAX} bytes"
                        )));
                    }
                    let shown = shortened(&name);
                    if tensors.insert(name, shard).is_some() {
                        return Err(A::Error::custom(format_args!(
                            "tensor {shown:?} is there twice"
                        )));
                    }
                }
                Ok(WeightMap(tensors))
            }
        }
        deserializer.deserialize_map(WeightMapVisitor)
    }
}

#[cfg(test)]
mod tests;
