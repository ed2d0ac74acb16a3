"""Computes which tokens may come next by grammars: for all rows of a step at once, in a thread while the model runs.

What a grammar allows next is known once the last token was chosen, before the model runs: so llguidance, which does
without the interpreter's lock, computes it beside the model, and a step only waits for what is not done by then.
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
"""Tokens times rows: to wake threads takes longer than smaller masks."""


class MasksAhead:
    """Computes which tokens grammars allow next in a thread of its own, while the model runs; one step at a time.

    The thread and those of llguidance are made at the first grammar.
    """

    @contextmanager
    def of(self, matchers: Sequence[Matcher]) -> Iterator[Callable[[], None]]:
        """Begin with the masks of these matchers; gives a function that waits for them, and raises their error.

        The matchers may be touched when that has returned, or behind the block.
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
        """Return as many threads of llguidance as it takes for large masks."""
        return import_module("llguidance").LLExecutor()


def _nothing() -> None: ...


def mask_rows_(scores_SV: Tensor, matchers: Sequence[tuple[int, Matcher]]) -> None:
    """Set the scores of tokens that a row's grammar does not allow to -inf, in place.

    Masks that were not computed ahead are computed first.
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
