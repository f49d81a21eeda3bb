use std::fs;
use std::path::PathBuf;

use ::safetensors::SafeTensors;
use proptest::prelude::*;
use tempfile::TempDir;

use super::super::{
    Checkpoint, ModelFiles, NewTensor, SafetensorsOptions, pattern, write_safetensors,
};
use super::*;

/// A scratch directory with `model.safetensors` of this header and so many zero bytes of data.
fn file(json: &str, data_bytes: usize) -> (TempDir, PathBuf) {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    raw_file(&bytes)
}

fn raw_file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn open(json: &str, data_bytes: usize) -> Result<ModelFiles, ModelError> {
    let (_directory, path) = file(json, data_bytes);
    ModelFiles::open(&path)
}

/// Where and what, of an error about a file's bytes.
fn defect(result: Result<ModelFiles, ModelError>) -> (u64, Defect) {
    match result {
        Err(ModelError::Malformed { path, offset, defect }) => {
            assert!(path.ends_with("model.safetensors"), "{path:?}");
            (offset, defect)
        }
        other => panic!("expected a malformed file, got {other:?}"),
    }
}

#[test]
fn a_plain_file_is_read() {
    let json = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},"a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}} "#;
    assert_eq!(json.len(), 143);
    let (_directory, path) = file(json, 12);
    let model = ModelFiles::open(&path).unwrap();
    assert_eq!(model.shards().len(), 1);
    let shard = &model.shards()[0];
    assert_eq!((shard.size, shard.data_offset, shard.data_length), (163, 151, 12));
    let seen: Vec<_> = model
        .tensors()
        .iter()
        .map(|t| (t.name.as_str(), t.dtype, t.shape.as_slice(), t.shard, t.range.clone()))
        .collect();
    assert_eq!(
        seen,
        [
            ("a", Dtype::BF16, [1, 2].as_slice(), 0, 151..155),
            ("b", Dtype::F32, [2].as_slice(), 0, 155..163),
        ]
    );
    assert_eq!(model.metadata().iter().collect::<Vec<_>>(), [("format", "pt")]);
    assert_eq!(model.find("b"), Some(1));
    assert_eq!(model.find("c"), None);
}

#[test]
fn files_without_tensors_are_models_without_tensors() {
    for json in ["{}", r#"{"__metadata__":{}}"#, r#"{"__metadata__":null}"#, "{}      "] {
        let model = open(json, 0).unwrap();
        assert_eq!(model.tensors(), []);
        assert_eq!(model.shards()[0].data_length, 0);
        assert!(model.layers().is_empty());
    }
    let model = open(r#"{"__metadata__":{"a":"b"}}"#, 0).unwrap();
    assert_eq!(model.metadata().get("a"), Some("b"));
}

#[test]
fn empty_tensors_may_be_first_last_or_alone() {
    let empty = |name, at| {
        format!(r#""{name}":{{"dtype":"F32","shape":[0,7],"data_offsets":[{at},{at}]}}"#)
    };
    let full = r#""full":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}"#;
    let only = open(&format!("{{{}}}", empty("only", 0)), 0).unwrap();
    assert_eq!(only.tensors().len(), 1);
    assert_eq!(only.tensors()[0].bytes(), 0);

    let json = format!("{{{},{},{full}}}", empty("last", 3), empty("first", 0));
    let model = open(&json, 3).unwrap();
    let names: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["first", "full", "last"]);
    assert_eq!(model.tensors()[2].range, model.shards()[0].size..model.shards()[0].size);

    let (_, beyond) = defect(open(&format!("{{{}}}", empty("beyond", 1)), 0));
    assert!(matches!(beyond, Defect::OutOfRange { .. }), "{beyond}");
}

#[test]
fn every_dtype_is_written_and_read_as_the_library_reads_it() {
    let directory = tempfile::tempdir().unwrap();
    for spaces in [None, Some(0), Some(1), Some(5)] {
        let path = directory.path().join(format!("{spaces:?}.safetensors"));
        let dtypes: Vec<Dtype> =
            Dtype::ALL.iter().copied().filter(|dtype| dtype.to_safetensors().is_some()).collect();
        assert_eq!(dtypes.len(), 22);
        let contents: Vec<Vec<u8>> = dtypes
            .iter()
            .map(|dtype| {
                let mut bytes = vec![0; usize::try_from(dtype.bytes(36).unwrap()).unwrap()];
                pattern(7, 3, &mut bytes);
                bytes
            })
            .collect();
        let tensors: Vec<NewTensor<'_>> = dtypes
            .iter()
            .zip(&contents)
            .map(|(dtype, bytes)| NewTensor {
                name: dtype.name(),
                dtype: *dtype,
                shape: &[9, 4],
                bytes,
            })
            .collect();
        let options = SafetensorsOptions { metadata: Some(vec![]), header_spaces: spaces };
        write_safetensors(&path, &tensors, &options).unwrap();

        let model = ModelFiles::open(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        let theirs = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(model.tensors().len(), 22);
        for tensor in model.tensors() {
            let view = theirs.tensor(&tensor.name).unwrap();
            assert_eq!(Some(view.dtype()), tensor.dtype.to_safetensors());
            assert_eq!(view.shape(), [9, 4]);
            assert_eq!(tensor.shape, [9, 4]);
            let range = usize::try_from(tensor.range.start).unwrap()
                ..usize::try_from(tensor.range.end).unwrap();
            assert_eq!(&bytes[range], view.data(), "{}", tensor.name);
        }
    }
}

#[test]
fn a_packed_dtype_must_fill_its_bytes() {
    let json = r#"{"p":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#;
    let (offset, what) = defect(open(json, 2));
    assert_eq!(offset, 61);
    assert!(matches!(what, Defect::PartialBlock { dtype: "F4", block: 2, .. }), "{what}");
}

#[test]
fn an_unknown_dtype_is_named() {
    let json = r#"{"w":{"dtype":"F128","shape":[1],"data_offsets":[0,16]}}"#;
    let (_, what) = defect(open(json, 16));
    assert_eq!(
        what.to_string(),
        r#"tensor "w" has dtype "F128", which safetensors 0.8 does not know; convert it"#
    );
}

#[test]
fn every_cut_of_the_header_and_every_4_kib_is_an_error_with_the_place() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    Checkpoint { bytes: 300_000, layers: 3, dtype: Dtype::BF16 }.write(&path).unwrap();
    let model = ModelFiles::open(&path).unwrap();
    let (size, data_offset) = (model.shards()[0].size, model.shards()[0].data_offset);
    assert!(size > 200_000 && data_offset > 1000, "{size} {data_offset}");
    let copy = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let whole = (0..size).rev();
    for length in whole.filter(|at| *at <= data_offset || at % 4096 == 0 || size - at <= 9) {
        copy.set_len(length).unwrap();
        let error = ModelFiles::open(&path).unwrap_err();
        assert_eq!(error.path(), path);
        let (offset, what) = defect(Err(error));
        if length < 8 {
            assert_eq!(offset, 0);
            let Defect::Truncated { needed: 8, available, .. } = what else { panic!("{what}") };
            assert_eq!(available, length);
        } else if length < data_offset {
            assert_eq!(offset, 8);
            let Defect::Truncated { needed, available, .. } = what else { panic!("{what}") };
            assert_eq!((needed, available), (data_offset - 8, length - 8));
        } else {
            let Defect::OutOfRange { end, size, .. } = what else { panic!("{length}: {what}") };
            assert_eq!(size, length);
            assert!(offset <= length && end > length, "{offset} {end} {length}");
        }
    }
}

#[test]
fn a_git_lfs_pointer_says_what_to_run() {
    let text = "version https://git-lfs.github.com/spec/v1\n\
        oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    let (_directory, path) = raw_file(text.as_bytes());
    let error = ModelFiles::open(&path).unwrap_err();
    assert!(matches!(error, ModelError::LfsPointer { .. }), "{error}");
    assert!(error.to_string().contains("git lfs pull"), "{error}");
}

#[test]
fn hostile_header_lengths_are_refused_before_anything_is_allocated() {
    for length in [100_000_001, 1 << 40, 1 << 60, u64::MAX] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        let (_directory, path) = raw_file(&bytes);
        let (offset, what) = defect(ModelFiles::open(&path));
        assert_eq!(offset, 0);
        let Defect::OverLimit { value, limit: 100_000_000, .. } = what else { panic!("{what}") };
        assert_eq!(value, length);
    }
    let mut bytes = 100_000_000u64.to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{}");
    let (_directory, path) = raw_file(&bytes);
    let (8, Defect::Truncated { needed: 100_000_000, available: 2, .. }) =
        defect(ModelFiles::open(&path))
    else {
        panic!("expected a truncated header")
    };
}

#[test]
fn hostile_layouts_are_refused() {
    let one = |shape: &str, offsets: &str| {
        format!(r#"{{"w":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    let seen = |json: &str, bytes| defect(open(json, bytes)).1;
    let big = u64::MAX;
    type Expected = fn(&Defect) -> bool;
    let cases: [(String, usize, Expected); 14] = [
        (one("[4]", "[4,0]"), 4, |d| matches!(d, Defect::Reversed { .. })),
        (one("[4]", "[0,5]"), 4, |d| matches!(d, Defect::OutOfRange { .. })),
        (one("[4]", "[0,3]"), 3, |d| {
            matches!(d, Defect::SizeMismatch { stated: 3, computed: 4, .. })
        }),
        (one("[4]", "[0,4]"), 5, |d| matches!(d, Defect::TrailingBytes { bytes: 1 })),
        (one("[4]", "[1,5]"), 5, |d| matches!(d, Defect::Hole { bytes: 1, .. })),
        (one("[1099511627776,1099511627776]", "[0,4]"), 4, |d| {
            matches!(d, Defect::ShapeOverflow { .. })
        }),
        (one("[1152921504606846976]", "[0,1152921504606846976]"), 4, |d| {
            matches!(d, Defect::OutOfRange { size: 65..200, .. })
        }),
        (one("[4]", &format!("[{big},{big}]")), 4, |d| matches!(d, Defect::OutOfRange { .. })),
        (one("[0]", &format!("[{big},0]")), 4, |d| matches!(d, Defect::Reversed { .. })),
        (two("[0,4]", "[0,4]"), 4, |d| matches!(d, Defect::Overlap { .. })),
        (two("[0,4]", "[3,7]"), 8, |d| matches!(d, Defect::Overlap { .. })),
        (two("[0,4]", "[5,9]"), 9, |d| matches!(d, Defect::Hole { bytes: 1, .. })),
        (one("[-1]", "[0,1]"), 1, |d| matches!(d, Defect::Json(_))),
        (one("[1.5]", "[0,1]"), 1, |d| matches!(d, Defect::Json(_))),
    ];
    for (json, bytes, expected) in cases {
        let what = seen(&json, bytes);
        assert!(expected(&what), "{json}: {what}");
    }
}

#[test]
fn names_are_there_once() {
    let entry = r#""w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let (_, what) = defect(open(&format!("{{{entry},{entry}}}"), 4));
    let Defect::Duplicate { what: "tensor", name } = what else { panic!("{what}") };
    assert_eq!(name, "w");
    let (_, what) = defect(open(r#"{"__metadata__":{},"__metadata__":{}}"#, 0));
    assert!(matches!(what, Defect::Duplicate { what: "key", .. }), "{what}");
    let json = r#"{"w":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    assert!(matches!(defect(open(json, 4)).1, Defect::Json(_)));
}

#[test]
fn hostile_json_is_an_error_with_the_place() {
    let (offset, what) = defect(open("{\"a\":\n  7}", 0));
    assert!(matches!(what, Defect::Json(_)), "{what}");
    assert_eq!(offset, 8 + 8);

    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    assert!(matches!(defect(open(&deep, 0)).1, Defect::Json(_)));
    let ignored = format!(r#"{{"a":{{"x":{}"#, "[".repeat(1_000_000));
    assert!(matches!(defect(open(&ignored, 0)).1, Defect::Json(_)));
    let objects = r#"{"a":"#.repeat(100_000);
    assert!(matches!(defect(open(&objects, 0)).1, Defect::Json(_)));

    let many = format!(
        r#"{{"a":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,1]}}}}"#,
        "1,".repeat(1_000_000)
    );
    let (_, what) = defect(open(&many, 1));
    assert!(what.to_string().contains("at most 32 dimensions"), "{what}");

    let long =
        format!(r#"{{"{}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#, "n".repeat(4097));
    let (_, what) = defect(open(&long, 1));
    assert!(matches!(what, Defect::OverLimit { value: 4097, limit: 4096, .. }), "{what}");

    for text in ["", " {}", "[]", "\u{feff}{}", "null"] {
        let (offset, what) = defect(open(text, 0));
        assert!(matches!(what, Defect::NotAnObject), "{text:?}: {what}");
        assert_eq!(offset, 8);
    }
    for text in ["{", "{}{}", "{} x", r#"{"a":null}"#, "{\"\u{0}"] {
        assert!(matches!(defect(open(text, 0)).1, Defect::Json(_)), "{text:?}");
    }
    let mut bytes = 4u64.to_le_bytes().to_vec();
    bytes.extend_from_slice(b"{\"\xff\"");
    let (_directory, path) = raw_file(&bytes);
    assert!(matches!(defect(ModelFiles::open(&path)).1, Defect::Json(_)));
}

#[test]
fn metadata_beyond_the_bound_is_left_out_and_said_so() {
    let text = "x".repeat(700_000);
    let json = format!(r#"{{"__metadata__":{{"a":"{text}","b":"{text}","c":"d"}}}}"#);
    let model = open(&json, 0).unwrap();
    assert_eq!(model.metadata().get("a").map(str::len), Some(700_000));
    assert_eq!(model.metadata().get("b"), None);
    assert_eq!(model.metadata().get("c"), Some("d"));
    assert!(model.metadata().is_incomplete());
}

/// A valid file of a few tensors.
fn valid() -> Vec<u8> {
    let json = r#"{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"e":{"dtype":"I8","shape":[0],"data_offsets":[24,24]},"p":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[24,27]}}"#;
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(bytes.len() + 27, 1);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_never_panic_nor_reach_outside(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 0..3),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = valid();
        let places: Vec<usize> =
            (8..bytes.len()).filter(|at| bytes[*at].is_ascii_digit()).collect();
        for (index, digit) in digits {
            bytes[places[index.index(places.len())]] = digit;
        }
        // Half of the time only digits change, so that more headers parse and their layouts are tested.
        if edits.len() > 2 {
            for (index, value) in edits {
                let at = index.index(bytes.len());
                bytes[at] = value;
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let (_directory, path) = raw_file(&bytes);
        let size = bytes.len() as u64;
        if let Ok(model) = ModelFiles::open(&path) {
            SafeTensors::deserialize(&bytes).expect("what is read here, the library reads too");
            for tensor in model.tensors() {
                prop_assert!(tensor.range.start <= tensor.range.end && tensor.range.end <= size);
            }
        }
    }
}
