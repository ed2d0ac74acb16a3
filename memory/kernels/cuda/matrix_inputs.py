"""Prepares the arguments of `Kernels.matrix_scan` for the kernels of matrix states on the GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hybridmem.memory.kernels.cuda.launch import absent, next_power_of_2, with_contiguous_rows
from hybridmem.memory.kernels.signature import Erase, Prepared, StateSlots


class Inputs(NamedTuple):
    """Holds the arguments of `Kernels.matrix_scan`, with contiguous rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    a: Tensor | None
    b: Tensor | None
    strength: Tensor | None
    skip: Prepared | None
    after_decay: bool

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        erase: Erase | None,
        strength: Tensor | None,
        skip: Prepared | None,
    ) -> Inputs:
        a, b, after_decay = (None, None, False) if erase is None else erase
        q, k, v, log_decay = (with_contiguous_rows(x) for x in (q, k, v, log_decay))
        a, b, strength = (None if x is None else with_contiguous_rows(x) for x in (a, b, strength))
        return Inputs(q, k, v, log_decay, a, b, strength, skip, after_decay)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the number of heads, and the rows and columns of a head's state."""
        return self.v.shape[1], self.v.shape[2], self.q.shape[2]

    @property
    def pointers(self) -> tuple[Any, ...]:
        """Return the tensors, each followed by its stride, and q, k and a also by the number of heads in a group.

        The order is q, k, a, v, log decay, strength and skip, which has no stride.
        """
        n_heads, a, strength = self.v.shape[1], absent(self.a, self.q), absent(self.strength, self.q)
        grouped = [y for x in (self.q, self.k, a) for y in (x, x.stride(0), n_heads // x.shape[1])]
        rest = [y for x in (self.v, self.log_decay, strength) for y in (x, x.stride(0))]
        return (*grouped, *rest, absent(self.skip, self.q))

    @property
    def flags(self) -> dict[str, Any]:
        return {
            "ERASES": self.a is not None,
            "HAS_STRENGTH": self.strength is not None,
            "HAS_SKIP": self.skip is not None,
        }


def rows_a_program(n_rows: int, n_columns: int) -> int:
    """Return how many rows of a head's state a program computes: 16 KiB of rows, but at most all rows of the head.

    The number does not depend on the number of segments of a step, so the order of sums does not either.
    """
    return min(max(8, 4096 // next_power_of_2(n_columns)), next_power_of_2(n_rows))


def part_of(state: StateSlots, begin: int, end: int) -> StateSlots:
    """Return the slots of only the segments [begin, end)."""
    chosen, tail = slice(begin, end), state.tail
    if tail is not None:
        sources, targets = (tuple(x[chosen] for x in ring) for ring in (tail.sources, tail.targets))
        tail = tail._replace(
            sources=sources,
            targets=targets,
            firsts=tail.firsts[chosen],
            counts=tail.counts[chosen],
            folds=tail.folds[chosen],
        )
    cu_rows = state.cu_rows.part(begin, end + 1)
    return state._replace(cu_rows=cu_rows, sources=state.sources[chosen], targets=state.targets[chosen], tail=tail)
