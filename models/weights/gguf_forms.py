"""Describes the blocks of GGUF files, as ggml defines them (ggml-common.h): where codes, scales and minima are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hybridmem.models.weights.coded import Form, Term
from hybridmem.models.weights.layouts import Layout

_SUPER = 256
"""The number of inputs of a block whose groups have factors."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The numbers of FP4 (E2M1), multiplied by two."""

Terms = tuple[tuple[Term, ...], ...]
Factors = tuple[Terms, ...]


def _nibbles(offset: int) -> Terms:
    """Return the places of codes in half bytes: byte i has those of inputs i (lower half) and i + 16."""
    return tuple((Term(offset, 4 * half, 15),) for half in range(2))


def _with_bits(terms: Terms, offset: int) -> Terms:
    """Add a fifth bit to codes: from `offset` on, there is one bit for each input."""
    return tuple((*own, Term(offset + 2 * half, up=4, is_bits=True)) for half, own in enumerate(terms))


def _by_group(term: Callable[[int, int], tuple[Term, ...]]) -> Terms:
    """Return the places of the codes of 256 inputs, by their group of 32 and the half of the group."""
    return tuple(term(group, half) for group in range(8) for half in range(2))


def _k4_factors() -> Factors:
    """Return the places of 8 scales and 8 minima of 6 bits each in Q4_K and Q5_K, in the 12 bytes after two floats."""
    first = [((Term(4 + i, 0, 63),), (Term(8 + i, 0, 63),)) for i in range(4)]
    last = [
        ((Term(12 + i, 0, 15), Term(4 + i, 6, 3, 4)), (Term(12 + i, 4, 15), Term(8 + i, 6, 3, 4))) for i in range(4)
    ]
    return (*first, *last)


def _k3_factors() -> Factors:
    """Say where 16 scales of 6 bits each are in 12 bytes: their lower four bits, and after them the upper two."""
    return tuple(((Term(96 + i % 8, 4 * (i // 8), 15), Term(104 + i % 4, 2 * (i // 4), 3, 4)),) for i in range(16))


def _iq4_factors() -> Factors:
    """Return the places of 8 scales of 6 bits each: the upper two bits in two bytes, the others in the next four."""
    return tuple(((Term(4 + i // 2, 4 * (i % 2), 15), Term(2 + i // 4, 2 * (i % 4), 3, 4)),) for i in range(8))


_OF_32 = Layout(4)
_OF_SUPER = replace(_OF_32, unit=_SUPER)
_HALF_GROUPS = replace(_OF_SUPER, group=16)
_K2_FACTORS: Factors = tuple(((Term(i, 0, 15),), (Term(i, 4, 15),)) for i in range(16))
_K6_FACTORS: Factors = tuple(((Term(192 + i),),) for i in range(16))
_NIBBLES_OF_K = _by_group(lambda group, half: (Term(16 + 32 * (group // 2) + 16 * half, 4 * (group % 2), 15),))

_ALL = (
    Form("Q4_0", replace(_OF_32, zero=8), 18, _nibbles(2), (0,)),
    Form("Q4_1", replace(_OF_32, minimum="float"), 20, _nibbles(4), (0, 2)),
    Form("Q5_0", replace(_OF_32, n_bits=5, zero=16), 22, _with_bits(_nibbles(6), 2), (0,)),
    Form("Q5_1", replace(_OF_32, n_bits=5, minimum="float"), 24, _with_bits(_nibbles(8), 4), (0, 2)),
    Form("Q8_0", Layout(8), 34, ((Term(2),), (Term(18),)), (0,)),
    Form(
        "Q2_K", replace(_HALF_GROUPS, n_bits=2, minimum="factor"), 84,
        _by_group(lambda group, half: (Term(16 + 32 * (group // 4) + 16 * half, 2 * (group % 4), 3),)),
        (80, 82), _K2_FACTORS,
    ),
    Form(
        "Q3_K", replace(_HALF_GROUPS, n_bits=3, zero=4), 110,
        _by_group(lambda group, half: (
            Term(32 + 32 * (group // 4) + 16 * half, 2 * (group % 4), 3), Term(16 * half, group, 1, 2),
        )),
        (108,), _k3_factors(), bias=-32,
    ),
    Form("Q4_K", replace(_OF_SUPER, minimum="factor"), 144, _NIBBLES_OF_K, (0, 2), _k4_factors()),
    Form(
        "Q5_K", replace(_OF_SUPER, n_bits=5, minimum="factor"), 176,
        _by_group(lambda group, half: (
            Term(48 + 32 * (group // 2) + 16 * half, 4 * (group % 2), 15), Term(16 + 16 * half, group, 1, 4),
        )),
        (0, 2), _k4_factors(),
    ),
    Form(
        "Q6_K", replace(_HALF_GROUPS, n_bits=6, zero=32), 210,
        _by_group(lambda group, half: (
            Term(64 * (group // 4) + 32 * (group % 2) + 16 * half, 4 * (group % 4 // 2), 15),
            Term(128 + 32 * (group // 4) + 16 * half, 2 * (group % 4), 3, 4),
        )),
        (208,), _K6_FACTORS,
    ),
    Form("IQ4_NL", replace(_OF_32, table=_IQ4), 18, _nibbles(2), (0,)),
    Form(
        "IQ4_XS", replace(_OF_SUPER, table=_IQ4), 136,
        _by_group(lambda group, half: (Term(8 + 16 * group, 4 * half, 15),)), (0,), _iq4_factors(), bias=-32,
    ),
    Form("MXFP4", replace(_OF_32, scale="bfloat16", table=_MXFP4), 17, _nibbles(1), (0,), is_exponent=True),
)  # fmt: skip

FORMS = {form.name: form for form in _ALL}
"""Maps GGUF's name of a type to its form."""
