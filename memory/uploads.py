"""Host arrays on their way to the device.

What a step's plan says is uploaded in one copy, from pinned memory: the host never waits for the device, which reads an array when all that
was asked of it before is done. Arrays of a plan do not change, so what was uploaded once is found again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from memory.interface import Int64s

T = TypeVar("T")

_LEAST_ELEMENTS = 1 << 14
_WHOLE = 2
"""Arrays begin at multiples of 16 bytes, which kernels load at once."""


class Stage:
    """Arrays that wait for one copy to `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used, self._host, self._on_device = 0, np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64)
        self._pinned = self._on_device

    def add(self, array: Int64s) -> Tensor:
        """What will be a copy of the array once this is sent."""
        if self._used + array.size > len(self._host):
            self.send()
            n = max(_LEAST_ELEMENTS, 2 * len(self._host), array.size)
            # torch gives pinned memory to nobody else before copies out of it are done.
            self._pinned = torch.empty(n, dtype=torch.int64, pin_memory=self._device.type == "cuda")
            self._used, self._host, self._on_device = 0, self._pinned.numpy(), torch.empty(n, dtype=torch.int64, device=self._device)
        end = self._used + array.size
        self._host[self._used : end] = array.ravel()
        placed = self._on_device[self._used : end].view(array.shape)
        self._used = -(-end // _WHOLE) * _WHOLE
        return placed

    def send(self) -> None:
        n = min(self._used, len(self._host))
        if n:
            self._on_device[:n].copy_(self._pinned[:n], non_blocking=True)


_open_stage: ContextVar[Stage | None] = ContextVar("open_stage", default=None)


@contextmanager
def together(device: torch.device) -> Iterator[None]:
    """What is uploaded to a CUDA device inside goes in one copy at the end; until then it can be handed on, but not read."""
    if device.type != "cuda":
        yield
        return
    stage = Stage(device)
    token = _open_stage.set(stage)
    try:
        yield
    finally:
        _open_stage.reset(token)
        stage.send()


def upload(array: Int64s, device: torch.device) -> Tensor:
    """The array, int64, on the device; on the CPU it shares memory with it. The host does not wait."""
    if device.type != "cuda":
        return torch.from_numpy(array)
    index = torch.cuda.current_device() if device.index is None else device.index  # a memory says "cuda", its tensors "cuda:0"
    return remember((array,), index, lambda: _upload(array, device))


def _upload(array: Int64s, device: torch.device) -> Tensor:
    stage = _open_stage.get()
    if stage is not None:
        return stage.add(array)
    return torch.from_numpy(np.ascontiguousarray(array)).pin_memory().to(device, non_blocking=True)


_remembered: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], dict[object, Any]]] = {}


def remember(anchors: tuple[object, ...], key: object, make: Callable[[], T]) -> T:
    """What `make` gave for this key, as long as all anchors live, none of which it may refer to."""
    ids = tuple(map(id, anchors))
    if ids not in _remembered:
        _remembered[ids] = ([weakref.ref(anchor, lambda _: _remembered.pop(ids, None)) for anchor in anchors], {})
    of_anchors = _remembered[ids][1]
    if key not in of_anchors:
        of_anchors[key] = make()
    found: T = of_anchors[key]
    return found
