"""Real models continue texts sensibly, and what they remember is rolled back, saved and loaded exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.session.session import ChatSession
from hybridmem.memory import HybridMemory, Sequence
from hybridmem.models import load_model
from tests.real.conftest import Real
from tests.real.download import GEMMA_3, SMOLLM_2
from tests.tolerances import TOLERANCE

BUDGET = "512MiB"
STORY = "Once upon a time, in a small village, there lived a girl whose name was "
CONTINUATIONS = {
    SMOLLM_2: (
        ("1, 2, 3, 4, 5, 6,", " 7, 8, 9, 10"),
        ("January, February, March,", " and April, which is a classic example of a leap year."),
        ("The days of the week are Monday, Tuesday,", " Wednesday, Thursday, Friday, Saturday, Sunday"),
    ),
    GEMMA_3: (
        ("1, 2, 3, 4, 5, 6,", " 7, 8, 9, 10"),
        ("Monday, Tuesday, Wednesday,", " Thursday, Friday, Saturday, Sunday,"),
        ("one two three four five", " six seven eight nine ten"),
    ),
}
"""The greedy text of llama.cpp's server (b11434), as far as no other token is nearly as likely."""


def feed(real: Real, memory: HybridMemory, sequence: Sequence, ids: list[int]) -> Tensor:
    """Return the logits after the last of these tokens."""
    with memory.step({sequence: ids}) as step:
        logits: Tensor = real.model(step)
    return logits[-1].float()


def continue_greedily(real: Real, memory: HybridMemory, sequence: Sequence, ids: list[int], n: int) -> list[int]:
    found: list[int] = []
    for _ in range(n):
        ids = [int(feed(real, memory, sequence, ids).argmax())]
        found += ids
    return found


def test_texts_are_continued_as_llama_cpp_continues_them(real: Real) -> None:
    """This also holds if several requests share a step."""
    memory = HybridMemory(real.model.memory_spec, BUDGET)
    engine = Engine(real.model, HybridMemory(real.model.memory_spec, BUDGET), tokenizer=real.tokenizer)
    generations = []
    for prompt, expected in CONTINUATIONS[real.path.name]:
        ids = real.encode(prompt)
        wanted = real.tokenizer.encode(expected, add_special_tokens=False)
        assert continue_greedily(real, memory, memory.open(), ids, len(wanted)) == wanted, prompt
        generations.append((engine.submit(ids, max_tokens=len(wanted)), wanted))
    engine.run()
    assert all(list(generation.token_ids) == wanted for generation, wanted in generations)


def test_a_rollback_leaves_no_trace(real: Real) -> None:
    """This also holds beyond the window, if there is a checkpoint."""
    memory = HybridMemory(real.model.memory_spec, BUDGET)
    sequence, ids = memory.open(), real.encode(STORY)
    feed(real, memory, sequence, ids[:-1])
    checkpoint = memory.checkpoint(sequence)
    expected = feed(real, memory, sequence, ids[-1:])
    for n_fed in (8, 100):
        feed(real, memory, sequence, ids[::-1][:8] * (n_fed // 8))
        memory.rollback(sequence, to=checkpoint if n_fed > memory.rollback_window else len(ids) - 1)
        found = feed(real, memory, sequence, ids[-1:])
        spread = float(expected.max() - expected.min())
        assert (found - expected).abs().max() <= TOLERANCE[torch.bfloat16].replay * spread
        assert found.argmax() == expected.argmax()
    fork = memory.fork(sequence)
    assert continue_greedily(real, memory, fork, ids[:1], 8) == continue_greedily(real, memory, sequence, ids[:1], 8)


def test_a_saved_sequence_goes_on_bit_for_bit(real: Real, tmp_path: Path) -> None:
    memory = HybridMemory(real.model.memory_spec, BUDGET)
    sequence, ids = memory.open(), real.encode(STORY)
    feed(real, memory, sequence, ids)
    memory.save(sequence, tmp_path / "sequence")
    expected = feed(real, memory, sequence, ids[:1])
    other = Real(real.path, load_model(real.path, progress=False), real.tokenizer)
    memory = HybridMemory(other.model.memory_spec, BUDGET)
    assert torch.equal(feed(other, memory, memory.load(tmp_path / "sequence"), ids[:1]), expected)


def test_a_chat_answers_and_goes_on_after_a_restart(real: Real, tmp_path: Path) -> None:
    if real.tokenizer.chat_template is None:
        pytest.skip(f"{real.path.name} has no chat template")

    def engine() -> Engine:
        return Engine(real.model, HybridMemory(real.model.memory_spec, BUDGET), tokenizer=real.tokenizer)

    with ChatSession(engine(), max_tokens=24) as session:
        assert "Paris" in session.say("What is the capital of France? Answer in one sentence.").text
        assert "Rome" in session.say("And what is the capital of Italy?").text
        session.save(tmp_path / "session")
        after = session.say("Which of the two is further north?").text
        session.undo()
        assert session.say("Which of the two is further north?").text == after
    with ChatSession.resume(engine(), tmp_path / "session") as session:
        assert session.say("Which of the two is further north?").text == after
