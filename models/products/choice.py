"""Chooses how the weights of a product are held, and compiles ahead what multiplies them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from hybridmem.models.products.packed import PackedWeight, packed_dtype
from hybridmem.models.weights.coded import CodedTensor, as_floats
from hybridmem.models.weights.formats import WeightFormat

if TYPE_CHECKING:
    from hybridmem.models.products.blocked import BlockedWeight
    from hybridmem.models.products.joined import JoinedWeight
    from hybridmem.models.products.quantised import QuantisedWeight

    HeldWeight = PackedWeight | BlockedWeight | QuantisedWeight | JoinedWeight


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


def hold_joined(weights: Sequence[Tensor], format: WeightFormat) -> HeldWeight | Tensor:
    """Return weights (n_out_i, n_in) as one, as the fastest product reads it; a tensor for torch's own product.

    Those that are stored alike become one weight. Others are joined as they are held.
    """
    alike = [list(group) for _, group in groupby(weights, _stored_as)]
    if len(alike) > 1:
        parts = [hold(_cat(group), format) for group in alike]
        if all(part is not None for part in parts):
            from hybridmem.models.products.joined import JoinedWeight

            return JoinedWeight([part for part in parts if part is not None])
        weights = [as_floats(weight) for weight in weights]
    whole = _cat(weights)
    return as_floats(whole) if (held := hold(whole, format)) is None else held


def _stored_as(weight: Tensor) -> str | None:
    return weight.form.name if isinstance(weight, CodedTensor) else None


def _cat(weights: Sequence[Tensor]) -> Tensor:
    """Return the weights one behind the other; of those on "meta" torch would import much for that."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if first.is_meta and not isinstance(first, CodedTensor):
        return first.new_empty(sum(len(weight) for weight in weights), *first.shape[1:])
    return torch.cat(list(weights))


def compile_ahead(dtype: torch.dtype, formats: Iterable[WeightFormat] = get_args(WeightFormat)) -> None:
    """Compile what models of this dtype need for weights of these formats, or load it from disk."""
    for format in formats:
        if (held := hold(torch.zeros(1, 1, dtype=dtype), format)) is not None:
            held.multiply(torch.zeros(1, 1, dtype=dtype), None, None)
            if (product := held.compiled(None, None)) is not None:
                product.compile()
