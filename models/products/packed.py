"""Lays weights of products out for oneDNN, on the CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from hybridmem.memory.blocks import ceil_div

if TYPE_CHECKING:
    from hybridmem.models.products.few_rows import CompiledProduct

_TYPICAL_ROWS = 64
"""The number of rows for which oneDNN chooses a layout. The layout then serves any number of rows.

Layouts for 8 to 64 rows are equally fast. Those for a single row are two to three times slower for more rows.
"""


_LEAST_ROWS = 4
"""The number of rows to which one or two rows are repeated.

In these layouts oneDNN takes longer for one or two rows than for four. With repeated rows, a decode step of one
sequence takes a twentieth less time, and a step of two sequences a sixth less. (Rows are repeated by `cat`, because
tensors made by `expand` or `pad` cost 20 µs more for each product.)
"""


_LARGE = 1 << 18
"""The number of elements from which on weights are read from memory, not from a cache.

For smaller weights, repeating rows costs more than it gains.
"""


class PackedWeight:
    """Holds a weight (n_out, n_in) in oneDNN's blocked order, by the operators that torch's own compiler uses.

    In float32 on one such machine, a product is 3 to 5 times as fast as `F.linear` for up to 16 rows, twice as fast for
    32 rows, and 1.1 times as fast for a thousand. bfloat16 takes half of the time of float32.

    Args:
        dtype: the result of `packed_dtype` for the weight.
    """

    FUSED: ClassVar = {"silu": "swish", "swish": "swish", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
    """Activations that oneDNN applies while it writes the product, and its names for them."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.dtype = self.bias_dtype = dtype
        self.n_out = weight.shape[0]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _TYPICAL_ROWS)
        self._repeats_rows = weight.numel() >= _LARGE

    def __deepcopy__(self, memo: dict[int, object]) -> PackedWeight:
        """Copy the weight by an operator, because torch cannot copy what oneDNN has laid out."""
        twin = object.__new__(PackedWeight)
        twin.__dict__.update(vars(self), _weight=self._weight.clone())
        return twin

    def compiled(self, bias: Tensor | None, activation: str | None) -> CompiledProduct | None:
        """Return None, because oneDNN has no separate product for few rows."""
        return None

    def multiply(self, x: Tensor, bias: Tensor | None, activation: str | None, *, keeps_sums: bool = False) -> Tensor:
        """Return activation(x W^T + bias), (T, n_out) of x (T, n_in), in the dtype of x.

        oneDNN ignores the stride of a bias, so the bias must be contiguous, and in `self.dtype`.

        With `keeps_sums`, the result is float32: oneDNN's sums if weights are laid out as float32. If they are
        bfloat16, torch's operator has rounded the sums to bfloat16.
        """
        own = x if x.dtype is self.dtype else x.to(self.dtype)
        n_rows = x.shape[0]
        if self._repeats_rows and 0 < n_rows <= _LEAST_ROWS // 2:
            rows = torch.cat((own,) * (_LEAST_ROWS // n_rows))
        else:
            n_more = _round_up(n_rows) - n_rows
            rows = torch.cat((own, own[:n_more])) if n_more else own
        fused = "none" if activation is None else self.FUSED[activation]
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, bias, fused, [], "")
        return (y if rows is own else y[:n_rows]).to(torch.float32 if keeps_sums else x.dtype)


def _round_up(n_rows: int) -> int:
    """Return the number of rows to which `n_rows` is padded for oneDNN.

    The result is any number up to 8, one of four numbers between a power of two and the next up to 64, and beyond that
    a multiple of 16. oneDNN generates code for each number of rows and shape of weights, which takes as long as several
    small products. It keeps the last 1024 pieces of code, of 0.3 to 0.6 MiB each. The steps of a server have any number
    of rows.
    """
    if n_rows <= 8:
        return n_rows
    step = min(16, 1 << ((n_rows - 1).bit_length() - 3))
    return ceil_div(n_rows, step) * step


def packed_dtype(weight: Tensor) -> torch.dtype | None:
    """Return the dtype in which `weight` is laid out for oneDNN, or None if this torch cannot do that.

    It is float32, or bfloat16 for bfloat16 weights if the processor can multiply these. The operators have no public
    name. Without them products are only slower.
    """
    if (
        weight.device.type != "cpu"
        or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or not torch.backends.mkldnn.is_available()
        or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        or not hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return None
    return torch.bfloat16 if weight.dtype is torch.bfloat16 and multiplies_bfloat16() else torch.float32


@cache
def multiplies_bfloat16() -> bool:
    """True if the processor has instructions for products of bfloat16, as oneDNN uses them.

    These instructions are AVX512_BF16 and AMX on x86, and BF16 on Arm. torch's own check says yes for every processor
    with AVX-512. Without the instructions, oneDNN only imitates them, which is slower than float32.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if not torch.cpu._is_avx2_supported():  # The processor is not x86.
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
