"""What every launch needs: sizes of blocks, and plans' numbers where kernels read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memory.errors import StepError
from memory.interface import Int64s


def next_power_of_2(n: int) -> int:
    """The least one that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def ceil_div(n: int, d: int) -> int:
    return -(-n // d)


def device_ints(array: Int64s, device: torch.device) -> Tensor:
    """An int64 array of the host where kernels read it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def tiles(cu_rows: Int64s, tile_rows: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Runs of packed rows cut into tiles of `tile_rows`: (2, n) the run of each tile and its first row within the run; cu_rows; and n."""
    n_tiles = -(-np.diff(cu_rows) // tile_rows)
    runs = np.repeat(np.arange(len(n_tiles)), n_tiles)
    first = (np.arange(len(runs)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)) * tile_rows
    packed = device_ints(np.concatenate([runs, first, cu_rows]), device)
    return packed[: 2 * len(runs)], packed[2 * len(runs) :], len(runs)


def longest(cu_rows: Int64s) -> int:
    """Rows of the longest run."""
    return int(np.diff(cu_rows).max(initial=0))


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x (T, ...) such that each row is contiguous: itself where it is, such as a part of a wider row."""
    return x if x.numel() == 0 or x[0].is_contiguous() else x.contiguous()


def require_shapes(what: str, **pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Raise StepError unless each (found, expected) agrees: compiled code does not look where it writes."""
    for name, (found, expected) in pairs.items():
        if tuple(found) != tuple(expected):
            raise StepError(
                f"{what}: {name} has shape {tuple(found)}, not {tuple(expected)}; a layer's weights must fit its spec and its rows"
            )


def absent(x: Any, instead: Tensor) -> Any:
    """A pointer that is never read, where an input is None."""
    return instead if x is None else x
