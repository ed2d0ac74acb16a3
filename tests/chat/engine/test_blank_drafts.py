"""A head that fills blanks drafts in the engine. Replies are the same with its drafts, whatever the head remembers."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.draft_models import Guess
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models.draft_heads import HiddenRows
from tests.chat.engine.test_head_drafts import follow, noted, replies
from tests.chat.engines import make_memory, run_checked
from tests.extent import only_in_long, pick
from tests.models.draft_heads.dflash_checkpoints import BLOCK, load_pair


class Pair(NamedTuple):
    model: Any
    head: Any


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(*load_pair(tmp_path_factory.mktemp("with-blanks")))


def make_drafter(pair: Pair, budget: str = "4MiB", *, caches: bool = False, **options: Any) -> BlankDrafter:
    memory = make_memory(pair.head, budget, rollback_window=2 * BLOCK)
    options = {"least_chance": 0.0} | options
    return BlankDrafter(pair.model, pair.head, memory, prefixes=PrefixCache(memory) if caches else None, **options)


@pytest.mark.parametrize(("seed", "budget"), pick([(0, "64KiB")], [*product(range(6), ("4MiB", "64KiB"))]))
def test_replies_are_the_same_with_drafts_of_blanks(pair: Pair, seed: int, budget: str) -> None:
    """Choices fork, prompts have common beginnings, and replies are preempted.

    Sometimes the head's own memory has too little room.
    """
    caches = seed % 2 == 1
    drafter = make_drafter(pair, "4MiB" if seed % 2 else "16KiB", caches=caches, step_tokens=20)
    without, plain = replies(pair.model, None, seed, budget, caches=caches)
    drafted, engine = replies(pair.model, drafter, seed, budget, caches=caches)
    for a, b in zip(without, drafted, strict=True):
        assert (a.token_ids, a.finish_reason, a.error) == (b.token_ids, b.finish_reason, None)
    assert engine.stats.n_accepted > 0 and engine.stats.n_drafted > 100
    assert (plain.stats.n_preempted > 0) == (budget == "64KiB")
    kept = drafter.prefixes.stats().n_checkpoints if drafter.prefixes is not None else 0
    assert len(drafter.memory.sequences) == kept, "its sequences are closed with the jobs"


@only_in_long
def test_drafts_are_what_the_head_says_of_the_whole_text(pair: Pair) -> None:
    """The head remembers the right rows after blanks, chunks of a prompt, and pairs that were fed ahead."""
    drafter = make_drafter(pair)
    engine, seen = follow(pair.model, drafter, step_tokens=24, max_running=4), noted(drafter)
    prompt = torch.randint(0, 40, (100,), generator=torch.Generator().manual_seed(3)).tolist()
    generation = engine.submit(prompt, max_tokens=90)
    run_checked(engine)
    text, head = [*prompt, *generation.token_ids], pair.head
    assert len(seen) > 60 and {len(draft) for draft in seen.values()} >= {BLOCK - 1}
    for n_text, draft in [*seen.items()][:: len(seen) // 4]:
        memory, own = make_memory(pair.model), make_memory(head, rollback_window=2 * BLOCK)
        with memory.step({memory.open(): text[: n_text - 1]}) as step:
            rows_TM = head.read(HiddenRows(pair.model, head.after)(step)[1])
        sequence, tokens = own.open(), text[1:n_text]
        with own.step({sequence: [*tokens, *head.blanks_after(tokens[-1])]}) as step:
            logits_SNV = head(step, rows_TM, [len(tokens)])
            step.accept({sequence: len(tokens)})
        assert draft == logits_SNV[0].argmax(-1).tolist()[: len(draft)]


def test_a_draft_ends_before_the_first_token_that_the_head_is_unsure_of(pair: Pair) -> None:
    drafter = make_drafter(pair, least_chance=0.5)
    chances_NV = torch.tensor([[0.1, 0.9, 0], [0, 0.4, 0.6], [0.4, 0.35, 0.25], [0, 0, 1]])
    guess = Guess(4, None)
    drafter._fill(guess, (chances_NV + 1e-9).log(), ())
    assert guess.token_ids == [1, 2]


def test_a_memory_that_cannot_take_blanks_back_is_refused(pair: Pair) -> None:
    with pytest.raises(SpecError, match="rollback_window=8, and 10 tokens of blanks"):
        BlankDrafter(pair.model, pair.head, HybridMemory(pair.head.memory_spec, "1MiB", rollback_window=8))
