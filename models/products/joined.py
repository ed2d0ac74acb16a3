"""Joins weights that share their rows but not their layout: their outputs stand one after the other.

For instance, a layer's values may be stored in more bits than its queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.models.products import epilogue
from hybridmem.models.products.few_rows import CompiledProduct
from hybridmem.models.products.few_rows_kernels import ProductKind
from hybridmem.models.products.quantised import QuantisedWeight, multiply_by

if TYPE_CHECKING:
    from hybridmem.models.products.blocked import BlockedWeight
    from hybridmem.models.products.packed import PackedWeight

PASSES_ADDRESSES = True
"""Declares that arrays and addresses taken from tensors here go only to kernels (`memory.kernels.cpu.recording`)."""


class JoinedWeight:
    """Holds several weights (n_out_i, n_in) as one weight of (sum of n_out_i, n_in).

    Weights of integers whose kernels read the same rows are multiplied in one call.

    Attributes:
        FUSED: activations that all parts apply before sums are rounded.
    """

    bias_dtype = torch.float32

    def __init__(self, parts: Sequence[PackedWeight | BlockedWeight | QuantisedWeight]) -> None:
        self._parts = list(parts)
        self.n_out: int = sum(part.n_out for part in parts)
        self.FUSED: tuple[str, ...] = tuple(
            name for name in epilogue.FUSED if all(name in part.FUSED for part in parts)
        )
        pieces = [part.product() for part in parts if isinstance(part, QuantisedWeight) and not part.codes.is_meta]
        self._last: tuple[Tensor | None, str | None, CompiledProduct] | None = None
        self._product = _joined(pieces) if len(pieces) == len(parts) else None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the product, which has the arrays of the parts: a copy has other arrays."""
        return {**vars(self), "_last": None}

    def compiled(self, bias: Tensor | None, activation: str | None) -> CompiledProduct | None:
        """Return the product for few rows, or None if some part has none."""
        if self._product is None or self._product.reads is not self._product.dtype:
            return None
        return _with(self._product, bias, activation)

    def multiply(self, x: Tensor, bias: Tensor | None, activation: str | None, *, keeps_sums: bool = False) -> Tensor:
        """Return activation(x W^T + bias), (T, n_out) of x (T, n_in), in the dtype of x. `bias` is float32.

        With `keeps_sums`, the float32 sums are returned without rounding, from one call for each part.
        """
        if self._product is not None and not keeps_sums:
            if (last := self._last) is None or last[0] is not bias or last[1] != activation:
                self._last = last = bias, activation, _with(self._product, bias, activation)
            return multiply_by(last[2], x)
        biases = [None] * len(self._parts) if bias is None else bias.split([part.n_out for part in self._parts])
        found = [
            part.multiply(x, None if own is None else own.to(part.bias_dtype), activation, keeps_sums=keeps_sums)
            for part, own in zip(self._parts, biases, strict=True)
        ]
        return torch.cat(found, 1)


def _joined(pieces: Sequence[CompiledProduct]) -> CompiledProduct | None:
    """Return the product with all pieces, or None if their kernels are called differently."""
    first = pieces[0]
    if not all(piece.kind.is_called_like(first.kind) and piece.reads is first.reads for piece in pieces):
        return None
    kind = ProductKind(np.dtype(np.uint8), first.dtype, "pieces in tiles" if first.kind.has_tiles else "pieces")
    n_out = sum(piece.n_out for piece in pieces)
    return replace(first, weight=(), n_out=n_out, kind=kind, pieces=tuple(pieces))


def _with(product: CompiledProduct, bias: Tensor | None, activation: str | None) -> CompiledProduct:
    product.arrays()  # This makes the arrays once for all calls.
    own = epilogue.NO_BIAS if bias is None else bias.numpy()
    return replace(product, bias=own, activation=epilogue.ACTIVATIONS[activation])
