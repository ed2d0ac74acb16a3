"""Compiles products with weights of 8 and 4 bits, and the rounding of weights to these, for the CPU.

torch's own operators for this are slow for rows of float32, and for more than a few rows. A weight is an integer times
a scale; each group of 32 inputs of an output has its own scale, in bfloat16. Sixteen outputs form a block, and lie in
the lanes of a vector: a block is read from its first group to its last, once for eight rows.

Layout, for each block and each group in it (512 or 256 bytes):
    8 bits: 16 pairs of inputs; a pair has 16 outputs of two bytes, the first input's first.
    4 bits: 4 times 32 words of 16 bits, for 16 outputs and the two inputs of a pair; a word holds these for 4 pairs.

Where the processor multiplies pairs of bfloat16 and adds their products (AVX512_BF16), rows of bfloat16 are read as
pairs; integers of 8 bits are exact in bfloat16. Otherwise rows and weights become float32. Sums are float32, and each
row's are formed in the same order in any company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.core.registry import cpu_target

from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.numbers import get, put, untyped_intrinsic
from memory.kernels.cpu.threads import ELEMENTWISE
from memory.kernels.cpu.vector_math import LOG2_E, exp2_f32

GROUP = 32
"""Inputs that share a scale."""

BLOCK = 16
"""Outputs that are computed at once."""

_PAIRS = GROUP // 2
_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _SHORTS, INTS, FLOATS = (ir.VectorType(kind, BLOCK) for kind in (_I8, _I16, _I32, _F32))
_WORDS = ir.VectorType(_I16, 2 * BLOCK)
ZEROS = ir.Constant(FLOATS, [0.0] * BLOCK)

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_ROUNDER = np.float32(12582912.0)
"""1.5 * 2**23: adding it rounds to an integer, of two the even one; subtracting it leaves that integer."""

_DIVISORS = np.array([7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5, 9.0], np.float32)
"""Quotients of a group's largest weight and its scale that are tried for 4 bits."""


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


def multiplies_pairs() -> bool:
    """True if compiled code may use AVX512_BF16: this processor has it, and numba is not told to do without."""
    features = str(cpu_target.target_context.codegen().magic_tuple())
    return "+avx512bf16" in features and "+avx512bw" in features


def _as_short(bits: int) -> int:
    return bits - (1 << 16) if bits >> 15 else bits


_BFLOAT_OF_CODE = [_as_short(int(np.float32((code & 15) - 8).view(np.uint32) >> 16)) for code in range(32)]
"""bfloat16 of the integers -8 .. 7, twice: a lookup uses five bits of its index, of which the fifth does not count."""


class _Tile:
    """Emits the sums of `n_rows` rows and one block, over all its groups.

    `codes`, `scales` and `x` are pointers to the block's first and the first row's; `x` to float32, or to pairs.
    """

    def __init__(self, builder: ir.IRBuilder, n_rows: int, n_bits: int, is_paired: bool) -> None:
        self.b, self.n_rows, self.n_bits, self.is_paired = builder, n_rows, n_bits, is_paired

    def sums(
        self, codes: ir.Value, scales: ir.Value, x: ir.Value, x_stride: ir.Value, n_groups: ir.Value
    ) -> list[ir.Value]:
        """Return a vector of sums for each row. `x_stride` counts what `x` points to; there is at least one group."""
        b, before = self.b, self.b.block
        loop, end = b.append_basic_block("groups"), b.append_basic_block("end")
        b.branch(loop)
        b.position_at_end(loop)
        group = b.phi(_I64)
        group.add_incoming(_I64(0), before)
        totals = [b.phi(FLOATS) for _ in range(self.n_rows)]
        for total in totals:
            total.add_incoming(ZEROS, before)
        parts = self._group(
            b.gep(codes, [b.mul(group, _I64(GROUP * BLOCK * self.n_bits // 8))]),
            [b.gep(x, [b.add(b.mul(x_stride, _I64(row)), b.mul(group, _I64(self._per_pair * _PAIRS)))])
             for row in range(self.n_rows)],
        )  # fmt: skip
        scale = b.load(b.bitcast(b.gep(scales, [b.mul(group, _I64(BLOCK))]), _SHORTS.as_pointer()), align=2)
        scale = b.bitcast(b.shl(b.zext(scale, INTS), _every(16)), FLOATS)
        sums = [self._fma(part, scale, total) for part, total in zip(parts, totals, strict=True)]
        following = b.add(group, _I64(1))
        group.add_incoming(following, loop)
        for total, value in zip(totals, sums, strict=True):
            total.add_incoming(value, loop)
        b.cbranch(b.icmp_signed("<", following, n_groups), loop, end)
        b.position_at_end(end)
        return sums

    @property
    def _per_pair(self) -> int:
        return 1 if self.is_paired else 2

    def _group(self, codes: ir.Value, rows: list[ir.Value]) -> list[ir.Value]:
        """Return the sums of one group, of integers times inputs."""
        sums = [ZEROS] * self.n_rows
        words = None
        for pair in range(_PAIRS):
            if self.n_bits == 4 and pair % 4 == 0:
                words = self._load(codes, 16 * pair, INTS)
            weights = self._bytes(codes, pair) if words is None else self._nibbles(words, pair % 4)
            for i, row in enumerate(rows):
                inputs = [self._input(row, pair * self._per_pair + k) for k in range(self._per_pair)]
                for weight, x in zip(weights, inputs, strict=True):
                    sums[i] = self._multiply_add(weight, x, sums[i])
        return sums

    def _bytes(self, codes: ir.Value, pair: int) -> list[ir.Value]:
        """Return a pair's weights of 8 bits: a vector of pairs, or two of float32."""
        b, at = self.b, 2 * BLOCK * pair
        if self.is_paired:
            low, high = (b.sitofp(b.sext(self._load(codes, at + k, _BYTES), INTS), FLOATS) for k in (0, BLOCK))
            return [self._call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS_OF_BFLOAT, high, low)]
        both = b.sext(self._load(codes, at, _SHORTS), INTS)
        first = b.ashr(b.shl(both, _every(24)), _every(24))
        return [b.sitofp(x, FLOATS) for x in (first, b.ashr(both, _every(8)))]

    def _nibbles(self, words: ir.Value, place: int) -> list[ir.Value]:
        """Return a pair's weights of 4 bits, as `_bytes`."""
        b = self.b
        if self.is_paired:
            codes = b.lshr(b.bitcast(words, _WORDS), ir.Constant(_WORDS, [4 * place] * 2 * BLOCK))
            table = ir.Constant(_WORDS, _BFLOAT_OF_CODE)
            return [b.bitcast(self._call("llvm.x86.avx512.permvar.hi.512", _WORDS, table, codes), PAIRS_OF_BFLOAT)]
        codes_of_two = (b.and_(b.lshr(words, _every(4 * place + 16 * k)), _every(15)) for k in range(2))
        return [b.sitofp(b.sub(codes, _every(8)), FLOATS) for codes in codes_of_two]

    def _input(self, row: ir.Value, at: int) -> ir.Value:
        """Return a row's input, or its pair of inputs, in every lane."""
        x = self.b.load(self.b.gep(row, [_I64(at)]), align=2 if self.is_paired else 4)
        nothing = ir.Constant(ir.VectorType(x.type, BLOCK), ir.Undefined)
        every = self.b.shuffle_vector(self.b.insert_element(nothing, x, _I32(0)), nothing, _every(0))
        return self.b.bitcast(every, PAIRS_OF_BFLOAT) if self.is_paired else every

    def _multiply_add(self, weight: ir.Value, x: ir.Value, sums: ir.Value) -> ir.Value:
        if self.is_paired:
            return self._call("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, sums, weight, x)
        return self._fma(weight, x, sums)

    def _fma(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return self._call(f"llvm.fma.v{BLOCK}f32", FLOATS, x, y, z)

    def _load(self, codes: ir.Value, at: int, kind: ir.Type) -> ir.Value:
        return self.b.load(self.b.bitcast(self.b.gep(codes, [_I64(at)]), kind.as_pointer()), align=1)

    def _call(self, name: str, returns: ir.Type, *values: ir.Value) -> ir.Value:
        kind = ir.FunctionType(returns, [value.type for value in values])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), values)  # type: ignore[no-untyped-call]


def _every(number: int) -> ir.Constant:
    return ir.Constant(INTS, [number] * BLOCK)


def _tile(n_rows: int) -> Any:
    @untyped_intrinsic
    def tile(typing_context, codes, first_code, scales, first_scale, x, first_input, x_stride, n_groups, sums):  # type: ignore[no-untyped-def]
        """Set sums[: n_rows * 16] to the sums of rows and a block; not checked.

        Codes of 8 bits are int8, of 4 bits uint8; x is float32, or uint16 for bfloat16, which then comes in pairs.
        """

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            def pointer(i: int, at: ir.Value, element: ir.Type) -> ir.Value:
                data = context.make_array(signature.args[i])(context, builder, arguments[i]).data
                return builder.bitcast(builder.gep(data, [at]), element.as_pointer())

            _, code_at, _, scale_at, _, input_at, stride, groups, _ = arguments
            is_paired = x.dtype == types.uint16
            emitter = _Tile(builder, n_rows, 8 if codes.dtype == types.int8 else 4, is_paired)
            found = emitter.sums(
                pointer(0, code_at, _I8), pointer(2, scale_at, _I16), pointer(4, input_at, _I32 if is_paired else _F32),
                builder.lshr(stride, _I64(1)) if is_paired else stride, groups,
            )  # fmt: skip
            for row, vector in enumerate(found):
                builder.store(vector, pointer(8, _I64(BLOCK * row), FLOATS), align=4)
            return context.get_dummy_value()

        at = types.int64
        return types.void(codes, at, scales, at, x, at, at, at, sums), codegen

    return tile


_tile_8, _tile_4, _tile_2, _tile_1 = map(_tile, (8, 4, 2, 1))


@compiled(parallel=True, error_model="numpy")
def product(codes, scales, x_TI, bias, activation, n_parts, out_TO):  # type: ignore[no-untyped-def]
    """Set out = activation(x W^T + bias).

    Args:
        x_TI: rows, of a multiple of 32 inputs.
        bias: (outputs,) or empty.
        activation: its number in `ACTIVATIONS`.
        n_parts: into how many parts the blocks are divided, one for each thread.
    """
    n_rows, n_out = out_TO.shape
    n_in, x = x_TI.shape[1], x_TI.reshape(-1)
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, n_in // GROUP
    block_codes = len(codes) // n_blocks
    for part in prange(n_parts):
        sums = np.empty(8 * BLOCK, np.float32)
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            code, scale = o * block_codes, o * n_groups * BLOCK
            t = 0
            while t < n_rows:
                left, at = n_rows - t, t * n_in
                if left >= 8:
                    n = 8
                    _tile_8(codes, code, scales, scale, x, at, n_in, n_groups, sums)
                elif left >= 4:
                    n = 4
                    _tile_4(codes, code, scales, scale, x, at, n_in, n_groups, sums)
                elif left >= 2:
                    n = 2
                    _tile_2(codes, code, scales, scale, x, at, n_in, n_groups, sums)
                else:
                    n = 1
                    _tile_1(codes, code, scales, scale, x, at, n_in, n_groups, sums)
                for row in range(n):
                    finish(sums[row * BLOCK : (row + 1) * BLOCK], bias, activation, o * BLOCK, out_TO[t + row])
                t += n


ACTIVATIONS = {None: 0, "silu": 1, "swish": 1, "relu": 2, "sigmoid": 3}
"""What `product` applies to sums before they are rounded, by names in transformers' configs."""

FUSED, NO_BIAS = tuple(name for name in ACTIVATIONS if name is not None), np.empty(0, np.float32)


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def finish(sums, bias, activation, first, out):  # type: ignore[no-untyped-def]
    """Write one row of a block."""
    n = min(BLOCK, len(out) - first)
    if len(bias) > 0:
        for e in range(n):
            sums[e] += get(bias, first + e)
    if activation == 1:
        for e in range(BLOCK):
            sums[e] = sums[e] / (_ONE + exp2_f32(-sums[e] * LOG2_E))
    elif activation == 2:
        for e in range(BLOCK):
            sums[e] = _ZERO if sums[e] < _ZERO else sums[e]
    elif activation == 3:
        for e in range(BLOCK):
            sums[e] = _ONE / (_ONE + exp2_f32(-sums[e] * LOG2_E))
    for e in range(n):
        put(out, first + e, sums[e])


@compiled(parallel=True, error_model="numpy")
def round_to_codes(weight, n_out, n_in, n_bits, n_parts, codes, scales):  # type: ignore[no-untyped-def]
    """Fill codes (uint8) and scales from a flat weight of float32 or 16 bits; what lies beyond its edges is zero.

    8 bits: the scale is the group's largest weight / 127. 4 bits: of some scales the one with the least squared error
    is taken, and what minimises it for the integers that come out. Sixteen outputs are rounded side by side, so their
    sums have the same order on every processor.
    """
    n_blocks, n_groups = (n_out + BLOCK - 1) // BLOCK, (n_in + GROUP - 1) // GROUP
    least, most = np.float32(-127.0 if n_bits == 8 else -8.0), np.float32(127.0 if n_bits == 8 else 7.0)
    for part in prange(n_parts):
        group, scale = np.empty((GROUP, BLOCK), np.float32), np.empty(BLOCK, np.float32)
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            for g in range(n_groups):
                _fill(weight, n_out, n_in, o * BLOCK, g * GROUP, group)
                _choose_scale(group, n_bits, scale)
                first = (o * n_groups + g) * BLOCK
                for lane in range(BLOCK):
                    put(scales, first + lane, scale[lane])
                    scale[lane] = get(scales, first + lane)
                    scale[lane] = _ONE / scale[lane] if scale[lane] != _ZERO else _ZERO
                for e in range(GROUP):
                    _round_(group[e], scale, least, most)
                _write(codes, n_bits, first * GROUP, group)


@njit(error_model="numpy")
def _fill(weight, n_out, n_in, first_output, first_input, group):  # type: ignore[no-untyped-def]
    """Set group[input, lane] to a block's weights."""
    group[:] = _ZERO
    n = min(GROUP, n_in - first_input)
    for lane in range(min(BLOCK, n_out - first_output)):
        at = (first_output + lane) * n_in + first_input
        own = weight[at : at + n]
        for e in range(n):
            group[e, lane] = get(own, e)


@njit(error_model="numpy")
def _choose_scale(group, n_bits, scale):  # type: ignore[no-untyped-def]
    """Set the scale of each lane; NaN where a weight is NaN or infinite."""
    largest, spoilt = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    for e in range(GROUP):
        _find_largest_(largest, spoilt, group[e])
    if n_bits == 8:
        for lane in range(BLOCK):
            scale[lane] = largest[lane] / np.float32(127.0)
    else:
        _search_scale(group, largest, scale)
    for lane in range(BLOCK):
        scale[lane] += spoilt[lane]


@njit(error_model="numpy")
def _search_scale(group, largest, scale):  # type: ignore[no-untyped-def]
    """Set the scale of each lane for 4 bits: of those from `_DIVISORS` the one with the least squared error."""
    scale[:] = _ZERO
    best = np.zeros(BLOCK, np.float32)
    inverse, both, squares = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for divisor in _DIVISORS:
        for lane in range(BLOCK):
            inverse[lane] = -divisor / largest[lane] if largest[lane] != _ZERO else _ZERO
        both[:], squares[:] = _ZERO, _ZERO
        for e in range(GROUP):
            _add_products_(both, squares, group[e], inverse)
        for lane in range(BLOCK):
            gain = both[lane] * both[lane] / squares[lane]
            if gain > best[lane]:  # not where all weights are zero, and it is NaN
                best[lane], scale[lane] = gain, both[lane] / squares[lane]


@njit(error_model="numpy")
def _find_largest_(largest, spoilt, row):  # type: ignore[no-untyped-def]
    for lane in range(len(row)):
        x = row[lane]
        largest[lane] = x if abs(x) > abs(largest[lane]) else largest[lane]
        spoilt[lane] += x * _ZERO


@njit(error_model="numpy")
def _add_products_(both, squares, row, factor):  # type: ignore[no-untyped-def]
    """Add what each lane's integer gives for the error of its scale."""
    for lane in range(len(row)):
        x = _nearest(row[lane] * factor[lane], -np.float32(8.0), np.float32(7.0))
        both[lane] += row[lane] * x
        squares[lane] += x * x


@njit(error_model="numpy")
def _round_(x, factor, least, most):  # type: ignore[no-untyped-def]
    """Set x to the integers that are nearest to x * factor."""
    for lane in range(len(x)):
        x[lane] = _nearest(x[lane] * factor[lane], least, most)


@njit(inline="always", error_model="numpy")
def _nearest(x, least, most):  # type: ignore[no-untyped-def]
    x = least if x < least else x
    x = most if x > most else x
    return (x + _ROUNDER) - _ROUNDER


@njit(error_model="numpy")
def _write(codes, n_bits, first, integers):  # type: ignore[no-untyped-def]
    """Write the integers of a block's group, whose first code, counted in weights, is `first`."""
    for e in range(GROUP):
        pair, row = e // 2, integers[e]
        if n_bits == 8:
            at = first + 2 * BLOCK * pair
            own = codes[at : at + 2 * BLOCK]
            for lane in range(BLOCK):
                own[2 * lane + e % 2] = np.uint8(np.int8(row[lane]))
        else:
            at = first // 2 + (pair // 4) * 4 * BLOCK
            own, place = codes[at : at + 4 * BLOCK], 2 * (e % 2) + (pair % 4) // 2
            for lane in range(BLOCK):
                code = np.uint8(row[lane] + np.float32(8.0))
                own[4 * lane + place] = code if pair % 2 == 0 else own[4 * lane + place] | (code << np.uint8(4))
