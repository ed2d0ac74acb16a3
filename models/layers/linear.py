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

    On the CPU the weights are laid out once in oneDNN's blocked order, by the operators that torch's own compiler uses;
    the plain weights are not kept. In float32 it is, on one such machine, 3 to 5 times as fast as `F.linear` for up to
    16 rows, twice for 32, and 1.1 times for a thousand. bfloat16 takes half of that time where the processor multiplies
    it; elsewhere 16 bits are laid out as float32 (`packed_dtype`). Other dtypes and devices, and a torch built without
    these operators, use `F.linear`.

    Args:
        weights: (n_out, n_in), or several that share their input, (n_out_i, n_in): their outputs are concatenated.
        bias: (n_out,) or None.
        activation: its name in transformers' configs, or None.
    """

    def __init__(self, *weights: Tensor, bias: Tensor | None = None, activation: str | None = None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.n_out, self.n_in = weight.shape
        self._dtype = packed_dtype(weight)
        self.is_packed = self._dtype is not None
        if self._dtype is not None:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._dtype), _TYPICAL_ROWS)
        self._weight = weight
        self._repeats_rows = self.is_packed and weight.numel() >= _LARGE
        # oneDNN does not look at the stride of a bias.
        self._bias = None if bias is None else bias.to(self._dtype or bias.dtype).contiguous()
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
        """Return (T, n_out) of x (T, n_in), in the dtype of x."""
        if self._dtype is None:
            y = F.linear(x, self._weight, self._bias)
        elif x.dtype is self._dtype:
            y = self._packed_product(x)
        else:
            y = self._packed_product(x.to(self._dtype)).to(x.dtype)
        return y if self._activation is None else self._activation(y)

    def _packed_product(self, x: Tensor) -> Tensor:
        n_rows = x.shape[0]
        if self._repeats_rows and 0 < n_rows <= _LEAST_ROWS // 2:
            rows = torch.cat((x,) * (_LEAST_ROWS // n_rows))
        else:
            n_more = _round_up(n_rows) - n_rows
            rows = torch.cat((x, x[:n_more])) if n_more else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, self._fused, [], "")
        return y if rows is x else y[:n_rows]


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


def packed_dtype(weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which `weight` is laid out for oneDNN; None if this torch cannot do that.

    It is float32, or bfloat16 for weights of that dtype where the processor multiplies it. The operators have no public
    name; without them products are only slower.
    """
    if (
        weight.device.type != "cpu"
        or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or not torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return None
    return torch.bfloat16 if weight.dtype is torch.bfloat16 and multiplies_bfloat16() else torch.float32


@cache
def multiplies_bfloat16() -> bool:
    """True if the processor has instructions for products of bfloat16, as oneDNN uses them.

    Those are AVX512_BF16 and AMX on x86, and BF16 on Arm. torch's own question is answered with yes by every processor
    with AVX-512, where oneDNN only imitates them: that is slower than float32.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if not torch.cpu._is_avx2_supported():  # not x86
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
