"""Holds weights of products as integers on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.blocks import ceil_div
from hybridmem.memory.kernels.cpu.parts import LIKE, as_array, use_threads
from hybridmem.models.products import amx, epilogue, huge_pages, integer_packing, integer_rounding, row_gathering
from hybridmem.models.products.blocked import pairs_of
from hybridmem.models.products.few_rows import CompiledProduct
from hybridmem.models.products.few_rows_kernels import ProductKind
from hybridmem.models.products.kernels import choose, kernel_of
from hybridmem.models.weights.coded import CodedTensor, weights_of
from hybridmem.models.weights.formats import IntegerFormat
from hybridmem.models.weights.layouts import BLOCK, GROUP, INT4, INT8, INT8_BY_ROW, Layout

PASSES_ADDRESSES = True
"""Declares that arrays and addresses taken from tensors here go only to kernels (`memory.kernels.cpu.recording`)."""

LAYOUTS: dict[IntegerFormat, Layout] = {"int8": INT8, "int8-row": INT8_BY_ROW, "int4": INT4}
"""The layouts to which weights are rounded: a bfloat16 scale serves 32 inputs, or all inputs of an output."""


class QuantisedWeight:
    """Holds a weight (n_out, n_in) as integers with scales. A product reads only these, and nothing else is kept.

    Rows are read in bfloat16 under two conditions: the integers stand for floats in bfloat16, and the processor
    multiplies bfloat16 (in pairs or tiles) or integers. Otherwise rows are read in float32. For products in tiles or
    integers, rows are rounded: each group of 32 numbers keeps twelve bits below the power of two of its largest number
    (`row_units`). A row's result has the same bits in any batch.

    Args:
        dtype: the dtype of the floats for which the integers stand.
        is_dry: True if there are no numbers, but only their count of bytes.
    """

    FUSED = epilogue.FUSED
    """Activations that are applied before sums are rounded."""

    bias_dtype = torch.float32

    def __init__(self, layout: Layout, n_out: int, n_in: int, dtype: torch.dtype, *, is_dry: bool = False) -> None:
        self.layout, self.n_out, self.n_in, self.dtype = layout, n_out, n_in, dtype
        # The last product is kept, because making one takes microseconds.
        self._last: tuple[Tensor | None, str | None, CompiledProduct] | None = None
        n_blocks = ceil_div(n_out, BLOCK)
        empty = partial(torch.empty, device="meta") if is_dry else huge_pages.empty
        self.codes: Tensor = empty(n_blocks * ceil_div(n_in, GROUP) * layout.code_bytes, dtype=torch.uint8)
        self.scales: Tensor = empty(n_blocks * layout.n_units(n_in) * layout.unit_shorts, dtype=torch.int16)
        if is_dry:
            return
        self._codes, self._scales = self.codes.numpy().view(layout.dtype), self.scales.numpy().view(np.uint16)
        name = choose(layout, dtype)
        assert name is not None, "one of the kernels is for every processor"
        self._kind = ProductKind(layout.dtype, dtype, name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the product, which has the weight's arrays: a copy has other arrays."""
        return {**vars(self), "_last": None}

    @staticmethod
    def zeros(layout: Layout, dtype: torch.dtype) -> QuantisedWeight:
        """Return a weight with a single zero, by which the kernels for its kind are compiled."""
        held = QuantisedWeight(layout, 1, 1, dtype)
        held.codes.zero_()
        held.scales.zero_()
        return held

    @staticmethod
    def rounded(weight: Tensor, format: IntegerFormat) -> QuantisedWeight:
        """Round a weight to integers.

        A weight takes 8.5, 8 or 4.5 bits. With 8 bits it is off by at most 1/250 of the largest weight that shares its
        scale, with 4 bits by at most 1/8 of it.

        Args:
            weight: of any float dtype, on the CPU; or on "meta", which gives the same bytes without numbers.
        """
        n_out, n_in = weight.shape
        weight = weight.dense(torch.float32) if isinstance(weight, CodedTensor) else weight
        own = weight if weight.dtype in (torch.float32, torch.bfloat16, torch.float16) else weight.float()
        layout = LAYOUTS[format]
        held = QuantisedWeight(layout, n_out, n_in, own.dtype, is_dry=weight.is_meta)
        if not weight.is_meta:
            integer_rounding.round_to_codes(
                as_array(own.contiguous().view(-1)), n_out, n_in, layout.n_bits, use_threads(weight.numel()),
                held.codes.numpy(), held._scales,
            )  # fmt: skip
        return held

    @staticmethod
    def kept(weight: CodedTensor) -> QuantisedWeight | None:
        """Lay out the same integers and scales in the smallest layout that has a kernel. Return None if none has."""
        layout = next((layout for layout in weight.layouts if choose(layout, weight.dtype) is not None), None)
        return None if layout is None else QuantisedWeight.laid_out(weight, layout)

    @staticmethod
    def laid_out(weight: CodedTensor, layout: Layout) -> QuantisedWeight:
        """Lay out the same integers and scales in one of the weight's layouts. Cost: they are read once."""
        n_out, n_in = weight.shape
        held = QuantisedWeight(layout, n_out, n_in, weight.dtype, is_dry=weight.is_meta)
        if not weight.is_meta:
            held._lay_out(weight)
        return held

    def _lay_out(self, weight: CodedTensor) -> None:
        """Write the integers and scales of a weight. Its chunks are read where they are if they are whole blocks."""
        chunks, first = weight.chunks, 0
        if any(len(chunk[0]) % BLOCK for chunk in chunks[:-1]):
            chunks = (weight.rows(),)
        n_blocks = ceil_div(self.n_out, BLOCK)
        codes, scales = self._codes.reshape(n_blocks, -1), self.scales.view(n_blocks, -1)
        for chunk in chunks:
            n = ceil_div(len(chunk[0]), BLOCK)
            own_codes, own_scales = codes[first : first + n].reshape(-1), scales[first : first + n].view(-1)
            n_parts = use_threads(len(chunk[0]) * self.n_in)
            integer_packing.lay_out_codes(weight.form, chunk[0], self.layout, weight.order, n_parts, own_codes)
            integer_packing.lay_out_scales(
                weight.form, chunk, self.layout, self.n_in, weight.order, n_parts, own_scales
            )
            first += n

    def dense(self) -> Tensor:
        """Return the weights that products use, (n_out, n_in) float32."""
        sizes = self.n_out, self.n_in
        codes = integer_packing.read_codes(self.layout, self.codes, *sizes)
        return weights_of(self.layout, codes, integer_packing.read_scales(self.layout, self.scales, *sizes))

    def rows(self, indices: Tensor) -> Tensor:
        """Return the rows of the weight, (T, n_in) float32, with the indices (T,)."""
        return row_gathering.gather(self.layout, self.codes, self.scales, self.n_out, self.n_in, indices)

    def compiled(self, bias: Tensor | None, activation: str | None) -> CompiledProduct | None:
        """Return the product for few rows.

        None if there are no numbers, or if rows are read in another dtype than weights.
        """
        if self.codes.is_meta:
            return None
        product = self.product(bias, activation)
        return product if product.reads is product.dtype else None

    def multiply(
        self, x: Tensor, bias: Tensor | None, activation: str | None = None, *, keeps_sums: bool = False
    ) -> Tensor:
        """Return activation(x W^T + bias), (T, n_out) of x (T, n_in), in the dtype of x. `bias` is float32.

        With `keeps_sums`, the float32 sums are returned without rounding.
        """
        if (last := self._last) is None or last[0] is not bias or last[1] != activation:
            self._last = last = bias, activation, self.product(bias, activation)
        return multiply_by(last[2], x, keeps_sums=keeps_sums)

    def product(self, bias: Tensor | None = None, activation: str | None = None) -> CompiledProduct:
        """Return the product for any number of rows."""
        return CompiledProduct(
            (self._codes, self._scales), epilogue.NO_BIAS if bias is None else bias.numpy(),
            epilogue.ACTIVATIONS[activation], self.n_in, self.n_out,
            self._kind, GROUP, 2 if self._kind.has_tiles else 1,
        )  # fmt: skip


def multiply_by(by: CompiledProduct, x: Tensor, *, keeps_sums: bool = False) -> Tensor:
    """Return the product of rows x (T, n_in), in their dtype or in float32, with weights in integers."""
    kernel, n_rows, dtype = kernel_of(by.kind.kernel), x.shape[0], torch.float32 if keeps_sums else x.dtype
    y = torch.empty(n_rows, by.n_out, dtype=torch.float32 if keeps_sums else by.kind.rows)
    options = by.bias, by.activation, use_threads(x.numel() * by.n_out // 16)
    if not n_rows:
        return y.to(dtype)
    if by.kind.has_tiles:
        pairs = pairs_of(x, GROUP)
        kernel.product(
            *by.arrays(), pairs.data_ptr(), n_rows, pairs.shape[1] // 2, amx.shape(n_rows), *options, y.data_ptr(),
            by.n_out, LIKE[y.dtype],
        )  # fmt: skip
    else:
        rows = x.to(by.reads).contiguous()
        rows = F.pad(rows, (0, -by.n_in % GROUP)) if by.n_in % GROUP else rows
        kernel.product(*by.arrays(), as_array(rows), *options, as_array(y))
    return y if y.dtype is dtype else y.to(dtype)
