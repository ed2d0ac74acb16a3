"""Holds a weight of a quantized checkpoint as codes, scales and zero points: weight = (code - zero) * scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.blocks import ceil_div
from hybridmem.memory.errors import FormatError
from hybridmem.models.weights.coded import CodedTensor, plain_form
from hybridmem.models.weights.layouts import GROUP, Layout

_MOST_ELEMENTS = 1 << 23
"""How many elements are multiplied at once. Their float32 products take 32 MiB in addition to the dense tensor."""

_MOST_SHARING = 256
"""How many inputs may share a scale in few bits. If more share one, each group of so many inputs has a copy of it."""

_SCALES: dict[torch.dtype, Literal["bfloat16", "float16", "float32"]] = {
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32",
}  # fmt: skip
_FLOATS: dict[torch.dtype, Literal["float8_e4m3fn", "float8_e5m2"]] = {
    torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class StoredCodes:
    """Holds the parts of a tensor. Parts on "meta" have only shapes.

    Attributes:
        codes: (..., rows, columns), uint8, int8 or a float of 8 bits.
        scale, zero: one for each block of rows and columns. Trailing axes of one element may be left out. A single
            number is the zero of all codes.
        block: how many rows and columns share a scale; None for all of them.
        group_of: (columns,) the group of each column, if a group's columns are not neighbours.
        bits: how many bits a code has, if codes are not negative.
    """

    name: str
    codes: Tensor
    scale: Tensor
    zero: Tensor | int | None
    block: tuple[int | None, int | None]
    group_of: Tensor | None = None
    bits: int = 8

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`, computed in float32 and rounded once."""
        *lead, n_rows, n_columns = self._grid_of_codes
        columns, group_of = self.block[1] or n_columns, self._group_of
        is_even = group_of is None and n_columns % columns == 0

        def by_column(part: Tensor) -> Tensor:
            if group_of is not None:
                return part[:, group_of]
            return part[:, :, None] if is_even else part.repeat_interleave(columns, -1)[:, :n_columns]

        scales, n_groups = self._by_row("scale", self.scale).float(), self._grid[-1]
        zeros = self._by_row("zero point", self.zero).float() if isinstance(self.zero, Tensor) else self.zero
        codes = self.codes.reshape(-1, n_columns)
        weight = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        step = max(1, _MOST_ELEMENTS // max(1, n_columns))
        for start in range(0, len(codes), step):
            here = slice(start, start + step)
            numbers = codes[here].float().view(-1, *((n_groups, columns) if is_even else (n_columns,)))
            if zeros is not None:
                numbers -= by_column(zeros[here]) if isinstance(zeros, Tensor) else zeros
            weight[here] = numbers.mul_(by_column(scales[here])).view(-1, n_columns)
        return weight.view(*lead, n_rows, n_columns)

    def coded(self, dtype: torch.dtype) -> CodedTensor | None:
        """Return the weight in its own bits, which count as `dtype` elsewhere; None if no product reads them."""
        *lead, n_rows, n_columns = self._grid_of_codes
        columns = self.block[1] or _MOST_SHARING
        group = min(columns, _MOST_SHARING)
        if self._group_of is not None or columns % group or (group != 16 and group % GROUP):
            return None
        if (layout := self._layout(group)) is None:
            return None
        n_groups = ceil_div(ceil_div(n_columns, GROUP) * GROUP, group)

        def by_group(part: str, stored: Tensor) -> Tensor:
            """Return (..., rows, groups) from `stored`, which is (..., blocks of rows, blocks of columns)."""
            found = self._by_row(part, stored).view(*lead, n_rows, -1)
            if self.block[1] is None:
                return found.expand(*lead, n_rows, n_groups)
            return F.pad(found.repeat_interleave(columns // group, -1)[..., :n_groups], (0, n_groups - min(
                n_groups, found.shape[-1] * (columns // group)
            )))  # fmt: skip

        scales = [by_group("scale", self.scale)]
        if isinstance(self.zero, Tensor):
            scales.append((by_group("zero point", self.zero.to(torch.int16)) - self._offset).to(torch.int8))
        codes = self.codes.view(torch.uint8)
        if self._offset:
            codes = codes ^ 0x80
        codes = F.pad(codes, (0, -n_columns % GROUP)) if n_columns % GROUP else codes
        form = plain_form(f"{self.bits} bits" if layout.float8 is None else layout.float8, layout)
        return CodedTensor(form, (codes, *scales), n_columns, dtype)

    @property
    def _offset(self) -> int:
        """Return the offset that is subtracted from codes of 8 bits, because our own layouts hold signed integers."""
        return 128 if self.codes.dtype is torch.uint8 and self.bits == 8 else 0

    def _layout(self, group: int) -> Layout | None:
        """Return the layout of the weight, or None if there is none."""
        scale = _SCALES.get(self.scale.dtype)
        if scale is None:
            return None
        if self.codes.dtype in _FLOATS:
            return Layout(8, scale, group, float8=_FLOATS[self.codes.dtype]) if self.zero is None else None
        zero = (self.zero or 0) - self._offset if not isinstance(self.zero, Tensor) else 0
        if self.bits == 8 and zero:
            return None
        return Layout(self.bits, scale, group, zero=zero, minimum="zero" if isinstance(self.zero, Tensor) else None)

    @cached_property
    def _grid_of_codes(self) -> tuple[int, ...]:
        if self.codes.dim() < 2:
            shape = list(self.codes.shape)
            raise FormatError(f"{self.name} of shape {shape} is quantised, but has no rows and columns")
        return tuple(self.codes.shape)

    @cached_property
    def _grid(self) -> tuple[int, ...]:
        """Return the shape of scales."""
        *lead, n_rows, n_columns = self._grid_of_codes
        rows, columns = self.block[0] or n_rows, self.block[1] or n_columns
        return (*lead, ceil_div(n_rows, rows), ceil_div(n_columns, columns))

    def _by_row(self, part: str, stored: Tensor) -> Tensor:
        """Return (all rows, groups) from (..., blocks of rows, groups)."""
        *_, n_rows, _ = self._grid_of_codes
        shaped, rows = stored.reshape(stored.shape + (1,) * (len(self._grid) - stored.dim())), self.block[0] or n_rows
        if shaped.shape != self._grid and not (self.block == (None, None) and stored.numel() == 1):
            raise FormatError(
                f"{self.name} of shape {list(self.codes.shape)} has a {part} of shape {list(stored.shape)}, but its "
                f"quantization_config says {list(self._grid)}; download the checkpoint again"
            )
        whole = shaped.expand(self._grid).repeat_interleave(rows, -2)[..., :n_rows, :]
        return whole.reshape(-1, self._grid[-1])

    @cached_property
    def _group_of(self) -> Tensor | None:
        """Return the groups of columns, or None if they are unset (-1)."""
        group_of, n_columns, n_groups = self.group_of, self._grid_of_codes[-1], self._grid[-1]
        if group_of is None or group_of.is_meta or bool((group_of == -1).all()):
            return None
        if group_of.shape != (n_columns,):
            raise FormatError(f"{self.name} has groups (g_idx) of {list(group_of.shape)} for {n_columns} columns")
        if not 0 <= int(group_of.min()) <= int(group_of.max()) < n_groups:
            raise FormatError(f"{self.name} has groups (g_idx) up to {int(group_of.max())}, but scales of {n_groups}")
        in_order = torch.arange(n_columns, device=group_of.device) // (self.block[1] or n_columns)
        return None if torch.equal(group_of.long(), in_order) else group_of.long()
