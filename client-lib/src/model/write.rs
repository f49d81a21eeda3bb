//! Writers of small, valid model files, for tests and examples. Never over an existing file.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::dtype::Dtype;
use super::error::ModelError;
use super::gguf::{ALIGNMENT_MAX, MAGIC};

/// Bytes gathered before they go to the file.
const BUFFER_BYTES: usize = 1 << 20;

/// A tensor to write, with its bytes.
#[derive(Debug, Clone, Copy)]
pub struct NewTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: &'a [u64],
    /// Its bytes: as many as shape and dtype make.
    pub bytes: &'a [u8],
}

/// How to write a safetensors file.
#[derive(Debug, Clone, Default)]
pub struct SafetensorsOptions {
    /// Entries of `__metadata__`; `Some` of none writes an empty object.
    pub metadata: Option<Vec<(String, String)>>,
    /// Spaces after the header's JSON; `None` for as many as align the data to 8 bytes. With the right number the
    /// data start anywhere.
    pub header_spaces: Option<usize>,
}

/// A metadata value of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufValue {
    /// Truth value.
    Bool(bool),
    /// Unsigned 32-bit number.
    U32(u32),
    /// Unsigned 64-bit number.
    U64(u64),
    /// 32-bit floating-point number.
    F32(f32),
    /// Text.
    Text(String),
    /// Array of unsigned 32-bit numbers.
    U32s(Vec<u32>),
    /// Array of texts.
    Texts(Vec<String>),
}

/// Writes a safetensors file with these tensors in this order, and makes it durable.
pub fn write_safetensors(
    path: &Path,
    tensors: &[NewTensor<'_>],
    options: &SafetensorsOptions,
) -> Result<(), ModelError> {
    for tensor in tensors {
        check(path, tensor, tensor.dtype.to_safetensors().is_some())?;
    }
    let entries = tensors
        .iter()
        .map(|tensor| (tensor.name, tensor.dtype, tensor.shape, tensor.bytes.len() as u64));
    let header = safetensors_header(entries, options);
    let mut output = Output::create(path)?;
    output.write(&header)?;
    for tensor in tensors {
        output.write(tensor.bytes)?;
    }
    output.finish()
}

/// Length prefix, JSON and padding of a safetensors file. Tensors are name, dtype, shape and bytes.
pub(super) fn safetensors_header<'a>(
    tensors: impl Iterator<Item = (&'a str, Dtype, &'a [u64], u64)>,
    options: &SafetensorsOptions,
) -> Vec<u8> {
    let mut fields = Vec::new();
    if let Some(metadata) = &options.metadata {
        let texts: Vec<String> = metadata
            .iter()
            .map(|(key, value)| format!("{}:{}", json_text(key), json_text(value)))
            .collect();
        fields.push(format!("\"__metadata__\":{{{}}}", texts.join(",")));
    }
    let mut start = 0;
    for (name, dtype, shape, bytes) in tensors {
        let end = start + bytes;
        let name = json_text(name);
        fields.push(format!(
            "{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}"
        ));
        start = end;
    }
    let mut json = format!("{{{}}}", fields.join(","));
    let aligned = json.len().next_multiple_of(8) - json.len();
    json.push_str(&" ".repeat(options.header_spaces.unwrap_or(aligned)));
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(json.as_bytes());
    header
}

fn json_text(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Writes a GGUF file of this version with these tensors in this order, and makes it durable. An entry
/// `general.alignment` is honoured.
pub fn write_gguf(
    path: &Path,
    version: u32,
    entries: &[(&str, GgufValue)],
    tensors: &[NewTensor<'_>],
) -> Result<(), ModelError> {
    let alignment = entries.iter().find_map(|(key, value)| match value {
        GgufValue::U32(value) if *key == "general.alignment" => Some(*value),
        _ => None,
    });
    let alignment = u64::from(alignment.unwrap_or(32).clamp(1, ALIGNMENT_MAX));
    let mut header = MAGIC.to_vec();
    header.extend(version.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend((entries.len() as u64).to_le_bytes());
    for (key, value) in entries {
        put_text(&mut header, key);
        put_value(&mut header, value);
    }
    let mut start: u64 = 0;
    for tensor in tensors {
        let number = tensor.dtype.ggml_number();
        check(path, tensor, number.is_some())?;
        put_text(&mut header, tensor.name);
        let rank = u32::try_from(tensor.shape.len()).unwrap_or(u32::MAX);
        header.extend(rank.to_le_bytes());
        for dimension in tensor.shape.iter().rev() {
            header.extend(dimension.to_le_bytes());
        }
        header.extend(number.unwrap_or_default().to_le_bytes());
        header.extend(start.to_le_bytes());
        start = (start + tensor.bytes.len() as u64).next_multiple_of(alignment);
    }
    let mut output = Output::create(path)?;
    output.write(&header)?;
    output.pad(alignment)?;
    for tensor in tensors {
        output.write(tensor.bytes)?;
        output.pad(alignment)?;
    }
    output.finish()
}

fn put_text(header: &mut Vec<u8>, text: &str) {
    header.extend((text.len() as u64).to_le_bytes());
    header.extend(text.as_bytes());
}

fn put_value(header: &mut Vec<u8>, value: &GgufValue) {
    let kind = |header: &mut Vec<u8>, number: u32| header.extend(number.to_le_bytes());
    let array = |header: &mut Vec<u8>, number: u32, length: usize| {
        header.extend(9u32.to_le_bytes());
        header.extend(number.to_le_bytes());
        header.extend((length as u64).to_le_bytes());
    };
    match value {
        GgufValue::U32(value) => {
            kind(header, 4);
            header.extend(value.to_le_bytes());
        }
        GgufValue::F32(value) => {
            kind(header, 6);
            header.extend(value.to_le_bytes());
        }
        GgufValue::Bool(value) => {
            kind(header, 7);
            header.push(u8::from(*value));
        }
        GgufValue::Text(value) => {
            kind(header, 8);
            put_text(header, value);
        }
        GgufValue::U64(value) => {
            kind(header, 10);
            header.extend(value.to_le_bytes());
        }
        GgufValue::U32s(values) => {
            array(header, 4, values.len());
            values.iter().for_each(|value| header.extend(value.to_le_bytes()));
        }
        GgufValue::Texts(values) => {
            array(header, 8, values.len());
            values.iter().for_each(|value| put_text(header, value));
        }
    }
}

/// The format has the type, and shape, type and bytes agree.
fn check(path: &Path, tensor: &NewTensor<'_>, known: bool) -> Result<(), ModelError> {
    let unwritable = |why| {
        Err(ModelError::Unwritable { path: path.into(), tensor: tensor.name.to_owned(), why })
    };
    if !known {
        return unwritable("the format does not have its dtype");
    }
    let elements =
        tensor.shape.iter().try_fold(1u64, |product, dimension| product.checked_mul(*dimension));
    match elements.and_then(|elements| tensor.dtype.bytes(elements)) {
        Some(bytes) if bytes == tensor.bytes.len() as u64 => Ok(()),
        _ => unwritable("its bytes are not as many as its shape and dtype make"),
    }
}

/// A new file; removed again if it is not finished.
#[derive(Debug)]
pub(super) struct Output {
    writer: BufWriter<File>,
    path: PathBuf,
    written: u64,
    finished: bool,
}

impl Output {
    pub(super) fn create(path: &Path) -> Result<Output, ModelError> {
        let file =
            OpenOptions::new().write(true).create_new(true).open(path).map_err(|source| {
                ModelError::Io { path: path.into(), action: "create it", source }
            })?;
        let writer = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Output { writer, path: path.into(), written: 0, finished: false })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ModelError> {
        self.writer.write_all(bytes).map_err(self.failed("write it"))?;
        self.written += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, alignment: u64) -> Result<(), ModelError> {
        let bytes = self.written.next_multiple_of(alignment) - self.written;
        let bytes = usize::try_from(bytes).expect("less than the greatest alignment");
        self.write(&vec![0; bytes])
    }

    /// Makes the file and its name durable.
    pub(super) fn finish(mut self) -> Result<(), ModelError> {
        self.writer.flush().map_err(self.failed("write it"))?;
        self.writer.get_ref().sync_all().map_err(self.failed("sync it"))?;
        let directory = match self.path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        File::open(directory)
            .and_then(|directory| directory.sync_all())
            .map_err(self.failed("sync the directory of it"))?;
        self.finished = true;
        Ok(())
    }

    fn failed(&self, action: &'static str) -> impl FnOnce(std::io::Error) -> ModelError + use<> {
        let path = self.path.clone();
        move |source| ModelError::Io { path, action, source }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.finished {
            // Half a model is of no use; if it cannot be removed either, its header shows that it is cut short.
            std::fs::remove_file(&self.path).ok();
        }
    }
}
