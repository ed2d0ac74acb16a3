"""Pins host memory, so that a CUDA device reads and writes it over the bus.

The module allocates ordinary memory and registers it with CUDA, because torch would round the bytes of pinned memory up
to a power of two.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.journal import Journal
from hybridmem.memory.blocks.store import Store, reserve
from hybridmem.memory.errors import HOST_UNIT

HostAttention = Literal["stream", "compute"]
"""Which processor attends to pages in host memory: "stream" is the device, over the bus; "compute" is the host's."""

_HOST = torch.device("cpu")
_PORTABLE_AND_MAPPED = 1 | 2
"""Flags of `cudaHostRegister`: pinned for every context of the process, at addresses that devices can use."""


def host_store(
    n_bytes: int, device: torch.device, attention: HostAttention, *, poison: bool, journal: Journal,
    is_reproducible: bool = False,
) -> Store:  # fmt: skip
    """Make a store in host memory, for a memory on `device`. Its tensors are on the device whose kernels read them.

    Raises SpecError if the host cannot allocate or pin so many bytes.
    """
    if device.type != "cuda":  # The CPU's memory is host memory already, and "meta" has no memory.
        return Store(n_bytes, device, poison=poison, unit=HOST_UNIT, journal=journal, is_reproducible=is_reproducible)
    index = torch.cuda.current_device() if device.index is None else device.index
    place = _HOST if attention == "compute" else torch.device("cuda", index)
    return Store(
        n_bytes, place, poison=poison, unit=HOST_UNIT, journal=journal,
        reserve=lambda n, of: _reserve_pinned(n, of, index),
    )  # fmt: skip


def _reserve_pinned(n_bytes: int, place: torch.device, index: int) -> Tensor:
    """Return (n_bytes,) uint8 in host memory that CUDA device `index` can reach, as a tensor on `place`."""
    pinned = _Pinned(reserve(n_bytes, _HOST), index)
    return torch.from_numpy(np.asarray(pinned)) if place == _HOST else torch.as_tensor(pinned, device=place)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Pinned:
    """Holds host bytes. They stay pinned as long as anything refers to this object or to a tensor of them."""

    def __init__(self, host: Tensor, index: int) -> None:
        with torch.cuda.device(index):
            error = int(_cudart().cudaHostRegister(host.data_ptr(), host.numel(), _PORTABLE_AND_MAPPED))
        if error:
            raise RuntimeError(f"cudaHostRegister answers with error {error}")
        # With unified addressing, the device uses the same addresses as the host.
        self.__array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }
        self.__cuda_array_interface__: dict[str, Any] = self.__array_interface__
        weakref.finalize(self, _unpin, host, index, os.getpid())  # The finalizer keeps the bytes alive.


def _unpin(host: Tensor, index: int, process: int) -> None:
    if os.getpid() != process:  # CUDA does not work in a forked child.
        return
    torch.cuda.synchronize(index)  # Kernels may still read the bytes.
    _cudart().cudaHostUnregister(host.data_ptr())
