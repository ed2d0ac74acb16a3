"""Averages the rows of the last tokens, weighted for each channel by a softmax over gates.

Each row holds a key and gates for its channels; a bias for each place among the n rows is added to the gates. The state
is the last n - 1 rows. Indexes whose keys stand for spans of tokens are made so: the output at the last token of a span
is the span's key (`memory.attention.span_keys`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from hybridmem.memory.recurrences.registry import register_family
from hybridmem.memory.specs import RecurrentSpec, StateTensor
from hybridmem.memory.state.access import Recurrence, States

_AT_ONCE = 512
"""The number of tokens whose windows are in memory at once."""


def gated_pool_spec(n_channels: int, n_rows: int, name: str = "recurrence") -> RecurrentSpec:
    """Describe a pool over n_rows tokens, of which there are two at least.

    Row: a key of E channels, then as many gates. State: the last n_rows - 1 rows.
    """
    window = StateTensor("window", (n_rows - 1, 2 * n_channels), dtype=None)
    return RecurrentSpec("gated_pool", (2 * n_channels,), (window,), name)


@dataclass(frozen=True)
class GatedPool:
    """Averages the last W rows.

    Attributes:
        bias_WE: what is added to the gates of a row by its place, oldest first; float32.
    """

    bias_WE: Tensor

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Advance the states by rows (T, 2 E); returns averages (T, E) in the rows' dtype, and the states."""
        (before,) = states.start()
        counts, n_kept = np.diff(states.cu_rows), before.shape[1]
        if (counts == counts[0]).all():
            padded = torch.cat([before, rows.view(len(counts), -1, rows.shape[1])], 1)
            return self._averages(padded).flatten(0, 1), states.end(padded[:, padded.shape[1] - n_kept :])
        ys, ends = list[Tensor](), list[Tensor]()
        for start, own in zip(before, torch.split(rows, counts.tolist()), strict=True):
            padded = torch.cat([start, own])[None]
            ys.append(self._averages(padded)[0])
            ends.append(padded[0, padded.shape[1] - n_kept :])
        return torch.cat(ys), states.end(torch.stack(ends))

    def _averages(self, rows_SLR: Tensor) -> Tensor:
        """Return the average for each window of W rows, (S, L - W + 1, E)."""
        windows = rows_SLR.unfold(1, len(self.bias_WE), 1)
        return torch.cat([self._average(part) for part in torch.split(windows, _AT_ONCE, 1)], 1)

    def _average(self, windows_STRW: Tensor) -> Tensor:
        keys_STEW, gates_STEW = windows_STRW.chunk(2, 2)
        weights_STEW = (gates_STEW.float() + self.bias_WE.T).softmax(-1).to(keys_STEW.dtype)
        return (weights_STEW * keys_STEW).sum(-1)


@register_family("gated_pool")
def example(generator: Generator) -> tuple[RecurrentSpec, Recurrence]:
    return gated_pool_spec(5, 3), GatedPool(torch.randn(3, 5, generator=generator))
