"""The benchmark of drafts counts bytes between steps and inside of each step, with drafts and without."""

from __future__ import annotations

from typing import cast

import pytest

from benchmarks.speculative import WINDOW, Decoding, GivenDrafts, Watched
from hybridmem.models import LanguageModel, load_model


@pytest.fixture(scope="module")
def decoding() -> Decoding:
    return Decoding(load_model("embedded"), list(range(3, 40)), WINDOW)


@pytest.mark.parametrize("n_draft", [0, 4])
def test_bytes_are_looked_at_inside_of_every_step(decoding: Decoding, n_draft: int) -> None:
    drafter = GivenDrafts(decoding.text, n_draft, 1.0) if n_draft else None
    before, calls = decoding.memory.usage(), list[None]()
    watched = cast(LanguageModel, Watched(decoding.model, lambda: calls.append(None)))
    _, batch = decoding.decode(drafter, watched, adapts=False)
    assert len(calls) == batch.stats.n_steps > 1
    between, inside = decoding.most_bytes(drafter)
    assert between["states"] > 0 and inside["tails"] >= between["tails"] > 0
    assert decoding.memory.usage() == before
