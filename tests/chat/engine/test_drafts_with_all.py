"""Drafts, a prefix cache, swaps, preemption, choices, log probabilities, edits and files meet in a small budget.

Each reply is compared with that of a sequence that is computed anew and alone. Drafts come from texts, as chains or
trees, or from a draft head. Where the head remembers the whole text, they are compared with those of a head that reads
it anew. `TESTS=long` takes 1,000 steps, and `CONFORMANCE=full` 10,000.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, log_softmax

from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.engine.head_drafts import HeadDrafter
from hybridmem.chat.engine.output import Output
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import CapacityError, Sequence, Step
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import load_model
from hybridmem.models.draft_heads import DraftHead, HiddenRows
from tests.chat.engine.test_drafting import Repeating
from tests.chat.engine.test_remembered_texts import whole_text
from tests.chat.engines import draw_prompt, draw_sampling, follower_of, make_memory, private_bytes, scheduler_of
from tests.extent import IS_LONG, pick
from tests.models.draft_heads.mtp_checkpoints import write_mtp_checkpoint
from tests.models.families.qwen3_5 import qwen3_5_config
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

    def __init__(
        self, seed: int, folder: Path, model: Any, *, branches: int = 1, head: DraftHead | None = None
    ) -> None:
        self.random, self.model, self.seen, self.folder = random.Random(seed), model, Counter[str](), folder
        budget = 3 * private_bytes(self.model, _MOST_TEXT)
        self.memory = make_memory(self.model, budget)
        self.prefixes = PrefixCache(self.memory, grid_tokens=8)
        self.drafter, self.head = None if head is None else self.make_drafter(head), head
        self.engine = Engine(
            self.model, self.memory, None, stop_ids=_STOPS, prefixes=self.prefixes, step_tokens=40, max_running=6,
            speculation=Speculation(looks_up=head is None, adapts=False, branches=branches, drafter=self.drafter),
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
        if self.kept and self.random.random() < 0.2:
            self.save()
        if self.random.random() < 0.03:
            self.restart()
        self.engine.step()
        self.memory.check()
        if self.drafter is not None:
            self.drafter.memory.check()
        ended, self.asked = self.asked, []
        for asked in ended:
            if asked.generation.finish_reason is None:
                self.asked.append(asked)
            else:
                self.check(asked)

    # The methods below are about files.

    def save(self) -> None:
        """Write a kept sequence to a file, with what the drafter remembers of it, and go on from the files."""
        sequence, path, texts = self.kept.pop(), self.folder / "sequence.safetensors", self.engine.drafted_texts
        self.memory.save(sequence, path)
        if texts is not None and texts.save([sequence.tokens], None, self.folder / "drafts.safetensors"):
            texts.prefixes.clear()
            self.seen["prefixes of the head loaded"] += texts.load(self.folder / "drafts.safetensors", None)
        self.memory.close(sequence)
        try:
            self.kept.append(self.memory.load(path))
            self.seen["saved"] += 1
        except CapacityError:
            return

    def restart(self) -> None:
        """Write all prefixes to folders, and read them as the next server does."""
        texts = self.engine.drafted_texts
        for prefixes in (self.prefixes, *([] if texts is None else [texts.prefixes])):
            folder = self.folder / f"prefixes-{prefixes is self.prefixes}"
            prefixes.save(folder)
            prefixes.clear()
            self.seen["prefixes loaded"] += prefixes.load(folder)

    # The methods below are about a draft head.

    def make_drafter(self, head: DraftHead) -> HeadDrafter:
        """Make a drafter whose memory is small as well, and whose drafts are compared."""
        own = make_memory(head, 3 * private_bytes(_Rows(self.model, head), _MOST_TEXT))
        drafter = HeadDrafter(self.model, head, own, prefixes=PrefixCache(own), step_tokens=30)
        propose = drafter.draft

        def draft(wanted: Any) -> Any:
            drafts = propose(wanted)
            for job, tokens in drafts.items():
                text, follower = whole_text(job), follower_of(drafter, job)
                assert follower.sequence.tokens[: len(text) - follower.shift].tolist() == text[follower.shift :]
                knows_all = follower.shift == 1
                if knows_all and job.sampler is not None and job.sampler.is_plain:
                    self.compare(text, tokens)
                self.seen["drafts of a head that begins later"] += not knows_all
            return drafts

        drafter.draft = draft  # type: ignore[method-assign]
        return drafter

    def compare(self, text: list[int], drafted: list[int]) -> None:
        """Compare the beginning of a draft with what the head says when it reads the text anew."""
        if self.random.random() < 0.9:
            return
        assert self.head is not None
        memory, own = make_memory(self.model), make_memory(self.head)
        with memory.step({memory.open(): text[:-1]}) as step:
            rows_TM = self.head.read(HiddenRows(self.model)(step)[1])
        with own.step({own.open(): text[1:]}) as step:
            assert int(self.head(step, rows_TM)[0].argmax()) == drafted[0]
        self.seen["compared drafts"] += 1

    # The methods below submit.

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


class _Rows:
    """Runs a head over hidden states of zeros, to measure its memory."""

    def __init__(self, model: Any, head: DraftHead) -> None:
        self.head, self.memory_spec, self.n_model = head, head.memory_spec, model.config.hidden_size

    def __call__(self, step: Step) -> Tensor:
        return self.head(step, torch.zeros(len(step.token_ids), self.n_model))[0]


def with_a_head(folder: Path) -> tuple[Any, DraftHead]:
    write_mtp_checkpoint(folder, qwen3_5_config(), is_often_right=True)
    model: Any = load_model(folder, draft_head=True)
    return model, model.draft_head


@pytest.mark.parametrize("drafts", ["head", *(["chains", "trees"] if IS_LONG else [])])
def test_replies_are_those_of_texts_computed_anew(drafts: str, tmp_path: Path) -> None:
    if drafts == "head":
        model, head = with_a_head(tmp_path / "model")
        machine = Machine(3, tmp_path, model, head=head)
    else:
        branches = 1 if drafts == "chains" else 4
        machine = Machine(branches, tmp_path, Repeating(), branches=branches)
    for _ in range(10_000 if IS_FULL else pick(250, 1_000)):
        machine.step()
    stats = machine.engine.stats
    wanted = {"replies", "choices", "edited", "with log probabilities", "saved", "prefixes loaded"}
    wanted |= {"compared drafts", "prefixes of the head loaded"} if drafts == "head" else set()
    assert min(machine.seen[what] for what in wanted) > 2, machine.seen
    assert stats.n_preempted > 3 and stats.n_swapped_in > 0
    assert stats.n_accepted > 20 and stats.n_drafted > stats.n_accepted, "drafts are right and wrong"
    assert machine.prefixes.stats().n_hits > 3
