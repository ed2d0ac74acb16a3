"""Describes the blocks of GGUF files, as ggml defines them (ggml-common.h): where codes are, and how scales are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridmem.models.weights.coded import Form, Scales, Term
from hybridmem.models.weights.layouts import Layout

_SUPER = 256
"""Inputs of a block whose groups have factors."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of FP4 (E2M1)."""

Blocks = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Blocks (rows, blocks, bytes) -> floats (rows, blocks, n), and factors (rows, blocks, groups, n)."""


def _floats(blocks: Tensor, *offsets: int) -> Tensor:
    """Return float16 at these bytes of blocks."""
    found = [blocks[:, :, at : at + 2].contiguous().view(torch.float16) for at in offsets]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def _nibbles(offset: int) -> tuple[tuple[Term, ...], ...]:
    """Say where codes are whose lower halves come first: byte i has those of inputs i and i + 16."""
    return tuple((Term(offset, 4 * half, 15),) for half in range(2))


def _with_bits(terms: tuple[tuple[Term, ...], ...], offset: int) -> tuple[tuple[Term, ...], ...]:
    """Add a fifth bit, of which each input has its own from `offset` on."""
    return tuple((*own, Term(offset + 2 * half, up=4, is_bits=True)) for half, own in enumerate(terms))


def _by_group(term: Callable[[int, int], tuple[Term, ...]]) -> tuple[tuple[Term, ...], ...]:
    """Say where the codes of 256 inputs are, by their group of 32 and half of it."""
    return tuple(term(group, half) for group in range(8) for half in range(2))


def _plain(offset: int = 0, *, has_minimum: bool = False) -> Blocks:
    return lambda blocks: (_floats(blocks, offset, *([offset + 2] if has_minimum else [])), None)


def _k4_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Read 8 scales and 8 minima of 6 bits each, as Q4_K and Q5_K have them."""
    low, high, last = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat((low & 63, last & 15 | low >> 6 << 4), -1)
    minima = torch.cat((high & 63, last >> 4 | high >> 6 << 4), -1)
    return _floats(blocks, 0, 2), torch.stack((scales, minima), -1).view(torch.int8)


def _k2_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    both = blocks[:, :, :16]
    return _floats(blocks, 80, 82), torch.stack((both & 15, both >> 4), -1).view(torch.int8)


def _k3_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low, high = blocks[:, :, 96:104], blocks[:, :, 104:108]
    lower = torch.cat((low & 15, low >> 4), -1)
    upper = torch.cat([high >> 2 * i & 3 for i in range(4)], -1)
    return _floats(blocks, 108), (lower | upper << 4).view(torch.int8)[..., None] - 32


def _k6_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _floats(blocks, 208), blocks[:, :, 192:208].contiguous().view(torch.int8)[..., None]


def _iq4_xs_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    low = blocks[:, :, 4:8]
    lower = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    upper = torch.cat([blocks[:, :, 2 + i, None] >> 2 * j & 3 for i in range(2) for j in range(4)], -1)
    return _floats(blocks, 0), (lower | upper << 4).view(torch.int8)[..., None] - 32


def _mxfp4_scales(blocks: Tensor) -> tuple[Tensor, None]:
    """Return powers of two in bfloat16, half of what the byte says, since codes count twice."""
    exponents = blocks[:, :, :1].to(torch.int16)
    bits = torch.where(exponents < 2, 0x20 << exponents, exponents - 1 << 7)
    return bits.view(torch.bfloat16), None


def _form(
    name: str, layout: Layout, block_bytes: int, terms: tuple[tuple[Term, ...], ...], read: Blocks
) -> tuple[str, Form]:
    def read_scales(parts: Sequence[Tensor]) -> Scales:
        blocks = parts[0].view(len(parts[0]), -1, block_bytes)
        floats, factors = read(blocks)
        n_groups = blocks.shape[1] * max(1, layout.unit_inputs // layout.group)
        own = torch.empty(len(blocks), n_groups, 0, dtype=torch.int8) if factors is None else factors.flatten(1, 2)
        return Scales(floats, own)

    return name, Form(name, layout, 16 * len(terms), block_bytes, terms, read_scales)


_OF_32 = Layout(4)
_OF_SUPER = replace(_OF_32, unit=_SUPER)
_HALF_GROUPS = replace(_OF_SUPER, group=16)
_NIBBLES_OF_K = _by_group(lambda group, half: (Term(16 + 32 * (group // 2) + 16 * half, 4 * (group % 2), 15),))

FORMS: dict[str, Form] = dict([
    _form("Q4_0", replace(_OF_32, zero=8), 18, _nibbles(2), _plain()),
    _form("Q4_1", replace(_OF_32, minimum="float"), 20, _nibbles(4), _plain(has_minimum=True)),
    _form("Q5_0", replace(_OF_32, n_bits=5, zero=16), 22, _with_bits(_nibbles(6), 2), _plain()),
    _form("Q5_1", replace(_OF_32, n_bits=5, minimum="float"), 24, _with_bits(_nibbles(8), 4), _plain(has_minimum=True)),
    _form("Q8_0", Layout(8), 34, ((Term(2),), (Term(18),)), _plain()),
    _form(
        "Q2_K", replace(_HALF_GROUPS, n_bits=2, minimum="factor"), 84,
        _by_group(lambda group, half: (Term(16 + 32 * (group // 4) + 16 * half, 2 * (group % 4), 3),)), _k2_scales,
    ),
    _form(
        "Q3_K", replace(_HALF_GROUPS, n_bits=3, zero=4), 110,
        _by_group(lambda group, half: (
            Term(32 + 32 * (group // 4) + 16 * half, 2 * (group % 4), 3), Term(16 * half, group, 1, 2),
        )),
        _k3_scales,
    ),
    _form("Q4_K", replace(_OF_SUPER, minimum="factor"), 144, _NIBBLES_OF_K, _k4_scales),
    _form(
        "Q5_K", replace(_OF_SUPER, n_bits=5, minimum="factor"), 176,
        _by_group(lambda group, half: (
            Term(48 + 32 * (group // 2) + 16 * half, 4 * (group % 2), 15), Term(16 + 16 * half, group, 1, 4),
        )),
        _k4_scales,
    ),
    _form(
        "Q6_K", replace(_HALF_GROUPS, n_bits=6, zero=32), 210,
        _by_group(lambda group, half: (
            Term(64 * (group // 4) + 32 * (group % 2) + 16 * half, 4 * (group % 4 // 2), 15),
            Term(128 + 32 * (group // 4) + 16 * half, 2 * (group % 4), 3, 4),
        )),
        _k6_scales,
    ),
    _form("IQ4_NL", replace(_OF_32, table=_IQ4), 18, _nibbles(2), _plain()),
    _form(
        "IQ4_XS", replace(_OF_SUPER, table=_IQ4), 136,
        _by_group(lambda group, half: (Term(8 + 16 * group, 4 * half, 15),)), _iq4_xs_scales,
    ),
    _form("MXFP4", replace(_OF_32, scale="bfloat16", table=_MXFP4), 17, _nibbles(1), _mxfp4_scales),
])  # fmt: skip
"""GGUF's names of types -> their forms."""
