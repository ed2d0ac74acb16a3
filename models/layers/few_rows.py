"""Computes a layer's norms, gates and sums together with its products, in one call each, where there are few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memory.kernels import cpu, select_kernels
from memory.kernels.cpu.rows import LIKE, as_array
from memory.kernels.cpu.threads import use_threads
from models.layers import amx, few_rows_kernels
from models.layers.few_rows_kernels import ProductKind
from models.layers.norms import GatedNorm, RMSNorm

MOST_ROWS, _MOST_NUMBERS = 32, 1 << 16
"""Rows, and numbers in them, up to which one thread computes norms and gates while the others wait: that takes less
time than calls of their own would."""


@dataclass(frozen=True)
class CompiledProduct:
    """Holds a product as `few_rows_kernels` takes it.

    Attributes:
        weight: arrays of codes, and of scales if they are integers.
        bias: (n_out,) float32, or empty.
        activation: its number in `finishing.ACTIVATIONS`.
        n_multiple, n_per_code: inputs are padded to a multiple, and one code holds so many.
    """

    weight: tuple[np.ndarray, ...]
    bias: np.ndarray
    activation: int
    n_in: int
    n_out: int
    kind: ProductKind
    n_multiple: int
    n_per_code: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows that it reads and writes."""
        return self.kind.rows

    def compile(self) -> None:
        """Compile what is called for few rows, or load it from disk."""
        x, norm = torch.zeros(1, self.n_in, dtype=self.dtype), RMSNorm(torch.ones(self.n_in, dtype=self.dtype), 1.0)
        self.normed(x, norm, self)
        self.gated(x, None, None, torch.zeros(1, self.n_out, dtype=self.dtype))

    def normed(
        self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], other: CompiledProduct | None = None
    ) -> list[Tensor] | None:
        """Return the product with norm(x), and another's with it; None if that is not for these kernels."""
        if not isinstance(norm, RMSNorm) or (other is not None and other.kind != self.kind):
            return None
        if norm.weight_M.dtype is not self.dtype or not self.takes(x_TM):
            return None
        n_rows, like = x_TM.shape[0], LIKE[self.dtype]
        y = torch.empty(n_rows, self.n_out, dtype=self.dtype)
        second = None if other is None else torch.empty(n_rows, other.n_out, dtype=self.dtype)
        own = self.weight, self.bias, self.activation
        few_rows_kernels.normed_products(
            x_TM.data_ptr(), n_rows, self.n_in, LIKE[x_TM.dtype], as_array(norm.weights.prepared(cpu)[0]),
            np.float32(norm.eps), *self.sizes(n_rows, self.n_out + (0 if other is None else other.n_out)), like,
            few_rows_kernels.product_address(self.kind), *own, y.data_ptr(), self.n_out,
            *((*own, 0, 0) if other is None or second is None else
              (other.weight, other.bias, other.activation, second.data_ptr(), other.n_out)),
        )  # fmt: skip
        return [y] if second is None else [y, second]

    def gated(self, y_TE: Tensor, gate_TE: Tensor | None, norm: GatedNorm | None, residual_TM: Tensor) -> Tensor | None:
        """Return residual + product with y * gate, or with norm(y, gate); None if that is not for these kernels."""
        if self.activation or y_TE.dtype is not self.dtype or not self.takes(y_TE):
            return None
        if residual_TM.dtype not in LIKE or not residual_TM.is_contiguous():
            return None
        if gate_TE is not None and (gate_TE.dtype is not self.dtype or not gate_TE.is_contiguous()):
            return None
        n_rows, like = y_TE.shape[0], LIKE[self.dtype]
        weight, eps, n_part = like, np.float32(0.0), self.n_in
        if norm is not None:
            weight, eps, n_part = (
                as_array(norm.weights.prepared(cpu)[0]),
                np.float32(norm.eps),
                self.n_in // norm.n_groups,
            )
        out = torch.empty_like(residual_TM)
        few_rows_kernels.gated_product(
            y_TE.data_ptr(), 0 if gate_TE is None else gate_TE.data_ptr(), n_rows, self.n_in, weight, eps, n_part,
            *self.sizes(n_rows, self.n_out), like,
            few_rows_kernels.product_address(self.kind), self.weight, self.bias, residual_TM.data_ptr(), out.data_ptr(),
            self.n_out, LIKE[out.dtype],
        )  # fmt: skip
        return out

    def takes(self, x: Tensor) -> bool:
        """True if these kernels may read x: few whole rows of floats, and HYBRID_MEMORY_KERNELS names no others."""
        return (
            x.dim() == 2
            and 0 < x.shape[0] <= MOST_ROWS
            and x.numel() <= _MOST_NUMBERS
            and x.dtype in LIKE
            and x.is_contiguous()
            and select_kernels(x.device, self.dtype) is cpu
        )

    def sizes(self, n_rows: int, n_outputs: int) -> tuple[int, int, Any, int]:
        """Return padded inputs, codes, the shape of tiles or None, and into how many parts outputs are divided."""
        n_padded = -(-self.n_in // self.n_multiple) * self.n_multiple
        shape = amx.shape(n_rows) if self.kind.has_tiles else None
        return n_padded, n_padded // self.n_per_code, shape, use_threads(n_rows * n_padded * n_outputs // 16)
