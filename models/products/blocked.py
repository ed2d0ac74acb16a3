"""Lays out weights in float32 and bfloat16 for compiled products, on processors with AVX-512."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.blocks import ceil_div
from hybridmem.memory.kernels.cpu.parts import LIKE, as_array, use_threads
from hybridmem.models.products import amx, blocked_kernels, epilogue, huge_pages
from hybridmem.models.products.few_rows import CompiledProduct
from hybridmem.models.products.few_rows_kernels import ProductKind
from hybridmem.models.products.kernels import kernel_of
from hybridmem.models.weights.layouts import BLOCK

PASSES_ADDRESSES = True
"""Declares that arrays and addresses taken from tensors here go only to kernels (`memory.kernels.cpu.recording`)."""


_OUTPUTS = blocked_kernels.BLOCKS * BLOCK
_PER_CODE = {torch.float32: 1, torch.bfloat16: 2}
_CODES = {torch.float32: np.float32, torch.bfloat16: np.uint32}


class BlockedWeight:
    """Holds a weight (n_out, n_in) in float32 or bfloat16, in the layout of `blocked_kernels` and `tile_kernels`.

    bfloat16 is multiplied in tiles if the processor can. A row's result has the same bits in any batch.

    Args:
        dtype: float32, or bfloat16.
        kernel: the kernel's name in `KERNELS`.
    """

    FUSED = epilogue.FUSED
    """Activations that are applied before sums are rounded."""

    bias_dtype = torch.float32

    def __init__(self, weight: Tensor, dtype: torch.dtype, kernel: str) -> None:
        self.n_out, self.n_in = weight.shape
        self.dtype, self._n_multiple = dtype, blocked_kernels.UNROLLED * _PER_CODE[dtype]
        rows = _as_codes(weight, dtype, self._n_multiple)
        n_rows, n_codes = ceil_div(self.n_out, _OUTPUTS) * _OUTPUTS, rows.shape[1] // _PER_CODE[dtype]
        self.codes = huge_pages.empty(n_rows, n_codes, dtype=torch.float32 if dtype is torch.float32 else torch.int32)
        self._codes = self.codes.numpy().reshape(-1).view(_CODES[dtype])
        # Rows have the model's dtype, whose 16 bits may be laid out as float32.
        self._kind = ProductKind(self._codes.dtype, weight.dtype, kernel)
        blocked_kernels.lay_out(as_array(rows).view(_CODES[dtype]), use_threads(rows.numel()), self._codes)

    def compiled(self, bias: Tensor | None, activation: str | None) -> CompiledProduct:
        """Return the product for few rows. The arguments are those of `multiply`."""
        return CompiledProduct(
            (self._codes,), epilogue.NO_BIAS if bias is None else bias.numpy(),
            epilogue.ACTIVATIONS[activation], self.n_in, self.n_out,
            self._kind, self._n_multiple, _PER_CODE[self.dtype],
        )  # fmt: skip

    def multiply(self, x: Tensor, bias: Tensor | None, activation: str | None, *, keeps_sums: bool = False) -> Tensor:
        """Return activation(x W^T + bias), (T, n_out) of x (T, n_in), in the dtype of x. `bias` is float32.

        With `keeps_sums`, the float32 sums are returned without rounding.
        """
        rows = _as_codes(x, self.dtype, self._n_multiple)
        n_rows, n_inputs = rows.shape
        dtype = torch.float32 if keeps_sums else x.dtype
        y = torch.empty(n_rows, self.n_out, dtype=torch.float32 if keeps_sums else self.dtype)
        source, options = (rows.data_ptr(), n_rows, n_inputs // _PER_CODE[self.dtype]), (
            epilogue.NO_BIAS if bias is None else bias.numpy(), epilogue.ACTIVATIONS[activation],
            use_threads(n_rows * n_inputs * self.n_out // 16), y.data_ptr(), self.n_out, LIKE[y.dtype],
        )  # fmt: skip
        product = kernel_of(self._kind.kernel).product
        if not self._kind.has_tiles:
            product(self._codes, *source, *options)
        elif n_rows:
            product(self._codes, *source, amx.shape(n_rows), *options)
        return y if y.dtype is dtype else y.to(dtype)


def _as_codes(x: Tensor, dtype: torch.dtype, n_multiple: int) -> Tensor:
    """Return x (T, n) as contiguous rows of a multiple of `n_multiple` inputs, at an address where a code may begin."""
    rows = x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()
    if n_more := -rows.shape[1] % n_multiple:
        rows = F.pad(rows, (0, n_more))
    return rows if rows.data_ptr() % 4 == 0 else rows.clone()


def pairs_of(x: Tensor, n_multiple: int) -> Tensor:
    """Return x (T, n) as contiguous bfloat16 rows of a multiple of `n_multiple` inputs, at an address of a pair."""
    return _as_codes(x, torch.bfloat16, n_multiple)
