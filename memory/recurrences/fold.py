"""Makes a recurrence from its formula for one token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.errors import StepError
from hybridmem.memory.state.access import States

Formula = Callable[[tuple[Tensor, ...], Tensor], tuple[tuple[Tensor, ...], Tensor]]


class Fold:
    """Runs `state, y = f(state, row)` token by token in plain torch.

    A new family takes about five lines with it, and the kernels are tested against it.

    Args:
        f: takes states, (S, *shape) each, and rows (S, *row_shape); returns the next states and outputs (S, ...). If
            segments differ in length, later calls get fewer sequences.

    Cost: one call of `f` for each row of the longest segment, and one copy of all rows and outputs.
    """

    def __init__(self, f: Formula) -> None:
        self._f = f

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        counts = np.diff(states.cu_rows)
        if (counts == counts[0]).all():
            by_token = rows.reshape(len(counts), -1, *rows.shape[1:]).transpose(0, 1).contiguous()
            ys, ended = self._run(states.spec.family, states.start(), by_token.unbind())
            return torch.stack(ys, 1).flatten(0, 1), states.end(*ended)

        # The longest segments come first, so that those with rows left are always the first ones.
        order = np.argsort(-counts, kind="stable")
        n_left = [int(np.count_nonzero(counts > t)) for t in range(int(counts.max()))]
        starts = states.cu_rows[:-1][order]
        place = np.concatenate([starts[:n] + t for t, n in enumerate(n_left)])
        at, first = (torch.from_numpy(indices).to(rows.device) for indices in (place, order))
        ys, ended = self._run(
            states.spec.family, tuple(tensor[first] for tensor in states.start()), torch.split(rows[at], n_left)
        )
        joined, back = torch.cat(ys), first.argsort()
        outputs = torch.empty_like(joined)
        outputs[at] = joined
        return outputs, states.end(*(tensor[back] for tensor in ended))

    def _run(
        self, family: str, current: tuple[Tensor, ...], rows: Iterable[Tensor]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """Run the formula on one token of each sequence at a time. Return the outputs, and the last states.

        Args:
            current: start states, with those of the longest sequences first.
            rows: for each token, the rows of the sequences that are long enough. Their number never grows.
        """
        ys, ended = list[Tensor](), list[tuple[Tensor, ...]]()
        for row in rows:
            n = len(row)
            if n < len(current[0]):
                ended.append(tuple(tensor[n:] for tensor in current))
                current = tuple(tensor[:n] for tensor in current)
            advanced, y = self._f(current, row)
            if len(advanced) != len(current) or y.shape[:1] != (n,):
                raise StepError(
                    f"the formula of {family!r} gives {len(advanced)} states and outputs of shape {tuple(y.shape)}; "
                    f"give {len(current)} states, and outputs whose first axis is {n} sequences"
                )
            current = tuple(new.to(old.dtype) for new, old in zip(advanced, current, strict=True))
            ys.append(y)
        return ys, tuple(torch.cat(parts) for parts in zip(current, *ended[::-1], strict=True)) if ended else current
