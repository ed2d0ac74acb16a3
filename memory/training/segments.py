"""Lays the packed rows of several segments side by side, so that scans advance all segments at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s


class Segments:
    """Knows where each of S segments lies in the packed rows of a step. L is the length of the longest segment.

    Attributes:
        cu_rows: (S + 1,) int64 on the host. Segment i has rows [cu_rows[i], cu_rows[i + 1]).
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts = np.array(counts, np.int64)
        self.cu_rows: Int64s = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])
        self.n_longest, self.device = int(self.counts.max()), device
        self._is_even = bool((self.counts == self.n_longest).all())

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def device_counts(self) -> Tensor:
        return torch.from_numpy(self.counts).to(self.device)

    @cached_property
    def _places(self) -> Tensor:
        """Return (S, L): the row of each place, or the number of all rows where a segment has ended."""
        rows_SL = self.cu_rows[:-1, None] + np.arange(self.n_longest)
        found = np.where(np.arange(self.n_longest) < self.counts[:, None], rows_SL, self.cu_rows[-1])
        return torch.from_numpy(found).to(self.device)

    @cached_property
    def _filled(self) -> Tensor:
        return (self._places < int(self.cu_rows[-1])).flatten().nonzero()[:, 0]

    def pad(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return (S, L, ...) of packed rows (T, ...). Places after the end of a segment get `fill`."""
        if self._is_even:
            return x.reshape(len(self), self.n_longest, *x.shape[1:])
        return torch.cat([x, x.new_full((1, *x.shape[1:]), fill)])[self._places]

    def unpad(self, x: Tensor) -> Tensor:
        """Return packed rows (T, ...) of (S, L, ...)."""
        flat = x.flatten(0, 1)
        return flat if self._is_even else flat[self._filled]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the rows of each segment."""
        return torch.split(x, self.counts.tolist())
