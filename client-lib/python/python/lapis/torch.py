"""Modules of PyTorch whose weights are in VRAM only while they are used.

    import lapis, lapis.torch

    client = lapis.Client()
    handle = lapis.torch.offload(module, client)
    with torch.no_grad():
        output = module(input)

Weights move to allocations of the daemon, or are those of a model file already; each module's own weights are mapped before
its `forward` and unmapped after. The order of the first pass becomes the plan of the next ones. Between forwards each weight
is an `OffloadedWeight`, of which only type and shape can be had. Buffers stay where they are.
"""

import sys
import warnings

import torch

__all__ = ["Offload", "OffloadedWeight", "offload"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def offload(module, client, model=None, prefix="", wait=60.0):
    """Offloads the weights of `module` and all modules in it. Returns an `Offload`, which takes it back.

    model: a `lapis.Model` that has the weights already, by the names of `module.named_parameters()` with `prefix` before
    them; weights that it lacks, or has with another type or shape, are copied to memory of their own.
    wait: seconds that a forward waits for room.
    """
    return Offload(module, client, model, prefix, wait)


class OffloadedWeight(torch.nn.Parameter):
    """What is in a weight's place while it isn't mapped. Computing with it raises.

    That it is on the "meta" device would not do: PyTorch multiplies such tensors with others without a word.
    """

    _KNOWN = frozenset(
        "shape dtype device layout ndim names itemsize nbytes requires_grad is_leaf grad grad_fn _grad is_meta is_cuda is_cpu "
        "is_sparse is_quantized is_nested is_mkldnn is_xpu is_mps size dim numel nelement element_size stride "
        "is_contiguous is_floating_point is_complex is_signed _is_view __len__ __hash__ _version _backward_hooks output_nr".split()
    )

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = function.__self__.__name__
        if name in cls._KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RuntimeError(
            f"{name} of an offloaded weight: its bytes are only there while the forward of its module runs. A module whose "
            "weights another one uses must not be offloaded by itself, or remove() the offload first"
        )

    def __repr__(self):
        return f"OffloadedWeight({tuple(self.shape)}, {self.dtype})"


class _Weight:
    """One weight, wherever it is used: tied ones are one."""

    def __init__(self, parameter, name):
        self.name = name
        self.parameter = parameter
        self.dtype, self.shape, self.device = parameter.dtype, tuple(parameter.shape), parameter.device
        self.nbytes = parameter.numel() * parameter.element_size()
        self.placeholder = OffloadedWeight(torch.empty(self.shape, dtype=self.dtype, device="meta"), False)
        self.allocation = None
        self.tensor = None

    def move(self, client, model, prefix):
        name = prefix + self.name
        found = model.tensors.get(name) if model is not None else None
        if found is not None and _DTYPES.get(found[0]) == self.dtype and found[1] == self.shape:
            self.tensor = name
            return
        data = self.parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.allocation = client.allocate(self.nbytes)
        # Room for a weight of any size: piece by piece.
        piece = max(client.page_size, client.page_size * (client.mapped_pages_max // 2))
        for start in range(0, self.nbytes, piece):
            stop = min(start + piece, self.nbytes)
            with self.allocation.map(start, stop, "overwrite") as mapping:
                mapping[0].copy_from(data[start:stop].numpy())


class _Layer:
    """One module's own weights, and how to have them."""

    def __init__(self, owner, module, name):
        self.owner, self.module, self.name = owner, module, name
        self.weights = {}
        self.mappings = []
        self.depth = 0

    def map(self):
        self.depth += 1
        if self.depth > 1:
            return
        from_model = [weight for weight in self.weights.values() if weight.tensor is not None]
        own = [weight for weight in self.weights.values() if weight.tensor is None]
        views = {}
        try:
            if from_model:
                names = list({weight.tensor for weight in from_model})
                mapping = self.owner.model.map_tensors(names, self.owner.wait)
                self.mappings.append(mapping)
                for weight in from_model:
                    views[weight] = _view(mapping[weight.tensor], weight)
            if own:
                ranges = [(weight.allocation, 0, weight.nbytes) for weight in own]
                mapping = self.owner.client.map(ranges, "read", self.owner.wait)
                self.mappings.append(mapping)
                for number, weight in enumerate(own):
                    views[weight] = _view(mapping[number], weight)
            for name, weight in self.weights.items():
                self.module._parameters[name] = torch.nn.Parameter(views[weight], False)
        except BaseException:
            views.clear()
            self.unmap(failed=True)
            raise

    def unmap(self, failed=False):
        if self.depth == 0:
            return
        self.depth -= 1
        if self.depth > 0:
            return
        # The hook is called while what the forward raised is handled.
        failed = failed or sys.exc_info()[0] is not None
        for name, weight in self.weights.items():
            self.module._parameters[name] = weight.placeholder
        mappings, self.mappings = self.mappings, []
        for mapping in mappings:
            if failed:
                # The traceback may hold views; it ends with the last of them.
                mapping.__exit__(RuntimeError, None, None)
                continue
            try:
                mapping.unmap()
            except BufferError as error:
                raise RuntimeError(
                    f"something keeps weights of {self.name or 'the module'} beyond its forward: its output may be a view "
                    "of them, or autograd may have saved them (use torch.no_grad())"
                ) from error


def _view(tensor, weight):
    """The mapped bytes as a tensor of PyTorch."""
    if tensor.device == "cuda":
        # __cuda_array_interface__ would not do: PyTorch refuses what is only for reading.
        return torch.from_dlpack(tensor.raw()).view(weight.dtype).reshape(weight.shape)
    with warnings.catch_warnings():
        # Weights are mapped for reading, which PyTorch has no word for: writing them would end the process.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memoryview(tensor.raw()), dtype=weight.dtype).reshape(weight.shape)


class Offload:
    """A module that is offloaded. `remove()` gives it its weights back."""

    def __init__(self, module, client, model, prefix, wait):
        self.module, self.client, self.model, self.wait = module, client, model, wait
        self.plan = None
        self._recording = None
        self._depth = 0
        self._handles = []
        self._layers = []
        weights = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.numel() == 0 or parameter.device.type == "meta":
                continue
            weight = weights.get(id(parameter))
            if weight is None:
                weight = weights[id(parameter)] = _Weight(parameter, name)
            elif model is not None and prefix + weight.name not in model.tensors:
                weight.name = name
        self._weights = list(weights.values())
        for weight in self._weights:
            weight.move(client, model, prefix)
        for name, part in module.named_modules():
            layer = _Layer(self, part, name)
            for key, parameter in part._parameters.items():
                if parameter is not None and id(parameter) in weights:
                    layer.weights[key] = weights[id(parameter)]
            if layer.weights:
                self._layers.append(layer)
        self._handles.append(module.register_forward_pre_hook(self._begin))
        for layer in self._layers:
            for key, weight in layer.weights.items():
                layer.module._parameters[key] = weight.placeholder
            self._handles.append(layer.module.register_forward_pre_hook(lambda *_, layer=layer: layer.map()))
            self._handles.append(
                layer.module.register_forward_hook(lambda *_, layer=layer: layer.unmap(), always_call=True)
            )
        self._handles.append(module.register_forward_hook(self._end))
        for weight in self._weights:
            # The copy is all there is now, but for remove().
            weight.parameter = None

    def _begin(self, *_):
        if self.plan is None and self._recording is None:
            self._recording = self.client.record()

    def _end(self, *_):
        if self._recording is not None:
            recording, self._recording = self._recording, None
            self.plan = recording.plan(cyclic=True)

    def remove(self):
        """Copies all weights back to the module's own memory, on the device where they were, and forgets the daemon's."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        restored = {}
        for layer in self._layers:
            for key, weight in layer.weights.items():
                if weight not in restored:
                    restored[weight] = torch.nn.Parameter(self._read(weight), False)
                layer.module._parameters[key] = restored[weight]
        self._layers = []
        for weight in self._weights:
            if weight.allocation is not None:
                weight.allocation.free()
        if self.plan is not None:
            self.plan.end()

    def _read(self, weight):
        if weight.tensor is not None:
            mapping = self.model.map_tensors([weight.tensor], self.wait)
        else:
            mapping = self.client.map(weight.allocation, "read", self.wait)
        with mapping:
            data = bytearray(mapping[0].tobytes())
        return torch.frombuffer(data, dtype=weight.dtype).reshape(weight.shape).to(weight.device)
