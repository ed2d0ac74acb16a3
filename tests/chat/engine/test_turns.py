"""The prefix cache keeps checkpoints where turns of users begin. Sessions with other words continue from there."""

from __future__ import annotations

from typing import Any

import pytest

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.turns import apart, begun_turns
from hybridmem.chat.prompts import encode_chat, load_tokenizer
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import EMBEDDED


def prompt_of(tokenizer: Any, words: str) -> list[int]:
    """Return an agent's prompt: a long context before and after the words of its user."""
    context = [
        {"role": "user", "content": "The tools of this agent are many. " * 20},
        {"role": "assistant", "content": "Okay, noted."},
    ]
    behind = {"role": "user", "content": "What in this talk is worth to be remembered? " * 12}
    return encode_chat(tokenizer, [*context, {"role": "user", "content": words}, context[1], behind])


def test_a_session_with_other_words_continues_where_the_words_of_its_user_begin(embedded: Any) -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    memory = HybridMemory(embedded.memory_spec, "16MiB", rollback_window=16)
    engine = Engine(embedded, memory, tokenizer, prefixes=PrefixCache(memory, grid_tokens=0))
    first, second = (
        prompt_of(tokenizer, "My cat is called Zoe."),
        prompt_of(tokenizer, "I like tea, and I ride a horse."),
    )
    n_common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    begun = max(i for i in range(n_common) if first[i] == tokenizer.convert_tokens_to_ids("<|user|>"))
    for prompt in (first, second):
        generation = engine.submit(prompt, max_tokens=1)
        engine.run()
    assert generation.lookup is not None and generation.lookup.reused == begun >= n_common - 3


@pytest.mark.parametrize(
    ("at", "n_before", "n_behind", "found"),
    [
        ([100, 200, 300], 0, 8, [100, 200, 300]),
        ([100, 130, 163, 164], 0, 8, [100, 164]),
        ([100, 200, 300], 40, 8, [200, 300]),
        ([100, 200, 395], 0, 8, [100, 200]),
        ([398], 0, 0, [398]),
        ([399], 0, 0, []),
        ([65 * i for i in range(1, 6)], 0, 8, [130, 195, 260, 325]),
    ],
)
def test_turns_have_checkpoints_where_they_save_more_than_a_step(
    at: list[int], n_before: int, n_behind: int, found: list[int]
) -> None:
    tokens = [7] * 400
    for position in at:
        tokens[position : position + 2] = [1, 2]
    tokens = tokens[:400]
    assert begun_turns(tokens, (1, 2), n_before, n_behind) == found
    assert begun_turns(tokens, (), n_before, n_behind) == []


def test_a_turn_near_another_cut_has_none_of_its_own() -> None:
    assert apart([100, 110], [50, 163, 174, 220]) == [50, 100, 110, 174]
