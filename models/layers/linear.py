"""Matrix products with weights laid out ahead for the processor they run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.blocks.arrays import ceil_div
from models.loading.checkpoint import Checkpoint

_TYPICAL_ROWS = 64
"""oneDNN chooses a layout for this many rows; it is used for any number. Layouts chosen for 8 to 64 rows measure the same,
those for a single row are two to three times slower beyond it."""


_LEAST_ROWS = 4
"""In these layouts oneDNN takes longer for one or two rows than for four: a decode step of one or two sequences takes a twentieth and a
sixth less time if rows are repeated up to four. (By `cat`: what `expand` or `pad` give it costs 20 µs a product more.)"""


_LARGE = 1 << 18
"""Elements from which weights are read from memory rather than from a cache; where they are not, repeating costs more than it gains."""


_FUSED = {"silu": "swish", "swish": "swish", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
"""Activations that oneDNN applies while it writes the product, and what it calls them."""


@cache
def activation_by(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by its name in transformers' configs.

    One object each: making a torch module takes longer than all else about one of a thousand experts.
    """
    from transformers.activations import ACT2FN  # which transformers itself does not list

    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function


class Linear:
    """y = activation(x W^T + b).

    In float32 on the CPU the weights are laid out once in oneDNN's blocked order, by the operators that torch's own compiler
    uses; the plain weights are not kept. Against `F.linear` on one such machine: 3 to 5 times as fast for up to 16 rows,
    twice for 32, 1.1 for a thousand. Anything else, and a torch built without these operators, is `F.linear`.

    Args:
        weight: (n_out, n_in), or several that share their input, (n_out_i, n_in): their outputs follow one another.
        bias: (n_out,) or None.
        activation: as transformers' configs name it, or None.
    """

    def __init__(self, *weights: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.n_out, self.n_in = weight.shape
        self.is_packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS) if self.is_packed else weight
        self._repeats_rows = self.is_packed and weight.numel() >= _LARGE
        self._bias = None if bias is None else bias.contiguous()  # oneDNN does not look at its stride
        self._fused = _FUSED.get(activation or "", "none") if self.is_packed else "none"
        self._activation = None if activation is None or self._fused != "none" else activation_by(activation)

    @staticmethod
    def load(
        checkpoint: Checkpoint, prefix: str, n_out: int, n_in: int, *, has_bias: bool = False, activation: str | None = None
    ) -> Linear:
        """From `weight`, and `bias` if there is one, below `prefix`."""
        weight = checkpoint.take(f"{prefix}.weight", n_out, n_in)
        return Linear(weight, bias=checkpoint.take_optional(has_bias, f"{prefix}.bias", n_out), activation=activation)

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, n_in) -> (T, n_out)."""
        if self.is_packed:
            n_rows = len(x)
            if self._repeats_rows and 0 < n_rows <= _LEAST_ROWS // 2:
                rows = torch.cat((x,) * (_LEAST_ROWS // n_rows))
            else:
                n_more = _round_up(n_rows) - n_rows
                rows = torch.cat((x, x[:n_more])) if n_more else x
            y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, self._fused, [], "")
            y = y[:n_rows] if len(rows) > n_rows else y
        else:
            y = F.linear(x, self._weight, self._bias)
        return y if self._activation is None else self._activation(y)


def _round_up(n_rows: int) -> int:
    """The next number of rows that oneDNN is given: every one up to 8, 4 between a power of two and the next up to 64, then each 16th.

    oneDNN writes code for each number of rows and shape of weights, which takes as long as several small products, and keeps that
    code: 0.3 to 0.6 MiB each, for the last 1024. A server's steps have any number of rows.
    """
    if n_rows <= 8:
        return n_rows
    step = min(16, 1 << ((n_rows - 1).bit_length() - 3))
    return ceil_div(n_rows, step) * step


def can_pack(weight: Tensor) -> bool:
    """Whether this torch can lay `weight` out for oneDNN. The operators have no public name; without them nothing is lost but speed."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
