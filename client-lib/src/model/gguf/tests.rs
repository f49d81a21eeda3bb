use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::super::{Format, GgufValue, ModelFiles, NewTensor, write_gguf};
use super::*;

fn raw_file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn open(bytes: &[u8]) -> Result<ModelFiles, ModelError> {
    let (_directory, path) = raw_file(bytes);
    ModelFiles::open(&path)
}

fn defect(bytes: &[u8]) -> (u64, Defect) {
    match open(bytes) {
        Err(ModelError::Malformed { path, offset, defect }) => {
            assert!(path.ends_with("model.gguf"), "{path:?}");
            (offset, defect)
        }
        other => panic!("expected a malformed file, got {other:?}"),
    }
}

/// Builds a header piece by piece, valid or not.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(tensors: u64, entries: u64) -> Raw {
        Raw(b"GGUF".to_vec()).u32(3).u64(tensors).u64(entries)
    }

    fn u32(mut self, value: u32) -> Raw {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Raw {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn text(self, text: &str) -> Raw {
        let mut raw = self.u64(text.len() as u64);
        raw.0.extend(text.as_bytes());
        raw
    }

    fn tensor(self, name: &str, shape: &[u64], kind: u32, start: u64) -> Raw {
        let raw = self.text(name).u32(u32::try_from(shape.len()).unwrap());
        shape.iter().fold(raw, |raw, dimension| raw.u64(*dimension)).u32(kind).u64(start)
    }

    /// Padding to 32 bytes, then so many bytes of data.
    fn data(mut self, bytes: usize) -> Vec<u8> {
        self.0.resize(self.0.len().next_multiple_of(32) + bytes, 0);
        self.0
    }
}

fn entries() -> Vec<(&'static str, GgufValue)> {
    vec![
        ("general.architecture", GgufValue::Text("llama".to_owned())),
        ("general.alignment", GgufValue::U32(64)),
        ("tokens", GgufValue::Texts(vec!["a".to_owned(), String::new(), "ccc".to_owned()])),
        ("scores", GgufValue::U32s(vec![1, 2, 3])),
        ("flag", GgufValue::Bool(true)),
        ("large", GgufValue::U64(1 << 40)),
        ("scale", GgufValue::F32(0.5)),
    ]
}

#[test]
fn a_plain_file_is_read() {
    for version in [2, 3] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.gguf");
        let tensors = [
            NewTensor {
                name: "token_embd.weight",
                dtype: Dtype::F32,
                shape: &[2, 3],
                bytes: &[1; 24],
            },
            NewTensor { name: "blk.0.empty", dtype: Dtype::F16, shape: &[0], bytes: &[] },
            NewTensor { name: "blk.0.w", dtype: Dtype::Q8_0, shape: &[2, 32], bytes: &[2; 68] },
        ];
        write_gguf(&path, version, &entries(), &tensors).unwrap();
        let model = ModelFiles::open(&path).unwrap();
        assert_eq!(model.format(), Format::Gguf);
        let shard = &model.shards()[0];
        assert_eq!(shard.data_offset % 64, 0);
        assert_eq!(shard.size, shard.data_offset + 192);
        // From the first tensor to the end of the last, without its padding.
        assert_eq!(shard.data_length, 64 + 68);
        let seen: Vec<_> = model
            .tensors()
            .iter()
            .map(|t| {
                (
                    t.name.as_str(),
                    t.dtype,
                    t.shape.as_slice(),
                    t.range.start - shard.data_offset,
                    t.bytes(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("token_embd.weight", Dtype::F32, [2, 3].as_slice(), 0, 24),
                ("blk.0.empty", Dtype::F16, [0].as_slice(), 64, 0),
                ("blk.0.w", Dtype::Q8_0, [2, 32].as_slice(), 64, 68),
            ]
        );
        let metadata: Vec<_> = model.metadata().iter().collect();
        assert_eq!(
            metadata,
            [
                ("flag", "true"),
                ("general.alignment", "64"),
                ("general.architecture", "llama"),
                ("large", "1099511627776"),
                ("scale", "0.5"),
            ]
        );
        let bytes = fs::read(&path).unwrap();
        let start = usize::try_from(model.tensors()[2].range.start).unwrap();
        assert_eq!(bytes[start..start + 68], [2; 68]);
    }
}

#[test]
fn every_ggml_type_is_written_and_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let dtypes: Vec<Dtype> =
        Dtype::ALL.iter().copied().filter(|dtype| dtype.ggml_number().is_some()).collect();
    let contents: Vec<Vec<u8>> = dtypes
        .iter()
        .map(|dtype| vec![3; usize::try_from(dtype.bytes(3 * 256).unwrap()).unwrap()])
        .collect();
    let tensors: Vec<NewTensor<'_>> = dtypes
        .iter()
        .zip(&contents)
        .map(|(dtype, bytes)| NewTensor {
            name: dtype.name(),
            dtype: *dtype,
            shape: &[3, 256],
            bytes,
        })
        .collect();
    write_gguf(&path, 3, &[], &tensors).unwrap();
    let model = ModelFiles::open(&path).unwrap();
    assert_eq!(model.tensors().len(), 34);
    for (tensor, dtype) in model.tensors().iter().zip(dtypes) {
        assert_eq!((tensor.name.as_str(), tensor.dtype), (dtype.name(), dtype));
        assert_eq!(Some(tensor.bytes()), dtype.bytes(768));
    }
}

#[test]
fn files_without_tensors_are_read_padded_or_not() {
    let bare = Raw::new(0, 0).0;
    assert_eq!(bare.len(), 24);
    let model = open(&bare).unwrap();
    assert!(model.tensors().is_empty());
    assert_eq!((model.shards()[0].data_offset, model.shards()[0].data_length), (24, 0));
    assert!(open(&Raw::new(0, 0).data(0)).unwrap().tensors().is_empty());
}

#[test]
fn empty_tensors_may_be_first_last_or_alone() {
    let only = Raw::new(1, 0).tensor("only", &[0, 5], 0, 0);
    assert_eq!(open(&only.clone().data(0)).unwrap().tensors()[0].bytes(), 0);
    // Without the padding even an empty tensor starts outside the file.
    assert!(matches!(defect(&only.0).1, Defect::OutOfRange { .. }));

    let three = Raw::new(3, 0).tensor("last", &[0], 0, 32).tensor("full", &[8], 0, 0).tensor(
        "first",
        &[0],
        0,
        0,
    );
    let model = open(&three.data(32)).unwrap();
    let names: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["first", "full", "last"]);
    assert_eq!(model.tensors()[2].range.end, model.shards()[0].size);
}

#[test]
fn every_cut_of_the_header_and_every_4_kib_is_an_error_with_the_place() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let bytes = vec![5; 40_000];
    let names: Vec<String> = (0..8).map(|layer| format!("blk.{layer}.ffn.weight")).collect();
    let tensors: Vec<NewTensor<'_>> = names
        .iter()
        .map(|name| NewTensor { name, dtype: Dtype::F32, shape: &[100, 100], bytes: &bytes })
        .collect();
    write_gguf(&path, 3, &entries(), &tensors).unwrap();
    let model = ModelFiles::open(&path).unwrap();
    let data_offset = model.shards()[0].data_offset;
    let end = data_offset + model.shards()[0].data_length;
    assert!(data_offset > 700 && end > 320_000, "{data_offset} {end}");
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let lengths = (0..end).rev();
    for length in lengths.filter(|at| *at <= data_offset || at % 4096 == 0 || end - at <= 9) {
        file.set_len(length).unwrap();
        let error = ModelFiles::open(&path).unwrap_err();
        assert_eq!(error.path(), path);
        let offset = error.offset().unwrap();
        assert!(offset <= length, "{offset} {length}");
        let ModelError::Malformed { defect, .. } = error else { panic!("{error}") };
        match defect {
            Defect::Truncated { available, needed, .. } => {
                assert_eq!(offset + available, length);
                assert!(needed > available);
            }
            Defect::OutOfRange { end, size, .. } => assert!(size == length && end > length),
            // A count is held against what is left, so a cut shows there first.
            Defect::OverLimit { what, value, limit } => {
                assert!(value > limit && what.contains("number"), "{what}");
            }
            other => panic!("{length}: {other}"),
        }
    }
}

#[test]
fn what_is_no_gguf_of_a_known_version_is_refused() {
    assert!(matches!(defect(b"GGUX\x03\0\0\0"), (0, Defect::Magic)));
    for version in [0, 1, 4, u32::MAX] {
        let raw = Raw(b"GGUF".to_vec()).u32(version).u64(0).u64(0);
        let (4, Defect::Version { version: seen }) = defect(&raw.0) else {
            panic!("expected a version error")
        };
        assert_eq!(seen, version);
    }
    let big_endian = Raw(b"GGUF".to_vec()).u32(3u32.swap_bytes()).u64(0).u64(0);
    assert!(matches!(defect(&big_endian.0), (4, Defect::BigEndian)));
    assert!(matches!(defect(b""), (0, Defect::Truncated { needed: 4, available: 0, .. })));
}

#[test]
fn hostile_counts_are_refused_before_anything_is_allocated() {
    for count in [5, 1 << 40, 1 << 60, u64::MAX] {
        let (offset, what) = defect(&Raw::new(count, 0).data(96));
        let Defect::OverLimit { what: "the number of tensors", value, limit: 4 } = what else {
            panic!("{what}")
        };
        assert_eq!((offset, value), (8, count));
        let (offset, what) = defect(&Raw::new(0, count.saturating_add(4)).data(96));
        let Defect::OverLimit { what: "the number of metadata entries", limit: 8, .. } = what
        else {
            panic!("{what}")
        };
        assert_eq!(offset, 16);

        let long_key = Raw::new(0, 1).u64(count.saturating_mul(1 << 20)).data(96);
        assert!(matches!(defect(&long_key), (24, Defect::OverLimit { limit: 65_535, .. })));
        let long_text = Raw::new(0, 1).text("k").u32(8).u64(count.saturating_mul(1 << 8)).data(96);
        assert!(matches!(defect(&long_text).1, Defect::Truncated { .. }));
        let array =
            |kind| Raw::new(0, 1).text("k").u32(9).u32(kind).u64(count.saturating_mul(1 << 20));
        for kind in [0, 4, 8, 9, 12] {
            let (offset, what) = defect(&array(kind).data(96));
            assert!(matches!(what, Defect::OverLimit { .. }), "{what}");
            assert_eq!(offset, 41);
        }
        let long_name = Raw::new(1, 0).u64(count.saturating_mul(1 << 20)).data(96);
        assert!(matches!(defect(&long_name), (24, Defect::OverLimit { limit: 4096, .. })));
    }
}

#[test]
fn counts_that_fit_the_file_are_bounded_too() {
    let (offset, what) = defect(&Raw::new(1_048_577, 0).data(24 * 1_048_577));
    assert_eq!(offset, 8);
    assert!(matches!(what, Defect::OverLimit { limit: 1_048_576, .. }), "{what}");
    let (offset, what) = defect(&Raw::new(0, 65_537).data(13 * 65_537));
    assert_eq!(offset, 16);
    assert!(matches!(what, Defect::OverLimit { limit: 65_536, .. }), "{what}");
}

#[test]
fn arrays_within_arrays_are_bounded() {
    let nested = |depth: u32| {
        let mut raw = Raw::new(0, 1).text("k").u32(9);
        for _ in 1..depth {
            raw = raw.u32(9).u64(1);
        }
        raw.u32(4).u64(2).u32(7).u32(8).data(0)
    };
    assert!(open(&nested(1)).is_ok());
    assert!(open(&nested(4)).is_ok());
    for depth in [5, 10_000] {
        let (_, what) = defect(&nested(depth));
        assert!(matches!(what, Defect::OverLimit { value: 5, limit: 4, .. }), "{what}");
    }
}

#[test]
fn hostile_tensors_are_refused() {
    let one = |shape: &[u64], kind, start| {
        defect(&Raw::new(1, 0).tensor("w", shape, kind, start).data(64)).1
    };
    let unknown = one(&[4], 999, 0);
    assert!(matches!(unknown, Defect::UnknownGgmlType { number: 999, .. }), "{unknown}");
    for removed in [4, 5, 31, 36] {
        assert!(matches!(one(&[4], removed, 0), Defect::UnknownGgmlType { .. }));
    }
    assert!(matches!(one(&[1; 5], 0, 0), Defect::OverLimit { value: 5, limit: 4, .. }));
    assert!(matches!(one(&[1 << 40, 1 << 40], 0, 0), Defect::ShapeOverflow { .. }));
    assert!(matches!(one(&[1 << 62], 0, 0), Defect::ShapeOverflow { .. }));
    assert!(matches!(one(&[1 << 60], 24, 0), Defect::OutOfRange { .. }));
    assert!(matches!(one(&[16], 0, 16), Defect::Misaligned { start: 16, alignment: 32, .. }));
    assert!(matches!(one(&[16], 0, 32), Defect::OutOfRange { .. }));
    assert!(matches!(one(&[16], 0, u64::MAX - 31), Defect::ShapeOverflow { .. }));
    assert!(matches!(one(&[31, 32], 2, 0), Defect::PartialBlock { block: 32, .. }));
    assert!(matches!(one(&[], 2, 0), Defect::PartialBlock { .. }));

    let two = |second: &str, start| {
        defect(&Raw::new(2, 0).tensor("a", &[16], 0, 0).tensor(second, &[8], 0, start).data(96)).1
    };
    assert!(matches!(two("b", 32), Defect::Overlap { .. }));
    assert!(matches!(two("b", 0), Defect::Overlap { .. }));
    assert!(matches!(two("a", 64), Defect::Duplicate { what: "tensor", .. }));
}

#[test]
fn a_scalar_has_one_element() {
    let model = open(&Raw::new(1, 0).tensor("scale", &[], 0, 0).data(4)).unwrap();
    assert_eq!((model.tensors()[0].shape.len(), model.tensors()[0].bytes()), (0, 4));
}

#[test]
fn the_alignment_is_a_power_of_two_within_bounds() {
    let aligned = |value| Raw::new(0, 1).text("general.alignment").u32(4).u32(value).0;
    for value in [0, 3, 24, (1 << 20) + 1, 1 << 21, 1 << 31] {
        let (_, what) = defect(&aligned(value));
        assert!(matches!(what, Defect::Alignment { .. }), "{value}: {what}");
    }
    for value in [1, 8, 4096, 1 << 20] {
        assert!(open(&aligned(value)).is_ok(), "{value}");
    }
    let text = Raw::new(0, 1).text("general.alignment").u32(8).text("32").0;
    assert!(matches!(defect(&text).1, Defect::Alignment { value: 0, .. }));
}

#[test]
fn hostile_metadata_is_refused() {
    let twice = Raw::new(0, 2).text("k").u32(7).0;
    let mut twice = Raw(twice);
    twice.0.push(1);
    let mut twice = twice.text("k").u32(7);
    twice.0.push(0);
    assert!(matches!(defect(&twice.0).1, Defect::Duplicate { what: "metadata key", .. }));

    let unknown = Raw::new(0, 1).text("k").u32(13).data(32);
    assert!(matches!(defect(&unknown).1, Defect::UnknownValueType { number: 13, .. }));
    let unknown = Raw::new(0, 1).text("k").u32(9).u32(77).u64(1).data(32);
    assert!(matches!(defect(&unknown).1, Defect::UnknownValueType { number: 77, .. }));

    let mut not_text = Raw::new(0, 1).u64(2);
    not_text.0.extend([0xff, 0xfe]);
    assert!(matches!(defect(&not_text.data(32)), (24, Defect::NotText { .. })));
}

#[test]
fn long_texts_are_passed_over() {
    let text = "t".repeat(600_000);
    let raw = Raw::new(1, 2).text("a").u32(8).text(&text).text("b").u32(4).u32(9);
    let model = open(&raw.tensor("w", &[1], 0, 0).data(4)).unwrap();
    assert_eq!(model.metadata().get("a"), None);
    assert_eq!(model.metadata().get("b"), Some("9"));
    assert!(model.metadata().is_incomplete());
    assert_eq!(model.tensors().len(), 1);
}

fn valid() -> (Vec<u8>, usize) {
    let raw = Raw::new(3, 3)
        .text("general.alignment")
        .u32(4)
        .u32(32)
        .text("tokens")
        .u32(9)
        .u32(8)
        .u64(2)
        .text("a")
        .text("bc")
        .text("nested")
        .u32(9)
        .u32(9)
        .u64(1)
        .u32(0)
        .u64(0)
        .tensor("token_embd.weight", &[4, 2], 0, 0)
        .tensor("blk.0.w", &[32], 8, 32)
        .tensor("blk.1.w", &[0, 3, 2], 1, 96);
    let header = raw.0.len();
    (raw.data(96), header)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_never_panic_nor_reach_outside(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 0..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let (mut bytes, header) = valid();
        for (index, value, small) in edits {
            bytes[index.index(header)] = if small { value % 16 } else { value };
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(model) = open(&bytes) {
            let mut end = 0;
            for tensor in model.tensors() {
                prop_assert!(tensor.range.start >= end && tensor.range.start <= tensor.range.end);
                prop_assert!(tensor.range.end <= bytes.len() as u64);
                end = tensor.range.end;
            }
        }
    }
}

#[test]
fn the_file_that_the_mutations_start_from_is_valid() {
    let model = open(&valid().0).unwrap();
    assert_eq!(model.tensors().len(), 3);
}
