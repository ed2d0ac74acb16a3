"""Pins host memory, so that a CUDA device reads and writes it over the bus.

Ordinary memory is registered with CUDA: pinned memory of torch's own would take the next power of two of the bytes.
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
"""What attends to pages in host memory: the device, over the bus, or the host's processor, which sends the results."""

_HOST = torch.device("cpu")
_PORTABLE_AND_MAPPED = 1 | 2
"""Flags of `cudaHostRegister`: pinned for every context of the process, at addresses that devices read and write."""


def host_store(
    n_bytes: int, device: torch.device, attention: HostAttention, *, poison: bool, journal: Journal
) -> Store:  # fmt: skip
    """Make a store in host memory, for a memory on `device`. Its tensors are of the device whose kernels read them.

    Raises SpecError: the host cannot allocate, or pin, so many bytes.
    """
    if device.type != "cuda":  # the CPU's memory is the host's already, and "meta" has none
        return Store(n_bytes, device, poison=poison, unit=HOST_UNIT, journal=journal)
    index = torch.cuda.current_device() if device.index is None else device.index
    place = _HOST if attention == "compute" else torch.device("cuda", index)
    return Store(
        n_bytes, place, poison=poison, unit=HOST_UNIT, journal=journal,
        reserve=lambda n, of: _reserve_pinned(n, of, index),
    )  # fmt: skip


def _reserve_pinned(n_bytes: int, place: torch.device, index: int) -> Tensor:
    """Return (n_bytes,) uint8 in host memory that CUDA device `index` reaches, as a tensor on `place`."""
    pinned = _Pinned(reserve(n_bytes, _HOST), index)
    return torch.from_numpy(np.asarray(pinned)) if place == _HOST else torch.as_tensor(pinned, device=place)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Pinned:
    """Holds host bytes, pinned as long as anything refers to this or to a tensor of them."""

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
        weakref.finalize(self, _unpin, host, index, os.getpid())  # keeps the bytes alive until then


def _unpin(host: Tensor, index: int, process: int) -> None:
    if os.getpid() != process:  # CUDA does not work in a forked child
        return
    torch.cuda.synchronize(index)  # kernels may still read them
    _cudart().cudaHostUnregister(host.data_ptr())
