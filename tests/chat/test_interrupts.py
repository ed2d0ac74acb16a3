"""A Ctrl-C or a timeout comes anywhere in a batch, a search, an engine or a chat.

No token is lost or fed twice, and no sequence is left behind.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from hybridmem.chat.decoding.beams import BeamOptions, beam_searches, n_best
from hybridmem.chat.decoding.drafts import DraftModel, PromptLookup
from hybridmem.chat.decoding.speculative import SpeculativeBatch
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.session.session import ChatSession
from hybridmem.memory import (
    AttentionSpec,
    HybridMemory,
    MemorySpec,
    RecurrentSpec,
    Sequence,
    SequenceError,
    StateTensor,
    Step,
)
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import EMBEDDED
from tests.chat.engines import scheduler_of
from tests.extent import few_cases, pick
from tests.interrupts import HANDLERS, Outcome, try_places

Attempt = tuple[Callable[[], Any], Callable[[Outcome], None]]
STOP = 2


@pytest.fixture(params=list(HANDLERS)[: pick(1, 2)], ids=lambda number: signal.Signals(number).name)
def number(request: pytest.FixtureRequest) -> int:
    """Return the signal that comes: that of Ctrl-C, or of the end of a time limit."""
    return int(request.param)


class Counting:
    """Is a model without layers, for memories without tensors.

    What it says follows from each token and its position.
    """

    def __init__(self, vocab_size: int = 19, ends: tuple[int, ...] = ()) -> None:
        recurrent = RecurrentSpec("average", (5,), (StateTensor("mean", (5,)),))
        layers = ((AttentionSpec(2, 1, 4),), (recurrent,))
        self.memory_spec = MemorySpec(layers, vocab_size, model="counting", device=torch.device("meta"))
        self._ends = ends
        self._vocab_size = vocab_size

    def __call__(self, step: Step) -> Tensor:
        chosen = 3 + (step.token_ids * 5 + step.positions % 3) % 7
        chosen[(step.positions % 11) == 10] = STOP
        logits = torch.arange(self._vocab_size).flip(0) * 0.01 + torch.nn.functional.one_hot(chosen, self._vocab_size)
        return step.select(logits)


def make_memory(model: Counting) -> HybridMemory:
    return HybridMemory(model.memory_spec, "1MiB", rollback_window=4, page_tokens=4)


def assert_nothing_left(memory: HybridMemory) -> None:
    memory.check()
    usage = memory.usage()
    assert not usage.by_sequence and usage.used_bytes == 0


# The tests below interrupt speculative decoding.

PROMPTS = [[4, 5, 6, 7, 4, 5, 6], [9]]


@pytest.mark.parametrize(
    ("n_steps", "drafter", "step_tokens"), [(0, "lookup", 3), (0, "lookup", 512), (2, "lookup", 512), (2, "model", 512)]
)
def test_a_speculative_step_can_be_tried_again(n_steps: int, drafter: str, step_tokens: int, number: int) -> None:
    """Its tokens are returned once, and fed once.

    This holds whether the interrupted step had committed or not.
    """
    model = Counting()

    def attempt() -> Attempt:
        own = make_memory(model)
        guesses = PromptLookup(1, 4) if drafter == "lookup" else DraftModel(model, own, 3)
        batch = SpeculativeBatch(
            model, make_memory(model), (STOP,), guesses, step_tokens=step_tokens, remembers_end=True
        )
        texts: dict[Sequence, list[int]] = {batch.memory.open(): [] for _ in PROMPTS}
        for sequence, prompt in zip(texts, PROMPTS, strict=True):
            batch.add(sequence, prompt, 7)

        def tell(new: list[Any]) -> None:
            for token in new:
                texts[token.sequence].append(token.token_id)

        for _ in range(n_steps):
            tell(batch.step())

        def verify(outcome: Outcome) -> None:
            tell(outcome.result or [])
            batch.memory.check()
            while not batch.is_idle:
                tell(batch.step())
            # These are the returned texts, and the tokens that were fed.
            found = [*texts.values()], [s.tokens.tolist() for s in texts]
            expected[:] = expected or found
            assert [*found] == expected
            for sequence in texts:
                batch.memory.close(sequence)
            assert_nothing_left(batch.memory)
            if isinstance(guesses, DraftModel):
                guesses.draft({})
                assert_nothing_left(own)
            known, outcome.result = WeakSet(texts), None
            del sequence
            texts.clear()
            assert not len(known), "a finished sequence is still in the books"

        return batch.step, verify

    expected: list[list[list[int]]] = []
    try_places(attempt, 8, edges=("chat/decoding/speculative.py",), number=number)


def test_logits_that_say_nothing_leave_the_step_as_it_was() -> None:
    model = Counting()
    batch = SpeculativeBatch(lambda step: model(step) * float("nan"), make_memory(model), (), PromptLookup(1, 4))  # type: ignore[arg-type]
    sequence = batch.memory.open()
    batch.add(sequence, [1, 2], 5, sampling=Sampling(temperature=1.0, seed=1))
    for _ in range(2):
        with pytest.raises(Exception, match="finite"):
            batch.step()
        assert sequence.length == 0


# The tests below interrupt beams.


@pytest.mark.parametrize("search", ["beams", "n best"])
def test_an_interrupted_search_leaves_no_sequence(search: str, number: int) -> None:
    model = Counting()

    def attempt() -> Attempt:
        memory = make_memory(model)

        def call() -> Any:
            if search == "beams":
                return beam_searches(model, memory, PROMPTS, BeamOptions(3, 4, stop_ids=(STOP,)))  # type: ignore[arg-type]
            return n_best(model, memory, PROMPTS[0], 3, 4, sampling=Sampling(temperature=1.0, seed=1))  # type: ignore[arg-type]

        return call, lambda outcome: assert_nothing_left(memory)

    try_places(attempt, 8, edges=("chat/decoding/beams.py",), number=number)


# The tests below interrupt the engine.


def make_engine(model: Counting, tokenizer: Tokenizer | None = None) -> Engine:
    memory = make_memory(model)
    options: dict[str, Any] = {"step_tokens": 8, "max_running": 3, "clock": lambda: 0.0}
    return Engine(model, memory, tokenizer, stop_ids=(STOP,), prefixes=PrefixCache(memory, grid_tokens=4), **options)  # type: ignore[arg-type]


def assert_all_given_back(engine: Engine) -> None:
    assert engine.is_idle and not engine.step(), "what has ended is released again"
    assert engine.prefixes is not None
    engine.prefixes.clear()
    assert_nothing_left(engine.memory)


@pytest.mark.parametrize("what", ["first step", "later step", "last step", "submit", "cancel"])
def test_an_interrupted_engine_goes_on(what: str, number: int) -> None:
    model = Counting()
    expected: list[list[int]] = []

    def attempt() -> Attempt:
        engine = make_engine(model)
        generations = [engine.submit(prompt, max_tokens=6) for prompt in PROMPTS]
        for _ in range({"later step": 2, "last step": 5}.get(what, 0)):
            engine.step()
        third: list[Any] = []

        def call() -> Any:
            if what == "submit":
                third.append(engine.submit([3, 4], max_tokens=3))
            elif what == "cancel":
                engine.cancel(generations[0])
            else:
                engine.step()

        def verify(outcome: Outcome) -> None:
            assert len(scheduler_of(engine).jobs) == sum(not g.is_finished for g in (*generations, *third))
            engine.run()
            said = [g.token_ids for g in generations]
            expected.extend([] if expected else said)
            if what != "cancel":
                assert said == expected
            assert {g.finish_reason for g in generations} <= {"stop", "length", "cancelled"}
            assert_all_given_back(engine)

        return call, verify

    try_places(attempt, 12, number=number)


# The tests below interrupt chats.

CALLS: dict[str, Callable[[ChatSession], Any]] = {
    "say": lambda session: session.say("And you?"),
    "edit": lambda session: session.edit(0, "Good bye"),
    "undo": lambda session: session.undo(),
    "branch": lambda session: session.branch(),
    "sleep": lambda session: session.sleep(),
    "close": lambda session: session.close(),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EMBEDDED)


@few_cases
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_chat_goes_on(name: str, tokenizer: Tokenizer, number: int) -> None:
    model = Counting(932)
    done: list[Any] = []

    def attempt() -> Attempt:
        engine = make_engine(model, tokenizer)
        session = ChatSession(engine, max_tokens=4)
        session.say("Hello")
        before = session.messages

        def verify(outcome: Outcome) -> None:
            done[:] = done or [session.messages]
            assert session.messages in (
                [done[0]] if outcome.has_returned else [before] if name in ("say", "edit") else [before, done[0]]
            )
            engine.memory.check()
            handles = engine.memory.sequences
            if name == "branch" and outcome.has_returned:
                outcome.result.say("Who?")
                outcome.result.close()
            if not (name == "close" and repr(session).endswith(": closed>")):
                session.say("Once more")
                session.close()
            engine.run()
            assert_all_given_back(engine)
            for handle in handles:
                # The message must not say "in use by another generation".
                with pytest.raises(SequenceError, match="closed"):
                    engine.submit([1], sequence=handle)

        return lambda: CALLS[name](session), verify

    try_places(attempt, 10, edges=("chat/session/session.py",), number=number)
