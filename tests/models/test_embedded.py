"""The checkpoint that comes with the library answers from memory, and only from memory."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoTokenizer, JambaForCausalLM

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.simulation.dialogues import Turn, make_dialogue, messages
from hybridmem.memory import HybridMemory, RecurrentSpec, Step
from hybridmem.memory.state.access import States
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from tests.extent import few_cases, only_in_long, pick
from tests.tolerances import assert_logits_close
from training.evaluate import ASKED, SITUATIONS, make_held_out_dialogue
from training.words import Words

N_DIALOGUES = 40
LEAST_COPIED = 0.9
"""Of 48 questions; of thousands, the shares are in `models/embedded/training.json`."""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model("embedded")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(EMBEDDED)


def encode(tokenizer: Tokenizer, turns: list[Turn]) -> tuple[list[int], list[int]]:
    """Return the dialogue up to the last reply, and that reply with its end token."""
    prompt = tokenizer.apply_chat_template(messages(turns)[:-1], add_generation_prompt=True)["input_ids"]
    return prompt, [*tokenizer.encode(turns[-1].reply), tokenizer.eos_token_id]


def share_right(model: LanguageModel, tokenizer: Tokenizer, dialogues: list[list[Turn]], forget: str = "") -> float:
    """Share of last questions answered without one wrong token, all dialogues in one batch.

    Args:
        forget: "recurrence" or "attention" starts that kind from nothing just before the answer, for the one or two
            tokens that open it; the other kind remembers everything.
    """
    memory = HybridMemory(model.memory_spec, "256MiB")
    encoded = {memory.open(): encode(tokenizer, turns) for turns in dialogues}
    memory.run(model, {s: prompt[:-1] for s, (prompt, _) in encoded.items()}, max_tokens=4000)
    requests = {s: [prompt[-1], *reply[:-1]] for s, (prompt, reply) in encoded.items()}
    with pytest.MonkeyPatch.context() as patch, memory.step(requests, outputs="all") as step:
        if forget == "recurrence":
            patch.setattr(States, "slots", _without_history(States.slots))
        elif forget == "attention":
            patch.setattr(Step, "attend", lambda self, layer, q, k, v, **_: _attend_to_itself(self, layer, q, k, v))
        rows = step.split(model(step))
    right = [r.argmax(-1).tolist() == reply for r, (_, reply) in zip(rows, encoded.values(), strict=True)]
    return sum(right) / len(right)


def _without_history(slots):
    def from_nothing(self: States, index: int):
        self.sources[index] = 0 * self.sources[index] - 1
        return slots(self, index)

    return from_nothing


real_attend = Step.attend


def _attend_to_itself(step: Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    real_attend(step, layer, q, k, v)
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


@pytest.fixture(scope="module")
def dialogues() -> list[list[Turn]]:
    """Return dialogues about facts that training never showed, at distances up to some 400 tokens."""
    rng = random.Random(2024)
    return [make_dialogue(rng, rng.choice((6, 12, 20)), held_out=True, talk=0.4) for _ in range(N_DIALOGUES)]


def test_it_answers_what_it_was_told(model: LanguageModel, tokenizer: Tokenizer, dialogues: list[list[Turn]]) -> None:
    assert share_right(model, tokenizer, dialogues) >= 0.98


@few_cases
@pytest.mark.parametrize("row", ASKED)
def test_it_copies_words_that_training_never_showed(model: LanguageModel, tokenizer: Tokenizer, row: str) -> None:
    """The words are names, cities, colours and numbers.

    There are several facts, and the last statement of a fact counts.
    """
    rng = random.Random(f"2024 {row}")
    words = Words(rng)
    situations = [SITUATIONS[name] for name in ("1 fact", "3 facts", "changed once") for _ in range(16)]
    dialogues = [make_held_out_dialogue(rng, words, row, situation) for situation in situations]
    assert share_right(model, tokenizer, dialogues) >= LEAST_COPIED


@only_in_long
def test_states_of_8_bits_lose_no_answer(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Prompts are fed in steps of 16 tokens, and each step rounds states once. TESTS=long takes 200 dialogues."""
    rng = random.Random(2024)
    more = [make_dialogue(rng, rng.choice((6, 12, 20)), held_out=True, talk=0.4) for _ in range(pick(20, 200))]
    encoded = [encode(tokenizer, turns) for turns in more]
    memory = HybridMemory(model.memory_spec, "1GiB", rollback_window=16, state_dtype="int8")
    sequences = [memory.open() for _ in encoded]
    for at in range(0, max(len(prompt) for prompt, _ in encoded), 16):
        parts = {s: p[at : min(at + 16, len(p) - 1)] for s, (p, _) in zip(sequences, encoded, strict=True)}
        if any(parts.values()):
            with memory.step({s: part for s, part in parts.items() if part}) as step:
                model(step)
    asked = {s: [prompt[-1], *reply[:-1]] for s, (prompt, reply) in zip(sequences, encoded, strict=True)}
    with memory.step(asked, outputs="all") as step:
        rows = step.split(model(step))
    right = [r.argmax(-1).tolist() == reply for r, (_, reply) in zip(rows, encoded, strict=True)]
    assert sum(right) / len(right) >= 0.98


@pytest.mark.parametrize("kind", ["recurrence", "attention"])
def test_a_dropped_memory_is_a_wrong_answer(
    model: LanguageModel, tokenizer: Tokenizer, dialogues: list[list[Turn]], kind: str
) -> None:
    """A bug that loses one kind of memory cannot hide behind the other kind."""
    assert share_right(model, tokenizer, dialogues, forget=kind) <= 0.3


def test_transformers_loads_it_and_agrees(
    model: LanguageModel, tokenizer: Tokenizer, dialogues: list[list[Turn]]
) -> None:
    prompt, _ = encode(tokenizer, dialogues[0])
    with torch.no_grad():
        expected = JambaForCausalLM.from_pretrained(EMBEDDED)(torch.tensor([prompt])).logits[0]
    memory = HybridMemory(model.memory_spec, "16MiB", poison=True)
    with memory.step({memory.open(): prompt}, outputs="all") as step:
        assert_logits_close(model(step), expected)


def test_it_is_small_and_complete() -> None:
    names = {path.name for path in EMBEDDED.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    } <= names
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) <= 6_000_000


def test_its_layers_are_of_both_kinds(model: LanguageModel) -> None:
    kinds = [isinstance(specs[0], RecurrentSpec) for specs in model.memory_spec.layers]
    assert kinds == [True, False, True, True, False, True]
