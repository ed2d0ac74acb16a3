"""Chooses how the weights of a product are held, and compiles ahead what multiplies them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from hybridmem.models.products.packed import PackedWeight, packed_dtype
from hybridmem.models.weights.coded import CodedTensor
from hybridmem.models.weights.formats import WeightFormat

if TYPE_CHECKING:
    from hybridmem.models.products.blocked import BlockedWeight
    from hybridmem.models.products.quantised import QuantisedWeight

    HeldWeight = PackedWeight | BlockedWeight | QuantisedWeight


def hold(weight: Tensor, format: WeightFormat) -> HeldWeight | None:
    """Return a weight (n_out, n_in) as the fastest product reads it; None if that is torch's own.

    Modules that need numba are imported when they are used: others do without it.
    """
    if isinstance(weight, CodedTensor):
        from hybridmem.models.products.quantised import LAYOUTS, QuantisedWeight

        is_kept = format == "auto" or (format != "dense" and weight.form.layout.n_bits <= LAYOUTS[format].n_bits)
        if is_kept and (held := QuantisedWeight.kept(weight)) is not None:
            return held
        weight = weight.dense()
    if format not in ("auto", "dense"):
        from hybridmem.models.products.quantised import QuantisedWeight

        return QuantisedWeight.rounded(weight, format)
    if (dtype := packed_dtype(weight)) is None:
        return None
    from hybridmem.models.products.kernels import choose

    if (kernel := choose(None, dtype)) is None:
        return PackedWeight(weight, dtype)
    from hybridmem.models.products.blocked import BlockedWeight

    return BlockedWeight(weight, dtype, kernel)


def compile_ahead(dtype: torch.dtype, formats: Iterable[WeightFormat] = get_args(WeightFormat)) -> None:
    """Compile what models of this dtype need for weights of these formats, or load it from disk."""
    for format in formats:
        if (held := hold(torch.zeros(1, 1, dtype=dtype), format)) is not None:
            held.multiply(torch.zeros(1, 1, dtype=dtype), None, None)
            if (product := held.compiled(None, None)) is not None:
                product.compile()
