"""Computes attention over pages on the GPU: a tile of queries reads keys and values with an online softmax.

The method is that of Dao et al. 2022 and 2023. The rows that few queries see (decoding, verifying drafts) are divided
among programs, whose results `_merge` joins. The rows of many queries (prompts) are not divided. Query heads that share
a key/value head share a tile, so each key and value is read once for all of them. A head_dim that is no power of two is
computed in two parts: 576 as 512 and 64. Scores are in units of log2, because the hardware has exp2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.staging import upload
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cuda import folded_rows
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.folded_rows import NOT_FOLDED, load_folded
from hybridmem.memory.kernels.cuda.launch import aligned_elements, head_parts, launch, next_power_of_2
from hybridmem.memory.kernels.cuda.softmax import LOG2_E, add, hide, load_bias, load_rows, score, store_rows
from hybridmem.memory.kernels.cuda.tiles import MERGE, TASK, Shape, Tiles, tile
from hybridmem.memory.kernels.signature import FoldedRows, PagedBatch, Scoring


def plan_attention(
    batch: PagedBatch, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device, window: int | None,
    folded: FoldedRows | None = None,
) -> None:  # fmt: skip
    _lay_out(batch, Shape.of(*heads, dtype.itemsize, device), window, folded, device)


def paged_attention(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    n_kv_heads: int,
    scoring: Scoring,
    folded: FoldedRows | None = None,
) -> Tensor:
    checks.paged_attention(q_THD, batch, n_kv_heads, scoring, checks.FLOATS)
    q_THD = q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous()
    (_, n_heads, head_dim), device = q_THD.shape, q_THD.device
    itemsize, bits = q_THD.element_size(), NOT_FOLDED if folded is None else folded.storage.code_bits
    shape = Shape.of(n_heads, n_kv_heads, head_dim, itemsize, device)
    tiles, tasks, merges = _lay_out(batch, shape, scoring.window, folded, device)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    partial = torch.empty(tiles.n_partial, n_heads, head_dim, dtype=torch.float32, device=device)
    totals = torch.empty(tiles.n_partial, n_heads, dtype=torch.float32, device=device)
    sinks_H, bias_HL = scoring.sinks_H, None if scoring.bias_HL is None else scoring.bias_HL.contiguous()
    blocks = tasks if folded is None else folded.blocks
    pages = batch.pages
    for n_queries, begin, end in tiles.launches:
        block_m = max(16, next_power_of_2(n_queries * shape.heads))
        sizes = block_m, head_dim, itemsize, bits
        # Choices are measured without a bias. With one, the default is used, because a bias takes more shared memory.
        choice = _choose(device, *sizes) if bias_HL is None else _choose.default(*sizes)
        block_n, num_warps, num_stages = choice
        parts = head_parts(head_dim)
        launch(
            _attend, (end - begin, n_kv_heads * shape.parts), q_THD, out_THD, partial, totals, keys, values, pages,
            tasks, begin, q_THD if sinks_H is None else sinks_H, q_THD if bias_HL is None else bias_HL, blocks,
            *folded_rows.flats(folded, q_THD), q_THD.stride(0), q_THD.stride(1),
            *(x.stride(0) if x.dim() == 2 and x is not tasks else 0 for x in (pages, blocks)),
            scoring.scale * LOG2_E.value, (scoring.softcap or 0.0) * LOG2_E.value, scoring.window or 0,
            1 if bias_HL is None else bias_HL.shape[-1],
            0 if bias_HL is None or bias_HL.dim() == 2 else bias_HL.stride(0), N_HEADS=n_heads,
            N_SHARED=n_heads // n_kv_heads, HEADS=shape.heads, PARTS=shape.parts, D=head_dim, PAGE=batch.page_tokens,
            IS_SHARED=keys.data_ptr() == values.data_ptr(), HAS_SOFTCAP=scoring.softcap is not None,
            HAS_SINKS=sinks_H is not None, HAS_BIAS=bias_HL is not None, HAS_WINDOW=scoring.window is not None,
            BLOCK_M=block_m, BLOCK_N=block_n, TASK=TASK, ALIGN=aligned_elements(head_dim, itemsize),
            **parts, **folded_rows.constants(folded), num_warps=min(num_warps, _most_warps(block_m, parts["D1"])),
            num_stages=num_stages,
        )  # fmt: skip
    launch(
        _merge, (len(tiles.merges), n_heads), partial, totals, merges, q_THD if sinks_H is None else sinks_H, out_THD,
        N_HEADS=n_heads, D=head_dim, BLOCK_D=next_power_of_2(head_dim), HAS_SINKS=sinks_H is not None, MERGE=MERGE,
        num_warps=1,
    )  # fmt: skip
    return out_THD


def attend_rows(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
) -> Tensor:
    checks.attend_rows(q_THD, k_RGD, v_RGD, scoring, checks.FLOATS)
    (n_rows, n_kv_heads, head_dim), device = k_RGD.shape, q_THD.device
    pages = torch.arange(n_rows, device=device) * (n_kv_heads * head_dim)  # Each page holds a single row.
    batch = batch or PagedBatch(
        np.array([0, len(q_THD)]), np.array([n_rows]), pages, np.array([0, n_rows]), page_tokens=1
    )
    keys = k_RGD.contiguous().view(-1)
    values = keys if v_RGD is k_RGD else v_RGD.contiguous().view(-1)
    return paged_attention(q_THD, keys, values, batch.at(pages), n_kv_heads, scoring)


def _lay_out(
    batch: PagedBatch, shape: Shape, window: int | None, folded: FoldedRows | None, device: torch.device
) -> tuple[Tiles, Tensor, Tensor]:
    """Divide a batch into tiles, once for all layers of a shape.

    Return the tiles, and tasks and merges on the device.
    """
    arrays = () if folded is None else (folded.lengths, folded.cu_blocks)
    key = (shape, window, *map(id, arrays))
    if key not in batch.layouts:
        tiles = tile(batch, shape, window, folded)
        n = tiles.merges.size
        ints = upload(np.concatenate([tiles.merges.ravel(), tiles.tasks.ravel()]), device)
        # The arrays are kept alive, so that no other array can get the same id.
        batch.layouts[key] = (tiles, ints[n:].view(-1, TASK), ints[:n].view(-1, MERGE)), arrays
    found: tuple[Tiles, Tensor, Tensor] = batch.layouts[key][0]
    return found


class Attend(NamedTuple):
    """Holds a choice for `_attend`: the rows of keys in a tile, the warps, and the tiles in flight."""

    block_n: int
    num_warps: int
    num_stages: int


@tunable("attend", Attend, block_n=powers_of_2(16, 128), num_warps=powers_of_2(1, 16), num_stages=range(1, 9))
def _choose(block_m: int, head_dim: int, itemsize: int, bits: int) -> Attend:
    """Choose two or three tiles of keys and values in flight if shared memory (227 KiB) allows it.

    `bits` is the number of bits of a code of folded rows.
    """
    block_n = 64 if head_dim * itemsize <= 256 else 32 if head_dim * itemsize <= 1024 else 16
    tile_bytes = 2 * block_n * next_power_of_2(head_dim) * itemsize
    wanted = 3 if block_m >= 64 else 4  # With a small tile, one of the stages is used for page offsets.
    num_stages = 1 if bits != NOT_FOLDED else max(1, min(wanted, (160 << 10) // tile_bytes))
    return Attend(block_n, 8 if block_m * head_dim > 64 * 128 else 4, num_stages)


def _most_warps(block_m: int, n_last_channels: int) -> int:
    """Return the most warps that may share a tile.

    With 64 queries, eight warps would halve products of 16 channels. On Hopper, Triton 3.6 computes such products
    wrongly or reads from a wrong place.
    """
    return 4 if n_last_channels == 16 and block_m < 128 else 16


@triton.jit(do_not_specialize=["first_task", "pages_head", "blocks_head"])  # These arguments change from step to step.
def _attend(
    q, out, partial, totals, keys, values, pages, tasks, first_task, sinks, bias, blocks, k_codes, k_scales, k_lows,
    v_codes, v_scales, v_lows, q_token, q_head, pages_head, blocks_head, scale, softcap, window, n_distances,
    bias_token,
    N_HEADS: tl.constexpr, N_SHARED: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, IS_SHARED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TASK: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, ALIGN: tl.constexpr, BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr, K_SCALES: tl.constexpr, V_ROWS: tl.constexpr, V_SCALES: tl.constexpr,
):  # fmt: skip
    """Compute one task for key/value head g, or for some of the query heads that share it."""
    task, g, part = tasks + (first_task + tl.program_id(0)) * TASK, tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    token, n_queries, newest = tl.load(task), tl.load(task + 1).to(tl.int32), tl.load(task + 2).to(tl.int32)
    begin, end, partial_row = tl.load(task + 3).to(tl.int32), tl.load(task + 4).to(tl.int32), tl.load(task + 6)
    n_folded, table = tl.load(task + 7).to(tl.int32), pages + g.to(tl.int64) * pages_head + tl.load(task + 5)
    m = tl.arange(0, BLOCK_M)
    query, head = m // HEADS, g * N_SHARED + part * HEADS + m % HEADS
    is_own = (query < n_queries) & (part * HEADS + m % HEADS < N_SHARED)
    q0, q1 = load_rows(q, (token + query) * q_token + head * q_head, is_own, D, D0, D1)
    bias_at = (token + query) * bias_token + head * n_distances
    highest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        if partial_row < 0:  # If there are partial results, `_merge` adds the sinks.
            highest, total = tl.load(sinks + head, mask=is_own, other=0.0).to(tl.float32) * LOG2_E, total + 1.0
    acc0, acc1 = tl.zeros([BLOCK_M, D0], tl.float32), tl.zeros([BLOCK_M, D1 if D1 > 0 else 1], tl.float32)
    if BITS >= 0:
        own_blocks, end_folded = blocks + g.to(tl.int64) * blocks_head + tl.load(task + 8), tl.minimum(end, n_folded)
        for start in range(begin, end_folded, BLOCK_N):
            r = start + tl.arange(0, BLOCK_N)
            block, slot = tl.load(own_blocks + r // BLOCK_ROWS, mask=r < end_folded, other=0), r % BLOCK_ROWS
            k0, k1 = load_folded(
                k_codes, k_scales, k_lows, block, slot, g, r < end_folded, D, D0, D1, BITS, BLOCK_ROWS, K_ROWS, K_SCALES
            )
            v0, v1 = load_folded(
                v_codes, v_scales, v_lows, block, slot, g, r < end_folded, D, D0, D1, BITS, BLOCK_ROWS, V_ROWS, V_SCALES
            )
            s = score(q0, q1, k0.to(q0.dtype), k1.to(q0.dtype), scale, softcap, D1, HAS_SOFTCAP)
            if HAS_BIAS:
                s += load_bias(bias, bias_at, newest + query, r, is_own, n_distances)
            s = hide(s, newest + query, r, end_folded, window, HAS_WINDOW)
            acc0, acc1, highest, total = add(s, v0.to(q0.dtype), v1.to(q0.dtype), acc0, acc1, highest, total, D1)
    for start in range(tl.maximum(begin, n_folded), end, BLOCK_N):
        r = start + tl.arange(0, BLOCK_N)
        row = r - n_folded
        at = tl.multiple_of(tl.load(table + row // PAGE, mask=r < end, other=0) + (g * PAGE + row % PAGE) * D, ALIGN)
        k0, k1 = load_rows(keys, at, r < end, D, D0, D1)
        v0, v1 = k0, k1
        if not IS_SHARED:
            v0, v1 = load_rows(values, at, r < end, D, D0, D1)
        s = score(q0, q1, k0, k1, scale, softcap, D1, HAS_SOFTCAP)
        if HAS_BIAS:
            s += load_bias(bias, bias_at, newest + query, r, is_own, n_distances)
        s = hide(s, newest + query, r, end, window, HAS_WINDOW)
        acc0, acc1, highest, total = add(s, v0, v1, acc0, acc1, highest, total, D1)
    # A total of 0 means that no score was above -inf. For a part of the rows, `highest` tells `_merge` so. For all
    # rows, the result is 0 / 0.
    total = tl.where(total == 0.0, tl.where(partial_row < 0, float("nan"), 1.0), total)
    share = (1.0 / total)[:, None]
    if partial_row < 0:
        store_rows(out, ((token + query) * N_HEADS + head) * D, acc0 * share, acc1 * share, is_own, D, D0, D1)
    else:
        row = (partial_row + query) * N_HEADS + head
        store_rows(partial, row * D, acc0 * share, acc1 * share, is_own, D, D0, D1)
        tl.store(totals + row, highest + tl.log2(total), mask=is_own)


@triton.jit
def _merge(
    partial, totals, merges, sinks, out, N_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SINKS: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Join the results of several programs for one query and head, each weighted by its sum of weights."""
    merge, head = merges + tl.program_id(0) * MERGE, tl.program_id(1)
    token, first, step, n = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2), tl.load(merge + 3).to(tl.int32)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    highest, total = float("-inf"), 0.0
    if HAS_SINKS:
        highest, total = tl.load(sinks + head).to(tl.float32) * LOG2_E, 1.0
    for i in range(n):
        row = (first + i * step) * N_HEADS + head
        own = tl.load(totals + row)
        higher = tl.maximum(highest, own)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(highest - shift), tl.exp2(own - shift)
        x = tl.load(partial + row * D + d, mask=d < D, other=0.0)
        acc, total, highest = acc * fade + x * weight, total * fade + weight, higher
    total = tl.where(total == 0.0, float("nan"), total)  # No score was above -inf, so the result is 0 / 0.
    tl.store(
        out + (token * N_HEADS + head) * D + d, (acc / total).to(out.dtype.element_ty), mask=d < tl.where(n > 0, D, 0)
    )
