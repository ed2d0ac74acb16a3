"""Computes matrix products with weights that are laid out ahead for the processor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.blocks.arrays import ceil_div
from models.loading.checkpoint import Checkpoint

_TYPICAL_ROWS = 64
"""Number of rows for which oneDNN chooses a layout, which then serves any number.

Layouts for 8 to 64 rows measure the same; those for a single row are two to three times slower for more rows.
"""


_LEAST_ROWS = 4
"""Number of rows to which one or two rows are repeated.

In these layouts oneDNN takes longer for one or two rows than for four: with repeated rows a decode step of one sequence
takes a twentieth less time, of two sequences a sixth less. (Rows are repeated by `cat`; tensors made by `expand` or
`pad` cost 20 µs more for each product.)
"""


_LARGE = 1 << 18
"""Number of elements from which weights are read from memory, not from a cache.

For smaller weights repeating rows costs more than it gains.
"""


_FUSED = {"silu": "swish", "swish": "swish", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
"""Activations that oneDNN applies while it writes the product, and its names for them."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Activations of the supported families, as transformers computes them."""


@cache
def activation_by(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by its name in transformers' configs.

    There is one object for each name: making a torch module takes longer than everything else about one of a thousand
    experts.
    """
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    from transformers.activations import ACT2FN  # transformers does not export it, and imports much for it

    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function


class Linear:
    """Computes y = activation(x W^T + b).

    In float32 on the CPU the weights are laid out once in oneDNN's blocked order, by the operators that torch's own
    compiler uses; the plain weights are not kept. On one such machine it is 3 to 5 times as fast as `F.linear` for up
    to 16 rows, twice for 32, and 1.1 times for a thousand. Other dtypes and devices, and a torch built without these
    operators, use `F.linear`.

    Args:
        weights: (n_out, n_in), or several that share their input, (n_out_i, n_in): their outputs are concatenated.
        bias: (n_out,) or None.
        activation: its name in transformers' configs, or None.
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
        checkpoint: Checkpoint,
        prefix: str,
        n_out: int,
        n_in: int,
        *,
        has_bias: bool = False,
        activation: str | None = None,
    ) -> Linear:
        """Load `weight`, and `bias` if `has_bias`, below `prefix`."""
        weight = checkpoint.take(f"{prefix}.weight", n_out, n_in)
        return Linear(weight, bias=checkpoint.take_optional(has_bias, f"{prefix}.bias", n_out), activation=activation)

    def __call__(self, x: Tensor) -> Tensor:
        """Return (T, n_out) of x (T, n_in)."""
        if self.is_packed:
            n_rows = x.shape[0]
            if self._repeats_rows and 0 < n_rows <= _LEAST_ROWS // 2:
                rows = torch.cat((x,) * (_LEAST_ROWS // n_rows))
            else:
                n_more = _round_up(n_rows) - n_rows
                rows = torch.cat((x, x[:n_more])) if n_more else x
            y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, self._fused, [], "")
            y = y if rows is x else y[:n_rows]
        else:
            y = F.linear(x, self._weight, self._bias)
        return y if self._activation is None else self._activation(y)


def _round_up(n_rows: int) -> int:
    """Return the number of rows to which `n_rows` is padded for oneDNN.

    It is any number up to 8, one of four between a power of two and the next up to 64, and then a multiple of 16.
    oneDNN generates code for each number of rows and shape of weights, which takes as long as several small products,
    and keeps the code of the last 1024, 0.3 to 0.6 MiB each. The steps of a server have any number of rows.
    """
    if n_rows <= 8:
        return n_rows
    step = min(16, 1 << ((n_rows - 1).bit_length() - 3))
    return ceil_div(n_rows, step) * step


def can_pack(weight: Tensor) -> bool:
    """True if this torch can lay `weight` out for oneDNN.

    The operators for it have no public name; without them products are only slower.
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
