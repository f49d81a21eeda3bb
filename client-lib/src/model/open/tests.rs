use std::fs;
use std::path::PathBuf;

use lapis_proto::ids::AllocationId;
use lapis_proto::kind::Kind;
use lapis_proto::message::{Allocated, Done, OpenFile, Prefetch};
use tempfile::TempDir;

use super::*;
use crate::model::{
    Checkpoint, Dtype, GgufValue, NewTensor, SafetensorsOptions, pattern, write_gguf,
    write_safetensors,
};
use crate::testing::{Daemon, PAGE, scripted};

const NO_WAIT: Duration = Duration::ZERO;

/// A checkpoint of about 1 MB: 16 pages of 64 KiB.
fn checkpoint() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    Checkpoint { bytes: 1_000_000, layers: 4, dtype: Dtype::BF16 }.write(&path).unwrap();
    (directory, path)
}

#[test]
fn every_layer_is_streamed_through_a_tier_smaller_than_the_model() {
    let daemon = Daemon::start(6, "layers");
    let (_directory, path) = checkpoint();
    let model = daemon.client.open_model(&path).unwrap();
    assert_eq!(model.layers().len(), 6);
    assert!(u64::from(model.allocation(0).unwrap().pages()) > 12);
    assert_eq!(model.allocation(0).unwrap().size(), model.files().shards()[0].data_length);
    let mut addresses = vec![None; model.tensors().len()];
    for _ in 0..2 {
        let mut seen = 0;
        for (index, layer) in model.layers().iter().enumerate() {
            let mapping = model.map_layer(index, NO_WAIT).unwrap();
            for tensor in &layer.tensors {
                let bytes = mapping.tensor(*tensor).unwrap();
                let name = &model.tensors()[*tensor].name;
                let mut whole = vec![0; bytes.len()];
                Checkpoint::contents(name, 0, &mut whole);
                assert_eq!(bytes.len() as u64, model.tensors()[*tensor].bytes());
                assert!(bytes == whole, "{name}");
                let address = mapping.tensor_ptr(*tensor).unwrap().addr();
                assert_eq!(*addresses[*tensor].get_or_insert(address), address);
                seen += 1;
            }
            assert_eq!(mapping.tensor(model.tensors().len()), None);
            mapping.unmap().unwrap();
        }
        assert_eq!(seen, 39);
    }
    drop(model);
    let seen = daemon.finish();
    assert_eq!((seen.maps.len(), seen.unmapped, seen.freed), (12, 12, 1));
}

#[test]
fn parts_pass_a_tier_smaller_than_a_tensor() {
    let daemon = Daemon::start(2, "parts");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let mut bytes = vec![0; 400_000];
    pattern(5, 0, &mut bytes);
    let tensors = [
        NewTensor { name: "layers.0.a", dtype: Dtype::U8, shape: &[400_000], bytes: &bytes },
        NewTensor { name: "layers.0.b", dtype: Dtype::F4, shape: &[0], bytes: &[] },
    ];
    // Data from an odd byte on.
    let options = SafetensorsOptions { header_spaces: Some(2), ..SafetensorsOptions::default() };
    write_safetensors(&path, &tensors, &options).unwrap();
    let model = daemon.client.open_model(&path).unwrap();
    assert_eq!(model.files().shards()[0].data_offset % 2, 1);
    let grid = model.files().page_grid(PAGE);
    let parts = model.layers()[0].parts_of_pages(2, &grid);
    assert_eq!(parts.len(), 4);
    let mut whole = Vec::new();
    for part in &parts {
        let mapping = model.map_part(part, NO_WAIT).unwrap();
        for (slice, bytes) in mapping.iter() {
            assert_eq!(slice.tensor, 0);
            assert_eq!(slice.inside.start, whole.len() as u64);
            whole.extend_from_slice(bytes);
        }
        assert_eq!(mapping.tensor(1), None);
        assert!(mapping.stats().pages <= 2);
    }
    assert!(whole == bytes);
    let refused = model.map_layer(0, NO_WAIT).unwrap_err();
    assert!(matches!(refused, Error::Refused(_)), "{refused}");
    drop(model);
    daemon.finish();
}

#[test]
fn a_layer_spread_over_shards_is_one_mapping() {
    let daemon = Daemon::start(4, "shards");
    let directory = tempfile::tempdir().unwrap();
    let shard = |name: &str, tensors: &[NewTensor<'_>]| {
        let options = SafetensorsOptions::default();
        write_safetensors(&directory.path().join(name), tensors, &options).unwrap();
    };
    let tensor = |name, bytes| NewTensor { name, dtype: Dtype::U8, shape: &[5], bytes };
    shard("1.safetensors", &[tensor("h.0.a", b"first"), tensor("h.1.a", b"other")]);
    shard("2.safetensors", &[tensor("h.0.b", b"again")]);
    let empty = NewTensor { name: "h.0.c", dtype: Dtype::F32, shape: &[3, 0], bytes: &[] };
    shard("3.safetensors", &[empty]);
    let index = directory.path().join("model.safetensors.index.json");
    let map = r#"{"weight_map":{"h.0.a":"1.safetensors","h.1.a":"1.safetensors",
        "h.0.b":"2.safetensors","h.0.c":"3.safetensors"}}"#;
    fs::write(&index, map).unwrap();

    let model = daemon.client.open_model(directory.path()).unwrap();
    assert!(model.allocation(2).is_none());
    model.prefetch_layer(0).unwrap();
    let mapping = model.map_layer(0, NO_WAIT).unwrap();
    let bytes: Vec<&[u8]> = mapping.iter().map(|(_, bytes)| bytes).collect();
    assert_eq!(bytes, [b"first", b"again"]);
    let (one, two) = (model.map_tensor("h.1.a", NO_WAIT), model.map_tensor("h.0.c", NO_WAIT));
    assert_eq!(one.unwrap().tensor(1), Some(b"other".as_slice()));
    assert_eq!(two.unwrap().iter().count(), 0);
    drop((mapping, model));
    let seen = daemon.finish();
    assert_eq!((seen.maps.len(), seen.freed), (2, 2));
    assert_eq!(seen.maps[0].ranges.len(), 2);
}

#[test]
fn a_gguf_tensor_is_mapped_by_name() {
    let daemon = Daemon::start(4, "gguf");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let (a, b) = ([1; 34], [2; 12]);
    let tensors = [
        NewTensor { name: "blk.0.a", dtype: Dtype::Q8_0, shape: &[1, 32], bytes: &a },
        NewTensor { name: "blk.0.b", dtype: Dtype::F32, shape: &[3], bytes: &b },
    ];
    let entries = [("general.name", GgufValue::Text("small".to_owned()))];
    write_gguf(&path, 3, &entries, &tensors).unwrap();
    let model = daemon.client.open_model(&path).unwrap();
    let mapping = model.map_tensor("blk.0.b", NO_WAIT).unwrap();
    assert_eq!(mapping.tensor(1), Some(b.as_slice()));
    assert_eq!(mapping.tensor(0), None);
    drop((mapping, model));
    daemon.finish();
}

#[test]
fn a_file_that_changed_since_its_header_was_read_is_not_opened() {
    let daemon = Daemon::start(4, "changed");
    let (_directory, path) = checkpoint();
    let files = ModelFiles::open(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    let error = daemon.client.open_model_files(files).unwrap_err();
    assert!(matches!(error, Error::Model(ModelError::Changed { .. })), "{error}");
    assert!(!error.is_retryable());
    assert_eq!(daemon.finish().freed, 0);
}

#[test]
fn what_the_model_does_not_have_is_an_error() {
    let daemon = Daemon::start(4, "absent");
    let (_directory, path) = checkpoint();
    let model = daemon.client.open_model(&path).unwrap();
    let absent = |result: Result<LayerMapping, Error>| match result {
        Err(Error::Model(ModelError::Absent { what, name, .. })) => format!("{what} {name}"),
        other => panic!("expected nothing, got {other:?}"),
    };
    assert_eq!(absent(model.map_layer(6, NO_WAIT)), "layer 6");
    assert_eq!(absent(model.map_tensor("nothing", NO_WAIT)), "tensor nothing");
    assert!(model.prefetch_layer(6).is_err());
    let slice = |shard, range: Range<u64>| TensorSlice { tensor: 0, inside: 0..1, shard, range };
    let part = |slice: TensorSlice| Part { slices: vec![slice], ranges: vec![] };
    assert_eq!(absent(model.map_part(&part(slice(1, 5..6)), NO_WAIT)), "shard with these bytes 1");
    assert_eq!(absent(model.map_part(&part(slice(0, 5..6)), NO_WAIT)), "shard with these bytes 0");
    let beyond = model.map_part(&part(slice(0, 1 << 40..1 << 41)), NO_WAIT).unwrap_err();
    assert!(matches!(beyond, Error::OutOfRange { .. }), "{beyond}");
    let error = daemon.client.open_model("/nowhere/at/all").unwrap_err();
    assert!(matches!(error, Error::Model(ModelError::Io { .. })), "{error}");
    drop(model);
    assert!(daemon.finish().maps.is_empty());
}

#[test]
fn layers_are_prefetched_by_the_pages_they_touch() {
    let (client, daemon) = scripted(4, |mut peer, _events| {
        let mut prefetched = Vec::new();
        while let Some(received) = peer.receive() {
            match received.kind {
                Kind::OpenFile => {
                    let OpenFile { length, .. } = received.decode();
                    let pages = u32::try_from(length.div_ceil(PAGE)).unwrap();
                    let allocated = Allocated { allocation: AllocationId(1), pages };
                    peer.reply(received.request, &allocated);
                }
                Kind::Prefetch => {
                    let ranges = received.decode::<Prefetch>().ranges;
                    prefetched.extend(ranges.iter().map(|range| (range.first, range.count)));
                    peer.reply(received.request, &Done {});
                }
                _ => peer.reply(received.request, &Done {}),
            }
        }
        prefetched
    });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let bytes = [0; 100_000];
    let tensor = |name| NewTensor { name, dtype: Dtype::U8, shape: &[100_000], bytes: &bytes };
    let tensors = [tensor("h.0.a"), tensor("h.1.a"), tensor("h.0.b")];
    write_safetensors(&path, &tensors, &SafetensorsOptions::default()).unwrap();
    let model = client.open_model(&path).unwrap();
    model.prefetch_layer(0).unwrap();
    model.prefetch_layer(1).unwrap();
    model.prefetch_part(&model.layers()[0].parts(100_000)[1]).unwrap();
    drop((model, client));
    // Bytes 0..100000 and 200000..300000, then 100000..200000, then 200000..300000, in pages of 65536.
    assert_eq!(daemon.join().unwrap(), [(0, 2), (3, 2), (1, 3), (3, 2)]);
}
