"""Lays out weights in bfloat16 for processors that multiply pairs of them, or whole tiles."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memory.blocks.arrays import ceil_div
from memory.kernels.cpu.rows import as_array
from memory.kernels.cpu.threads import use_threads
from models.layers import amx, integer_vectors, paired_kernels, quantised_kernels, tile_kernels

_INPUTS = 2 * paired_kernels.UNROLLED
_OUTPUTS = paired_kernels.BLOCKS * integer_vectors.BLOCK


@cache
def multiplies_pairs_fastest() -> bool:
    """True if compiled products are the fastest in bfloat16.

    The processor has AVX512_BF16. Where it has AMX as well, oneDNN uses that: compiled products are faster than that if
    they may use it too.
    """
    if not quantised_kernels.multiplies_pairs():
        return False
    return amx.multiplies_tiles() or not torch.cpu._is_amx_tile_supported()


class PairedWeight:
    """Holds a weight (n_out, n_in) in bfloat16, as `paired_kernels` and `tile_kernels` read it.

    Tiles are multiplied where the processor does that. A row's result has the same bits in any company.
    """

    FUSED = quantised_kernels.FUSED
    """Activations that are applied before sums are rounded."""

    def __init__(self, weight: Tensor) -> None:
        self.n_out, self.n_in = weight.shape
        rows = weight.contiguous() if self.n_in % _INPUTS == 0 else F.pad(weight, (0, -self.n_in % _INPUTS))
        self.codes = torch.empty(ceil_div(self.n_out, _OUTPUTS) * _OUTPUTS, rows.shape[1] // 2, dtype=torch.int32)
        self._codes = self.codes.numpy().reshape(-1).view(np.uint32)
        self._has_tiles = amx.multiplies_tiles()
        pairs = as_array(rows if rows.data_ptr() % 4 == 0 else rows.clone()).view(np.uint32)
        paired_kernels.lay_out(pairs, use_threads(rows.numel()), self._codes)

    def multiply(self, x: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
        """Return activation(x W^T + bias), (T, n_out) of x (T, n_in), in the dtype of x. `bias` is float32."""
        rows = pairs_of(x, _INPUTS)
        n_rows, n_inputs = rows.shape
        y = torch.empty(n_rows, self.n_out, dtype=torch.bfloat16)
        source, options = (rows.data_ptr(), n_rows, n_inputs // 2), (
            quantised_kernels.NO_BIAS if bias is None else bias.numpy(), quantised_kernels.ACTIVATIONS[activation],
            use_threads(n_rows * n_inputs * self.n_out // 16), y.data_ptr(), self.n_out,
        )  # fmt: skip
        if not self._has_tiles:
            paired_kernels.product(self._codes, *source, *options)
        elif n_rows:
            tile_kernels.product(self._codes, *source, amx.shape(n_rows), *options)
        return y if x.dtype is torch.bfloat16 else y.to(x.dtype)


def pairs_of(x: Tensor, n_multiple: int) -> Tensor:
    """Return x (T, n) as contiguous rows of bfloat16, of a multiple of `n_multiple` inputs, that begin at a pair."""
    rows = x if x.dtype is torch.bfloat16 and x.is_contiguous() else x.to(torch.bfloat16).contiguous()
    if n_more := -rows.shape[1] % n_multiple:
        rows = F.pad(rows, (0, n_more))
    return rows if rows.data_ptr() % 4 == 0 else rows.clone()


def compile_pairs() -> None:
    """Compile what products in bfloat16 need, or load it from disk."""
    PairedWeight(torch.zeros(1, 1, dtype=torch.bfloat16)).multiply(torch.zeros(1, 1, dtype=torch.bfloat16), None)
