"""Lapis: more GPU memory than the card has.

A `Client` is a connection to `lapisd`. It allocates memory or opens part of a model file, and maps ranges of it: while a
`Mapping` lives, its bytes are in VRAM. What will be mapped next can be prefetched, or planned once and for all.

    import lapis

    with lapis.Client() as client:
        memory = client.allocate(64 << 20)
        with memory.map(0, 4096, "write") as mapping:
            mapping[0].numpy()[:] = 7

No view of mapped bytes outlives its mapping: `Mapping.unmap()`, and the end of a `with` block, raise `BufferError` while there
are any. Everything blocks, with the interpreter's lock released, and everything may be used from several threads at once.
"""

from . import _errors
from ._errors import *  # noqa: F403
from ._lapis import Allocation, Client, Mapping, Model, Plan, Recording, Tensor

__all__ = ["Allocation", "Client", "Mapping", "Model", "Plan", "Recording", "Tensor"]
__all__ += [name for name, value in vars(_errors).items() if isinstance(value, type)]
