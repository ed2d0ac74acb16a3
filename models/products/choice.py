"""Chooses how the weights of a product are held, and compiles the kernels that multiply them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory.blocks import Scoped
from hybridmem.memory.kernels import wants_reproducible
from hybridmem.models.products.packed import PackedWeight, packed_dtype
from hybridmem.models.weights.coded import CodedTensor, Form, as_floats
from hybridmem.models.weights.dry import joined
from hybridmem.models.weights.formats import HeldFormat
from hybridmem.models.weights.gguf_forms import FORMS
from hybridmem.models.weights.layouts import Layout

if TYPE_CHECKING:
    from hybridmem.models.products.blocked import BlockedWeight
    from hybridmem.models.products.joined import JoinedWeight
    from hybridmem.models.products.quantised import QuantisedWeight

    OneWeight = PackedWeight | BlockedWeight | QuantisedWeight
    HeldWeight = OneWeight | JoinedWeight


@dataclass(frozen=True)
class Kind:
    """Describes how a weight is held.

    Attributes:
        layout: the layout of its integers; None for floats.
        dtype: the dtype of the floats, or of the floats for which the integers stand.
        stored: the form of the weight in its file; None for floats, and for weights made from floats.
        keeps_sums: True if its products are float32 sums, as those of heads, and are not rounded to the rows' dtype.
    """

    layout: Layout | None
    dtype: torch.dtype
    stored: Form | None = None
    keeps_sums: bool = False

    def __str__(self) -> str:
        """Return in which bits weights are held, and in which bits they are stored if these differ."""
        floats = str(self.dtype).removeprefix("torch.")
        if self.stored is None:
            return floats if self.layout is None else f"{self.layout.n_bits} bits"
        if self.layout == self.stored.layout:
            return f"{self.stored.name}, as stored"
        return f"{self.stored.name} as {floats if self.layout is None else f'integers of {self.layout.n_bits} bits'}"


_kinds = Scoped[Counter[Kind] | None]("kinds of weights", None)


def noting_kinds(kinds: Counter[Kind]) -> AbstractContextManager[None]:
    """Count the numbers of all weights that are held inside of the block, by their kind."""
    return _kinds.set_to(kinds)


def numbers_by_name(kinds: Counter[Kind]) -> dict[str, int]:
    """Return how many numbers of weights are held in each way, under its name."""
    found = Counter[str]()
    for kind, n in kinds.items():
        found[str(kind)] += n
    return dict(sorted(found.items()))


def hold(weight: Tensor, format: HeldFormat, *, keeps_sums: bool = False) -> OneWeight | None:
    """Return a weight (n_out, n_in) in the form that the fastest product reads; None if that is torch's product.

    Modules that need numba are imported when they are used, because other products work without it.

    Args:
        keeps_sums: see `Kind`.
    """
    if format == "plain":
        return None
    form: Form | None = None
    if isinstance(weight, CodedTensor):
        if (kept := _keep(weight, format, keeps_sums=keeps_sums)) is not None:
            return kept
        form, weight = weight.form, weight.dense()
    if format != "auto" and format != "dense":
        from hybridmem.models.products.quantised import QuantisedWeight

        rounded = QuantisedWeight.rounded(weight, format)
        _note(Kind(rounded.layout, rounded.dtype, form, keeps_sums), weight)
        return rounded
    _note(Kind(None, weight.dtype, form, keeps_sums), weight)
    if wants_reproducible.get() and weight.device.type == "cpu":
        from hybridmem.models.products.blocked import BlockedWeight
        from hybridmem.models.products.kernels import choose_by_row

        return BlockedWeight(weight, *choose_by_row(weight.dtype))
    if (dtype := packed_dtype(weight)) is None:
        return None
    from hybridmem.models.products.kernels import choose

    if (kernel := choose(None, dtype)) is None:
        return PackedWeight(weight, dtype)
    from hybridmem.models.products.blocked import BlockedWeight

    return BlockedWeight(weight, dtype, kernel)


def hold_rows(weight: Tensor, format: HeldFormat) -> Tensor | QuantisedWeight:
    """Return a weight from which single rows are read, in its stored bits if `format` keeps them."""
    kept = _keep(weight, format) if isinstance(weight, CodedTensor) else None
    return as_floats(weight) if kept is None else kept


def rows_of(held: HeldWeight | Tensor) -> Tensor | QuantisedWeight | None:
    """Return a weight if single rows can be read from its held form, else None."""
    if isinstance(held, Tensor):
        return held
    if isinstance(held, PackedWeight):
        return None
    from hybridmem.models.products.quantised import QuantisedWeight

    return held if isinstance(held, QuantisedWeight) else None


def _keep(weight: CodedTensor, format: HeldFormat, *, keeps_sums: bool = False) -> QuantisedWeight | None:
    """Return a weight in its stored bits, or None if other bits are wanted or no kernel reads these."""
    from hybridmem.models.products.quantised import LAYOUTS, QuantisedWeight

    if (
        format == "dense"
        or format == "plain"
        or (format != "auto" and weight.form.layout.n_bits > LAYOUTS[format].n_bits)
    ):
        return None
    if (held := QuantisedWeight.kept(weight)) is not None:
        _note(Kind(held.layout, held.dtype, weight.form, keeps_sums), weight)
    return held


def _note(kind: Kind, weight: Tensor) -> None:
    if (kinds := _kinds.get()) is not None:
        kinds[kind] += weight.numel()


def hold_joined(weights: Sequence[Tensor], format: HeldFormat, *, keeps_sums: bool = False) -> HeldWeight | Tensor:
    """Return weights (n_out_i, n_in) joined, in the form of the fastest product, or as a tensor for torch's product.

    Weights that are stored alike become one weight. Others are joined in their held forms.
    """
    alike = [list(group) for _, group in groupby(weights, _stored_as)]
    if len(alike) > 1:
        parts = [hold(joined(*group), format, keeps_sums=keeps_sums) for group in alike]
        if all(part is not None for part in parts):
            from hybridmem.models.products.joined import JoinedWeight

            return JoinedWeight([part for part in parts if part is not None])
        weights = [as_floats(weight) for weight in weights]
    whole = joined(*weights)
    return as_floats(whole) if (held := hold(whole, format, keeps_sums=keeps_sums)) is None else held


def _stored_as(weight: Tensor) -> str | None:
    return weight.form.name if isinstance(weight, CodedTensor) else None


def kinds_of(dtype: torch.dtype) -> list[Kind]:
    """Return the kinds of weights of all formats, and of all forms of few bits in GGUF files, also those of heads."""
    from hybridmem.models.products.quantised import LAYOUTS

    layouts = dict.fromkeys((*LAYOUTS.values(), *(form.layout for form in FORMS.values())))
    return [Kind(layout, dtype, keeps_sums=is_head) for is_head in (False, True) for layout in (None, *layouts)]


def compile_ahead(kinds: Iterable[Kind]) -> None:
    """Compile the kernels that products with weights of these kinds need, or load them from disk."""
    for layout, dtype, keeps_sums in dict.fromkeys((kind.layout, kind.dtype, kind.keeps_sums) for kind in kinds):
        held: OneWeight | None
        if layout is None:
            held = hold(torch.zeros(1, 1, dtype=dtype), "dense")
        else:
            from hybridmem.models.products.quantised import QuantisedWeight

            held = own = QuantisedWeight.zeros(layout, dtype)
            own.rows(torch.zeros(1, dtype=torch.int64))
        if held is None:
            continue
        held.multiply(torch.zeros(1, 1, dtype=dtype), None, None, keeps_sums=keeps_sums)
        # Steps multiply by a head after everything else, so it is not in a call with norms.
        if not keeps_sums and (product := held.compiled(None, None)) is not None:
            product.compile()
