import os
from types import TracebackType
from typing import Any, Iterable, Literal, Protocol, Self, Union

from ._errors import *

_Path = Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]
_Access = Literal["read", "write", "overwrite"]
_Advice = Literal["normal", "sequential", "random", "keep", "dont_need"]
_Range = Union["Allocation", tuple["Allocation", int, int]]
_Ranges = Union[_Range, Iterable[_Range]]

class _File(Protocol):
    def fileno(self) -> int: ...

class Client:
    """A connection to lapisd. It ends with the last of its allocations, mappings, models and plans.

    After a fork only the parent may use it: in the child every call raises `Forked`.
    """

    def __new__(
        cls,
        socket: _Path | None = None,
        *,
        name: str | None = None,
        timeout: float = 10.0,
        libcuda: _Path | None = None,
        raise_open_files: bool = True,
    ) -> Self:
        """Connects to the daemon at `socket`, else $LAPIS_SOCKET, $XDG_RUNTIME_DIR/lapis.sock, /run/lapis/lapis.sock.

        name: for the daemon's log. timeout: seconds to wait for its welcome. libcuda: the CUDA driver's library.
        raise_open_files: whether to raise the process's limit of open files, so that each VRAM frame can have one.
        """

    def close(self) -> None:
        """Closes it. What it made lives on."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    @property
    def page_size(self) -> int:
        """Bytes of a page: the unit in which bytes are in VRAM or not."""
    @property
    def device(self) -> Literal["sim", "cuda"]:
        """What VRAM is: host memory, or a GPU's."""
    @property
    def mapped_pages_max(self) -> int:
        """Most pages that can be mapped at once."""
    @property
    def daemon_version(self) -> str: ...
    def allocate(self, size: int) -> Allocation:
        """Reserves `size` bytes, which start as zeros."""

    def open_path(self, path: _Path, offset: int = 0, length: int | None = None) -> Allocation:
        """Makes bytes of a file an allocation that can be read: `length` of them from `offset` on, or all from there."""

    def open_file(self, file: int | _File, offset: int, length: int) -> Allocation:
        """The same for an open file, which may be closed afterwards."""

    def open_model(self, path: _Path) -> Model:
        """Opens a .safetensors file, an index with its shards, a .gguf file, or a directory that has one of these."""

    def map(self, ranges: _Ranges, access: _Access = "read", wait: float = 60.0) -> Mapping:
        """Brings ranges to VRAM, all or none of them, and keeps them there until the mapping ends.

        With "overwrite" all bytes must be written before any is read. Waits up to `wait` seconds for room; signals are
        handled when it is over.
        """

    def prefetch(self, ranges: _Ranges, priority: int = 0, within: float | None = None) -> None:
        """Says that ranges will be mapped soon, in this order. Returns at once."""

    def cancel_prefetch(self, ranges: _Ranges) -> None:
        """Takes prefetches back, as far as they have not begun."""

    def advise(self, ranges: _Ranges, advice: _Advice) -> None:
        """Says how ranges will be used, which changes what is evicted first and nothing else."""

    def flush(self, ranges: _Ranges, wait: float = 60.0) -> None:
        """Writes ranges of allocated memory down to the NVMe tier, and leaves them where they are as well."""

    def plan(self, steps: Iterable[_Ranges | tuple[_Ranges, _Access]], cyclic: bool = True) -> Plan:
        """Declares in which order ranges are going to be mapped: once, or over and over."""

    def record(self) -> Recording:
        """Takes down what is mapped from now on, on all threads."""

    def stats(self) -> dict[str, Any]:
        """The daemon's counters: tiers, this session, all sessions."""

class Allocation:
    """Bytes with addresses of their own, wherever their pages are. It is given up with its last handle and mapping."""

    @property
    def size(self) -> int: ...
    @property
    def id(self) -> int:
        """As lapisctl shows it."""
    def map(
        self, start: int = 0, stop: int | None = None, access: _Access = "read", wait: float = 60.0
    ) -> Mapping:
        """Maps some of its bytes, or all."""

    def free(self) -> None:
        """Gives it up, once no mapping has any of it."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Mapping:
    """Bytes that are in VRAM until it ends. Its ranges are tensors: by number, or of a model by name."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: int | str) -> Tensor: ...
    def __contains__(self, name: str) -> bool: ...
    def keys(self) -> list[str | None]: ...
    def values(self) -> list[Tensor]: ...
    def items(self) -> list[tuple[str | None, Tensor]]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def stats(self) -> dict[str, Any]:
        """What it cost: pages, hits, seconds."""
    def unmap(self) -> None:
        """Ends it. Raises BufferError while there are views of its bytes. On a GPU it waits for the process's work."""

    def unmap_after(self, stream: int = 0) -> None:
        """Ends it once the GPU has done what `stream`, a live one of the primary context, holds now."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it, as unmap() does; while an exception is raised, with the last view."""

class Tensor:
    """Mapped bytes with a type and a shape. A buffer for numpy and others, on a GPU by way of DLPack; never a copy.

    Each view of it keeps the mapping from ending.
    """

    @property
    def name(self) -> str | None: ...
    @property
    def dtype(self) -> str:
        """As safetensors and GGUF spell it, such as "F32", "BF16" or "Q4_K"."""
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def device(self) -> Literal["sim", "cuda"]: ...
    @property
    def device_ptr(self) -> int | None:
        """Address for kernels, to be used until the mapping ends; None on sim."""
    def raw(self) -> Tensor:
        """Its bytes, as U8."""

    def numpy(self) -> Any:
        """An array of numpy on its bytes; bfloat16 and 8-bit floats are those of ml_dtypes."""

    def tobytes(self) -> bytes:
        """A copy of its bytes, on any device."""

    def copy_from(self, source: Any, offset: int = 0) -> None:
        """Copies bytes over its own, from its byte `offset` on, on any device."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

class Model:
    """A model's files, opened. It holds no bytes in VRAM; its mappings do."""

    @property
    def layers(self) -> list[str]:
        """Names of its layers, in the order of execution."""
    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Type, shape and bytes of each tensor."""
    @property
    def metadata(self) -> dict[str, str]: ...
    @property
    def nbytes(self) -> int: ...
    def layer_tensors(self, layer: int) -> list[str]: ...
    def map_layer(self, layer: int, wait: float = 60.0) -> Mapping:
        """Brings a layer's tensors to VRAM. Empty tensors are left out."""

    def map_tensors(
        self, names: list[str | tuple[str, int, int]], wait: float = 60.0
    ) -> Mapping:
        """Brings some tensors to VRAM, all or none of them; of `(name, start, stop)` only these rows."""

    def prefetch_layer(self, layer: int) -> None: ...
    def plan(self, cyclic: bool = True) -> Plan:
        """Declares that its layers are going to be mapped in order: once, or over and over."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Plan:
    """A plan in force, until it is ended or deleted."""

    def end(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Recording:
    """What a client maps, being recorded."""

    def plan(self, cyclic: bool = True) -> Plan:
        """Ends it, and declares that the same will be mapped again."""

    def end(self) -> None:
        """Forgets it."""
