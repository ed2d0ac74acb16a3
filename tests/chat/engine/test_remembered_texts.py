"""A draft head remembers a text wherever the model does: its drafts are those of a head that reads the whole text.

Each detour leaves a text and comes back to it, in the same engine or in another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation, Sampling
from hybridmem.chat.engine.head_drafts import HeadDrafter
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.session.reuse import resume
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import load_model
from hybridmem.models.draft_heads import BlankHead, HiddenRows
from tests.chat.engines import draw_prompt, run_checked, scheduler_of
from tests.extent import few_cases
from tests.models.draft_heads.dflash_checkpoints import load_pair
from tests.models.draft_heads.mtp_checkpoints import write_mtp_checkpoint
from tests.models.families.deepseek import CONFIGS as DEEPSEEK
from tests.models.families.qwen3_next import qwen3_next_config


def whole_text(job: Job) -> list[int]:
    return [*job.live_sequence.tokens[: job.n_base].tolist(), *job.tokens]


@dataclass
class Place:
    """Holds an engine whose drafts are noted, each with the whole text that it continues."""

    model: Any
    head: Any
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory, own = (self.make_memory(each) for each in (self.model, self.head))
        kind, options = (BlankDrafter, {"least_chance": 0.0}) if isinstance(self.head, BlankHead) else (HeadDrafter, {})
        self.drafter = kind(self.model, self.head, own, prefixes=PrefixCache(own), step_tokens=40, **options)
        propose = self.drafter.draft

        def note(wanted: Any) -> Any:
            drafts = propose(wanted)
            for job, draft in drafts.items():
                self.seen.append((whole_text(job), draft))
            return drafts

        self.drafter.draft = note  # type: ignore[method-assign]
        self.prefixes = PrefixCache(self.memory, grid_tokens=0)
        self.engine = Engine(
            self.model, self.memory, None, stop_ids=(), step_tokens=40, max_running=6, prefixes=self.prefixes,
            speculation=Speculation(adapts=False, drafter=self.drafter),
        )  # fmt: skip

    @staticmethod
    def make_memory(model: Any) -> HybridMemory:
        return HybridMemory(
            model.memory_spec, "6MiB", rollback_window=16, page_tokens=4, host_budget="6MiB", poison=True
        )

    def prompt(self, n_tokens: int, seed: int = 3) -> list[int]:
        return draw_prompt(random.Random(seed), n_tokens, min(40, self.model.memory_spec.vocab_size))

    def say(self, tokens: list[int], n: int = 20, **options: Any) -> Generation:
        generation = self.engine.submit(tokens, max_tokens=n, **options)
        run_checked(self.engine)
        self.drafter.memory.check()
        return generation

    def go_on(self, text: list[int], sequence: Any = None) -> None:
        """Say something after a text, from whatever is remembered of it, as a session does."""
        start = resume(self.engine, sequence, text)
        assert start.n_kept > 50, "the model remembers the text"
        self.seen.clear()
        self.say(text[start.n_kept :], sequence=start.sequence)

    def expected(self, text: list[int], n: int) -> list[int]:
        """Return the draft of a head that is fed all of a text at once."""
        memory, own = self.make_memory(self.model), self.make_memory(self.head)
        with memory.step({memory.open(): text[:-1]}) as step:
            rows_TM = self.head.read(HiddenRows(self.model, self.head.after)(step)[1])
        sequence, tokens, drafted = own.open(), text[1:], list[int]()
        if isinstance(self.head, BlankHead):
            with own.step({sequence: [*tokens, *self.head.blanks_after(tokens[-1])]}) as step:
                logits_NV = self.head(step, rows_TM, [len(tokens)])[0]
                step.accept({sequence: len(tokens)})
            return logits_NV.argmax(-1).tolist()[:n]
        while len(drafted) < n:
            with own.step({sequence: tokens}) as step:
                logits_SV, rows_TM = self.head(step, rows_TM)
            tokens = [int(logits_SV.argmax())]
            drafted += tokens
        return drafted

    def check(self) -> None:
        assert self.seen
        for text, draft in self.seen[:: max(1, len(self.seen) // 5)]:
            assert draft == self.expected(text, len(draft))


def preempted(place: Place, folder: Path) -> None:
    """The reply and its head are swapped out in the middle, and come back."""
    first, other = (place.engine.submit(place.prompt(100, seed), max_tokens=40) for seed in (3, 4))
    while len(other.token_ids) < 9:
        place.engine.step()
    scheduler_of(place.engine).preempt()
    while not first.is_finished:
        place.engine.step()
    place.seen.clear()
    run_checked(place.engine)
    assert place.engine.stats.n_preempted == 1


def branched(place: Place, folder: Path) -> None:
    """Another prompt differs from the first one after 70 tokens, and in the middle of a cached prefix."""
    place.say(place.prompt(100))
    place.say([*place.prompt(70), 1, 2, 3])
    place.go_on([*place.prompt(70), 3, 2, 1, 0])


def beside(place: Place, folder: Path) -> None:
    """A prompt that begins like one that is still being replied to."""
    running = place.engine.submit(place.prompt(100), max_tokens=60)
    while len(running.token_ids) < 3:
        place.engine.step()
    second = place.engine.submit([*place.prompt(100), 5, 6], max_tokens=30)
    place.engine.step()
    running_text = [*place.prompt(100)]
    place.seen.clear()
    run_checked(place.engine)
    assert second.lookup is not None and second.lookup.reused > 90
    place.seen = [each for each in place.seen if each[0][100:102] == [5, 6] and each[0][:100] == running_text]


def chosen(place: Place, folder: Path) -> None:
    """Three choices have one prompt."""
    place.engine.submit_choices(place.prompt(100), [Sampling(), Sampling(), Sampling(repetition_penalty=1.0)])
    for _ in range(30):
        place.engine.step()


def continued(place: Place, folder: Path) -> None:
    """A kept sequence goes on, as a chat does at its next turn."""
    sequence = place.say(place.prompt(100), keeps_sequence=True).sequence
    assert sequence is not None
    place.go_on([*sequence.tokens.tolist(), 1, 2, 3], sequence)


def edited(place: Place, folder: Path) -> None:
    """A kept sequence is taken back by more than its rollback window, to the end of its prompt."""
    sequence = place.say(place.prompt(100), 40, keeps_sequence=True).sequence
    assert sequence is not None
    place.go_on([*sequence.tokens.tolist()[:100], 2, 1], sequence)


def restarted(place: Place, folder: Path) -> None:
    """A server saves its prefixes, and another one reads them."""
    said = place.say(place.prompt(100), 30)
    place.prefixes.save(folder / "prefixes")
    place.drafter.texts.prefixes.save(folder / "of-the-head")
    again = Place(place.model, place.head)
    again.prefixes.load(folder / "prefixes")
    again.drafter.texts.prefixes.load(folder / "of-the-head")
    again.go_on([*place.prompt(100), *said.token_ids[:10], 5])
    place.seen = again.seen


def loaded(place: Place, folder: Path) -> None:
    """A sequence is saved in one engine, and loaded into another one."""
    sequence = place.say(place.prompt(100), 30, keeps_sequence=True).sequence
    assert sequence is not None
    text = sequence.tokens.tolist()
    place.memory.save(sequence, folder / "sequence.safetensors")
    assert place.drafter.texts.save([sequence.tokens], None, folder / "of-the-head.safetensors")
    again = Place(place.model, place.head)
    assert again.drafter.texts.load(folder / "of-the-head.safetensors", None)
    again.go_on([*text, 5, 6], again.memory.load(folder / "sequence.safetensors"))
    place.seen = again.seen


DETOURS = [preempted, branched, beside, chosen, continued, edited, restarted, loaded]


def trained(folder: Path) -> tuple[Any, Any]:
    model: Any = load_model("embedded", draft_head=True)
    return model, model.draft_head


def mtp(config: Callable[[], Any], *, nextn: bool = False) -> Callable[[Path], tuple[Any, Any]]:
    def make(folder: Path) -> tuple[Any, Any]:
        write_mtp_checkpoint(folder, config(), nextn=nextn)
        model: Any = load_model(folder, draft_head=True)
        return model, model.draft_head

    return make


HEADS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "embedded": trained,
    "qwen3-next": mtp(qwen3_next_config),
    "deepseek-v3": mtp(DEEPSEEK["deepseek-v3"], nextn=True),
    "dflash": load_pair,
}


@pytest.fixture(scope="module", params=HEADS)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return HEADS[request.param](tmp_path_factory.mktemp("with-a-head"))


@few_cases
@pytest.mark.parametrize("detour", DETOURS, ids=lambda detour: detour.__name__)
def test_drafts_after_a_detour_are_those_of_the_whole_text(
    parts: tuple[Any, Any], detour: Callable[[Place, Path], None], tmp_path: Path
) -> None:
    place = Place(*parts)
    detour(place, tmp_path)
    place.check()
