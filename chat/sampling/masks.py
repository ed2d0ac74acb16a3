"""Computes which tokens grammars allow next, for all rows of a step at once, in a thread while the model runs.

A grammar's mask depends only on the tokens chosen so far, which are known before the model runs. llguidance does not
hold the interpreter's lock, so it computes the masks beside the model. A step only waits for masks that are not done by
then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.chat.sampling.grammar import Matcher, fill_masks

_LEAST_PARALLEL = 1 << 20
"""Masks are computed in parallel from this many tokens times rows on. Waking threads takes longer than smaller masks.
"""


class MasksAhead:
    """Computes the masks of one step at a time, in a thread of its own, while the model runs.

    The first grammar starts this thread and those of llguidance.
    """

    @contextmanager
    def of(self, matchers: Sequence[Matcher]) -> Iterator[Callable[[], None]]:
        """Begin to compute the masks of these matchers. Yields a function that waits for them, and raises their error.

        Nobody may touch the matchers until that function has returned, or the block has ended.
        """
        if not matchers:
            yield _nothing
            return
        threads = self._threads_for(len(matchers) * matchers[0].n_words * 32)
        future: Future[None] = self._thread.submit(fill_masks, matchers, threads)
        try:
            yield future.result
        finally:
            wait([future])

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "masks")

    def _threads_for(self, n_tokens: int) -> Any:
        return self._one if n_tokens < _LEAST_PARALLEL else self._many

    @cached_property
    def _one(self) -> Any:
        return import_module("llguidance").LLExecutor(1)

    @cached_property
    def _many(self) -> Any:
        """Return the threads of llguidance that compute large masks."""
        return import_module("llguidance").LLExecutor()


def _nothing() -> None: ...


def mask_rows_(scores_SV: Tensor, matchers: Sequence[tuple[int, Matcher]]) -> None:
    """Set to -inf, in place, the scores of tokens that a row's grammar does not allow.

    Masks that are still missing are computed first.
    """
    if missing := [matcher for _, matcher in matchers if matcher.mask is None]:
        fill_masks(missing)
    bits, n_vocab = np.stack([matcher.mask for _, matcher in matchers]), scores_SV.shape[1]  # type: ignore[misc]
    is_out = np.unpackbits(~bits.view(np.uint8), axis=1, count=n_vocab, bitorder="little").view(np.bool_)
    out_SV = torch.from_numpy(is_out).to(scores_SV.device)
    if len(matchers) == len(scores_SV):
        scores_SV.masked_fill_(out_SV, -torch.inf)
        return
    rows = [row for row, _ in matchers]
    scores_SV[rows] = scores_SV[rows].masked_fill(out_SV, -torch.inf)
