"""Quantised files, as the `gguf` package writes, reads and dequantises them."""

import os

import numpy as np
import pytest


gguf = pytest.importorskip("gguf", reason="gguf is not installed")

QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
PLAIN = ["F32", "F16", "BF16"]


@pytest.fixture
def written(tmp_path):
    random = np.random.default_rng(11)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for number, name in enumerate(QUANTISED + PLAIN):
        kind = gguf.GGMLQuantizationType[name]
        values = random.normal(size=(6, 256)).astype(np.float32)
        writer.add_tensor(f"blk.{number}.{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_mapped_blocks_dequantise_to_the_same(client, written):
    reader = gguf.GGUFReader(written)
    with client.open_model(written) as model:
        assert len(model.layers) == len(QUANTISED + PLAIN)
        for expected in reader.tensors:
            with model.map_tensors([expected.name]) as mapping:
                tensor = mapping[expected.name]
                assert tensor.dtype == expected.tensor_type.name
                assert tensor.shape == tuple(int(size) for size in reversed(expected.shape))
                raw = np.frombuffer(tensor.tobytes(), np.uint8).reshape(tensor.shape[0], -1)
                plain = np.array(expected.data)
                kind = expected.tensor_type
                typed = raw.view(plain.dtype)
                found = gguf.quants.dequantize(typed, kind)
                assert np.array_equal(found, gguf.quants.dequantize(plain, kind)), expected.name
                if os.environ.get("LAPIS_TEST_DEVICE", "sim") == "sim" and tensor.dtype in QUANTISED:
                    with pytest.raises(TypeError, match="numpy has no elements of type"):
                        tensor.numpy()
                    view = np.asarray(tensor.raw())
                    assert np.array_equal(gguf.quants.dequantize(view.reshape(raw.shape), kind), found)
                    del view
            with model.map_tensors([(expected.name, 2, 4)]) as mapping:
                assert mapping[0].tobytes() == raw[2:4].tobytes()
