//! What can be wrong with a model file: which file, at which byte, why, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use safetensors::SafeTensorError;
use thiserror::Error;

/// A model file could not be read or written.
#[derive(Debug, Error)]
pub enum ModelError {
    /// The operating system failed a call.
    #[error("{}: cannot {action}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What was tried, as a verb.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// Neither a regular file nor a directory.
    #[error("{}: not a regular file; give a model file, or a directory that holds one", path.display())]
    NotAFile {
        /// Which.
        path: PathBuf,
    },
    /// The text that git-LFS leaves in place of a file it has not fetched.
    #[error(
        "{}: this is a git-LFS pointer, not the weights; run `git lfs pull` in its repository",
        path.display()
    )]
    LfsPointer {
        /// Which.
        path: PathBuf,
    },
    /// Neither GGUF nor safetensors nor a safetensors index.
    #[error(
        "{}: neither safetensors, nor a safetensors index, nor GGUF; convert the model to one of them",
        path.display()
    )]
    UnknownFormat {
        /// Which.
        path: PathBuf,
    },
    /// A directory without a model file.
    #[error("{}: holds no .safetensors, .safetensors.index.json or .gguf file", path.display())]
    NoModel {
        /// Which.
        path: PathBuf,
    },
    /// A directory with more than one model.
    #[error(
        "{}: holds more than one model, {first:?} and {second:?} among them; name the one that is meant",
        path.display()
    )]
    Ambiguous {
        /// The directory.
        path: PathBuf,
        /// One candidate.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },
    /// The file is not the one whose header was read.
    #[error("{}: changed since its header was read; open the model again", path.display())]
    Changed {
        /// Which.
        path: PathBuf,
    },
    /// A shard that the index names is not there.
    #[error(
        "{}: shard {} is missing; download it into the same directory",
        index.display(),
        shard.display()
    )]
    ShardMissing {
        /// The index.
        index: PathBuf,
        /// The missing file.
        shard: PathBuf,
    },
    /// The file's bytes break its format.
    #[error("{}: at byte {offset}: {defect}", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// Where in it, in bytes from its start.
        offset: u64,
        /// What is wrong there.
        #[source]
        defect: Defect,
    },
    /// Something asked for by name or number that the model does not have.
    #[error("{}: the model has no {what} {name}", path.display())]
    Absent {
        /// The model's first file.
        path: PathBuf,
        /// What kind of thing.
        what: &'static str,
        /// Its name or number.
        name: String,
    },
    /// A tensor to be written does not fit the format.
    #[error("{}: cannot write tensor {tensor:?}: {why}", path.display())]
    Unwritable {
        /// The file that was to be written.
        path: PathBuf,
        /// Which tensor.
        tensor: String,
        /// Why not.
        why: &'static str,
    },
}

/// What breaks the format at one place of a file.
#[derive(Debug, Error)]
pub enum Defect {
    /// The file ends too early.
    #[error(
        "{what} needs {needed} bytes but the file has {available} from here; it is truncated, download it again"
    )]
    Truncated {
        /// What was to be read.
        what: &'static str,
        /// Bytes it needs.
        needed: u64,
        /// Bytes there are.
        available: u64,
    },
    /// A number that no real model reaches.
    #[error("{what} is {value}, over the limit of {limit}; is this really a model file?")]
    OverLimit {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The most accepted.
        limit: u64,
    },
    /// JSON that cannot be parsed, or that has another structure.
    #[error("the JSON header is not valid: {0}")]
    Json(#[source] serde_json::Error),
    /// A safetensors header that does not start with a brace.
    #[error("the header does not start with `{{`; is this really a safetensors file?")]
    NotAnObject,
    /// A name that is there twice.
    #[error("{what} {name:?} is there twice; write the file again")]
    Duplicate {
        /// What has the name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A safetensors dtype that safetensors 0.8 does not know.
    #[error(
        "tensor {tensor:?} has dtype {dtype:?}, which safetensors 0.8 does not know; convert it"
    )]
    UnknownDtype {
        /// Which tensor.
        tensor: String,
        /// The dtype as written, shortened.
        dtype: String,
    },
    /// A ggml type number that is not known here.
    #[error(
        "tensor {tensor:?} has ggml type {number}, which is not known; quantise it to another type"
    )]
    UnknownGgmlType {
        /// Which tensor.
        tensor: String,
        /// The number.
        number: u32,
    },
    /// A GGUF metadata type number that is not known.
    #[error("metadata key {key:?} has a value of unknown type {number}")]
    UnknownValueType {
        /// Which key.
        key: String,
        /// The number.
        number: u32,
    },
    /// The product of the dimensions, or the size in bytes, is no 64-bit number.
    #[error("the size of tensor {tensor:?} overflows 64 bits")]
    ShapeOverflow {
        /// Which tensor.
        tensor: String,
    },
    /// The shape cuts a block of a packed or quantised type.
    #[error("tensor {tensor:?} does not consist of whole {dtype} blocks of {block} elements")]
    PartialBlock {
        /// Which tensor.
        tensor: String,
        /// Its type's name.
        dtype: &'static str,
        /// Elements of a block.
        block: u64,
    },
    /// Shape and byte range contradict one another.
    #[error("tensor {tensor:?} has {stated} bytes but its shape and dtype make {computed}")]
    SizeMismatch {
        /// Which tensor.
        tensor: String,
        /// Bytes of its range.
        stated: u64,
        /// Bytes of its shape.
        computed: u64,
    },
    /// A range that ends before it starts.
    #[error("tensor {tensor:?} ends before it starts")]
    Reversed {
        /// Which tensor.
        tensor: String,
    },
    /// Two tensors share bytes.
    #[error("tensor {tensor:?} overlaps tensor {other:?}")]
    Overlap {
        /// The later one.
        tensor: String,
        /// The earlier one.
        other: String,
    },
    /// Bytes before a safetensors tensor that belong to no tensor.
    #[error(
        "{bytes} bytes before tensor {tensor:?} belong to no tensor, which safetensors does not allow"
    )]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Length of the hole.
        bytes: u64,
    },
    /// A tensor passes the end of the file.
    #[error(
        "tensor {tensor:?} ends at byte {end} but the file has {size}; it is truncated, download it again"
    )]
    OutOfRange {
        /// Which tensor.
        tensor: String,
        /// Where it ends.
        end: u64,
        /// The file's size.
        size: u64,
    },
    /// Bytes after the last safetensors tensor.
    #[error(
        "{bytes} bytes after the last tensor belong to no tensor, which safetensors does not allow"
    )]
    TrailingBytes {
        /// How many.
        bytes: u64,
    },
    /// The safetensors crate refuses what all checks above let pass.
    #[error("the header is refused by the safetensors library")]
    Upstream(#[source] SafeTensorError),
    /// No GGUF magic.
    #[error("no GGUF magic; is this really a GGUF file?")]
    Magic,
    /// A GGUF version that is not read.
    #[error("GGUF version {version}; versions 2 and 3 are read, convert the file")]
    Version {
        /// Which.
        version: u32,
    },
    /// A GGUF file for big-endian machines.
    #[error("big-endian GGUF; convert it to little-endian")]
    BigEndian,
    /// An alignment that is no power of two, too large, or no `u32`.
    #[error("general.alignment is {value}; it must be a u32, a power of two, at most {limit}")]
    Alignment {
        /// Its value; 0 if it has another type.
        value: u64,
        /// The most accepted.
        limit: u64,
    },
    /// A GGUF tensor off the alignment.
    #[error("tensor {tensor:?} starts at {start} of the data, off the alignment of {alignment}")]
    Misaligned {
        /// Which tensor.
        tensor: String,
        /// Where in the data section.
        start: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// Bytes that should be text and are not UTF-8.
    #[error("{what} is not UTF-8 text")]
    NotText {
        /// What.
        what: &'static str,
    },
    /// A shard that is not a plain file name.
    #[error("shard {name:?} is not a plain file name; shards lie beside their index")]
    ShardName {
        /// The name, shortened.
        name: String,
    },
    /// The index lists a tensor that its shard does not have.
    #[error(
        "tensor {tensor:?} is not in shard {shard:?}; index and shards are of different downloads"
    )]
    TensorMissing {
        /// Which tensor.
        tensor: String,
        /// In which shard it should be.
        shard: String,
    },
}

impl ModelError {
    /// The file that the error is about.
    pub fn path(&self) -> &Path {
        match self {
            ModelError::Io { path, .. }
            | ModelError::NotAFile { path }
            | ModelError::LfsPointer { path }
            | ModelError::UnknownFormat { path }
            | ModelError::NoModel { path }
            | ModelError::Ambiguous { path, .. }
            | ModelError::Changed { path }
            | ModelError::Malformed { path, .. }
            | ModelError::Absent { path, .. }
            | ModelError::Unwritable { path, .. } => path,
            ModelError::ShardMissing { shard, .. } => shard,
        }
    }

    /// Where in the file, in bytes from its start, if the error is about one place.
    pub fn offset(&self) -> Option<u64> {
        match self {
            ModelError::Malformed { offset, .. } => Some(*offset),
            ModelError::Io { .. }
            | ModelError::NotAFile { .. }
            | ModelError::LfsPointer { .. }
            | ModelError::UnknownFormat { .. }
            | ModelError::NoModel { .. }
            | ModelError::Ambiguous { .. }
            | ModelError::Changed { .. }
            | ModelError::ShardMissing { .. }
            | ModelError::Absent { .. }
            | ModelError::Unwritable { .. } => None,
        }
    }
}

/// The start of a text from a file, short enough for a message.
pub(super) fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}
