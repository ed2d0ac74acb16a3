"""Sums the rows and the columns of a table of integers in one pass, for the checksums of saved files."""

from __future__ import annotations

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.kernels.cpu.compiled import compiled


@compiled()
def _sum(table: Int64s, of_columns: Int64s, of_rows: Int64s) -> None:
    of_columns[:] = 0
    for i in range(len(table)):
        row, total = table[i], np.int64(0)
        for j in range(len(row)):
            total += row[j]
            of_columns[j] += row[j]
        of_rows[i] = total


def column_and_row_sums(table: Int64s) -> Int64s:
    """Return the sums of the columns of a table of int64, then those of its rows, modulo 2**64.

    numpy takes two passes, and twice as long.
    """
    n_rows, n_columns = table.shape
    sums = np.empty(n_columns + n_rows, np.int64)
    _sum(table, sums[:n_columns], sums[n_columns:])
    return sums
