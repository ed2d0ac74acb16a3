"""Holds weights in the few bits in which a file stores them, as tensors whose rows can be chosen and joined.

Products keep these bits (`models.products`). All other code sees the floats for which they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridmem.models.weights.dry import joined
from hybridmem.models.weights.layouts import GROUP, Layout

_AT_ONCE = 1 << 22
"""How many numbers become floats at once. Temporary tensors take a few times their bytes."""


@dataclass(frozen=True)
class Term:
    """Says where some bits of the codes of 16 inputs are: code |= (byte >> shift & mask) << up.

    Attributes:
        offset: the place of the first of 16 bytes in a block of the file, or of two bytes that have one bit per input.
            Factors of a group have one byte.
    """

    offset: int
    shift: int = 0
    mask: int = 0xFF
    up: int = 0
    is_bits: bool = False


@dataclass(frozen=True)
class Scales:
    """Holds the factors of codes: floats of units, and factors of groups, as `Layout` describes them.

    Attributes:
        floats: (rows, units, 1 or 2), of the layout's float type.
        factors: (rows, groups, 0 to 2), int8.
    """

    floats: Tensor
    factors: Tensor


@dataclass(frozen=True)
class Form:
    """Describes how a file stores weights in few bits: in blocks of codes, with scales among or beside the codes.

    Attributes:
        name: the name in the file's format.
        layout: the layout in which products hold the same codes and scales.
        block_bytes: the bytes of a block.
        terms: for each 16 inputs of a block, the places of their codes.
        floats: the offsets of a block's floats; none if floats and factors are separate tensors.
        factors: for each group of a block and each of its factors, the place of its bits.
        bias: a number that is added to factors.
        is_exponent: True if a float is a byte that encodes a power of two, and codes count twice (MXFP4).
    """

    name: str
    layout: Layout
    block_bytes: int
    terms: tuple[tuple[Term, ...], ...]
    floats: tuple[int, ...] = ()
    factors: tuple[tuple[tuple[Term, ...], ...], ...] = ()
    bias: int = 0
    is_exponent: bool = False

    @property
    def n_block(self) -> int:
        """Return the number of inputs of a block."""
        return 16 * len(self.terms)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Return the layouts that can hold the same weights exactly, the smallest first."""
        own = self.layout
        if own.n_bits == 8 or (own.table is None and own.minimum is not None):
            return (own,)
        return own, replace(own, n_bits=8, zero=0, table=None)

    def codes(self, stored: Tensor) -> Tensor:
        """Return the codes (rows, inputs) of the first part as stored: uint8, or int8 if a code has 8 bits."""
        blocks = stored.view(len(stored), -1, self.block_bytes)
        found = blocks.new_zeros(*blocks.shape[:2], self.n_block)
        for i, terms in enumerate(self.terms):
            own = found[:, :, 16 * i : 16 * i + 16]
            for term in terms:
                if term.is_bits:
                    both = blocks[:, :, term.offset : term.offset + 2].repeat_interleave(8, -1)
                    bits = both >> torch.arange(8, dtype=torch.uint8).repeat(2) & 1
                else:
                    bits = blocks[:, :, term.offset : term.offset + 16] >> term.shift & term.mask
                own |= bits << term.up
        return found.flatten(1).view(torch.int8 if self.layout.n_bits == 8 else torch.uint8)

    def scales(self, parts: Sequence[Tensor]) -> Scales:
        """Return the scales from all parts. Each part has one row for each output."""
        if not self.floats:
            floats, n_factors = parts[1].view(len(parts[1]), -1, self.layout.n_floats), self.layout.n_factors
            if not n_factors:
                return Scales(floats, floats.new_empty(len(floats), 1, 0, dtype=torch.int8))
            return Scales(floats, parts[2].view(len(parts[2]), -1, n_factors))
        blocks = parts[0].view(len(parts[0]), -1, self.block_bytes)
        if self.is_exponent:
            floats = powers_of_two(blocks[:, :, self.floats[0], None])
        else:
            own = [blocks[:, :, at : at + 2].contiguous().view(torch.float16) for at in self.floats]
            floats = torch.cat(own, -1)
        factors = blocks.new_zeros(*blocks.shape[:2], len(self.factors), self.layout.n_factors)
        for i, group in enumerate(self.factors):
            for k, terms in enumerate(group):
                for term in terms:
                    factors[:, :, i, k] |= (blocks[:, :, term.offset] >> term.shift & term.mask) << term.up
        return Scales(floats, factors.flatten(1, 2).view(torch.int8) + self.bias)


def plain_form(name: str, layout: Layout) -> Form:
    """Return the form of separate tensors of codes (one byte each, whole groups of 32), of floats, and of factors."""
    return Form(name, layout, GROUP, ((Term(0),), (Term(16),)))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2**(byte - 128) for each byte, in bfloat16: half of the power of two for which the byte stands."""
    wide = exponents.to(torch.int16)
    return torch.where(wide < 2, 0x20 << wide.clamp(max=1), wide - 1 << 7).to(torch.int16).view(torch.bfloat16)


def weights_of(layout: Layout, codes: Tensor, scales: Scales) -> Tensor:
    """Return the weights that codes (rows, inputs) stand for, in float32."""
    n_in = codes.shape[1]
    group = layout.group or n_in
    if layout.float8 is not None:
        numbers = codes.view(getattr(torch, layout.float8)).float()
    elif layout.table is None:
        numbers = codes.float() - layout.zero
    else:
        numbers = torch.tensor(layout.table, dtype=torch.float32)[codes.long()]
    factors, floats = scales.factors.float(), scales.floats.float()
    per_unit = max(1, layout.unit_inputs // group)
    floats = floats.repeat_interleave(per_unit, 1)[:, : -(-n_in // group)]
    factors = factors[:, : floats.shape[1]]
    scale, minimum = floats[:, :, 0], None
    if layout.minimum == "zero":
        numbers -= factors[:, :, -1].repeat_interleave(group, 1)[:, :n_in]
    elif layout.minimum == "factor":
        minimum = -floats[:, :, 1] * factors[:, :, -1]
    elif layout.minimum == "float":
        minimum = floats[:, :, 1]
    if layout.has_factors:
        scale = scale * factors[:, :, 0]
    found = numbers * scale.repeat_interleave(group, 1)[:, :n_in]
    return found if minimum is None else found + minimum.repeat_interleave(group, 1)[:, :n_in]


class CodedTensor(Tensor):
    """Holds a tensor in few bits. All axes except the last can be divided, reordered and joined as for any tensor.

    Other functions of torch see floats of the tensor's dtype, which take memory for as long as they are used.

    Attributes:
        form: how the tensor is stored.
        chunks: the tensor's rows in consecutive chunks. A chunk has the tensors whose last axes hold the bits of a row
            of inputs. A tensor that is no matrix has one chunk.
        order: which piece of the stored inputs stands at each place of a row, if they are reordered in equal pieces.
            Empty: inputs stand as they are stored.
    """

    form: Form
    chunks: tuple[tuple[Tensor, ...], ...]
    order: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, form: Form, parts: Sequence[Tensor], n_in: int, dtype: torch.dtype, order: Sequence[int] = ()
    ) -> CodedTensor:
        shape = (*parts[0].shape[:-1], n_in)
        own: CodedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=parts[0].device)
        own.form, own.chunks, own.order = form, (tuple(parts),), tuple(order)
        return own

    def __init__(
        self, form: Form, parts: Sequence[Tensor], n_in: int, dtype: torch.dtype, order: Sequence[int] = ()
    ) -> None:
        """Make a tensor of these parts, each of which has one row for each row of the tensor."""

    @staticmethod
    def of_rows(tensors: Sequence[CodedTensor], dtype: torch.dtype | None = None) -> CodedTensor:
        """Return the rows of matrices of the same form and order, one matrix after the other. Nothing is copied."""
        first, n_rows = tensors[0], sum(len(x) for x in tensors)
        own: CodedTensor = Tensor._make_wrapper_subclass(
            CodedTensor, (n_rows, first.shape[1]), dtype=dtype or first.dtype, device=first.device
        )
        own.form, own.chunks, own.order = first.form, tuple(chunk for x in tensors for chunk in x.chunks), first.order
        return own

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Return the parts of all rows. Several chunks are copied."""
        several = len(self.chunks) > 1
        return tuple(joined(*own) for own in zip(*self.chunks, strict=True)) if several else self.chunks[0]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"CodedTensor({self.form.name}, shape={list(self.shape)}, dtype={self.dtype})"

    def rows(self) -> tuple[Tensor, ...]:
        """Return the parts as matrices with one row for each output."""
        return tuple(part.reshape(-1, part.shape[-1]) for part in self.parts)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the floats, in this dtype or in the tensor's own, with one rounding."""
        found = torch.empty(self.shape, dtype=dtype or self.dtype, device=self.device)
        if self.is_meta:
            return found
        parts, out = self.rows(), found.view(-1, self.shape[-1])
        step = max(1, _AT_ONCE // max(1, self.shape[-1]))
        for start in range(0, len(out), step):
            here = [part[start : start + step].contiguous() for part in parts]
            codes = self.form.codes(here[0])[:, : self.shape[-1]]
            weights = weights_of(self.form.layout, codes, self.form.scales(here))
            if self.order:
                weights = weights.view(len(weights), len(self.order), -1)[:, list(self.order)].flatten(1)
            out[start : start + step] = weights
        return found

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Return the layouts that can hold the same weights exactly, the smallest first.

        Inputs that are moved together share a float, or have several.
        """
        width = self.shape[-1] // max(1, len(self.order))
        return tuple(replace(own, unit=width) if own.unit > width else own for own in self.form.layouts)

    def with_inputs(self, order: Sequence[int], width: int) -> CodedTensor | None:
        """Return a matrix whose inputs are reordered in pieces of `width`; None if that would change a scale's inputs.

        Nothing is copied: products lay out the pieces in their order.

        Args:
            order: the numbers of the pieces, each once.
        """
        form, layout = self.form, self.form.layout
        if self.order or not form.floats or self.dim() != 2 or self.shape[1] != len(order) * width or width % GROUP:
            return None
        if width % form.n_block and (layout.unit % width or width <= layout.group):
            return None
        return CodedTensor(form, self.parts, self.shape[1], self.dtype, order)

    def take_at(self, indices: Tensor) -> Tensor:
        """Return the numbers at these places of the tensor, counted through all its rows."""
        n_in = self.shape[-1]
        if self.order:
            width, at = n_in // len(self.order), indices % n_in
            indices = indices - at + torch.tensor(self.order)[at // width] * width + at % width
        # Blocks that hold their own scales are decoded alone, because a row may have fifty of them.
        width = self.form.n_block if self.form.floats else n_in
        pieces, which = torch.unique(indices // width, return_inverse=True)
        per_row = n_in // width
        rows, columns = pieces // per_row, pieces % per_row
        own = list[tuple[Tensor, ...]]()
        chunks = self.chunks if len(self.chunks) > 1 else (self.rows(),)
        first_rows = list(accumulate((len(chunk[0]) for chunk in chunks), initial=0))
        cuts = torch.searchsorted(rows, torch.tensor(first_rows)).tolist()
        for chunk, first, (i, j) in zip(chunks, first_rows, pairwise(cuts), strict=False):
            of_chunk, column = rows[i:j] - first, columns[i:j]
            own.append(tuple(part.view(len(part), per_row, -1)[of_chunk, column] for part in chunk))
        blocks = [torch.cat(parts) for parts in zip(*own, strict=True)]
        return CodedTensor(self.form, blocks, width, self.dtype).dense()[which, indices % width]

    def like(self, parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> CodedTensor:
        """Return a tensor with other rows in the same form."""
        return CodedTensor(self.form, parts, self.shape[-1], dtype or self.dtype, self.order)

    def with_dtype(self, dtype: torch.dtype | None) -> CodedTensor:
        """Return the same bits as a tensor of another dtype."""
        return CodedTensor.of_rows([self], dtype) if len(self.chunks) > 1 else self.like(self.parts, dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Change rows without torch's dispatch, which imports torch.distributed at its first tensor of a subclass."""
        kwargs = kwargs or {}
        if (rule := _FUNCTIONS.get(func)) is not None and kwargs.keys() <= {"dim", "dtype", "device"}:
            if (found := rule(*args, **kwargs)) is not None:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (rule := _RULES.get(func)) is not None and (found := rule(*args, **kwargs)) is not None:
            return found
        args, kwargs = torch.utils._pytree.tree_map(as_floats, (args, kwargs))
        return func(*args, **kwargs)


def as_floats(x: Any) -> Any:
    """Return the floats of a tensor in few bits. Other objects are returned as they are."""
    return x.dense() if isinstance(x, CodedTensor) else x


def _before_last(x: CodedTensor, *dims: int) -> bool:
    """True if none of these axes is the last one."""
    return all(dim % x.dim() < x.dim() - 1 for dim in dims)


def _of_each(x: CodedTensor, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function that returns a tensor, or several, to each part."""
    found = [function(part) for part in x.parts]
    if isinstance(found[0], Tensor):
        return x.like(found)
    return [x.like(parts) for parts in zip(*found, strict=True)]


def _view(x: CodedTensor, shape: Sequence[int]) -> CodedTensor | None:
    n_in, whole = x.shape[-1], list(shape)
    if tuple(whole) == x.shape:
        return x
    if -1 in whole:
        whole[whole.index(-1)] = x.numel() // -prod(whole)
    return _of_each(x, lambda part: part.reshape(*whole[:-1], -1)) if whole and whole[-1] == n_in else None


def _permute(x: CodedTensor, dims: Sequence[int]) -> CodedTensor | None:
    keeps_last = len(dims) == x.dim() and dims[-1] % x.dim() == x.dim() - 1
    return _of_each(x, lambda part: part.permute(*dims)) if keeps_last else None


def _transpose(x: CodedTensor, one: int, other: int) -> CodedTensor | None:
    at = one % x.dim(), other % x.dim()
    return _of_each(x, lambda part: part.transpose(*at)) if _before_last(x, one, other) else None


def _slice(
    x: CodedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> CodedTensor | None:
    at = (*[slice(None)] * (dim % x.dim()), slice(start, end, step))
    return _of_each(x, lambda part: part[at]) if _before_last(x, dim) else None


def _select(x: CodedTensor, dim: int, index: int) -> CodedTensor | None:
    return _of_each(x, lambda part: part.select(dim % x.dim(), index)) if _before_last(x, dim) else None


def _split(x: CodedTensor, size: Any, dim: int = 0) -> Any:
    return _of_each(x, lambda part: torch.split(part, size, dim % x.dim())) if _before_last(x, dim) else None


def _chunk(x: CodedTensor, n_chunks: int, dim: int = 0) -> Any:
    return _split(x, -(-x.shape[dim] // n_chunks), dim)


def _unbind(x: CodedTensor, dim: int = 0) -> Any:
    return _of_each(x, lambda part: part.unbind(dim % x.dim())) if _before_last(x, dim) else None


def _index(x: CodedTensor, indices: Sequence[Tensor | None]) -> CodedTensor | None:
    own = tuple(slice(None) if index is None else index for index in indices)
    return _of_each(x, lambda part: part[own]) if len(own) < x.dim() else None


def _unsqueeze(x: CodedTensor, dim: int) -> CodedTensor | None:
    at = dim % (x.dim() + 1)
    return _of_each(x, lambda part: part.unsqueeze(at)) if at < x.dim() else None


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> CodedTensor | None:
    coded = [x for x in tensors if isinstance(x, CodedTensor)]
    first = coded[0]
    if len(coded) < len(tensors) or not _before_last(first, dim):
        return None
    if any(x.form != first.form or x.order != first.order for x in coded):
        return None
    if first.dim() == 2:
        return CodedTensor.of_rows(coded)
    own = [x.parts for x in coded]
    return first.like([joined(*parts, dim=dim % first.dim()) for parts in zip(*own, strict=True)])


def _reshape(x: CodedTensor, *shape: Any) -> CodedTensor | None:
    whole = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return _view(x, whole) if isinstance(whole, Sequence) else None


def _flatten(x: CodedTensor, start_dim: int = 0, end_dim: int = -1) -> CodedTensor | None:
    start, end = start_dim % x.dim(), end_dim % x.dim() + 1
    return _view(x, (*x.shape[:start], prod(x.shape[start:end]), *x.shape[end:]))


def _permuted(x: CodedTensor, *dims: Any) -> CodedTensor | None:
    return _permute(x, dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)


def _at(x: CodedTensor, index: Any) -> Any:
    """Return rows at an index that does not reach the last axis."""
    own = index if isinstance(index, tuple) else (index,)
    is_known = all(
        type(i) in (int, slice) or (isinstance(i, Tensor) and i.dtype == torch.int64 and i.dim() == 1) for i in own
    )
    return _of_each(x, lambda part: part[index]) if is_known and len(own) < x.dim() else None


def _to_float(x: CodedTensor) -> CodedTensor:
    return x.with_dtype(torch.float32)


def _to(x: CodedTensor, *options: Any, **named: Any) -> Any:
    """Change the dtype or the device, if nothing else is asked for."""
    wanted = [torch.device(w) if isinstance(w, str) else w for w in (*options, *named.values())]
    if not all(isinstance(w, torch.dtype | torch.device) for w in wanted):
        return None
    dtype = next((w for w in wanted if isinstance(w, torch.dtype)), None)
    return _copy(x, dtype=dtype, device=next((w for w in wanted if isinstance(w, torch.device)), None))


def _copy(x: CodedTensor, *_: Any, dtype: torch.dtype | None = None, device: Any = None, **__: Any) -> Any:
    """Change the dtype of the floats for which the bits stand."""
    moves = device is not None and torch.device(device).type not in ("cpu", "meta")
    if moves or (dtype is not None and not dtype.is_floating_point):
        return None
    if device is None or torch.device(device).type == x.device.type:
        return x.with_dtype(dtype)
    return x.like([part.to(device) for part in x.parts], dtype)


_ATEN = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN.view.default: _view, _ATEN._unsafe_view.default: _view, _ATEN.reshape.default: _view,
    _ATEN.permute.default: _permute, _ATEN.transpose.int: _transpose, _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _select, _ATEN.split.Tensor: _split, _ATEN.split_with_sizes.default: _split,
    _ATEN.unbind.int: _unbind, _ATEN.index.Tensor: _index, _ATEN.unsqueeze.default: _unsqueeze, _ATEN.cat.default: _cat,
    _ATEN._to_copy.default: _copy, _ATEN.detach.default: _copy, _ATEN.alias.default: _copy, _ATEN.clone.default: _copy,
}  # fmt: skip
"""Maps functions of torch that change only rows to their versions for parts. A version returns None if it cannot."""

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.reshape: _reshape, Tensor.view: _reshape, torch.reshape: _view, Tensor.flatten: _flatten,
    torch.flatten: _flatten, Tensor.permute: _permuted, torch.permute: _permute, Tensor.transpose: _transpose,
    torch.transpose: _transpose, Tensor.__getitem__: _at, Tensor.split: _split, torch.split: _split,
    Tensor.split_with_sizes: _split, Tensor.chunk: _chunk, torch.chunk: _chunk, Tensor.unbind: _unbind,
    torch.unbind: _unbind, Tensor.unsqueeze: _unsqueeze, torch.unsqueeze: _unsqueeze,
    torch.cat: _cat, Tensor.float: _to_float, Tensor.to: _to,
}  # fmt: skip
"""Maps the usual ones of these functions, as they are called in Python, to the same versions. Others are dispatched."""
