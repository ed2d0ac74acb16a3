"""The embedded model learns to answer a question about a fact that was told 3,000 tokens before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.simulation.dialogues import NOTED, Turn, messages, small_talk
from hybridmem.memory import HybridMemory
from hybridmem.memory.training import Tape
from hybridmem.models import EMBEDDED, LanguageModel, Trainable, load_model
from tests.extent import only_in_long
from tests.subjects import IS_FULL

N_TOKENS, N_STEPS = 3000, 8
TOKENIZER = load_tokenizer(EMBEDDED)


def dialogue(value: str, seed: int) -> tuple[list[int], list[int]]:
    """Return a prompt that says where the gold is, then talks of other things and asks, and the right reply."""
    rng = random.Random(seed)
    turns = [Turn(f"The captain hides his gold in {value}.", NOTED, "gold", value)]
    question = Turn("Where is the gold?", f"The gold is in {value}.", "gold", value, is_question=True)

    def prompt() -> list[int]:
        ids: list[int] = TOKENIZER.apply_chat_template(messages([*turns, question])[:-1], add_generation_prompt=True)[
            "input_ids"
        ]
        return ids

    while len(ids := prompt()) < N_TOKENS:
        turns += [small_talk(rng) for _ in range(1 + (N_TOKENS - len(ids)) // 40)]
    return ids, [*TOKENIZER.encode(question.reply), TOKENIZER.eos_token_id]


def answer(model: LanguageModel, prompt: list[int], n_tokens: int) -> str:
    memory = HybridMemory(model.memory_spec, "64MiB")
    sequence, said = memory.open(), list[int]()
    last = memory.run(model, {sequence: prompt}, max_tokens=1024)
    while len(said) < n_tokens:
        said.append(int(last[-1].argmax()))
        with memory.step({sequence: said[-1:]}) as step:
            last = model(step)
    return str(TOKENIZER.decode(said))


@only_in_long
@pytest.mark.parametrize("seed", range(3 if IS_FULL else 1))
def test_facts_of_3000_tokens_ago_are_answered(seed: int, tmp_path: Path) -> None:
    facts = [dialogue("Mizaro", seed), dialogue("Delfa", seed + 10)]
    other, other_reply = dialogue("Quenna", seed + 200)
    before = load_model(EMBEDDED)
    for prompt, reply in facts:
        assert answer(before, prompt, len(reply)) != TOKENIZER.decode(reply)
    trainable = Trainable.load(EMBEDDED)
    optimizer = torch.optim.AdamW(trainable.parameters(), lr=3e-3, weight_decay=0)
    losses = []
    for i in range(N_STEPS):
        prompt, reply = facts[i % 2]
        tape = Tape(trainable.model(), chunk_tokens=512)
        text = tape.open()
        tape.feed({text: prompt})
        loss = -tape.run({text: reply})[text].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 < 2 < losses[0]
    trainable.save(tmp_path)
    tuned = load_model(tmp_path)
    for prompt, reply in facts:
        assert answer(tuned, prompt, len(reply)) == TOKENIZER.decode(reply)
    # The model has learnt to look back, not the words: it finds another word in another conversation as well.
    assert answer(tuned, other, len(other_reply)) == TOKENIZER.decode(other_reply)
