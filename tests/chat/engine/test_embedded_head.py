"""The embedded model's draft head is often right in dialogues, and changes no reply."""

from __future__ import annotations

import random
from typing import Any

from hybridmem import EMBEDDED, load_model
from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Sampling
from hybridmem.chat.prompts import encode_chat, load_tokenizer
from hybridmem.chat.simulation.dialogues import make_dialogue, messages
from hybridmem.memory import HybridMemory
from tests.extent import pick

LEAST_SHARE = 0.6
"""Of the drafted tokens of so many dialogues; of a hundred, the share is in `draft_head/training.json`."""


def test_the_embedded_models_head_is_often_right_and_changes_no_reply() -> None:
    """Every third reply is drawn. The facts in these dialogues are none of those that training showed."""
    model: Any = load_model("embedded", draft_head=True)
    tokenizer, rng = load_tokenizer(EMBEDDED), random.Random(5)
    chats = [[*messages(make_dialogue(rng, rng.choice((2, 5, 9)), held_out=True))[:-1]] for _ in range(pick(24, 120))]
    told = []
    for drafts in (False, True):
        own = HybridMemory(model.draft_head.memory_spec, "16MiB", rollback_window=16)
        drafter = BlankDrafter(model, model.draft_head, own) if drafts else None
        memory = HybridMemory(model.memory_spec, "64MiB", rollback_window=16)
        engine = Engine(model, memory, tokenizer, speculation=Speculation(adapts=False, drafter=drafter))
        generations = [
            engine.submit(encode_chat(tokenizer, chat), sampling=Sampling(0.7 * (i % 3 == 0), seed=i), max_tokens=24)
            for i, chat in enumerate(chats)
        ]
        engine.run()
        told.append([generation.token_ids for generation in generations])
        share = engine.stats.n_accepted / max(1, engine.stats.n_drafted)
        assert (share > 0) == drafts and share >= LEAST_SHARE * drafts
        assert not drafts or engine.stats.n_drafted > 3 * len(chats)
    assert told[0] == told[1]
