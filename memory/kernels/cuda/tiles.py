"""Divides attention among GPU programs. It does so on the host, once for all layers of one shape.

A program computes a tile: some queries of one request, for the query heads of one key/value head (or some of these
heads). The rows that few queries see are split among programs, whose results are merged. The division depends only on
the lengths of the request itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hybridmem.memory.blocks.arrays import Int64s, ceil_div, ranges, starts_of
from hybridmem.memory.blocks.staging import room_for
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.launch import next_power_of_2
from hybridmem.memory.kernels.signature import FoldedRows, PagedBatch

FEW_QUERIES = 16
"""The rows of requests of at most this many queries are split. More queries fill the device without a split."""

SPLIT_ROWS = 256
"""The fewest rows that a program reads if rows are split. So the merge adds at most 3 % to the bytes."""

_MOST_PROGRAMS = 256
"""The most programs that share the rows of one request: about two for each multiprocessor of a Hopper GPU."""

WHOLE_TILES = 64
"""The rows of each split are a multiple of this number, which is a multiple of most tiles of keys."""


class Split(NamedTuple):
    """Holds a choice: the values of `SPLIT_ROWS` and `_MOST_PROGRAMS` for one shape of attention."""

    rows: int
    programs: int


@tunable("split", Split, rows=range(WHOLE_TILES, 1 << 15, WHOLE_TILES), programs=powers_of_2(1, 1 << 12))
def _choose_split(n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int) -> Split:
    return Split(SPLIT_ROWS, _MOST_PROGRAMS)


class Shape(NamedTuple):
    """Holds the sizes of tiles for one shape of attention.

    Attributes:
        heads: the query heads of a tile, which share a key/value head.
        parts: how many tiles share a key/value head.
        most: the most rows of a tile, which are queries times heads.
        split: how rows are divided among programs.
    """

    n_kv_heads: int
    heads: int
    parts: int
    most: int
    split: Split

    @staticmethod
    def of(n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int, device: torch.device) -> Shape:
        """Choose sizes so that a tile's accumulators (rows x head_dim float32) fit into registers of eight warps."""
        most = 128 if head_dim <= 128 and itemsize < 4 else 64 if head_dim <= 256 or itemsize < 4 else 16
        heads, split = min(n_heads // n_kv_heads, most), _choose_split(device, n_heads, n_kv_heads, head_dim, itemsize)
        return Shape(n_kv_heads, heads, ceil_div(n_heads // n_kv_heads, heads), most, split)


class Launch(NamedTuple):
    """Holds one launch: tasks [begin, end), each of at most `n_queries` queries."""

    n_queries: int
    begin: int
    end: int


class Tiles(NamedTuple):
    """Holds the work of all programs of a step.

    Attributes:
        tasks: (n, TASK): packed index of the first query, number of queries, the last row that the first query sees,
            rows [begin, end) to read, index of the request's first page, index of the first row of partial results or
            -1, number of folded rows, index of the first of their blocks. If all requests have few queries, tasks
            without queries are added as room.
        merges: (m, MERGE): packed index of a query, its first row of partial results, the distance between these rows,
            and their number. If all requests have few queries, there are no merges, or one for each query, some of them
            of no rows.
        n_partial: the number of rows of partial results, room included.
    """

    launches: tuple[Launch, ...]
    tasks: Int64s
    merges: Int64s
    n_partial: int


TASK, MERGE = 9, 4


def tile(batch: PagedBatch, shape: Shape, window: int | None, folded: FoldedRows | None) -> Tiles:
    counts = np.diff(batch.cu_seqlens)
    n_folded = np.zeros_like(counts) if folded is None else folded.lengths
    first_block = np.zeros_like(counts) if folded is None else folded.cu_blocks[:-1]
    n_rows = batch.kv_lengths + n_folded
    sizes = np.minimum(_powers_of_2(counts), max(1, shape.most // shape.heads))
    launches, tasks, merges = list[Launch](), list[Int64s](), list[Int64s]()
    n_tasks = n_partial = 0
    for size in np.unique(sizes).tolist():
        requests = (sizes == size).nonzero()[0]
        n_tiles = ceil_div(counts[requests], size)
        r, first = np.repeat(requests, n_tiles), _indices(n_tiles) * size
        n_queries = np.minimum(size, counts[r] - first)
        newest = n_rows[r] - counts[r] + first
        end = newest + n_queries
        begin = np.zeros_like(end) if window is None else np.maximum(0, newest - window + 1)
        n_splits, length = _splits(end - begin, counts[r] <= FEW_QUERIES, shape)
        is_split = n_splits > 1
        own_partial = n_partial + starts_of(np.where(is_split, n_splits * n_queries, 0))[:-1]
        n_partial += int((n_splits * n_queries)[is_split].sum())

        s, split = np.repeat(np.arange(len(r)), n_splits), _indices(n_splits)
        partial = np.where(is_split[s], own_partial[s] + split * n_queries[s], -1)
        begins = begin[s] + split * length[s]
        ends = np.minimum(begins + length[s], end[s])
        token = batch.cu_seqlens[r] + first
        columns = (
            token[s],
            n_queries[s],
            newest[s],
            begins,
            ends,
            batch.cu_pages[r][s],
            partial,
            n_folded[r][s],
            first_block[r][s],
        )
        tasks.append(np.stack(columns, 1))
        launches.append(Launch(size, n_tasks, n_tasks + len(s)))
        n_tasks += len(s)

        m = np.repeat(is_split.nonzero()[0], n_queries[is_split])
        query = _indices(n_queries[is_split])
        merges.append(np.stack([token[m] + query, own_partial[m] + query, n_queries[m], n_splits[m]], 1))
    tiles = Tiles(tuple(launches), np.concatenate(tasks), np.concatenate(merges), n_partial)
    return _with_room(tiles, int(counts.sum())) if len(launches) == 1 and counts.max() <= FEW_QUERIES else tiles


def _with_room(tiles: Tiles, n_queries: int) -> Tiles:
    """Add room, so that the next step, in which requests see one more row, mostly has tiles of the same shapes.

    Then a captured step can be replayed (`memory.recorded`).
    """
    size, _, n_tasks = tiles.launches[0]
    n_room, n_split = room_for(n_tasks), len(tiles.merges)
    tasks = np.concatenate([tiles.tasks, np.zeros((n_room - n_tasks, TASK), np.int64)])
    merges = np.concatenate([tiles.merges, np.zeros((n_queries - n_split if n_split else 0, MERGE), np.int64)])
    return Tiles((Launch(size, 0, n_room),), tasks, merges, n_room * size if n_split else 0)


def _splits(n_rows: Int64s, may_split: Int64s, shape: Shape) -> tuple[Int64s, Int64s]:
    """Return how many programs share the rows of each tile, and how many rows each but the last of them reads."""
    most = max(1, shape.split.programs // (shape.n_kv_heads * shape.parts))
    wanted = np.where(may_split, np.clip(ceil_div(n_rows, shape.split.rows), 1, most), 1)
    length = -(-n_rows // wanted // WHOLE_TILES) * WHOLE_TILES
    return -(-n_rows // length), length


def _powers_of_2(counts: Int64s) -> Int64s:
    return np.array([next_power_of_2(n) for n in counts.tolist()], np.int64)


def _indices(counts: Int64s) -> Int64s:
    """Return the numbers 0, 1, ... counts[i] - 1 for each i, one after the other."""
    return ranges(np.zeros_like(counts), counts)
