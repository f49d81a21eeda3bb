use std::fs::File;

use proptest::prelude::*;

use super::super::{Dtype, FileIdentity, Format, Metadata, Shard};
use super::*;

/// A model of tensors that follow one another in one shard whose data start at 11416.
fn model(tensors: &[(&str, u64)]) -> ModelFiles {
    let mut at = 11_416;
    let tensors: Vec<Tensor> = tensors
        .iter()
        .map(|(name, bytes)| {
            let range = at..at + bytes;
            at = range.end;
            Tensor {
                name: (*name).to_owned(),
                dtype: Dtype::U8,
                shape: vec![*bytes],
                shard: 0,
                range,
            }
        })
        .collect();
    let metadata = File::open("/").unwrap().metadata().unwrap();
    let shard = Shard {
        path: "/model".into(),
        size: at,
        data_offset: 11_416,
        data_length: at - 11_416,
        identity: FileIdentity::of(&metadata),
    };
    ModelFiles {
        format: Format::Safetensors,
        shards: vec![shard],
        tensors,
        metadata: Metadata::default(),
    }
}

fn grouped<'a>(names: &[&'a str]) -> Vec<(String, Vec<&'a str>)> {
    let tensors: Vec<(&str, u64)> = names.iter().map(|name| (*name, 4)).collect();
    let layers = model(&tensors).layers();
    layers
        .into_iter()
        .map(|layer| (layer.name, layer.tensors.into_iter().map(|index| names[index]).collect()))
        .collect()
}

fn order(names: &[&str]) -> Vec<String> {
    grouped(names).into_iter().map(|(name, _)| name).collect()
}

#[test]
fn llama_is_embeddings_layers_and_head() {
    let names = [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.weight",
        "model.layers.10.mlp.weight",
        "model.layers.2.self_attn.weight",
        "model.layers.2.mlp.experts.7.weight",
        "model.norm.weight",
    ];
    let expected = [
        ("embeddings", vec!["model.embed_tokens.weight"]),
        ("model.layers.0", vec!["model.layers.0.mlp.weight"]),
        (
            "model.layers.2",
            vec!["model.layers.2.self_attn.weight", "model.layers.2.mlp.experts.7.weight"],
        ),
        ("model.layers.10", vec!["model.layers.10.mlp.weight"]),
        ("head", vec!["lm_head.weight", "model.norm.weight"]),
    ];
    let expected: Vec<(String, Vec<&str>)> =
        expected.into_iter().map(|(name, tensors)| (name.to_owned(), tensors)).collect();
    assert_eq!(grouped(&names), expected);
}

#[test]
fn stacks_of_many_families_are_found() {
    assert_eq!(
        order(&[
            "embeddings.word_embeddings.weight",
            "encoder.layer.0.a",
            "encoder.layer.1.a",
            "pooler.dense.bias"
        ]),
        ["embeddings", "encoder.layer.0", "encoder.layer.1", "head"]
    );
    assert_eq!(
        order(&["wte.weight", "wpe.weight", "h.0.a", "h.1.a", "ln_f.bias"]),
        ["embeddings", "h.0", "h.1", "head"]
    );
    assert_eq!(
        order(&["transformer.h.0.a", "transformer.wte.weight"]),
        ["embeddings", "transformer.h.0"]
    );
    assert_eq!(
        order(&["output.weight", "output_norm.weight", "token_embd.weight", "blk.1.a", "blk.0.a"]),
        ["embeddings", "blk.0", "blk.1", "head"]
    );
    assert_eq!(order(&["layers.0.a"]), ["layers.0"]);
    // A number that is there once, under no known word, makes no stack.
    assert_eq!(
        order(&["stem.0.weight", "stages.0.conv.0.a", "stages.1.conv.0.a"]),
        ["stages.0", "stages.1", "head"]
    );
    assert_eq!(
        order(&["model.0.layers.3.a", "model.0.layers.4.a"]),
        ["model.0.layers.3", "model.0.layers.4"]
    );
    assert_eq!(order(&["0.weight", "2.weight"]), ["0", "2"]);
    assert_eq!(
        order(&["gpt_neox.embed_in.weight", "gpt_neox.layers.0.a", "embed_out.weight"]),
        ["embeddings", "gpt_neox.layers.0", "head"]
    );
    assert_eq!(order(&["conv1.weight", "final.bias"]), ["head"]);
}

#[test]
fn stacks_follow_one_another_as_executed() {
    assert_eq!(
        order(&["decoder.block.0.a", "encoder.block.1.a", "encoder.block.0.a", "shared.weight"]),
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "head"]
    );
    assert_eq!(
        order(&["language_model.layers.0.a", "vision_tower.blocks.0.a", "v.blk.1.a"]),
        ["v.blk.1", "vision_tower.blocks.0", "language_model.layers.0"]
    );
}

#[test]
fn ranges_of_different_shards_never_merge() {
    let mut model = model(&[("h.0.a", 10), ("h.0.b", 5)]);
    model.shards.push(model.shards[0].clone());
    model.tensors[1].shard = 1;
    let layer = &model.layers()[0];
    assert_eq!(layer.ranges, [(0, 11_416..11_426), (1, 11_426..11_431)]);
    assert_eq!(layer.parts(4096)[0].ranges, layer.ranges);
    let grid = model.page_grid(4096);
    assert_eq!(grid.count(&layer.ranges), 2);
    assert_eq!(layer.parts_of_pages(1, &grid).len(), 2);
}

#[test]
fn ranges_merge_only_where_they_touch() {
    let model = model(&[
        ("layers.0.a", 10),
        ("layers.0.b", 5),
        ("layers.1.a", 7),
        ("layers.0.c", 3),
        ("layers.0.z", 0),
    ]);
    let layers = model.layers();
    assert_eq!(layers[0].tensors, [0, 1, 3, 4]);
    assert_eq!(layers[0].ranges, [(0, 11_416..11_431), (0, 11_438..11_441)]);
    assert_eq!(layers[0].bytes(), 18);
    assert_eq!(layers[1].ranges, [(0, 11_431..11_438)]);
}

/// Each part as its slices: tensor and sub-range.
fn shape(parts: &[Part]) -> Vec<Vec<(usize, Range<u64>)>> {
    parts
        .iter()
        .map(|part| part.slices.iter().map(|s| (s.tensor, s.inside.clone())).collect())
        .collect()
}

#[test]
fn parts_cut_only_tensors_larger_than_the_budget() {
    let model =
        model(&[("h.0.a", 3000), ("h.0.b", 2000), ("h.0.c", 8193), ("h.0.z", 0), ("h.0.d", 4096)]);
    let layer = &model.layers()[0];
    let parts = layer.parts(4096);
    assert_eq!(
        shape(&parts),
        [
            vec![(0, 0..3000)],
            vec![(1, 0..2000)],
            vec![(2, 0..4096)],
            vec![(2, 4096..8192)],
            vec![(2, 8192..8193), (3, 0..0)],
            vec![(4, 0..4096)],
        ]
    );
    assert_eq!(parts[3].ranges, [(0, 11_416 + 5000 + 4096..11_416 + 5000 + 8192)]);
    assert_eq!(layer.parts(0), parts);
    assert_eq!(shape(&layer.parts(1 << 20)).len(), 1);
    assert_eq!(layer.parts(1 << 20)[0].ranges, layer.ranges);
}

#[test]
fn parts_of_pages_touch_no_more_pages_and_cut_where_pages_meet() {
    // Pages of 1000: a is in 0..3, b in 2..4, c in 3..7, d in 6..7.
    let model = model(&[("h.0.a", 2500), ("h.0.b", 1000), ("h.0.c", 2600), ("h.0.d", 300)]);
    let grid = model.page_grid(1000);
    let layer = &model.layers()[0];
    assert_eq!(grid.count(&layer.ranges), 7);
    assert_eq!(
        shape(&layer.parts_of_pages(4, &grid)),
        [vec![(0, 0..2500), (1, 0..1000)], vec![(2, 0..2600), (3, 0..300)]]
    );
    let parts = layer.parts_of_pages(2, &grid);
    assert_eq!(
        shape(&parts),
        [
            vec![(0, 0..2000)],
            vec![(0, 2000..2500), (1, 0..1000), (2, 0..500)],
            vec![(2, 500..2500)],
            vec![(2, 2500..2600), (3, 0..300)],
        ]
    );
    let pages: Vec<u64> = parts.iter().map(|part| grid.count(&part.ranges)).collect();
    assert_eq!(pages, [2, 2, 2, 1]);
    assert_eq!(layer.parts_of_pages(0, &grid), layer.parts_of_pages(1, &grid));
}

#[test]
fn pages_are_counted_from_the_start_of_the_data() {
    let grid = PageGrid::new(4096, vec![11_416, 8]);
    assert_eq!(grid.pages(0, &(11_416..11_417)), 0..1);
    assert_eq!(grid.pages(0, &(11_416 + 4095..11_416 + 4097)), 0..2);
    assert_eq!(grid.pages(0, &(11_416 + 4096..11_416 + 8192)), 1..2);
    assert_eq!(grid.pages(0, &(20_000..20_000)), 2..2);
    let ranges = [
        (1, 8..9),
        (0, 16_000..16_001),
        (0, 11_416..11_500),
        (0, 11_600..11_700),
        (0, 15_512..15_513),
    ];
    assert_eq!(grid.runs(&ranges), [(0, 0..2), (1, 0..1)]);
    assert_eq!(grid.count(&ranges), 3);
    assert_eq!(grid.page_start(0, 2), 11_416 + 8192);
}

fn tensor_name() -> impl Strategy<Value = String> {
    let component = prop_oneof![
        Just("model".to_owned()),
        Just("layers".to_owned()),
        Just("encoder".to_owned()),
        Just("embed_tokens".to_owned()),
        (0u32..12).prop_map(|number| number.to_string()),
        "[a-z0-9.]{0,4}",
    ];
    prop::collection::vec(component, 1..6).prop_map(|components| components.join("."))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_is_in_exactly_one_layer_and_part(
        tensors in prop::collection::vec((tensor_name(), prop_oneof![Just(0u64), 1u64..20_000]), 0..20),
        bytes_max in 1u64..30_000,
        pages_max in 0u64..6,
        page_size in 1000u64..9000,
    ) {
        let tensors: Vec<(&str, u64)> = tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
        let model = model(&tensors);
        let grid = model.page_grid(page_size);
        let layers = model.layers();
        prop_assert_eq!(&layers, &model.layers());
        let mut members: Vec<usize> = layers.iter().flat_map(|layer| layer.tensors.clone()).collect();
        members.sort_unstable();
        prop_assert_eq!(members, (0..tensors.len()).collect::<Vec<_>>());
        for layer in &layers {
            let by_bytes = layer.parts(bytes_max);
            let by_pages = layer.parts_of_pages(pages_max, &grid);
            prop_assert!(by_bytes.iter().all(|part| part.bytes() <= bytes_max.max(4096)));
            prop_assert!(by_pages.iter().all(|part| grid.count(&part.ranges) <= pages_max.max(1)));
            for tensor in &layer.tensors {
                let whole = &model.tensors()[*tensor];
                let pages = grid.count(&[(0, whole.range.clone())]);
                for (parts, fits) in [
                    (&by_bytes, whole.bytes() <= bytes_max.max(4096)),
                    (&by_pages, pages <= pages_max.max(1)),
                ] {
                    let slices = parts.iter().flat_map(|part| &part.slices);
                    let count = slices.filter(|slice| slice.tensor == *tensor).count();
                    prop_assert_eq!(count == 1, fits);
                }
            }
            for parts in [by_bytes, by_pages] {
                for tensor in &layer.tensors {
                    let mut slices = parts.iter().flat_map(|part| &part.slices).filter(|s| s.tensor == *tensor);
                    let mut next = 0;
                    let mut count = 0;
                    let whole = slices.all(|slice| {
                        let follows = slice.inside.start == next;
                        next = slice.inside.end;
                        count += 1;
                        let start = model.tensors()[*tensor].range.start;
                        follows && slice.range == (start + slice.inside.start..start + slice.inside.end)
                    });
                    prop_assert!(whole);
                    prop_assert_eq!(next, model.tensors()[*tensor].bytes());
                    prop_assert!(count > 0);
                }
            }
        }
    }
}
