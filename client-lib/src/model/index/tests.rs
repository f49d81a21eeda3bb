use std::fs;
use std::path::Path;

use super::super::{Dtype, ModelFiles, NewTensor, SafetensorsOptions, write_safetensors};
use super::*;

fn shard(directory: &Path, name: &str, tensors: &[&str]) {
    let tensors: Vec<NewTensor<'_>> = tensors
        .iter()
        .map(|name| NewTensor { name, dtype: Dtype::U8, shape: &[4], bytes: b"abcd" })
        .collect();
    write_safetensors(&directory.join(name), &tensors, &SafetensorsOptions::default()).unwrap();
}

fn index(directory: &Path, weight_map: &str) -> std::path::PathBuf {
    let path = directory.join("model.safetensors.index.json");
    fs::write(&path, format!(r#"{{"metadata":{{"total_size":16}},"weight_map":{weight_map}}}"#))
        .unwrap();
    path
}

#[test]
fn a_layer_may_be_spread_over_shards() {
    let directory = tempfile::tempdir().unwrap();
    let one = ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.1.a"];
    shard(directory.path(), "model-1.safetensors", &one);
    shard(directory.path(), "model-2.safetensors", &["model.layers.1.b", "extra"]);
    let path = index(
        directory.path(),
        r#"{"model.layers.1.b":"model-2.safetensors","model.layers.1.a":"model-1.safetensors",
            "model.layers.0.a":"model-1.safetensors",
            "model.embed_tokens.weight":"model-1.safetensors"}"#,
    );
    for opened in [path.as_path(), directory.path()] {
        let model = ModelFiles::open(opened).unwrap();
        assert_eq!(model.shards().len(), 2);
        let names: Vec<(&str, usize)> =
            model.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.shard)).collect();
        // "extra" is not in the index.
        assert_eq!(names, [(one[0], 0), (one[1], 0), (one[2], 0), ("model.layers.1.b", 1)]);
        let layers = model.layers();
        let seen: Vec<(&str, usize)> =
            layers.iter().map(|layer| (layer.name.as_str(), layer.ranges.len())).collect();
        assert_eq!(seen, [("embeddings", 1), ("model.layers.0", 1), ("model.layers.1", 2)]);
        assert_eq!(layers[2].ranges[0].0, 0);
        assert_eq!(layers[2].ranges[1].0, 1);
        assert_eq!(layers[2].bytes(), 8);
    }
}

#[test]
fn a_missing_shard_is_named() {
    let directory = tempfile::tempdir().unwrap();
    shard(directory.path(), "one.safetensors", &["a"]);
    let path = index(directory.path(), r#"{"a":"one.safetensors","b":"two.safetensors"}"#);
    let error = ModelFiles::open(&path).unwrap_err();
    let ModelError::ShardMissing { index, shard } = &error else { panic!("{error}") };
    assert_eq!(*index, path);
    assert_eq!(*shard, directory.path().join("two.safetensors"));
}

#[test]
fn a_tensor_that_its_shard_lacks_is_named() {
    let directory = tempfile::tempdir().unwrap();
    shard(directory.path(), "one.safetensors", &["a", "c"]);
    let path = index(directory.path(), r#"{"a":"one.safetensors","b":"one.safetensors"}"#);
    let error = ModelFiles::open(&path).unwrap_err();
    let ModelError::Malformed { defect: Defect::TensorMissing { tensor, shard }, .. } = error
    else {
        panic!("{error}")
    };
    assert_eq!((tensor.as_str(), shard.as_str()), ("b", "one.safetensors"));
}

#[test]
fn shards_outside_the_directory_are_refused() {
    let long = "s".repeat(5000);
    let names =
        ["../one.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\\\\b", "a\\u0000", &long];
    for name in names {
        let directory = tempfile::tempdir().unwrap();
        let path = index(directory.path(), &format!(r#"{{"a":"{name}"}}"#));
        let error = ModelFiles::open(&path).unwrap_err();
        let shard_name =
            matches!(error, ModelError::Malformed { defect: Defect::ShardName { .. }, .. });
        assert!(shard_name, "{name}: {error}");
    }
}

#[test]
fn a_pointer_in_place_of_a_shard_says_what_to_run() {
    let directory = tempfile::tempdir().unwrap();
    let shard = directory.path().join("one.safetensors");
    fs::write(&shard, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        .unwrap();
    let path = index(directory.path(), r#"{"a":"one.safetensors"}"#);
    let error = ModelFiles::open(&path).unwrap_err();
    assert!(matches!(error, ModelError::LfsPointer { .. }), "{error}");
    assert_eq!(error.path(), shard);
}

#[test]
fn a_broken_index_is_an_error_with_the_place() {
    let directory = tempfile::tempdir().unwrap();
    let cases = [
        ("{\n\"weight_map\": 7}", 16),
        (r#"{"weight_map":{"a":"x","a":"y"}}"#, 30),
        (r#"{"metadata":{}}"#, 14),
        (r#"{"weight_map":{"a":["x"]}}"#, 18),
        ("", 0),
    ];
    for (text, place) in cases {
        let path = directory.path().join("model.safetensors.index.json");
        fs::write(&path, text).unwrap();
        let error = ModelFiles::open(&path).unwrap_err();
        let json = matches!(error, ModelError::Malformed { defect: Defect::Json(_), .. });
        assert!(json, "{text}: {error}");
        assert_eq!(error.offset(), Some(place), "{text}: {error}");
    }
}

#[test]
fn directories_are_searched_for_one_model() {
    let directory = tempfile::tempdir().unwrap();
    let error = ModelFiles::open(directory.path()).unwrap_err();
    assert!(matches!(error, ModelError::NoModel { .. }), "{error}");

    shard(directory.path(), "b.safetensors", &["b"]);
    let model = ModelFiles::open(directory.path()).unwrap();
    assert_eq!(model.tensors()[0].name, "b");

    shard(directory.path(), "a.safetensors", &["a"]);
    let error = ModelFiles::open(directory.path()).unwrap_err();
    let ModelError::Ambiguous { first, second, .. } = &error else { panic!("{error}") };
    assert_eq!(
        (first.as_path(), second.as_path()),
        (Path::new("a.safetensors"), Path::new("b.safetensors"))
    );

    shard(directory.path(), "model.safetensors", &["m"]);
    let model = ModelFiles::open(directory.path()).unwrap();
    assert_eq!(model.tensors()[0].name, "m");
}

#[test]
fn what_is_no_model_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notes");
    fs::write(&path, "plain text, long enough").unwrap();
    let error = ModelFiles::open(&path).unwrap_err();
    assert!(matches!(error, ModelError::UnknownFormat { .. }), "{error}");

    let fifo = directory.path().join("fifo.safetensors");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
    let error = ModelFiles::open(&fifo).unwrap_err();
    assert!(matches!(error, ModelError::NotAFile { .. }), "{error}");

    let error = ModelFiles::open(&directory.path().join("absent")).unwrap_err();
    assert!(matches!(error, ModelError::Io { action: "open it", .. }), "{error}");
    assert_eq!(error.offset(), None);
}

#[test]
fn content_decides_and_not_the_name() {
    let directory = tempfile::tempdir().unwrap();
    shard(directory.path(), "hash", &["a"]);
    assert_eq!(ModelFiles::open(&directory.path().join("hash")).unwrap().tensors().len(), 1);
    fs::write(directory.path().join("list"), r#"{"weight_map":{"a":"hash"}}"#).unwrap();
    assert_eq!(ModelFiles::open(&directory.path().join("list")).unwrap().tensors().len(), 1);
}
