use std::fs;

use super::super::ModelFiles;
use super::*;

#[test]
fn a_checkpoint_is_about_as_large_as_asked_and_has_llamas_layers() {
    let directory = tempfile::tempdir().unwrap();
    for (bytes, layers, dtype) in [
        (10_000_000, 4, Dtype::BF16),
        (3_000_000, 1, Dtype::F32),
        (1_000_000, 7, Dtype::F4),
        (2_000_000, 3, Dtype::F8_E8M0),
    ] {
        let path = directory.path().join(format!("{bytes}.safetensors"));
        Checkpoint { bytes, layers, dtype }.write(&path).unwrap();
        let model = ModelFiles::open(&path).unwrap();
        let seen = model.bytes();
        assert!(seen.abs_diff(bytes) * 100 < bytes, "{seen} for {bytes}");
        let groups = model.layers();
        assert_eq!(groups.len(), usize::try_from(layers).unwrap() + 2);
        assert_eq!(groups[0].name, "embeddings");
        assert_eq!(groups[1].name, "model.layers.0");
        assert_eq!(groups[1].tensors.len(), 9);
        assert_eq!(groups[1].ranges.len(), 1);
    }
}

#[test]
fn contents_are_reproducible_from_any_byte() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    // The embedding is larger than what is made at once.
    Checkpoint { bytes: 30_000_000, layers: 2, dtype: Dtype::BF16 }.write(&path).unwrap();
    let model = ModelFiles::open(&path).unwrap();
    assert!(model.tensors()[0].bytes() > 1 << 20);
    let file = fs::read(&path).unwrap();
    for tensor in model.tensors() {
        let start = usize::try_from(tensor.range.start).unwrap();
        let bytes = &file[start..start + usize::try_from(tensor.bytes()).unwrap()];
        let mut expected = vec![0; bytes.len()];
        Checkpoint::contents(&tensor.name, 0, &mut expected);
        assert!(bytes == expected, "{}", tensor.name);
        for offset in [1, 7, 8, 9, bytes.len() - 20] {
            let mut expected = [0; 20];
            Checkpoint::contents(&tensor.name, offset as u64, &mut expected);
            assert_eq!(bytes[offset..offset + 20], expected, "{} from {offset}", tensor.name);
        }
    }
}

#[test]
fn the_pattern_is_the_same_for_ever() {
    let mut bytes = [0; 12];
    pattern(0, 8, &mut bytes);
    // SplitMix64 of seed 0 begins with e220a8397b1dcdaf, 6e789e6aa1b965f4.
    assert_eq!(bytes, [0xaf, 0xcd, 0x1d, 0x7b, 0x39, 0xa8, 0x20, 0xe2, 0xf4, 0x65, 0xb9, 0xa1]);
    let mut inner = [0; 3];
    pattern(0, 10, &mut inner);
    assert_eq!(inner, [0x1d, 0x7b, 0x39]);
    let mut none = [];
    pattern(0, 3, &mut none);
    let mut one = [0; 1];
    pattern(0, 9, &mut one);
    assert_eq!(one, [0xcd]);
}

#[test]
fn no_file_is_overwritten_and_none_is_left_half_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    fs::write(&path, "precious").unwrap();
    let small = Checkpoint { bytes: 1000, layers: 1, dtype: Dtype::U8 };
    let error = small.write(&path).unwrap_err();
    assert!(matches!(error, ModelError::Io { action: "create it", .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"precious");

    let absent = directory.path().join("absent.safetensors");
    for impossible in [
        Checkpoint { dtype: Dtype::Q4_K, ..small },
        Checkpoint { layers: 10_001, ..small },
        Checkpoint { bytes: u64::MAX, dtype: Dtype::F4, ..small },
    ] {
        let error = impossible.write(&absent);
        assert!(error.is_err());
        assert!(!absent.exists());
    }
}

#[test]
fn the_default_is_512_mib() {
    let default = Checkpoint::default();
    let total: u64 = default
        .tensors()
        .iter()
        .map(|(_, shape)| Dtype::BF16.bytes(shape.iter().product()).unwrap())
        .sum();
    assert!(total.abs_diff(512 << 20) < 1 << 20, "{total}");
}
