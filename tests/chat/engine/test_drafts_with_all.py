"""Drafts, a prefix cache, swaps, preemption, several choices, log probabilities and edits meet in a small budget.

Each reply is compared with that of a sequence that is computed anew and alone. `TESTS=long` takes 2,000
steps, and `CONFORMANCE=full` 10,000.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from torch import log_softmax

from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.output import Output
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import Sequence
from hybridmem.memory.prefix.cache import PrefixCache
from tests.chat.engine.test_drafting import Repeating
from tests.chat.engines import draw_prompt, draw_sampling, make_memory, private_bytes, scheduler_of
from tests.extent import pick
from tests.subjects import IS_FULL
from tests.toy import VOCAB

_MOST_TEXT, _STOPS = 90, (4,)


@dataclass
class Asked:
    """Holds a reply that is being generated. `text` is all that was fed before it."""

    generation: Generation
    text: list[int]
    sampling: Sampling
    is_kept: bool = False


class Machine:
    """Submits, edits, preempts and cancels at random."""

    def __init__(self, seed: int, branches: int) -> None:
        self.random, self.model, self.seen = random.Random(seed), Repeating(), Counter[str]()
        budget = 3 * private_bytes(self.model, _MOST_TEXT)
        self.memory = make_memory(self.model, budget)
        self.prefixes = PrefixCache(self.memory, grid_tokens=8)
        self.engine = Engine(
            self.model, self.memory, None, stop_ids=_STOPS, prefixes=self.prefixes, step_tokens=40, max_running=6,
            speculation=Speculation(looks_up=True, adapts=False, branches=branches),
        )  # fmt: skip
        self.asked, self.texts, self.kept = list[Asked](), [draw_prompt(self.random, 20, VOCAB)], list[Sequence]()

    def step(self) -> None:
        if len(self.asked) < 8 and self.random.random() < 0.5:
            self.edit() if self.kept else self.random.choice([self.submit, self.submit, self.submit_choices])()
        if self.asked and self.random.random() < 0.05:
            self.seen["preempted"] += 1
            if len(scheduler_of(self.engine).running) > 1:
                scheduler_of(self.engine).preempt()
        if self.asked and self.random.random() < 0.02:
            self.engine.cancel(self.random.choice(self.asked).generation)
        self.engine.step()
        self.memory.check()
        ended, self.asked = self.asked, []
        for asked in ended:
            if asked.generation.finish_reason is None:
                self.asked.append(asked)
            else:
                self.check(asked)

    def draw_prompt(self) -> list[int]:
        """Draw a prompt that repeats some of its own tokens.

        It begins as an earlier text does, which may be in the cache.
        """
        text = self.random.choice(self.texts)
        prompt = [*text[: self.random.randint(0, min(30, len(text)))], *draw_prompt(self.random, 4, VOCAB)]
        return prompt + prompt[-6:]

    def options(self) -> dict[str, Any]:
        prediction = [self.random.randrange(5) for _ in range(12)] if self.random.random() < 0.3 else ()
        output = Output(logprobs=2) if self.random.random() < 0.4 else Output()
        return {"max_tokens": self.random.randint(1, 25), "prediction": prediction, "output": output}

    def submit(self) -> None:
        prompt, sampling = self.draw_prompt(), draw_sampling(self.random)
        # The engine cannot make room of kept sequences, so there is one at most.
        is_kept = not self.kept and not any(asked.is_kept for asked in self.asked)
        generation = self.engine.submit(
            prompt, sampling=sampling, keeps_sequence=is_kept, remembers_end=self.random.random() < 0.5,
            **self.options(),
        )  # fmt: skip
        self.asked.append(Asked(generation, prompt, sampling, is_kept))

    def submit_choices(self) -> None:
        prompt, samplings = self.draw_prompt(), [draw_sampling(self.random) for _ in range(3)]
        choices = self.engine.submit_choices(prompt, samplings, **self.options())
        self.asked += [Asked(choice, prompt, own) for choice, own in zip(choices, samplings, strict=True)]
        self.seen["choices"] += 1

    def edit(self) -> None:
        """Take a kept sequence back to some earlier position, and let another text follow."""
        sequence = self.kept.pop()
        if sequence.is_swapped or sequence.length > _MOST_TEXT - 28:
            self.memory.close(sequence)
            return
        to = self.memory.resume_point(sequence, to=self.random.randint(0, sequence.length))
        self.seen["edited"] += to < sequence.length
        self.memory.rollback(sequence, to=to)
        new, sampling = draw_prompt(self.random, 3, VOCAB), self.random.choice([Sampling(), Sampling(1.0, seed=to)])
        text = [*sequence.tokens.tolist(), *new]
        generation = self.engine.submit(
            new, sequence=sequence, sampling=sampling, keeps_sequence=True, **self.options()
        )  # fmt: skip
        self.asked.append(Asked(generation, text, sampling, is_kept=True))

    def check(self, asked: Asked) -> None:
        """Compare a reply with what the model says of the same text when it is computed anew."""
        generation, said = asked.generation, asked.generation.token_ids
        assert generation.finish_reason in ("stop", "length", "cancelled"), generation.error
        if generation.sequence is not None and not generation.sequence.closed:
            self.kept.append(generation.sequence)
            assert generation.sequence.tokens.tolist() == [*asked.text, *said, *_STOPS][: generation.sequence.length]
        if not said:
            return
        self.texts = [*self.texts[-20:], [*asked.text, *said]]
        memory, sampler = make_memory(self.model), Sampler(asked.sampling, asked.text)
        with memory.step({memory.open(): [*asked.text, *said[:-1]]}, outputs="all") as step:
            logits = self.model(step)[len(asked.text) - 1 :]
        # A token that ended the reply is not among its tokens.
        assert [sampler.choose(row) for row in logits] == said
        for own, row in zip(generation.logprobs, logits, strict=False):
            assert own.logprob == pytest.approx(float(log_softmax(row.double(), -1)[own.token_id]), abs=1e-4)
            self.seen["with log probabilities"] += 1
        self.seen["replies"] += 1


@pytest.mark.parametrize("branches", [1, 4])
def test_replies_are_those_of_texts_computed_anew(branches: int) -> None:
    machine = Machine(branches, branches)
    for _ in range(10_000 if IS_FULL else pick(250, 2_000)):
        machine.step()
    stats = machine.engine.stats
    assert min(machine.seen[what] for what in ("replies", "choices", "edited", "with log probabilities")) > 2
    assert stats.n_preempted > 3 and stats.n_swapped_in > 0
    assert stats.n_accepted > 20 and stats.n_drafted > stats.n_accepted, "drafts are right and wrong"
    assert machine.prefixes.stats().n_hits > 3
