"""Knows where a recorded step's results are, and packs them: later results reuse the memory of those no longer needed.

While a step is recorded, all its results stay at different addresses, so that each address stands for one result. If
the recording were replayed like that, a model of twelve layers would write twelve times as much memory as fits into a
fast cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.kernels.cpu.launches import Address

Calls = list[tuple[Callable[..., object], tuple[Any, ...]]]
"""Functions and their arguments, in the order of the calls."""

_LINE_BYTES = 64
_Place = tuple[int, int]
"""The allocation to which an address belongs, and the distance in bytes of the address from the allocation's begin."""


class ActivationPlanner:
    """Knows all memory that a recorded step has allocated: `n_bytes` bytes.

    It keeps all tensors that the step has used, so that no other tensor gets one of their addresses.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._begins: list[int] = []
        self.n_bytes = 0

    def add(self, made: list[Tensor], given: list[Tensor]) -> None:
        """Keep the results of an operation, and its arguments."""
        self._tensors += made + given
        for at, n_bytes in filter(None, map(storage_of, made)):
            if at not in self._numbers:
                self._numbers[at] = len(self._sizes)
                self._sizes.append(n_bytes)
                self.n_bytes += n_bytes

    def find(self, address: int) -> _Place | None:
        """Return the place of an address in the memory that the step has allocated, or None if it is elsewhere."""
        if len(self._begins) != len(self._numbers):
            self._begins = sorted(self._numbers)
        at = bisect_right(self._begins, address) - 1
        if at < 0:
            return None
        begin = self._begins[at]
        number = self._numbers[begin]
        return (number, address - begin) if address < begin + self._sizes[number] else None

    def key_of(self, x: Any) -> Hashable:
        """Return a key of an argument. Two recordings of one step give arguments with the same keys.

        Raises ValueError for an integer that is an address in the memory of the step, but was not declared as an
        address.
        """
        if isinstance(x, tuple | list):
            return tuple(map(self.key_of, x))
        if isinstance(x, dict):
            return tuple((name, self.key_of(x[name])) for name in sorted(x))
        if isinstance(x, Tensor):
            if x.layout is not torch.strided:
                return "opaque", id(x)
            return "tensor", *_sizes(x), x.dtype, self._key_at(x.data_ptr()) if x.numel() else 0
        if isinstance(x, np.ndarray):
            return "array", x.shape, x.strides, x.dtype.str, self._key_at(x.ctypes.data) if x.size else 0
        if isinstance(x, Address):
            return "address", self._key_at(x)
        if isinstance(x, int) and self.find(x) is not None:
            raise ValueError("a kernel is given an address by an argument that is not declared as one")
        return repr(x) if isinstance(x, float | complex | np.generic | None) else (type(x).__name__, str(x))

    def _key_at(self, address: int) -> Hashable:
        return self.find(address) or address

    def pack(self, calls: Calls, output: Any) -> tuple[Calls, Any, int]:
        """Move all results into one block. Return the calls on this block, their output, and the bytes of the block."""
        lives = dict[int, list[int]]()
        for i, arguments in enumerate([*(arguments for _, arguments in calls), (output,)]):
            for number, _ in filter(None, map(self.find, _addresses_in(arguments))):
                lives.setdefault(number, [i, i])[1] = i
        begins, n_bytes = _lay_out({
            number: (first, last, self._sizes[number]) for number, (first, last) in lives.items()
        })  # fmt: skip
        block = torch.empty(n_bytes, dtype=torch.uint8)
        moved = _Moved(self, begins, block)
        return [(function, moved(arguments)) for function, arguments in calls], moved(output), n_bytes


class _Moved:
    """Replaces those arguments that are in the memory of a step by arguments in a packed block."""

    def __init__(self, memory: ActivationPlanner, begins: dict[int, int], block: Tensor) -> None:
        self._memory, self._begins, self._block, self._array = memory, begins, block, block.numpy()

    def __call__(self, x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(map(self, x))
        if isinstance(x, dict):
            return {name: self(own) for name, own in x.items()}
        if isinstance(x, Tensor) and storage_of(x) and (at := self._at(x.data_ptr())) is not None:
            moved = torch.empty(0, dtype=x.dtype)
            return moved.set_(self._block.untyped_storage(), at // x.itemsize, x.shape, x.stride())
        if isinstance(x, np.ndarray) and (at := self._at(x.ctypes.data)) is not None:
            return np.ndarray(x.shape, x.dtype, self._array, at, x.strides)
        if isinstance(x, Address):
            return int(x) if (at := self._at(x)) is None else self._block.data_ptr() + at
        return x

    def _at(self, address: int) -> int | None:
        """Return the offset in the packed block to which the bytes at an address were moved, or None if they stay."""
        place = self._memory.find(address)
        return None if place is None else self._begins[place[0]] + place[1]


def _addresses_in(x: Any) -> Iterator[int]:
    """Yield the addresses among arguments."""
    if isinstance(x, tuple | list | dict):
        for own in x.values() if isinstance(x, dict) else x:
            yield from _addresses_in(own)
    elif isinstance(x, Tensor):
        if storage_of(x):
            yield x.data_ptr()
    elif isinstance(x, np.ndarray):
        yield x.ctypes.data
    elif isinstance(x, Address):
        yield x


def _lay_out(lives: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Choose the offset of each result in a block, and return the offsets and the bytes of the block.

    Args:
        lives: result -> its first and its last use, and its bytes. Results that are in use at the same time do not
            overlap.
    """
    # `taken` holds (last use, begin, end) of each result.
    begins, taken = dict[int, int](), list[tuple[int, int, int]]()
    n_bytes = 0
    for number, (first, last, size) in sorted(lives.items(), key=lambda item: item[1]):
        taken = [part for part in taken if part[0] >= first]
        begin = _first_gap(size, sorted((start, end) for _, start, end in taken))
        begins[number], end = begin, begin + -(-size // _LINE_BYTES) * _LINE_BYTES
        taken.append((last, begin, end))
        n_bytes = max(n_bytes, end)
    return begins, n_bytes


def _first_gap(size: int, taken: Iterable[tuple[int, int]]) -> int:
    """Return the first place with `size` free bytes between the `taken` ranges, which are in order."""
    begin = 0
    for start, end in taken:
        if start - begin >= size:
            break
        begin = max(begin, end)
    return begin


def storage_of(x: Tensor) -> tuple[int, int] | None:
    """Return address and bytes of a tensor's storage, or None if it has none, as for tensors of oneDNN."""
    if x.layout is not torch.strided:
        return None
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _sizes(x: Tensor) -> tuple[int, ...]:
    return *x.shape, *x.stride()
