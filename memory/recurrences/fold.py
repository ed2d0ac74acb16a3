"""Makes a recurrence from its formula for one token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from memory.errors import StepError
from memory.state.access import States

Formula = Callable[[tuple[Tensor, ...], Tensor], tuple[tuple[Tensor, ...], Tensor]]


class Fold:
    """Runs `state, y = f(state, row)` token by token in plain torch.

    It makes a new family of five lines, and it is what the kernels are tested against.

    Args:
        f: takes states, (S, *shape) each, and rows (S, *row_shape); returns the next states and outputs (S, ...). When
            segments differ in length, later calls have fewer sequences.

    Cost: one call of `f` for each row of the longest segment.
    """

    def __init__(self, f: Formula) -> None:
        self._f = f

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        counts, cu_rows = np.diff(states.cu_rows), states.device_cu_rows
        # Longest first, so that the segments that have rows left are always the first ones.
        order = None if (counts == counts[0]).all() else torch.argsort(cu_rows.diff(), descending=True, stable=True)
        current, first = states.start(), cu_rows[:-1]
        if order is not None:
            current, first = tuple(tensor[order] for tensor in current), first[order]
        outputs: Tensor | None = None
        for t in range(int(counts.max())):
            n = int((counts > t).sum())
            at = first[:n] + t
            advanced, y = self._f(tuple(tensor[:n] for tensor in current), rows[at])
            if len(advanced) != len(current) or y.shape[:1] != (n,):
                raise StepError(
                    f"the formula of {states.spec.family!r} gives {len(advanced)} states and outputs of shape "
                    f"{tuple(y.shape)}; give {len(current)} states, and outputs whose first axis is {n} sequences"
                )
            advanced = tuple(new.to(old.dtype) for new, old in zip(advanced, current, strict=True))
            current = (
                advanced
                if n == len(counts)
                else tuple(torch.cat([a, b[n:]]) for a, b in zip(advanced, current, strict=True))
            )
            outputs = y.new_empty(len(rows), *y.shape[1:]) if outputs is None else outputs
            outputs[at] = y
        assert outputs is not None, "a segment has at least one row"
        if order is not None:
            back = torch.argsort(order)
            current = tuple(tensor[back] for tensor in current)
        return outputs, states.end(*current)
