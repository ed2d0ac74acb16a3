"""Stores keys and values of bodies, which are older than the rollback window, in few bits per number.

A storage encodes rows into parts (tensors of small dtypes), and decodes these parts. Parts are made once, from the
exact rows of a fixed group of tokens, and never written again. So the same rows give the same bytes, whichever requests
were in the batch, and whether tokens came one by one or at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from hybridmem.memory.errors import SpecError

Shaped = tuple[tuple[int, ...], torch.dtype]
Parts = tuple[Tensor, ...]
"""Rows (..., G, R, D) of G heads in stored form: a tensor of codes, and perhaps tensors of scales and lows.

Each has the shape (..., G, R or 1, some).
"""

_MOST = 60_000.0
"""The largest scale or low. Both are stored in float16, and larger numbers are clipped."""


@dataclass(frozen=True)
class Storage(ABC):
    """Encodes keys and values for a body, and decodes them.

    Attributes:
        group: how many tokens fold together. For keys, so many tokens of a channel share a scale; for values, so many
            channels of a token do.
    """

    _: KW_ONLY
    group: int = 64

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group < 1:
            raise SpecError(f"{type(self).__name__}.group={self.group!r}; it must be an integer of at least 1 token")

    @property
    @abstractmethod
    def label(self) -> str:
        """Return the storage's name, which is used in the names of pools."""

    @property
    @abstractmethod
    def code_bits(self) -> int:
        """Return how many bits a code has; 0 for a float8."""

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise SpecError unless heads of `head_dim` channels can be stored."""

    @abstractmethod
    def shapes(self, n_heads: int, n_rows: int, head_dim: int, *, by_channel: bool) -> tuple[Shaped, ...]:
        """Return shapes and dtypes of the parts."""

    @abstractmethod
    def encode(self, x_GRD: Tensor, *, by_channel: bool) -> Parts:
        """Encode rows (..., G, R, D).

        With `by_channel`, all rows of a channel share a scale. Otherwise groups of channels of a row do.
        """

    @abstractmethod
    def decode(self, parts: Parts) -> Tensor:
        """Decode parts to rows (..., G, R, D) in float32."""


@dataclass(frozen=True)
class Quantized(Storage):
    """Stores integer codes, x = code * scale + low, with a float16 scale and low for each quantization group.

    This is Liu et al. 2024, "KIVI". Keys of `group` tokens share a scale for each channel, because a few channels of
    keys are much larger than the others. Values share a scale within each token, for `group` channels, or for the whole
    head if it is narrower. An eviction policy evicts single rows. Under one, keys are grouped as values are, so that
    rows move from fold to fold without being quantized again.

    4 bits in groups of 64 take 4.5 bits a number. The error is at most half a scale, (greatest - least) / (2**bits - 1)
    / 2.

    Attributes:
        bits: 8, 4 or 2.
    """

    bits: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (8, 4, 2) or isinstance(self.bits, bool):
            raise SpecError(f"Quantized.bits is {self.bits!r}; choose 8, 4 or 2")

    @property
    def label(self) -> str:
        return f"{self.bits} bits"

    @property
    def code_bits(self) -> int:
        return self.bits

    def _channels(self, head_dim: int) -> int:
        """Return the number of channels of a row that share a scale."""
        return min(self.group, head_dim)

    def check(self, head_dim: int) -> None:
        codes_a_byte = 8 // self.bits
        if head_dim % codes_a_byte:
            raise SpecError(
                f"heads of {head_dim} channels do not fill bytes of {codes_a_byte} codes; choose more bits than "
                f"{self.bits}"
            )
        if head_dim % self._channels(head_dim):
            raise SpecError(
                f"groups of {self.group} do not divide heads of {head_dim} channels; choose a divisor, or {head_dim} "
                "or more"
            )

    def shapes(self, n_heads: int, n_rows: int, head_dim: int, *, by_channel: bool) -> tuple[Shaped, ...]:
        scales = (n_heads, 1, head_dim) if by_channel else (n_heads, n_rows, head_dim // self._channels(head_dim))
        codes = (n_heads, n_rows, head_dim * self.bits // 8)
        return (codes, torch.uint8), (scales, torch.float16), (scales, torch.float16)

    def encode(self, x_GRD: Tensor, *, by_channel: bool) -> Parts:
        x_GRD = x_GRD.float().clamp(-_MOST, _MOST).contiguous()
        if by_channel:
            least, greatest = x_GRD.amin(-2, keepdim=True), x_GRD.amax(-2, keepdim=True)
        else:
            grouped = x_GRD.view(*x_GRD.shape[:-1], -1, self._channels(x_GRD.shape[-1]))
            least, greatest = grouped.amin(-1), grouped.amax(-1)
        low = -_half_above(-least)
        scale = _half_above((greatest - low.float()) / (2**self.bits - 1))
        spread_low, spread_scale = (_spread(x.float(), x_GRD.shape[-1]) for x in (low, scale))
        codes = ((x_GRD - spread_low) / spread_scale.clamp(min=1e-8)).round().clamp(0, 2**self.bits - 1)
        return _pack(codes.to(torch.uint8), self.bits), scale, low

    def decode(self, parts: Parts) -> Tensor:
        codes, scale, low = parts
        x_GRD = _unpack(codes, self.bits).float()
        return x_GRD * _spread(scale.float(), x_GRD.shape[-1]) + _spread(low.float(), x_GRD.shape[-1])


@dataclass(frozen=True)
class Float8(Storage):
    """Stores each number in 8 bits, float8 e4m3: three bits of mantissa, clipped at 448 (Micikevicius et al. 2022)."""

    @property
    def label(self) -> str:
        return "float8"

    @property
    def code_bits(self) -> int:
        return 0

    def check(self, head_dim: int) -> None:
        return

    def shapes(self, n_heads: int, n_rows: int, head_dim: int, *, by_channel: bool) -> tuple[Shaped, ...]:
        return (((n_heads, n_rows, head_dim), torch.uint8),)

    def encode(self, x_GRD: Tensor, *, by_channel: bool) -> Parts:
        return (x_GRD.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8),)

    def decode(self, parts: Parts) -> Tensor:
        return parts[0].contiguous().view(torch.float8_e4m3fn).float()


def _half_above(x: Tensor) -> Tensor:
    """Return the smallest float16 that is not below x. With such a scale, codes reach both ends of a group."""
    half = x.half()
    # A float is stored as sign and magnitude: as integers, the next greater float is one more, or one less if negative.
    next_up = half.view(torch.int16) + torch.where(half.view(torch.int16) < 0, -1, 1).to(torch.int16)
    return torch.where(half.float() < x, next_up.view(torch.float16), half)


def _spread(x: Tensor, head_dim: int) -> Tensor:
    """Repeat the number of each group for all channels of the group."""
    return x.repeat_interleave(head_dim // x.shape[-1], dim=-1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., D) into bytes (..., D * bits / 8). The lowest bits of all bytes hold the first channels."""
    parts = codes.chunk(8 // bits, -1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        packed |= part << (i * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes (..., D * bits / 8) to codes (..., D)."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], -1)
