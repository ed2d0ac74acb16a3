"""Emits the code that turns integers of 8 and 4 bits into vectors of numbers, and multiplies these.

Sixteen outputs form a block, and lie in the lanes of a vector. Layout, for each block and each group of 32 inputs in it
(512 or 256 bytes):
    8 bits: 16 pairs of inputs; a pair has 16 outputs of two bytes, the first input's first.
    4 bits: 4 times 32 words of 16 bits, for 16 outputs and the two inputs of a pair; a word holds these for 4 pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

GROUP = 32
"""Inputs that share a scale."""

BLOCK = 16
"""Outputs that are computed at once."""

PAIRS = GROUP // 2
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _SHORTS, INTS, FLOATS = (ir.VectorType(kind, BLOCK) for kind in (I8, I16, I32, F32))
_WORDS, _PAIRS_OF_BYTES = ir.VectorType(I16, 2 * BLOCK), ir.VectorType(I8, 2 * BLOCK)
ZEROS = ir.Constant(FLOATS, [0.0] * BLOCK)
ROUNDER = ir.Constant(FLOATS, [12582912.0] * BLOCK)
"""Rounds to integers, of two to the even one, where it is added and subtracted again: it is 1.5 * 2**23."""


def multiplies_pairs() -> bool:
    """True if compiled code may use AVX512_BF16: this processor has it, and numba is not told to do without."""
    return "+avx512bf16" in _features() and "+avx512bw" in _features()


def adds_integers() -> bool:
    """True if compiled code may use AVX512_VNNI, which adds products of pairs of 16-bit integers."""
    return "+avx512vnni" in _features() and "+avx512bw" in _features()


def has_many_registers() -> bool:
    """True if compiled code may use AVX-512, whose 32 registers hold a vector of sixteen numbers each."""
    return "+avx512f" in _features()


@cache
def _features() -> str:
    """Return what compiled code may use of this processor, as LLVM names it."""
    return str(cpu_target.target_context.codegen().magic_tuple())


class _BFloat(ir.Type):  # type: ignore[misc]
    """Names LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    __str__ = _to_string

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


PAIRS_OF_BFLOAT = ir.VectorType(_BFloat(), 2 * BLOCK)


def _as_short(bits: int) -> int:
    return bits - (1 << 16) if bits >> 15 else bits


_BFLOAT_OF_CODE = [_as_short(int(np.float32((code & 15) - 8).view(np.uint32) >> 16)) for code in range(32)]
"""bfloat16 of the integers -8 .. 7, twice: a lookup uses five bits of its index, of which the fifth does not count."""


def call(b: ir.IRBuilder, name: str, returns: ir.Type, *values: ir.Value) -> ir.Value:
    """Call an intrinsic of LLVM by its name."""
    kind = ir.FunctionType(returns, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)


def in_every_lane(b: ir.IRBuilder, x: ir.Value, n: int = BLOCK) -> ir.Value:
    """Return a vector with x in each of its n lanes."""
    nothing = ir.Constant(ir.VectorType(x.type, n), ir.Undefined)
    first = ir.Constant(ir.VectorType(I32, n), [0] * n)
    return b.shuffle_vector(b.insert_element(nothing, x, I32(0)), nothing, first)


class Emitter:
    """Emits vectors of a block's weights, and what is done with them.

    Args:
        is_paired: weights become pairs of bfloat16, which holds these integers exactly; else float32.
    """

    def __init__(self, builder: ir.IRBuilder, n_bits: int, *, is_paired: bool) -> None:
        self.b, self.n_bits, self.is_paired = builder, n_bits, is_paired
        self._has_halves = "+avx512fp16" in _features()

    def weights(self, codes: ir.Value) -> Iterator[list[ir.Value]]:
        """Yield each pair of inputs of the group at `codes`: one vector of pairs, or two of float32."""
        words = None
        for pair in range(PAIRS):
            if self.n_bits == 4 and pair % 4 == 0:
                words = self._load(codes, 16 * pair, INTS)
            yield self._bytes(codes, pair) if words is None else self._nibbles(words, pair % 4)

    def words(self, codes: ir.Value) -> Iterator[ir.Value]:
        """Yield each pair of inputs of the group at `codes` as 16-bit integers: codes themselves, without conversion.

        Those of 4 bits are not negative: they are 8 more than the weight, and in odd places sixteen times as large.
        """
        b, words = self.b, None
        for pair in range(PAIRS):
            place = pair % 4
            if self.n_bits == 8:
                yield b.sext(self._load(codes, 2 * BLOCK * pair, _PAIRS_OF_BYTES), _WORDS)
                continue
            if place == 0:
                words = self._load(codes, 16 * pair, _WORDS)
            elif place == 2:
                words = b.lshr(words, _words(8))
            yield b.and_(words, _words(0xF0 if place % 2 else 0xF))

    def scales(self, scales: ir.Value) -> ir.Value:
        """Return the 16 scales at a place as float32."""
        short = self._load(scales, 0, _SHORTS)
        return self.b.bitcast(self.b.shl(self.b.zext(short, INTS), every(16)), FLOATS)

    def multiply_add(self, weight: ir.Value, x: ir.Value, sums: ir.Value) -> ir.Value:
        if self.is_paired:
            return call(self.b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, weight, x)
        return self.fma(weight, x, sums)

    def fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return call(self.b, f"llvm.fma.v{BLOCK}f32", FLOATS, x, y, z)

    def in_every_lane(self, x: ir.Value) -> ir.Value:
        """Return a number, or a pair of two bfloat16, in every lane."""
        every = in_every_lane(self.b, x)
        return self.b.bitcast(every, PAIRS_OF_BFLOAT) if self.is_paired else every

    def _bytes(self, codes: ir.Value, pair: int) -> list[ir.Value]:
        b, at = self.b, 2 * BLOCK * pair
        if self.is_paired and self._has_halves:
            return [self._by_halves(self._load(codes, at, _PAIRS_OF_BYTES))]
        if self.is_paired:
            low, high = (b.sitofp(b.sext(self._load(codes, at + k, _BYTES), INTS), FLOATS) for k in (0, BLOCK))
            return [call(self.b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS_OF_BFLOAT, high, low)]
        both = b.sext(self._load(codes, at, _SHORTS), INTS)
        first = b.ashr(b.shl(both, every(24)), every(24))
        return [b.sitofp(x, FLOATS) for x in (first, b.ashr(both, every(8)))]

    def _by_halves(self, codes: ir.Value) -> ir.Value:
        """Return pairs of bfloat16 by way of float16, which takes two thirds of the instructions.

        For these integers float16 ends in three zeros. Without them it is bfloat16 but for the bias of its exponent,
        112 less; zero has none.
        """
        b, words = self.b, self.b.sext(codes, _WORDS)
        halves = b.bitcast(b.sitofp(words, ir.VectorType(ir.HalfType(), 2 * BLOCK)), _WORDS)
        shifted = b.and_(b.ashr(halves, _words(3)), _words(_as_short(0x8FFF)))
        biased = b.select(b.icmp_signed("!=", words, _words(0)), b.add(shifted, _words(112 << 7)), shifted)
        return b.bitcast(biased, PAIRS_OF_BFLOAT)

    def _nibbles(self, words: ir.Value, place: int) -> list[ir.Value]:
        b = self.b
        if self.is_paired:
            codes = b.lshr(b.bitcast(words, _WORDS), ir.Constant(_WORDS, [4 * place] * 2 * BLOCK))
            table = ir.Constant(_WORDS, _BFLOAT_OF_CODE)
            return [b.bitcast(call(self.b, "llvm.x86.avx512.permvar.hi.512", _WORDS, table, codes), PAIRS_OF_BFLOAT)]
        if has_many_registers():
            shifted = (b.lshr(words, every(4 * place + 16 * k)) for k in range(2))
            table = ir.Constant(FLOATS, [float(code - 8) for code in range(BLOCK)])
            return [call(b, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, codes) for codes in shifted]
        codes_of_two = (b.and_(b.lshr(words, every(4 * place + 16 * k)), every(15)) for k in range(2))
        return [b.sitofp(b.sub(codes, every(8)), FLOATS) for codes in codes_of_two]

    def _load(self, codes: ir.Value, at: int, kind: ir.Type) -> ir.Value:
        return self.b.load(self.b.bitcast(self.b.gep(codes, [I64(at)]), kind.as_pointer()), align=1)


def _words(number: int) -> ir.Constant:
    return ir.Constant(_WORDS, [number] * 2 * BLOCK)


def every(number: int) -> ir.Constant:
    return ir.Constant(INTS, [number] * BLOCK)
