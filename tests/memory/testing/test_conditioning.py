"""The subject of Mamba-1, whole and in parts, is as near to a twin in float64 as float32 can be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.recurrences.mamba1 import Mamba1
from hybridmem.memory.testing import subjects
from hybridmem.memory.testing.toys import N_MODEL, VOCAB, project

_EXAMPLE = FAMILIES["mamba1"].example
CUTS = (0, 1, 19, 21, 23, 41, 60)


class Twin:
    """Computes what the subject computes, in float64 and without a memory."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        spec, recurrence = _EXAMPLE(generator)
        assert isinstance(recurrence, Mamba1)
        n_row = spec.row_shape[0]
        self.layer = recurrence
        self.embedding, self.rows = (torch.randn(n, N_MODEL, generator=generator).double() for n in (VOCAB, n_row))
        out = torch.Generator().manual_seed(generator.initial_seed() + n_row)
        self.out = torch.randn(N_MODEL, n_row, generator=out).double()

    def logits(self, tokens: list[int]) -> Tensor:
        x = self.embedding[tokens]
        for _ in range(2):
            y = self.recur(torch.tanh(0.5 * project(x, self.rows)))
            x = x + torch.tanh(project(y, self.out))
        return project(x, self.embedding)

    def recur(self, rows: Tensor) -> Tensor:
        conv, a, d = self.layer.conv, self.layer.a_NE.double(), self.layer.d_E.double()
        assert conv.bias_E is not None
        padded, taps = F.pad(rows, (0, 0, 3, 0)), conv.weight_WE.double()
        x = F.silu(sum(taps[i] * padded[i : i + len(rows)] for i in range(4)) + conv.bias_E.double())
        dt_TR, b, c = self.weighted(self.layer.x_proj, x).split([2, 3, 3], -1)
        dt = F.softplus(self.weighted(self.layer.dt_proj, dt_TR) + self.layer.dt_bias_E.double())
        h, found = torch.zeros(a.shape, dtype=torch.float64), []
        for t in range(len(x)):
            h = torch.exp(dt[t] * a) * h + b[t][:, None] * dt[t] * x[t]
            found.append((c[t][:, None] * h).sum(0) + d * x[t])
        return torch.stack(found)

    @staticmethod
    def weighted(linear: Any, x: Tensor) -> Tensor:
        """Multiply by the matrix of a linear map, whose columns are the images of the unit vectors."""
        return x @ linear(torch.eye(x.shape[1])).double()


@pytest.mark.parametrize("fold", ["keep", "defer"])
def test_mamba1_differs_from_float64_by_rounding_whole_and_in_parts(fold: str) -> None:
    twin, adapter = Twin(), subjects.family("mamba1", fold=fold)
    whole, parts = adapter.open(), adapter.open()
    tokens = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = twin.logits(tokens)
    at_once = adapter.step({whole: tokens})[0]
    in_parts = [adapter.step({parts: tokens[a:b]})[0] for a, b in pairwise(CUTS)]
    for found in (torch.from_numpy(at_once), torch.cat([torch.from_numpy(rows) for rows in in_parts])):
        worst, spread = float((found.double() - expected).abs().max()), float(expected.max() - expected.min())
        assert worst < 1e-6 * spread, f"off by {worst / spread} of the spread"
