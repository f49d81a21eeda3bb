"""Views of mapped bytes: what they hold, and that none outlives its mapping."""

import ctypes
import faulthandler
import gc
import os

import ml_dtypes
import numpy as np
import pytest

import lapis

on_cuda = os.environ.get("LAPIS_TEST_DEVICE", "sim") != "sim"
sim_only = pytest.mark.skipif(on_cuda, reason="the CPU can't reach a GPU's memory")


@pytest.fixture
def memory(client):
    with client.allocate(4096) as memory:
        yield memory
    del memory
    gc.collect()


@sim_only
def test_an_array_is_the_mapped_bytes(memory):
    with memory.map(access="write") as mapping:
        array = mapping[0].numpy()
        assert array.dtype == np.uint8 and array.shape == (4096,) and array.flags.writeable
        array[:] = np.arange(4096) % 256
        assert memoryview(mapping[0])[300] == 44
        del array
    with memory.map(16, 32) as mapping:
        array = np.asarray(mapping[0])
        assert array.tolist() == list(range(16, 32)) and not array.flags.writeable
        with pytest.raises(ValueError):
            array[0] = 1
        with pytest.raises(ValueError):
            array.flags.writeable = True
        del array


@sim_only
@pytest.mark.parametrize(
    "view",
    [
        memoryview,
        lambda tensor: tensor.numpy(),
        lambda tensor: np.asarray(tensor)[5:10],
        lambda tensor: np.from_dlpack(tensor),
        lambda tensor: tensor.numpy().view(np.float32).reshape(2, -1).T,
    ],
)
def test_no_view_outlives_its_mapping(memory, view):
    mapping = memory.map(access="write")
    kept = view(mapping[0])
    with pytest.raises(BufferError, match="1 views of its bytes are in use"):
        mapping.unmap()
    assert not mapping.closed
    with pytest.raises(BufferError):
        with mapping:
            pass
    del kept
    mapping.unmap()
    assert mapping.closed


@sim_only
def test_a_mapping_that_nobody_ends_ends_with_its_last_view(client, memory):
    mapping = memory.map(access="write")
    array = mapping[0].numpy()
    array[0] = 7
    del mapping
    gc.collect()
    assert client.stats()["mappings"] == 1 and array[0] == 7
    del array
    gc.collect()
    assert client.stats()["mappings"] == 0


@sim_only
def test_an_exception_in_a_with_block_is_the_one_that_is_seen(client, memory):
    with pytest.raises(ZeroDivisionError):
        with memory.map(access="write") as mapping:
            array = mapping[0].numpy()
            1 // 0
    assert mapping.closed
    with pytest.raises(lapis.Closed):
        mapping[0]
    assert client.stats()["mappings"] == 1, "the array is still there"
    del array
    assert client.stats()["mappings"] == 0


@sim_only
def test_addresses_stay_and_nothing_is_readable_after_the_end(memory):
    with memory.map(access="write") as mapping:
        array = mapping[0].numpy()
        address = array.ctypes.data
        array[:4] = [1, 2, 3, 4]
        del array
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(address, 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11
    with memory.map() as mapping:
        array = mapping[0].numpy()
        assert array.ctypes.data == address and array[:4].tolist() == [1, 2, 3, 4]
        del array


@sim_only
def test_copies_while_there_are_views(memory):
    with memory.map(access="write") as mapping:
        array = mapping[0].numpy()
        with pytest.raises(BufferError, match="while there are views"):
            mapping[0].copy_from(b"x")
        assert mapping[0].tobytes() == bytes(4096)
        del array
        mapping[0].copy_from(np.arange(3, dtype=np.int16), 2)
        assert mapping[0].tobytes()[:8] == b"\0\0\0\0\1\0\2\0"
        with pytest.raises(lapis.OutOfRange):
            mapping[0].copy_from(b"x", 4096)
        with pytest.raises(OverflowError):
            mapping[0].copy_from(b"x", -1)


@sim_only
def test_dlpack_says_what_may_be_written(memory):
    with memory.map() as mapping:
        tensor = mapping[0]
        assert tensor.__dlpack_device__() == (1, 0)
        with pytest.raises(BufferError, match="only DLPack 1 can say"):
            tensor.__dlpack__()
        with pytest.raises(BufferError):
            tensor.__dlpack__(max_version=(1, 0), dl_device=(2, 0))
        with pytest.raises(BufferError):
            tensor.__dlpack__(max_version=(1, 0), copy=True)
        array = np.from_dlpack(tensor)
        assert not array.flags.writeable
        del array
        # A capsule that nobody takes frees what it keeps.
        capsule = tensor.__dlpack__(max_version=(1, 0))
        with pytest.raises(BufferError):
            mapping.unmap()
        del capsule
    with memory.map(access="write") as mapping:
        capsule = mapping[0].__dlpack__()
        del capsule
        array = np.from_dlpack(mapping[0])
        assert array.flags.writeable or np.lib.NumpyVersion(np.__version__) < "2.1.0"
        del array


DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "C64": np.complex64, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
    "BOOL": np.bool_, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def write_safetensors(path, arrays):
    import json

    header, data = {}, b""
    for name, (dtype, array) in arrays.items():
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def typed(tmp_path):
    random = np.random.default_rng(7)
    arrays = {}
    for dtype, of in DTYPES.items():
        raw = random.integers(0, 2 if dtype == "BOOL" else 120, 6 * np.dtype(of).itemsize, dtype=np.uint8)
        arrays[dtype.lower()] = (dtype, raw.view(of).reshape(2, 3))
    arrays["scalar"] = ("F32", np.float32(1.5).reshape(()))
    path = tmp_path / "typed.safetensors"
    write_safetensors(path, arrays)
    return path, arrays


@sim_only
def test_every_type_comes_as_it_is(client, typed):
    path, arrays = typed
    with client.open_model(path) as model:
        with model.map_tensors(list(arrays)) as mapping:
            for name, (dtype, expected) in arrays.items():
                tensor = mapping[name]
                assert (tensor.name, tensor.dtype, tensor.shape) == (name, dtype, expected.shape)
                for array in [tensor.numpy(), np.asarray(tensor)]:
                    assert array.dtype == expected.dtype and array.shape == expected.shape
                    assert array.tobytes() == expected.tobytes() == tensor.tobytes()
                assert memoryview(tensor.raw()).nbytes == expected.nbytes
                if dtype in ("BF16", "F8_E4M3"):
                    with pytest.raises(BufferError, match="use numpy"):
                        memoryview(tensor)
                    assert np.asarray(tensor, dtype=np.float32).dtype == np.float32
                del array
    gc.collect()


def test_layers_of_a_model(client, model_path):
    with client.open_model(model_path) as model, model.plan():
        assert model.layers[0] == "embeddings" and len(model.layers) > 2
        seen = {}
        for number in range(len(model.layers)):
            model.prefetch_layer(number)
            with model.map_layer(number) as layer:
                assert sorted(layer.keys()) == sorted(model.layer_tensors(number))
                for name, tensor in layer.items():
                    assert model.tensors[name] == (tensor.dtype, tensor.shape, tensor.nbytes)
                    seen[name] = tensor.tobytes()
        assert seen.keys() == model.tensors.keys()
        assert sum(map(len, seen.values())) == model.nbytes
        content = model_path.read_bytes()
        assert all(value in content for value in seen.values())
        with model.map_layer(-1) as layer:
            assert list(layer.keys())[0] in layer
        with pytest.raises(IndexError, match="layer 99 of a model that has"):
            model.map_layer(99)
        with pytest.raises(KeyError, match="no.such"):
            model.map_tensors(["no.such"])
        name = next(name for name, (_, shape, _) in model.tensors.items() if len(shape) == 2)
        dtype, shape, nbytes = model.tensors[name]
        with model.map_tensors([name, (name, 2, 5), (name, 0, 0)]) as mapping:
            row = nbytes // shape[0]
            assert mapping[1].shape == (3, shape[1]) and mapping[1].name == name
            assert mapping[1].tobytes() == mapping[0].tobytes()[2 * row : 5 * row]
            assert len(mapping) == 2, "what is empty is left out"
        for start, stop in [(0, shape[0] + 1), (3, 2), (2**63, 2**64 - 1)]:
            with pytest.raises(IndexError, match="rows"):
                model.map_tensors([(name, start, stop)])
        for wrong in [[None], None, name]:
            with pytest.raises(TypeError):
                model.map_tensors(wrong)
        model.close()
        with pytest.raises(lapis.Closed):
            model.layers


@pytest.mark.skipif(not on_cuda, reason="sim has no device addresses")
def test_a_gpus_bytes_are_by_address(memory):
    with memory.map(access="write") as mapping:
        tensor = mapping[0]
        tensor.copy_from(b"tiers")
        assert tensor.tobytes()[:5] == b"tiers" and tensor.device == "cuda" and tensor.device_ptr > 0
        with pytest.raises(BufferError):
            memoryview(tensor)
        assert tensor.__dlpack_device__() == (2, 0)
        interface = tensor.__cuda_array_interface__
        assert interface["data"] == (tensor.device_ptr, False)
        assert (interface["shape"], interface["typestr"], interface["version"]) == ((4096,), "|u1", 3)
        with pytest.raises(BufferError, match="1 views"):
            mapping.unmap()
        del tensor
        capsule = mapping[0].__dlpack__()
        with pytest.raises(BufferError, match="1 views"):
            mapping.unmap()
        del capsule
        mapping.unmap_after()
    assert mapping.closed


@sim_only
def test_sim_has_no_device_addresses(memory):
    with memory.map() as mapping:
        assert mapping[0].device_ptr is None and not hasattr(mapping[0], "__cuda_array_interface__")
