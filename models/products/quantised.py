"""Holds weights of products in 8 or 4 bits on the CPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels.cpu.rows import LIKE, as_array
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.models.products import amx, epilogue, huge_pages, integer_rounding
from hybridmem.models.products.blocked import pairs_of
from hybridmem.models.products.few_rows import CompiledProduct
from hybridmem.models.products.few_rows_kernels import ProductKind
from hybridmem.models.products.kernels import KERNELS, choose
from hybridmem.models.weights.formats import IntegerFormat

PASSES_ADDRESSES = True
"""Says that what is taken from tensors here goes to kernels alone (`memory.kernels.cpu.recording`)."""


class QuantisedWeight:
    """Holds a weight (n_out, n_in) as integers of 8 or 4 bits, with a scale in bfloat16 for each group of 32 inputs.

    With "int8-row" all inputs of an output share one. A product reads 8.5, 8 or 4.5 bits for a weight, and turns them
    into numbers as it goes: nothing else is kept. Rows are read in bfloat16 if the weight was, where the processor
    multiplies pairs or tiles of that, or integers; else in float32. Tiles and integers read rows of which each 32
    numbers have twelve bits below the power of two of the largest (`row_units`). A row's result has the same bits in
    any company. At 8 bits a weight is off by at most 1/250 of the largest that shares its scale, at 4 bits by 1/8.

    Args:
        weight: of any float dtype, on the CPU; or on "meta", which gives the same bytes without numbers.
    """

    FUSED = epilogue.FUSED
    """Activations that are applied before sums are rounded."""

    bias_dtype = torch.float32

    def __init__(self, weight: Tensor, format: IntegerFormat) -> None:
        self.n_out, self.n_in = weight.shape
        self.format = format
        n_blocks, n_groups = ceil_div(self.n_out, 16), ceil_div(self.n_in, 32)
        n_weights, is_8 = n_blocks * 16 * n_groups * 32, format != "int4"
        is_dry = weight.device.type == "meta"
        empty = partial(torch.empty, device="meta") if is_dry else huge_pages.empty
        self.codes: Tensor = empty(n_weights if is_8 else n_weights // 2, dtype=torch.int8 if is_8 else torch.uint8)
        n_scales = 16 * n_blocks * (1 if format == "int8-row" else n_groups)
        self.scales: Tensor = empty(n_scales, dtype=torch.bfloat16)
        if is_dry:
            return
        self._codes, self._scales = self.codes.numpy(), as_array(self.scales)
        own = weight if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else weight.float()
        name = choose(format, own.dtype)
        assert name is not None, "one of the kernels is for every processor"
        self._kind, self._dtype = ProductKind(self._codes.dtype, own.dtype, name), KERNELS[name].rows
        integer_rounding.round_to_codes(
            as_array(own.contiguous().view(-1)), self.n_out, self.n_in, 8 if is_8 else 4,
            use_threads(weight.numel()), self._codes.view(np.uint8), self._scales,
        )  # fmt: skip

    def dense(self) -> Tensor:
        """Return the weights as they are used, (n_out, n_in) float32."""
        n_blocks, n_groups = ceil_div(self.n_out, 16), ceil_div(self.n_in, 32)
        if self.format != "int4":
            integers = self.codes.view(n_blocks, n_groups, 16, 16, 2).permute(0, 3, 1, 2, 4)  # block, lane, group, pair
        else:
            codes = self.codes.view(n_blocks, n_groups, 4, 16, 2, 2)  # group, four pairs, lane, of the pair, pairs of 2
            both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)  # ..., pair of four
            integers = both.to(torch.int8).permute(0, 3, 1, 2, 5, 4) - 8
        groups = integers.reshape(n_blocks * 16, n_groups, 32).float()
        scales = self.scales.float().view(n_blocks, -1, 16).transpose(1, 2).reshape(n_blocks * 16, -1, 1)
        return (groups * scales).flatten(1)[: self.n_out, : self.n_in]

    def compiled(self, bias: Tensor | None, activation: str | None) -> CompiledProduct | None:
        """Return the product for few rows; None without numbers, or if rows are read in another dtype than weights."""
        if self.codes.is_meta or self._kind.rows is not self._dtype:
            return None
        return CompiledProduct(
            (self._codes, self._scales), epilogue.NO_BIAS if bias is None else bias.numpy(),
            epilogue.ACTIVATIONS[activation], self.n_in, self.n_out,
            self._kind, 32, 2 if self._kind.has_tiles else 1,
        )  # fmt: skip

    def multiply(self, x: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
        """Return activation(x W^T + bias), (T, n_out) of x (T, n_in), in the dtype of x. `bias` is float32."""
        y = torch.empty(x.shape[0], self.n_out, dtype=self._kind.rows)
        n_threads = use_threads(x.numel() * self.n_out // 16)
        own_bias = epilogue.NO_BIAS if bias is None else bias.numpy()
        options = own_bias, epilogue.ACTIVATIONS[activation], n_threads
        product = KERNELS[self._kind.kernel].product
        if self._kind.has_tiles:
            if n_rows := x.shape[0]:
                pairs = pairs_of(x, 32)
                product(
                    self._codes, self._scales, pairs.data_ptr(), n_rows, pairs.shape[1] // 2, amx.shape(n_rows),
                    *options, y.data_ptr(), self.n_out, LIKE[y.dtype],
                )  # fmt: skip
        else:
            rows = x.to(self._dtype).contiguous()
            rows = F.pad(rows, (0, -self.n_in % 32)) if self.n_in % 32 else rows
            product(self._codes, self._scales, as_array(rows), *options, as_array(y))
        return y if x.dtype is y.dtype else y.to(x.dtype)
