//! Model files: what tensors are in them, where their bytes lie, and which of them make a layer.
//!
//! Headers are read with plain bounded reads, never through a mapping of the file, and checked completely: a
//! [`ModelFiles`] never names a byte outside its files, whatever the files hold. The weights themselves are not read
//! here; they reach the client as mappings of file-backed allocations.

mod dtype;
mod error;
mod generate;
mod gguf;
mod index;
mod layers;
mod open;
mod pages;
mod safetensors;
mod source;
mod write;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

pub use dtype::Dtype;
pub use error::{Defect, ModelError};
pub use generate::{Checkpoint, pattern};
pub use gguf::{
    ALIGNMENT_MAX as GGUF_ALIGNMENT_MAX, ENTRIES_MAX as GGUF_ENTRIES_MAX,
    HEADER_BYTES_MAX as GGUF_HEADER_BYTES_MAX,
};
pub use index::INDEX_BYTES_MAX;
pub use layers::{Layer, PART_BYTES_MIN, Part, TensorSlice};
pub use open::{LayerMapping, Model};
pub use pages::PageGrid;
pub use safetensors::HEADER_BYTES_MAX as SAFETENSORS_HEADER_BYTES_MAX;
pub use source::FileIdentity;
pub use write::{GgufValue, NewTensor, SafetensorsOptions, write_gguf, write_safetensors};

use source::Source;

/// Most tensors in one model.
pub const TENSORS_MAX: usize = 1 << 20;
/// Most files of one sharded model.
pub const SHARDS_MAX: usize = 4096;
/// Most dimensions of a tensor; GGUF itself stops at 4.
pub const DIMENSIONS_MAX: usize = 32;
/// Longest name of a tensor or shard, in bytes.
pub const NAME_BYTES_MAX: usize = 4096;
/// Most bytes of metadata kept, keys and values together.
pub const METADATA_BYTES_MAX: usize = 1 << 20;

/// Which format a model's files have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// safetensors, in one file or several with an index.
    Safetensors,
    /// GGUF.
    Gguf,
}

/// One file of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Where it is.
    pub path: PathBuf,
    /// Its size in bytes.
    pub size: u64,
    /// First byte of the tensor data, from the file's start. Aligned to nothing in general.
    pub data_offset: u64,
    /// Bytes from there to the end of the last tensor.
    pub data_length: u64,
    /// Tells whether a file opened later is still the one whose header was read.
    pub identity: FileIdentity,
}

/// One tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, unique in the model.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, slowest first in both formats (GGUF stores them the other way round).
    pub shape: Vec<u64>,
    /// Index of its shard.
    pub shard: usize,
    /// Its bytes, from the start of the shard's file.
    pub range: Range<u64>,
}

impl Tensor {
    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// A file's own description of itself, as texts. Bounded: what does not fit is left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metadata {
    entries: BTreeMap<String, String>,
    bytes: usize,
    incomplete: bool,
}

impl Metadata {
    /// The value of a key. A GGUF number or truth value is written out; arrays are not kept.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.entries.get(key).map(String::as_str)
    }

    /// All entries, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Whether something was left out because of [`METADATA_BYTES_MAX`].
    pub fn is_incomplete(&self) -> bool {
        self.incomplete
    }

    fn insert(&mut self, key: &str, value: &str) {
        let bytes = self.bytes.saturating_add(key.len()).saturating_add(value.len());
        if bytes > METADATA_BYTES_MAX {
            self.incomplete = true;
            return;
        }
        self.bytes = bytes;
        self.entries.insert(key.to_owned(), value.to_owned());
    }
}

/// What a header reader returns for one file; its tensors say shard 0.
#[derive(Debug)]
struct Parsed {
    data: Range<u64>,
    tensors: Vec<Tensor>,
    metadata: Metadata,
}

/// The files of one model, with their headers read and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFiles {
    format: Format,
    shards: Vec<Shard>,
    tensors: Vec<Tensor>,
    metadata: Metadata,
}

impl ModelFiles {
    /// Opens a `.safetensors` file, a `.safetensors.index.json` with its shards, a `.gguf` file, or a directory that
    /// holds one of these. The content decides which, not the name.
    pub fn open(path: &Path) -> Result<ModelFiles, ModelError> {
        let metadata = path.metadata().map_err(|source| ModelError::Io {
            path: path.into(),
            action: "open it",
            source,
        })?;
        if metadata.is_dir() {
            return ModelFiles::open_file(&find_model(path)?);
        }
        ModelFiles::open_file(path)
    }

    fn open_file(path: &Path) -> Result<ModelFiles, ModelError> {
        let source = Source::open(path)?;
        let (format, read): (Format, Reader) = match detect(&source)? {
            Content::Index => return ModelFiles::open_sharded(&source),
            Content::Safetensors => (Format::Safetensors, safetensors::read),
            Content::Gguf => (Format::Gguf, gguf::read),
        };
        let parsed = read(&source)?;
        source.check_unchanged()?;
        let shards = vec![shard(&source, &parsed.data)];
        Ok(ModelFiles { format, shards, tensors: parsed.tensors, metadata: parsed.metadata })
    }

    /// The index decides: a tensor that a shard has but the index does not place there is left out.
    fn open_sharded(index: &Source) -> Result<ModelFiles, ModelError> {
        let directory = index.path().parent().unwrap_or(Path::new(""));
        let mut model = ModelFiles {
            format: Format::Safetensors,
            shards: Vec::new(),
            tensors: Vec::new(),
            metadata: Metadata::default(),
        };
        for (name, wanted) in index::read(index)? {
            let path = directory.join(&name);
            if let Err(error) = path.metadata()
                && error.kind() == std::io::ErrorKind::NotFound
            {
                return Err(ModelError::ShardMissing { index: index.path().into(), shard: path });
            }
            let source = Source::open(&path)?;
            refuse_pointer(&source)?;
            let mut parsed = safetensors::read(&source)?;
            source.check_unchanged()?;
            // The index is ordered by tensor name, so `wanted` is too.
            parsed.tensors.retain(|tensor| wanted.binary_search(&tensor.name).is_ok());
            if let Some(tensor) = missing(&wanted, &parsed.tensors) {
                let tensor = tensor.to_owned();
                return Err(index.malformed(0, Defect::TensorMissing { tensor, shard: name }));
            }
            let shard_index = model.shards.len();
            model.shards.push(shard(&source, &parsed.data));
            model.tensors.extend(
                parsed.tensors.into_iter().map(|tensor| Tensor { shard: shard_index, ..tensor }),
            );
            for (key, value) in parsed.metadata.iter() {
                model.metadata.insert(key, value);
            }
            model.metadata.incomplete |= parsed.metadata.incomplete;
        }
        Ok(model)
    }

    /// The files' format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The files, in the order of their names.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// All tensors, in the order of shards and of their bytes there.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The index of the tensor with this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.name == name)
    }

    /// What the files say of themselves.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(Tensor::bytes).sum()
    }
}

type Reader = fn(&Source) -> Result<Parsed, ModelError>;

fn shard(source: &Source, data: &Range<u64>) -> Shard {
    Shard {
        path: source.path().into(),
        size: source.size(),
        data_offset: data.start,
        data_length: data.end - data.start,
        identity: source.identity(),
    }
}

fn missing<'a>(wanted: &'a [String], tensors: &[Tensor]) -> Option<&'a str> {
    if wanted.len() == tensors.len() {
        return None;
    }
    let present: std::collections::BTreeSet<&str> =
        tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    wanted.iter().map(String::as_str).find(|name| !present.contains(name))
}

enum Content {
    Safetensors,
    Index,
    Gguf,
}

/// Every version of the pointer text starts like this.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

fn refuse_pointer(source: &Source) -> Result<(), ModelError> {
    let length = source.size().min(LFS_POINTER.len() as u64);
    if source.read(0, length, "the file's start")? == LFS_POINTER {
        return Err(ModelError::LfsPointer { path: source.path().into() });
    }
    Ok(())
}

/// By content, so that a model cache whose files are named by their hashes works too; the name decides only for a
/// file whose start is damaged, so that the error speaks of the right format.
fn detect(source: &Source) -> Result<Content, ModelError> {
    refuse_pointer(source)?;
    let start = source.read(0, source.size().min(9), "the file's start")?;
    if start.starts_with(gguf::MAGIC) {
        return Ok(Content::Gguf);
    }
    let named = |suffix: &str| source.path().to_string_lossy().ends_with(suffix);
    if named(".safetensors") {
        return Ok(Content::Safetensors);
    }
    if named(".gguf") {
        return Ok(Content::Gguf);
    }
    if named(".index.json") {
        return Ok(Content::Index);
    }
    // A header of 0x7b bytes also starts with a brace, so the place of the header's own brace goes first.
    if start.get(8) == Some(&b'{') && start.get(5..8) == Some(&[0; 3]) {
        return Ok(Content::Safetensors);
    }
    if start.first() == Some(&b'{') {
        return Ok(Content::Index);
    }
    Err(ModelError::UnknownFormat { path: source.path().into() })
}

/// The one model in a directory. An index goes before plain files, for its shards lie beside it.
fn find_model(directory: &Path) -> Result<PathBuf, ModelError> {
    let failed = |source| ModelError::Io { path: directory.into(), action: "list it", source };
    let mut names = Vec::new();
    for entry in directory.read_dir().map_err(failed)? {
        names.push(entry.map_err(failed)?.file_name());
    }
    names.sort();
    for suffix in [".safetensors.index.json", ".safetensors", ".gguf"] {
        let mut found = names.iter().filter(|name| name.to_string_lossy().ends_with(suffix));
        let preferred = format!("model{suffix}");
        match (names.iter().find(|name| **name == *preferred), found.next(), found.next()) {
            (Some(name), _, _) | (None, Some(name), None) => return Ok(directory.join(name)),
            (None, Some(first), Some(second)) => {
                return Err(ModelError::Ambiguous {
                    path: directory.into(),
                    first: first.into(),
                    second: second.into(),
                });
            }
            (None, None, _) => {}
        }
    }
    Err(ModelError::NoModel { path: directory.into() })
}
