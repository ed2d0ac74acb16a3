"""Computes a layer's norms, gates and sums together with its products, in one call for each, if there are few rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.kernels import Weights, cpu, select_kernels
from hybridmem.memory.kernels.cpu.parts import LIKE, as_array, use_threads
from hybridmem.models.products import amx, few_rows_kernels
from hybridmem.models.products.few_rows_kernels import ProductKind
from hybridmem.models.products.fields import SHORTS, product_fields
from hybridmem.models.products.kernels import kernel_of

PASSES_ADDRESSES = True
"""Declares that arrays and addresses taken from tensors here go only to kernels (`memory.kernels.cpu.recording`)."""


MOST_ROWS, _MOST_NUMBERS = 32, 1 << 16
"""The most rows, and the most numbers in them, for which one thread computes norms and gates while the others wait.

Up to these limits, this takes less time than separate calls would.
"""


class Norm(Protocol):
    """Declares what kernels read of a norm, x / rms(x) * weight."""

    @property
    def weights(self) -> Weights: ...

    @property
    def eps(self) -> float: ...


class GroupedNorm(Norm, Protocol):
    """Declares what kernels read of a norm that is applied to each of n parts of a row."""

    @property
    def n_groups(self) -> int: ...


@dataclass(frozen=True)
class _Call:
    """Holds those arguments of calls of products with one norm that stay the same.

    Attributes:
        norm, weight, others: kept alive, because `fields` contains their addresses. The product that has the call is
            not kept, so that a model is freed as soon as nobody needs it.
        fields: the integers that `few_rows_kernels` reads.
        codes_like: an array with the dtype of codes, which all products share. With one array for each, nothing would
            be cached.
        n_multiplications: how many multiplications one row takes.
    """

    norm: Norm | None
    weight: np.ndarray | None
    others: tuple[CompiledProduct, ...]
    fields: np.ndarray
    codes_like: np.ndarray
    eps: float
    n_multiplications: int

    @staticmethod
    def of(
        norm: Norm | None, weight: np.ndarray | None, sizes: list[int], eps: float,
        own: CompiledProduct, *others: CompiledProduct,
    ) -> _Call:  # fmt: skip
        """Make it for a norm with these weights, and sizes that the kernel reads after their address."""
        address, products = 0 if weight is None else weight.ctypes.data, (own, *others)
        fields = [address, *sizes, *(number for product in products for number in product.fields())]
        n_multiplications = sum(product.n_padded * product.n_out for product in products)
        codes_like = few_rows_kernels.codes_like(own.kind.codes)
        return _Call(norm, weight, others, np.array(fields, np.int64), codes_like, float(eps), n_multiplications)


@dataclass(eq=False)
class CompiledProduct:
    """Holds a product in the form that `few_rows_kernels` takes.

    Attributes:
        weight: the array of codes, and the array of scales if codes are integers.
        bias: (n_out,) float32, or empty.
        activation: its number in `epilogue.ACTIVATIONS`.
        n_multiple, n_per_code: inputs are padded to a multiple, and one code holds so many.
        pieces: products whose outputs stand one after the other, if the weight is several.
    """

    weight: tuple[np.ndarray, ...]
    bias: np.ndarray
    activation: int
    n_in: int
    n_out: int
    kind: ProductKind
    n_multiple: int
    n_per_code: int
    pieces: tuple[CompiledProduct, ...] = ()
    _fields_of_pieces: np.ndarray | None = field(default=None, repr=False)
    _behind_norm: dict[tuple[CompiledProduct, ...], _Call] = field(default_factory=dict, repr=False)
    _of_gated: _Call | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached calls, because a copy's weights are at other addresses."""
        return {**vars(self), "_fields_of_pieces": None, "_behind_norm": {}, "_of_gated": None}

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the rows that the product reads and writes."""
        return self.kind.rows

    @property
    def n_padded(self) -> int:
        """Return the number of inputs, including those that are added to reach a multiple."""
        return -(-self.n_in // self.n_multiple) * self.n_multiple

    @property
    def reads(self) -> torch.dtype:
        """Return the dtype in which the product's kernel reads rows."""
        return self.pieces[0].reads if self.pieces else kernel_of(self.kind.kernel).rows

    def fields(self) -> list[int]:
        """Describe this product as integers: see `few_rows_kernels.product_fields`."""
        n, kernel_at = self.n_padded // self.n_per_code, few_rows_kernels.product_address(self.kind)
        return product_fields(self.arrays(), self.bias, self.activation, n, self.n_out, self.n_padded, kernel_at)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays that kernels get: those of the weight, or the fields of its pieces."""
        if not self.pieces:
            return self.weight
        if self._fields_of_pieces is None:
            self._fields_of_pieces = np.array([piece.fields() for piece in self.pieces], np.int64).reshape(-1)
        return self._fields_of_pieces.view(np.uint8), SHORTS

    def compile(self) -> None:
        """Compile the functions that are called for few rows, or load them from disk."""
        x, ones = torch.zeros(1, self.n_in, dtype=self.dtype), Weights(torch.ones(self.n_in, dtype=self.dtype))
        norm: Any = SimpleNamespace(weights=ones, eps=1.0)
        self.normed(x, norm, self)
        self.gated(x, None, None, torch.zeros(1, self.n_out, dtype=self.dtype))
        if self.n_in == self.n_out:
            self.gated_mlp(x, norm, self, self)

    def normed(self, x_TM: Tensor, norm: Norm, other: CompiledProduct | None = None) -> list[Tensor] | None:
        """Return the product with norm(x), and another's product with it; None if these kernels cannot compute it."""
        call = self._call_behind(norm, *(() if other is None else (other,)))
        if call is None or not self.takes(x_TM):
            return None
        n_rows = x_TM.shape[0]
        y = torch.empty(n_rows, self.n_out, dtype=self.dtype)
        second = None if other is None else torch.empty(n_rows, other.n_out, dtype=self.dtype)
        few_rows_kernels.normed_products(
            call.fields, call.codes_like, x_TM.data_ptr(), n_rows, LIKE[x_TM.dtype], call.eps, self.shape(n_rows),
            use_threads(n_rows * call.n_multiplications // 16), LIKE[self.dtype], y.data_ptr(),
            0 if second is None else second.data_ptr(),
        )  # fmt: skip
        return [y] if second is None else [y, second]

    def gated(
        self, y_TE: Tensor, gate_TE: Tensor | None, norm: GroupedNorm | None, residual_TM: Tensor
    ) -> Tensor | None:
        """Return residual + product with y * gate, or with norm(y, gate); None if these kernels cannot compute it."""
        if y_TE.dtype is not self.dtype or not self.takes(y_TE):
            return None
        if residual_TM.dtype not in LIKE or not residual_TM.is_contiguous():
            return None
        if gate_TE is not None and (gate_TE.dtype is not self.dtype or not gate_TE.is_contiguous()):
            return None
        if (call := self._call_of_gated(norm)) is None:
            return None
        n_rows, out = y_TE.shape[0], torch.empty_like(residual_TM)
        few_rows_kernels.gated_product(
            call.fields, call.codes_like, y_TE.data_ptr(), 0 if gate_TE is None else gate_TE.data_ptr(), n_rows,
            call.eps, self.shape(n_rows), use_threads(n_rows * call.n_multiplications // 16), LIKE[self.dtype],
            residual_TM.data_ptr(), out.data_ptr(), LIKE[out.dtype],
        )  # fmt: skip
        return out

    def gated_mlp(self, x_TM: Tensor, norm: Norm, up: CompiledProduct, down: CompiledProduct) -> Tensor | None:
        """Return x + down(this(norm(x)) * up(norm(x))); None if these kernels cannot compute it."""
        call = self._call_behind(norm, up, down)
        if call is None or not self.takes(x_TM) or x_TM.shape[0] * self.n_out > _MOST_NUMBERS:
            return None
        n_rows, out = x_TM.shape[0], torch.empty_like(x_TM)
        few_rows_kernels.gated_mlp(
            call.fields, call.codes_like, x_TM.data_ptr(), n_rows, LIKE[x_TM.dtype], call.eps, self.shape(n_rows),
            use_threads(n_rows * call.n_multiplications // 3 // 16), LIKE[self.dtype], out.data_ptr(),
        )  # fmt: skip
        return out

    def _call_behind(self, norm: Norm, *others: CompiledProduct) -> _Call | None:
        """Return constant arguments for calls of a norm and products of its rows; None if kernels cannot do them.

        They are kept for each choice of other products. Otherwise a prompt between two steps, which computes some of
        these products one by one, would move the arguments, and neither step could be replayed for the other.
        """
        call = self._behind_norm.get(others)
        if call is None or call.norm is not norm:
            if not all(other.kind.is_called_like(self.kind) for other in others):
                return None
            if (weight := self._prepared(norm.weights)) is None:
                return None
            call = self._behind_norm[others] = _Call.of(norm, weight, [self.n_in], norm.eps, self, *others)
        return call

    def _call_of_gated(self, norm: GroupedNorm | None) -> _Call | None:
        """Return the constant arguments of calls of this product of gated rows; None if kernels cannot compute them."""
        call = self._of_gated
        if call is None or call.norm is not norm:
            weight, n_part, eps = None, self.n_in, 0.0
            if norm is not None:
                weight, n_part, eps = self._prepared(norm.weights), self.n_in // norm.n_groups, norm.eps
                if weight is None:
                    return None
            call = _Call.of(norm, weight, [self.n_in, n_part], eps, self)
            self._of_gated = call
        return call

    def _prepared(self, weights: Weights) -> np.ndarray | None:
        """Return a norm's weights as an array; None unless there is one for each input, in the same dtype."""
        weight: np.ndarray = as_array(weights.prepared(cpu)[0])
        is_own = weight.dtype == LIKE[self.dtype].dtype and weight.shape == (self.n_in,)
        return np.ascontiguousarray(weight) if is_own else None

    def takes(self, x: Tensor) -> bool:
        """True if these kernels may read x: few whole rows of floats, unless HYBRID_MEMORY_KERNELS names others."""
        if x.dim() != 2:
            return False
        n_rows, n_inputs = x.shape
        return (
            n_inputs == self.n_in
            and 0 < n_rows <= MOST_ROWS
            and n_rows * n_inputs <= _MOST_NUMBERS
            and x.dtype in LIKE
            and x.is_contiguous()
            and select_kernels(x.device, self.dtype) is cpu
        )

    def shape(self, n_rows: int) -> np.ndarray | None:
        """Return the configuration of tiles, or None."""
        return amx.shape(n_rows) if self.kind.has_tiles else None
