"""Lays out integers for kernels: codes in a file's form become codes of the same weights in a kernel's layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from torch import Tensor

from hybridmem.memory.blocks import ceil_div
from hybridmem.memory.kernels.cpu.parts import compiled, element_at, subroutine, untyped_intrinsic
from hybridmem.models.products.integer_rounding import transposed
from hybridmem.models.products.integer_vectors import I8, I16, I64, INTS, every, in_every_lane, layout_of_codes
from hybridmem.models.weights.coded import Form, Scales, Term
from hybridmem.models.weights.layouts import BLOCK, GROUP, PAIRS, Layout, spare_bits, whole_pairs

_BYTES, _SHORTS = ir.VectorType(I8, BLOCK), ir.VectorType(I16, BLOCK)
_FORMS: dict[str, Form] = {}


@cache
def _stored_dtype(form: Form) -> np.dtype:
    """Return the dtype of arrays of a file's blocks.

    Compiled code recognizes the form by the name of the dtype's field.
    """
    where = form.terms, form.floats, form.factors, form.bias, form.is_exponent
    name = f"{form.block_bytes} bytes: {hashlib.sha256(repr(where).encode()).hexdigest()[:32]}"
    _FORMS[name] = form
    return np.dtype([(name, np.uint8)])


@untyped_intrinsic
def _sizes(typing_context, stored):
    """Return how many inputs a block has, and how many bytes."""
    form = _FORMS[next(iter(stored.dtype.fields))]

    def codegen(context, builder, signature, arguments):
        return context.make_tuple(builder, signature.return_type, [I64(form.n_block), I64(form.block_bytes)])

    return types.UniTuple(types.int64, 2)(stored), codegen


@untyped_intrinsic
def _read_block(typing_context, stored, at, group, row):
    """Set group[32 i : 32 (i + 1)] of a row to the codes of 32 inputs, for each i in a block at `at`.

    The 16 rows of 32 inputs lie one after the other.
    """
    form = _FORMS[next(iter(stored.dtype.fields))]

    def codegen(context, builder, signature, arguments):
        b = builder
        source = b.bitcast(element_at(context, b, stored, *arguments[:2]), I8.as_pointer())
        target = element_at(context, b, group, arguments[2], b.mul(arguments[3], I64(GROUP)))
        for i, terms in enumerate(form.terms):
            codes = None
            for term in terms:
                own = _term(b, source, term)
                codes = own if codes is None else b.or_(codes, own)
            place = b.gep(target, [I64(i // 2 * BLOCK * GROUP + i % 2 * BLOCK)])
            b.store(b.zext(codes, _SHORTS), b.bitcast(place, _SHORTS.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(stored, types.int64, group, types.int64), codegen


def _term(b: ir.IRBuilder, block: ir.Value, term: Term) -> ir.Value:
    place = b.gep(block, [I64(term.offset)])
    if term.is_bits:
        bits = in_every_lane(b, b.load(b.bitcast(place, I16.as_pointer()), align=1))
        own = b.lshr(bits, ir.Constant(_SHORTS, list(range(BLOCK))))
        bits = b.trunc(b.and_(own, ir.Constant(_SHORTS, [1] * BLOCK)), _BYTES)
        return b.shl(bits, ir.Constant(_BYTES, [term.up] * BLOCK))
    return _shifted(b, b.load(b.bitcast(place, _BYTES.as_pointer()), align=1), term)


def _shifted(b: ir.IRBuilder, bytes_: ir.Value, term: Term) -> ir.Value:
    """Return the bits of a term, shifted to their place in a code or factor."""
    bits = b.lshr(bytes_, ir.Constant(_BYTES, [term.shift] * BLOCK))
    bits = b.and_(bits, ir.Constant(_BYTES, [term.mask - (term.mask >> 7 << 8)] * BLOCK))
    return b.shl(bits, ir.Constant(_BYTES, [term.up] * BLOCK))


@untyped_intrinsic
def _write_group(typing_context, group, first, codes, at):
    """Write the codes of 32 inputs of a block, from 16 rows that begin at `first`, to `codes`. Nothing is checked."""
    n_bits = layout_of_codes(codes).n_bits

    def codegen(context, builder, signature, arguments):
        b = builder
        source = b.bitcast(element_at(context, b, group, *arguments[:2]), INTS.as_pointer())
        target = b.bitcast(element_at(context, b, codes, *arguments[2:]), I8.as_pointer())
        pairs = transposed(b, [b.load(b.gep(source, [I64(row)]), align=2) for row in range(BLOCK)])
        if n_bits == 8:
            for pair, own in enumerate(pairs):
                both = b.or_(b.and_(own, every(0xFF)), b.and_(b.lshr(own, every(8)), every(0xFF00)))
                place = b.gep(target, [I64(2 * BLOCK * pair)])
                b.store(b.trunc(both, _SHORTS), b.bitcast(place, _SHORTS.as_pointer()), align=1)
            return context.get_dummy_value()
        words, per_word = [every(0)] * n_bits, 16 // n_bits
        for pair, own in enumerate(pairs):
            if pair < whole_pairs(n_bits):
                word = pair // per_word
                words[word] = b.or_(words[word], b.shl(own, every(pair % per_word * n_bits)))
                continue
            for i, (word, bit) in enumerate(spare_bits(n_bits, pair)):
                one = b.and_(b.lshr(own, every(i)), every(0x10001))
                words[word] = b.or_(words[word], b.shl(one, every(bit)))
        for i, word in enumerate(words):
            b.store(word, b.bitcast(b.gep(target, [I64(4 * BLOCK * i)]), INTS.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(group, types.int64, codes, types.int64), codegen


@compiled(parallel=True)
def _lay_out(stored, n_out, places, table, n_parts, codes):
    """Write the codes of all rows of `stored`. Codes of outputs that do not exist are zero.

    Args:
        places: where each 32 inputs of a row go, counted in 32 inputs.
        table: what is written for each code, or an empty array to write the codes themselves.
    """
    n_block, block_bytes = _sizes(stored)
    n_blocks, per_row = (n_out + BLOCK - 1) // BLOCK, len(stored) // n_out // block_bytes
    n_groups, row_bytes = n_block // GROUP, len(stored) // n_out
    group_bytes = len(codes) // (n_blocks * per_row * n_groups)
    for part in prange(n_parts):
        group = np.zeros(n_groups * BLOCK * GROUP, np.uint16)
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            if (o + 1) * BLOCK > n_out:
                group[:] = np.uint16(0)
            for k in range(per_row):
                for row in range(min(BLOCK, n_out - o * BLOCK)):
                    _read_block(stored, (o * BLOCK + row) * row_bytes + k * block_bytes, group, row)
                if len(table) > 0:
                    _look_up(group, table)
                for g in range(n_groups):
                    at = (o * per_row * n_groups + places[k * n_groups + g]) * group_bytes
                    _write_group(group, g * BLOCK * GROUP, codes, at)


@subroutine()
def _look_up(codes, table):
    for i in range(len(codes)):
        codes[i] = table[codes[i]]


def lay_out_codes(
    form: Form, stored: Tensor, layout: Layout, order: Sequence[int], n_parts: int, codes: np.ndarray
) -> None:
    """Write codes of a form's first part (rows, bytes) in another layout. They stand for the same integers.

    Args:
        layout: the form's own layout, or one of 8 bits without a table. Its unit may be smaller.
        order: the order of inputs, as `CodedTensor` has it.
        codes: the output, of the layout's type.
    """
    own, table = form.layout, list[int]()
    if layout.n_bits != own.n_bits:
        table = [number & 0xFF for number in own.table or [code - own.zero for code in range(1 << own.n_bits)]]
    array = stored.contiguous().view(-1).numpy().view(_stored_dtype(form))
    places = _places(order, stored.shape[1] // form.block_bytes * form.n_block // GROUP)
    _lay_out(array, stored.shape[0], places, np.array(table, np.uint16), n_parts, codes)


def lay_out_scales(
    form: Form, parts: Sequence[Tensor], layout: Layout, n_in: int, order: Sequence[int], n_parts: int, out: Tensor
) -> None:
    """Write scales of a form's parts, which have one row for each output, to `out`, int16.

    Scales of inputs that do not exist are zero.
    """
    if not form.floats:
        _write_scales(layout, form.scales(parts), n_in, out)
        return
    array = parts[0].contiguous().view(-1).numpy().view(_stored_dtype(form))
    places, n_floats = _places(order, layout.n_units(n_in)), layout.n_floats * layout.float_shorts
    _lay_out_scales(array, len(parts[0]), places, n_floats, n_parts, out.numpy().view(np.uint16))


def _places(order: Sequence[int], n: int) -> np.ndarray:
    """Return where each of `n` equal parts of a row goes, if `order` says which piece stands at each place."""
    places = np.arange(n)
    if order:
        pieces = places.reshape(len(order), -1)
        pieces[list(order)] = pieces.copy()
    return places


@untyped_intrinsic
def _write_unit(typing_context, stored, first, row_bytes, n_rows, out, place):
    """Write floats and factors of a block of the file, for 16 rows of which `n_rows` exist. Nothing is checked."""
    form = _FORMS[next(iter(stored.dtype.fields))]

    def codegen(context, builder, signature, arguments):
        b = builder
        source = b.bitcast(element_at(context, b, stored, *arguments[:2]), I8.as_pointer())
        target = b.bitcast(element_at(context, b, out, *arguments[4:]), I8.as_pointer())
        last = b.sub(arguments[3], I64(1))
        rows = []
        for lane in range(BLOCK):
            own = b.select(b.icmp_signed("<", I64(lane), last), I64(lane), last)
            rows.append(b.gep(source, [b.mul(own, arguments[2])]))
        columns = _columns(b, rows, form)

        def store(vector: ir.Value, at: int) -> int:
            b.store(vector, b.bitcast(b.gep(target, [I64(at)]), vector.type.as_pointer()), align=1)
            return at + int(vector.type.count * vector.type.element.width) // 8

        at = 0
        for offset in form.floats:
            low = b.zext(columns[offset], _SHORTS)
            if form.is_exponent:  # This is half of the power of two, in bfloat16.
                one, many = (ir.Constant(_SHORTS, [n] * BLOCK) for n in (1, 7))
                small = b.shl(ir.Constant(_SHORTS, [0x20] * BLOCK), low)
                number = b.select(b.icmp_unsigned(">", low, one), b.shl(b.sub(low, one), many), small)
            else:
                high = b.shl(b.zext(columns[offset + 1], _SHORTS), ir.Constant(_SHORTS, [8] * BLOCK))
                number = b.or_(low, high)
            at = store(number, at)
        for terms in (terms for group in form.factors for terms in group):
            factor = ir.Constant(_BYTES, [0] * BLOCK)
            for term in terms:
                factor = b.or_(factor, _shifted(b, columns[term.offset], term))
            at = store(b.add(factor, ir.Constant(_BYTES, [form.bias] * BLOCK)), at)
        return context.get_dummy_value()

    i = types.int64
    return types.void(stored, i, i, i, out, i), codegen


def _columns(b: ir.IRBuilder, rows: list[ir.Value], form: Form) -> dict[int, ir.Value]:
    """Return those bytes of blocks from which scales are made: offset -> the byte at this offset of each row."""
    width = 1 if form.is_exponent else 2
    wanted = {offset + i for offset in form.floats for i in range(width)}
    wanted |= {term.offset for group in form.factors for terms in group for term in terms}
    columns: dict[int, ir.Value] = {}
    for offset in sorted(wanted):
        if offset not in columns:
            start = min(offset, form.block_bytes - BLOCK)
            places = [b.bitcast(b.gep(row, [I64(start)]), _BYTES.as_pointer()) for row in rows]
            found = transposed(b, [b.load(place, align=1) for place in places])
            columns |= {start + i: own for i, own in enumerate(found)}
    return columns


@compiled(parallel=True)
def _lay_out_scales(stored, n_out, places, n_floats, n_parts, out):
    """Write floats and factors of blocks in which both are stored among the codes.

    Args:
        places: where the scales of each unit of a row go. A block of the file may be several units, with equal floats.
        n_floats: how many numbers of 16 bits are the floats of a unit, for 16 rows.
    """
    _, block_bytes = _sizes(stored)
    n_blocks, row_bytes, n_units = (n_out + BLOCK - 1) // BLOCK, len(stored) // n_out, len(places)
    per_row = row_bytes // block_bytes
    per_block, unit = n_units // per_row, len(out) // (n_blocks * n_units)
    n_factors = unit - n_floats
    for part in prange(n_parts):
        whole = np.empty(n_floats + per_block * n_factors, np.uint16)
        for o in range(part * n_blocks // n_parts, (part + 1) * n_blocks // n_parts):
            first, n_rows = o * BLOCK * row_bytes, min(BLOCK, n_out - o * BLOCK)
            for k in range(per_row):
                if per_block == 1:
                    at = (o * n_units + places[k]) * unit
                    _write_unit(stored, first + k * block_bytes, row_bytes, n_rows, out, at)
                    continue
                _write_unit(stored, first + k * block_bytes, row_bytes, n_rows, whole, 0)
                for i in range(per_block):
                    at, factors = (o * n_units + places[k * per_block + i]) * unit, n_floats + i * n_factors
                    out[at : at + n_floats] = whole[:n_floats]
                    out[at + n_floats : at + unit] = whole[factors : factors + n_factors]


def _write_scales(layout: Layout, scales: Scales, n_in: int, out: Tensor) -> None:
    """Write scales that are stored in separate tensors."""
    n_blocks, n_units = ceil_div(len(scales.floats), BLOCK), layout.n_units(n_in)
    per_unit = 1 if layout.is_by_row else layout.unit_inputs // layout.group
    own = out.view(n_blocks, n_units, layout.unit_shorts)
    n_shorts = layout.n_floats * layout.float_shorts
    floats = _by_block(scales.floats, n_blocks, n_units)  # The axes are block, unit, float and lane.
    own[:, :, :n_shorts] = floats.flatten().view(torch.int16).view(n_blocks, n_units, -1)
    if layout.n_factors:
        factors = _by_block(scales.factors, n_blocks, n_units * per_unit).flatten()
        own[:, :, n_shorts:] = factors.view(torch.int16).view(n_blocks, n_units, -1)


def _by_block(numbers: Tensor, n_blocks: int, n: int) -> Tensor:
    """Return (blocks, n, k, 16) from (rows, up to n, k), with zeros for missing rows and units."""
    if numbers.shape[:2] != (n_blocks * BLOCK, n):
        whole = numbers.new_zeros(n_blocks * BLOCK, n, numbers.shape[2])
        whole[: len(numbers), : numbers.shape[1]] = numbers
        numbers = whole
    return numbers.view(n_blocks, BLOCK, n, numbers.shape[2]).permute(0, 2, 3, 1)


def read_codes(layout: Layout, codes: Tensor, n_out: int, n_in: int) -> Tensor:
    """Return the laid-out codes as (n_out, n_in). This is the plain torch code with which kernels are compared."""
    n_blocks, n_groups, n_bits = ceil_div(n_out, BLOCK), ceil_div(n_in, GROUP), layout.n_bits
    if n_bits == 8:
        found = codes.view(torch.int8).view(n_blocks, n_groups, PAIRS, BLOCK, 2)
    else:
        words = codes.view(torch.int16).view(n_blocks, n_groups, n_bits, BLOCK, 2).int() & 0xFFFF
        per_word, pairs = 16 // n_bits, []
        for pair in range(PAIRS):
            if pair < whole_pairs(n_bits):
                pairs.append(words[:, :, pair // per_word] >> pair % per_word * n_bits & (1 << n_bits) - 1)
                continue
            places = enumerate(spare_bits(n_bits, pair))
            bits = [(words[:, :, word] >> bit & 1) << i for i, (word, bit) in places]
            pairs.append(torch.stack(bits).sum(0))
        found = torch.stack(pairs, 2)
    return found.permute(0, 3, 1, 2, 4).reshape(n_blocks * BLOCK, n_groups * GROUP)[:n_out, :n_in]


def read_scales(layout: Layout, scales: Tensor, n_out: int, n_in: int) -> Scales:
    """Return the laid-out scales as `Scales`."""
    n_blocks, n_units = ceil_div(n_out, BLOCK), layout.n_units(n_in)
    own = scales.view(n_blocks, n_units, layout.unit_shorts)
    n_shorts = layout.n_floats * layout.float_shorts
    kind: Any = getattr(torch, layout.scale)
    floats = own[:, :, :n_shorts].contiguous().view(kind).view(n_blocks, n_units, layout.n_floats, BLOCK)
    n = layout.n_factors
    factors = own[:, :, n_shorts:].contiguous().view(torch.int8).view(n_blocks, -1 if n else 0, n, BLOCK)
    numbers = (x.permute(0, 3, 1, 2).flatten(0, 1)[:n_out] for x in (floats, factors))
    return Scales(*numbers)
