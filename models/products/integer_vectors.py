"""Emits code that turns integers of a few bits into vectors of numbers, and multiplies these vectors.

Sixteen outputs form a block, one in each lane of a vector. `models.weights.layouts` describes how codes and scales are
stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from hybridmem.memory.kernels.cpu.parts import as_float, features, has_many_registers
from hybridmem.models.weights.layouts import BLOCK, GROUP, PAIRS, Layout, layout_of, spare_bits, whole_pairs

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _SHORTS, INTS, FLOATS = (ir.VectorType(kind, BLOCK) for kind in (I8, I16, I32, F32))
_WORDS, _PAIRS_OF_BYTES = ir.VectorType(I16, 2 * BLOCK), ir.VectorType(I8, 2 * BLOCK)
ZEROS = ir.Constant(FLOATS, [0.0] * BLOCK)
ROUNDER = ir.Constant(FLOATS, [12582912.0] * BLOCK)
"""The number 1.5 * 2**23. Adding and subtracting it rounds to the nearest integer, and ties to the even one."""


def multiplies_pairs() -> bool:
    """True if compiled code may use AVX512_BF16: this processor has it, and numba is not told to do without it."""
    return "+avx512bf16" in features() and "+avx512bw" in features()


def adds_integers() -> bool:
    """True if compiled code may use AVX512_VNNI, which adds products of pairs of 16-bit integers."""
    return "+avx512vnni" in features() and "+avx512bw" in features()


class _BFloat(ir.Type):  # type: ignore[misc]
    """Represents LLVM's type bfloat, which llvmlite does not know."""

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


def call(b: ir.IRBuilder, name: str, returns: ir.Type, *values: ir.Value) -> ir.Value:
    """Call an intrinsic of LLVM by its name."""
    kind = ir.FunctionType(returns, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)


def in_every_lane(b: ir.IRBuilder, x: ir.Value, n: int = BLOCK) -> ir.Value:
    """Return a vector with x in each of its n lanes."""
    nothing = ir.Constant(ir.VectorType(x.type, n), ir.Undefined)
    first = ir.Constant(ir.VectorType(I32, n), [0] * n)
    return b.shuffle_vector(b.insert_element(nothing, x, I32(0)), nothing, first)


def layout_of_codes(kind: Any) -> Layout:
    """Return the layout of codes, given the type of their arrays in compiled code."""
    return layout_of(next(iter(kind.dtype.fields)))


class Emitter:
    """Emits vectors of a block's weights, and operations on them.

    Args:
        is_paired: True if weights become pairs of bfloat16, which holds these integers exactly. Otherwise they become
            float32.
    """

    def __init__(self, builder: ir.IRBuilder, layout: Layout, *, is_paired: bool) -> None:
        self.b, self.layout, self.is_paired = builder, layout, is_paired
        self._has_halves = "+avx512fp16" in features()

    def weights(self, codes: ir.Value) -> Iterator[list[ir.Value]]:
        """Yield each pair of the 32 inputs at `codes`, as one vector of pairs, or as two vectors of float32."""
        if self.layout.n_bits == 8:
            yield from (self._bytes(codes, pair) for pair in range(PAIRS))
            return
        words = self._words(codes)
        for pair in range(PAIRS):
            yield self._pair_of(*self._place(words, pair))

    def words(self, codes: ir.Value) -> Iterator[tuple[ir.Value, int]]:
        """Yield each pair of the 32 inputs as 16-bit integers, and by how many bits these are shifted to the left.

        Codes are not changed, unless a table says what they stand for. Codes of fewer than 8 bits are not negative.
        """
        b, n_bits = self.b, self.layout.n_bits
        if n_bits == 8:
            for pair in range(PAIRS):
                yield b.sext(self._load(codes, 2 * BLOCK * pair, _PAIRS_OF_BYTES), _WORDS), 0
            return
        words, shifted = self._words(codes), {}
        for pair in range(PAIRS):
            word, shift = self._place(words, pair)
            if self.layout.table is not None:
                yield self._looked_up(_in_turn(self.layout.table, 2 * BLOCK), self._shifted(word, shift)), 0
                continue
            # Two codes of a word at a time are extracted without shifting them down.
            even = shift // (2 * n_bits) * 2 * n_bits
            if (id(word), even) not in shifted:
                shifted[id(word), even] = self._shifted(word, even)
            yield b.and_(shifted[id(word), even], _words((1 << n_bits) - 1 << shift - even)), shift - even

    def scales(self, scales: ir.Value, group: ir.Value) -> list[tuple[ir.Value, ir.Value | None]]:
        """Return scales and minima of 32 inputs, or of each half of them, as float32.

        Args:
            scales: the address of the block's scales.
            group: the number of the 32 inputs.
        """
        layout, b = self.layout, self.b
        if layout.is_by_row:
            return [(self._float(scales, 0), None)]
        n_halves = layout.n_parts
        if layout.unit_inputs < GROUP:
            units = [b.add(b.mul(group, I64(n_halves)), I64(half)) for half in range(n_halves)]
            return [self._scale(b.gep(scales, [b.mul(unit, I64(layout.unit_shorts))]), I64(0)) for unit in units]
        per_unit = layout.unit_inputs // GROUP
        unit, own = (group, I64(0)) if per_unit == 1 else (b.udiv(group, I64(per_unit)), b.urem(group, I64(per_unit)))
        at = b.gep(scales, [b.mul(unit, I64(layout.unit_shorts))])
        first = b.udiv(b.mul(own, I64(GROUP)), I64(layout.group)) if layout.has_factors else I64(0)
        return [self._scale(at, b.add(first, I64(half))) for half in range(n_halves)]

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

    def _scale(self, unit: ir.Value, group: ir.Value) -> tuple[ir.Value, ir.Value | None]:
        """Return the scale and the minimum of a group of the unit at this address."""
        layout, b = self.layout, self.b
        scale, minimum = self._float(unit, 0), None
        factors = b.bitcast(b.gep(unit, [I64(layout.n_floats * layout.float_shorts)]), I8.as_pointer())
        own = b.gep(factors, [b.mul(group, I64(layout.n_factors * BLOCK))])
        if layout.minimum == "zero":
            minimum = b.fneg(b.fmul(scale, self._factor(own, BLOCK * int(layout.has_factors))))
        elif layout.minimum == "float":
            minimum = self._float(unit, 1)
        elif layout.minimum == "factor":
            minimum = b.fneg(b.fmul(self._float(unit, 1), self._factor(own, BLOCK * int(layout.has_factors))))
        if layout.has_factors:
            scale = b.fmul(scale, self._factor(own, 0))
        return scale, minimum

    def _float(self, unit: ir.Value, number: int) -> ir.Value:
        at = self.b.gep(unit, [I64(number * self.layout.float_shorts)])
        if self.layout.scale == "float32":
            return self._load(at, 0, FLOATS)
        kind = types.uint16 if self.layout.scale == "bfloat16" else types.int16
        return as_float(self.b, kind, self._load(at, 0, _SHORTS))

    def _factor(self, factors: ir.Value, at: int) -> ir.Value:
        return self.b.sitofp(self.b.sext(self._load(factors, at, _BYTES), INTS), FLOATS)

    def _words(self, codes: ir.Value) -> list[ir.Value]:
        return [self._load(codes, 4 * BLOCK * i, _WORDS) for i in range(self.layout.n_bits)]

    def _place(self, words: list[ir.Value], pair: int) -> tuple[ir.Value, int]:
        """Return the word with a pair's codes, and their lowest bit.

        A new word is made for a pair that is in no word.
        """
        b, n_bits = self.b, self.layout.n_bits
        if pair < whole_pairs(n_bits):
            return words[pair // (16 // n_bits)], pair % (16 // n_bits) * n_bits
        found: ir.Value | None = None
        bits = spare_bits(n_bits, pair)
        for word, bit, n in _runs(bits):
            target = bits.index((word, bit))
            own = b.and_(self._shifted(words[word], bit - target), _words((1 << n) - 1 << target))
            found = own if found is None else b.or_(found, own)
        return found, 0

    def _shifted(self, word: ir.Value, n: int) -> ir.Value:
        return self.b.lshr(word, _words(n)) if n else word

    def _pair_of(self, word: ir.Value, shift: int) -> list[ir.Value]:
        """Return the numbers of a pair whose codes are in a word, minus the code of zero."""
        b, layout = self.b, self.layout
        numbers = layout.table or [code - layout.zero for code in range(1 << layout.n_bits)]
        if self.is_paired:
            halves = [_as_short(int(np.float32(number).view(np.uint32) >> 16)) for number in numbers]
            return [b.bitcast(self._looked_up(halves, self._shifted(word, shift)), PAIRS_OF_BFLOAT)]
        whole = b.bitcast(word, INTS)
        shifted = [b.lshr(whole, every(shift + 16 * k)) if shift + k else whole for k in range(2)]
        if has_many_registers() and len(numbers) <= BLOCK:
            table = ir.Constant(FLOATS, _in_turn([float(number) for number in numbers], BLOCK))
            return [call(b, "llvm.x86.avx512.permvar.sf.512", FLOATS, table, codes) for codes in shifted]
        codes_of_two = (b.and_(codes, every((1 << layout.n_bits) - 1)) for codes in shifted)
        return [b.sitofp(b.sub(codes, every(layout.zero)), FLOATS) for codes in codes_of_two]

    def _looked_up(self, numbers: Sequence[int], codes: ir.Value) -> ir.Value:
        """Return the 16-bit numbers that codes stand for. Higher bits of the codes are ignored."""
        if not has_many_registers():
            found = _words(numbers[0])
            for code, number in enumerate(numbers[1:], 1):
                found = self.b.select(self.b.icmp_signed("==", codes, _words(code)), _words(number), found)
            return found
        whole = _in_turn(numbers, 2 * BLOCK)
        parts = [ir.Constant(_WORDS, whole[i : i + 2 * BLOCK]) for i in range(0, len(whole), 2 * BLOCK)]
        if len(parts) == 1:
            return call(self.b, "llvm.x86.avx512.permvar.hi.512", _WORDS, parts[0], codes)
        return call(self.b, "llvm.x86.avx512.vpermi2var.hi.512", _WORDS, parts[0], codes, parts[1])

    def _bytes(self, codes: ir.Value, pair: int) -> list[ir.Value]:
        b, at = self.b, 2 * BLOCK * pair
        if self.layout.float8 is not None:
            return self._floats8(self._load(codes, at, _PAIRS_OF_BYTES))
        if self.is_paired and self._has_halves:
            return [self._by_halves(self._load(codes, at, _PAIRS_OF_BYTES))]
        if self.is_paired:
            low, high = (b.sitofp(b.sext(self._load(codes, at + k, _BYTES), INTS), FLOATS) for k in (0, BLOCK))
            return [call(self.b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS_OF_BFLOAT, high, low)]
        both = b.sext(self._load(codes, at, _SHORTS), INTS)
        first = b.ashr(b.shl(both, every(24)), every(24))
        return [b.sitofp(x, FLOATS) for x in (first, b.ashr(both, every(8)))]

    def _floats8(self, codes: ir.Value) -> list[ir.Value]:
        """Return the values of 32 8-bit floats as bfloat16, which holds them exactly.

        Their bits are moved to bfloat16's places, whose exponent has another bias. Subnormal numbers are handled apart,
        because their exponent says nothing.
        """
        b, is_e4m3 = self.b, self.layout.float8 == "float8_e4m3fn"
        n_mantissa, bias = (3, 7) if is_e4m3 else (2, 15)
        words = b.zext(codes, _WORDS)
        sizes = b.and_(words, _words(0x7F))
        moved = b.add(b.shl(sizes, _words(7 - n_mantissa)), _words(127 - bias << 7))
        smallest = [np.float32(i * 2.0 ** (1 - bias - n_mantissa)) for i in range(1 << n_mantissa)]
        halves = [_as_short(int(number.view(np.uint32) >> 16)) for number in smallest]
        is_small = b.icmp_unsigned("<", sizes, _words(1 << n_mantissa))
        moved = b.select(is_small, self._looked_up(halves, sizes), moved)
        # Larger codes are NaN. This one is NaN in E4M3, and infinity in E5M2.
        largest = 0x7F if is_e4m3 else 0x7C
        ends = b.shl(b.sub(sizes, _words(largest - (1 if is_e4m3 else 0))), _words(5))
        moved = b.select(b.icmp_unsigned(">=", sizes, _words(largest)), b.or_(ends, _words(0x7F80)), moved)
        signed = b.or_(moved, b.shl(b.and_(words, _words(0x80)), _words(8)))
        if self.is_paired:
            return [b.bitcast(signed, PAIRS_OF_BFLOAT)]
        whole = b.bitcast(signed, INTS)
        return [b.bitcast(x, FLOATS) for x in (b.shl(whole, every(16)), b.and_(whole, every(-65536)))]

    def _by_halves(self, codes: ir.Value) -> ir.Value:
        """Return pairs of bfloat16, made by way of float16, which takes two thirds of the instructions.

        The float16 of these integers ends in three zero bits. Without them it is bfloat16, except that the bias of its
        exponent is smaller by 112, and that zero has no bias.
        """
        b, words = self.b, self.b.sext(codes, _WORDS)
        halves = b.bitcast(b.sitofp(words, ir.VectorType(ir.HalfType(), 2 * BLOCK)), _WORDS)
        shifted = b.and_(b.ashr(halves, _words(3)), _words(_as_short(0x8FFF)))
        biased = b.select(b.icmp_signed("!=", words, _words(0)), b.add(shifted, _words(112 << 7)), shifted)
        return b.bitcast(biased, PAIRS_OF_BFLOAT)

    def _load(self, at: ir.Value, n_bytes: int, kind: ir.Type) -> ir.Value:
        own = self.b.bitcast(at, I8.as_pointer())
        return self.b.load(self.b.bitcast(self.b.gep(own, [I64(n_bytes)]), kind.as_pointer()), align=1)


def _runs(bits: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the word, the lowest bit and the length of each run of neighbouring bits."""
    start = 0
    for i in range(1, len(bits) + 1):
        if i == len(bits) or bits[i] != (bits[i - 1][0], bits[i - 1][1] + 1):
            yield *bits[start], i - start
            start = i


def _in_turn(numbers: Sequence[Any], n: int) -> list[Any]:
    """Return n numbers or more by repeating the given ones."""
    return list(numbers) * max(1, n // len(numbers))


def _words(number: int) -> ir.Constant:
    return ir.Constant(_WORDS, [number] * 2 * BLOCK)


def every(number: int) -> ir.Constant:
    return ir.Constant(INTS, [number] * BLOCK)
