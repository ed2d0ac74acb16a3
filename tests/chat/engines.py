"""Holds what the tests of the engine share: models, memories that are poisoned, and an oracle.

The oracle is a sequence that decodes alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.engine.head_drafts import HeadDrafter
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.engine.scheduling import Scheduler
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.memory import HybridMemory, Step

GREEDY = Sampling()


def scheduler_of(engine: Engine) -> Scheduler:
    """Return what holds an engine's jobs.

    Neither `load` nor a generation says this.
    """
    return engine._scheduler


def make_memory(model: Any, budget: int | str = "4MiB", *, rollback_window: int = 8) -> HybridMemory:
    return HybridMemory(model.memory_spec, budget, rollback_window=rollback_window, page_tokens=4, poison=True)


def make_engine(model: Any, budget: int | str = "4MiB", **options: Any) -> Engine:
    """Return an engine without text. Its steps are so small that prompts are split, unless `options` say otherwise."""
    defaults: dict[str, Any] = {"tokenizer": None, "step_tokens": 24, "max_running": 6}
    return Engine(model, make_memory(model, budget), **(defaults | options))


def draw_prompt(generator: random.Random, n_tokens: int, vocab_size: int) -> list[int]:
    return [generator.randrange(vocab_size) for _ in range(n_tokens)]


def decode_alone(
    model: Any, prompt: list[int], max_tokens: int, sampling: Sampling = GREEDY, *, stop_ids: tuple[int, ...] = ()
) -> list[int]:
    """Return what a sequence in a memory of its own says.

    The whole prompt is fed in one step, then token by token.
    """
    memory, sampler, ids = make_memory(model), Sampler(sampling, prompt), list[int]()
    sequence, new = memory.open(), prompt
    while len(ids) < max_tokens and not (ids and ids[-1] in stop_ids):
        with memory.step({sequence: new}) as step:
            logits = model(step)
        ids.append(sampler.choose(logits[0]))
        new = ids[-1:]
    return ids


def choose_alone(model: Any, prompt: list[int], said: list[int], sampling: Sampling) -> list[int]:
    """Return what a sequence alone would choose after the prompt and after each of these tokens but the last.

    It reads all of them at once, in a memory of its own. As long as the result agrees with the given tokens, it is what
    `decode_alone` returns, for one step instead of one for each token.
    """
    if not said:
        return []
    memory, sampler = make_memory(model), Sampler(sampling, prompt)
    with memory.step({memory.open(): [*prompt, *said[:-1]]}, outputs="all") as step:
        return [sampler.choose(row) for row in model(step)[len(prompt) - 1 :]]


def private_bytes(model: Any, n_tokens: int) -> int:
    """Return the bytes that a sequence of this length takes."""
    memory = make_memory(model)
    memory.run(model, {memory.open(): [0] * n_tokens}, max_tokens=16)
    return memory.usage().used_bytes


def run_checked(
    engine: Engine, before_step: Callable[[int], None] = lambda n: None, *, most_steps: int = 2000
) -> list[Generation]:
    """Step until the engine is idle, and check the memory after every step.

    Return the generations in the order in which they ended.
    """
    finished: list[Generation] = []
    for n in range(most_steps):
        before_step(n)
        finished += engine.step()
        engine.memory.check()
        if engine.is_idle:
            return finished
    raise AssertionError(f"not done after {most_steps} steps: {engine.load}")


class Scripted:
    """Is a model that says what it is told to, over a real memory.

    Token i of the script follows the prompt and i tokens.

    Attributes:
        fails: raise in the middle of the next step.
        spoils: say NaN where a sequence is this long.
    """

    def __init__(self, model: Any, script: list[int], *, n_prompt: int) -> None:
        self.model, self.script, self.n_prompt = model, script, n_prompt
        self.memory_spec, self.config = model.memory_spec, getattr(model, "config", None)
        self.fails = False
        self.spoils: int | None = None

    def __call__(self, step: Step) -> Tensor:
        logits = self.model(step)
        if self.fails:
            raise RuntimeError("the model broke")
        ends = [s.length + n for s, n in zip(step.sequences, step.tokens.counts.tolist(), strict=True)]
        logits = torch.zeros_like(logits)
        for row, end in enumerate(ends):
            if end >= self.n_prompt:
                logits[row, self.script[(end - self.n_prompt) % len(self.script)]] = 5.0
            if end == self.spoils:
                logits[row] = float("nan")
        return logits


Wanted = list[tuple[Generation, list[int], int, Sampling]]


def draw_sampling(generator: random.Random) -> Sampling:
    seed = generator.randrange(1000)
    return generator.choice(
        [
            Sampling(),
            Sampling(repetition_penalty=1.3),
            Sampling(1.0, seed=seed),
            Sampling(0.8, top_k=5, top_p=0.9, seed=seed),
        ]
    )


def submit_some(
    engine: Engine, model: Any, generator: random.Random, n: int, most_prompt: int, most_tokens: int, **options: Any
) -> Wanted:
    wanted = []
    for _ in range(n):
        prompt = draw_prompt(generator, generator.randint(1, most_prompt), model.memory_spec.vocab_size)
        max_tokens, sampling = generator.randint(1, most_tokens), draw_sampling(generator)
        generation = engine.submit(prompt, max_tokens=max_tokens, sampling=sampling, **options)
        wanted.append((generation, prompt, max_tokens, sampling))
    return wanted


def assert_as_alone(model: Any, wanted: Wanted) -> None:
    for generation, prompt, max_tokens, sampling in wanted:
        assert generation.token_ids == choose_alone(model, prompt, generation.token_ids, sampling)
        if len(generation.token_ids) < max_tokens:
            assert generation.finish_reason in ("cancelled", "deadline")
        else:
            assert (generation.finish_reason, len(generation.token_ids)) == ("length", max_tokens)


def follower_of(drafter: HeadDrafter, job: Job) -> Any:
    """Return the sequence that a draft head feeds with the text of a job, and where in the text it begins."""
    return drafter._followers[job]
