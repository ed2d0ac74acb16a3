"""Rows in few bits a number, for bodies: what is older than the rollback window and never written again.

A storage turns rows into parts, tensors of small types, and back. Parts are made once, from exact rows, of a fixed
group of them: whatever was in the batch, and whether tokens came one by one or at once, the same rows give the same
bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from memory.errors import SpecError

Shaped = tuple[tuple[int, ...], torch.dtype]
Parts = tuple[Tensor, ...]
"""What rows (..., G, R, D) of G heads are stored as: codes, and perhaps scales and lows, each (..., G, R or 1, some).
"""

_MOST = 60_000.0
"""Scales and lows are float16; numbers beyond this are clipped."""


@dataclass(frozen=True)
class Storage(ABC):
    """How a body keeps keys and values.

    Attributes:
        group: tokens that fold together. For keys also how many share a scale, for values how many channels do.
    """

    _: KW_ONLY
    group: int = 64

    def __post_init__(self) -> None:
        if type(self.group) is not int or self.group < 1:
            raise SpecError(f"{type(self).__name__}.group={self.group!r}; it must be an integer of at least 1 token")

    @property
    @abstractmethod
    def label(self) -> str:
        """For the names of pools."""

    @property
    @abstractmethod
    def code_bits(self) -> int:
        """Of a code; 0 for a float8."""

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise SpecError unless heads of `head_dim` channels can be stored."""

    @abstractmethod
    def shapes(self, n_heads: int, n_rows: int, head_dim: int, *, by_channel: bool) -> tuple[Shaped, ...]:
        """Shapes and dtypes of the parts."""

    @abstractmethod
    def encode(self, x_GRD: Tensor, *, by_channel: bool) -> Parts:
        """Parts of rows (..., G, R, D): groups are all rows of a channel, or some channels of a row."""

    @abstractmethod
    def decode(self, parts: Parts) -> Tensor:
        """(..., G, R, D) float32."""


@dataclass(frozen=True)
class Quantized(Storage):
    """Integer codes, x = code scale + low, with a scale and a low in float16 for each group (Liu et al. 2024, "KIVI").

    Keys share them along a channel, for `group` tokens: a few channels of keys are much larger than the rest. Values
    share them along a token, for `group` channels, or for the whole head where it is narrower. Under a policy, which
    lets rows go one by one, keys are grouped as values are: rows move from fold to fold without being quantised again.

    4 bits in groups of 64 take 4.5 bits a number. The error is at most half a scale:
    (greatest - least) / (2**bits - 1) / 2.

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
        """That share a scale within a row."""
        return min(self.group, head_dim)

    def check(self, head_dim: int) -> None:
        a_byte = 8 // self.bits
        if head_dim % a_byte:
            raise SpecError(
                f"heads of {head_dim} channels do not fill bytes of {a_byte} codes; choose more bits than {self.bits}"
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
    """Each number by itself in 8 bits, float8 e4m3: three bits of mantissa, clipped at 448
    (Micikevicius et al. 2022)."""

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
    """The least float16 that is not below x: codes then reach both ends of a group."""
    half = x.half()
    # sign and magnitude
    next_up = half.view(torch.int16) + torch.where(half.view(torch.int16) < 0, -1, 1).to(torch.int16)
    return torch.where(half.float() < x, next_up.view(torch.float16), half)


def _spread(x: Tensor, head_dim: int) -> Tensor:
    """One number a group -> one a channel."""
    return x.repeat_interleave(head_dim // x.shape[-1], dim=-1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """(..., D) codes -> (..., D bits / 8) bytes: the lowest bits of the bytes hold the first channels, the next the
    following ones.
    """
    parts = codes.chunk(8 // bits, -1)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], start=1):
        packed |= part << (i * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], -1)
