"""The tests check the trace of `benchmarks agent-trace`, and what it counts as computed again."""

from __future__ import annotations

from collections import Counter

from benchmarks.agent_trace import Counts, make_trace
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.models import EMBEDDED


def test_the_trace_has_the_turns_of_an_agent_and_is_the_same_every_time() -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    trace = make_trace(tokenizer, 0.01)
    assert Counter(turn.kind for turn in trace if turn.of == 0) == {"say": 43, "retry": 3, "edit": 3}
    assert [turn.kind for turn in trace if turn.of == 2] == ["fork", *["say"] * 7]
    assert trace == make_trace(tokenizer, 0.01) and len(trace[0].text) > 2 * len(trace[1].text)


def test_tokens_that_were_seen_and_not_cached_are_counted_as_computed_again() -> None:
    counts = Counts()
    counts.add(n_prompt=100, n_cached=0, n_seen=0, seconds=1)  # All tokens are new.
    counts.add(n_prompt=100, n_cached=99, n_seen=100, seconds=1)  # The last token is fed for its output.
    counts.add(n_prompt=150, n_cached=60, n_seen=100, seconds=1)
    assert (counts.n_prompt, counts.n_cached, counts.n_seen, counts.n_again) == (350, 159, 199, 40)
