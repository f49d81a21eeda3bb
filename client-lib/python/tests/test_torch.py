"""lapis.torch: the same outputs as without, and no garbage. Skipped where torch isn't installed."""

import gc
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import lapis
import lapis.torch

pytestmark = pytest.mark.skipif(
    __import__("os").environ.get("LAPIS_TEST_DEVICE", "sim") != "sim", reason="torch has no fake GPU"
)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.gain = torch.nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("shift", torch.arange(width) / width)

    def forward(self, x):
        return x + self.gain * self.down(torch.nn.functional.gelu(self.up(self.norm(x)))) + self.shift


class Tied(torch.nn.Module):
    def __init__(self, width=128, words=1000, depth=4):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def tied():
    torch.manual_seed(7)
    return Tied().eval()


TOKENS = torch.tensor([[1, 5, 999, 0, 3]])


@torch.no_grad()
def test_outputs_are_the_same_and_weights_are_streamed(client, tied):
    expected = tied(TOKENS)
    weights = {name: value.clone() for name, value in tied.state_dict().items()}
    offloaded = lapis.torch.offload(tied, client)
    assert sum(value.numel() for value in tied.parameters() if value.device.type != "meta") == 0
    for _ in range(3):
        assert torch.equal(tied(TOKENS), expected)
        assert client.stats()["mappings"] == 0
    assert offloaded.plan is not None
    assert client.stats()["vram"]["capacity"] < sum(value.nbytes for value in weights.values())
    offloaded.remove()
    assert tied.head.weight is tied.embedding.weight
    assert torch.equal(tied(TOKENS), expected)
    for name, value in tied.state_dict().items():
        assert torch.equal(value, weights[name]), name
    del offloaded
    gc.collect()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(client, dtype):
    module = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 3)).to(dtype).eval()
    value = torch.randn(2, 8).to(dtype)
    expected = module(value)
    offloaded = lapis.torch.offload(module, client)
    assert torch.equal(module(value), expected)
    offloaded.remove()


@torch.no_grad()
def test_a_weight_without_its_forward_is_an_error(client, tied):
    offloaded = lapis.torch.offload(tied, client)
    x = torch.randn(1, 128)
    weight, up = tied.head.weight, tied.blocks[0].up
    assert weight.shape == (1000, 128) and weight.dtype == torch.float32 and weight.numel() == 128000
    uses = [
        lambda: x @ weight.T,
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.nn.functional.linear(x, up.weight, up.bias),
        lambda: torch.nn.functional.embedding(TOKENS, weight),
        lambda: weight + 1,
        lambda: weight.data,
        lambda: weight.tolist(),
        lambda: weight[0],
        lambda: tied.state_dict(),
        lambda: tied.to(torch.float64),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="of an offloaded weight"):
            use()
    offloaded.remove()


@torch.no_grad()
def test_an_output_that_is_a_view_of_weights_is_an_error(client):
    class Leaky(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(100))

        def forward(self):
            return self.weight[:5]

    module = Leaky()
    offloaded = lapis.torch.offload(module, client)
    with pytest.raises(RuntimeError, match="keeps weights of the module beyond its forward"):
        module()
    gc.collect()
    assert client.stats()["mappings"] == 0
    offloaded.remove()
    assert module().tolist() == [1] * 5


@torch.no_grad()
def test_a_forward_that_fails_leaves_nothing_mapped(client, tied):
    offloaded = lapis.torch.offload(tied, client)
    with pytest.raises(IndexError), warnings.catch_warnings():
        warnings.simplefilter("error")
        tied(torch.tensor([[5000]]))
    gc.collect()
    assert client.stats()["mappings"] == 0
    tied(TOKENS)
    offloaded.remove()


@torch.no_grad()
def test_weights_of_a_model_file(client, tmp_path, tied):
    from test_views import write_safetensors

    arrays = {
        "model." + name: ("F32", value.numpy()) for name, value in tied.state_dict().items() if name != "head.weight"
    }
    path = tmp_path / "tied.safetensors"
    write_safetensors(path, arrays)
    expected = tied(TOKENS)
    with client.open_model(path) as model:
        offloaded = lapis.torch.offload(tied, client, model=model, prefix="model.")
        assert client.stats()["allocations"] == 1, "all of them are in the file"
        assert torch.equal(tied(TOKENS), expected)
        offloaded.remove()
        assert torch.equal(tied(TOKENS), expected)
    del offloaded, model
    gc.collect()


def test_an_array_of_torch_holds_its_mapping(client):
    with client.allocate(4096) as memory:
        mapping = memory.map(access="write")
        tensor = torch.from_dlpack(mapping[0])
        tensor[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
        with pytest.raises(BufferError):
            mapping.unmap()
        del tensor
        assert mapping[0].tobytes()[:4] == b"\1\2\3\0"
        mapping.unmap()
    del memory
    gc.collect()
