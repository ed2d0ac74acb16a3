"""Beam search gives transformers' beams and scores, finds what exhaustive search finds, and leaves nothing behind."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.chat.decoding.beams import Beam, BeamOptions, beam_search, beam_searches, n_best
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import BatchError, CapacityError, HybridMemory, Step
from hybridmem.models import LanguageModel, load_model
from tests.extent import IS_LONG, few_cases, one_in, only_in_long
from tests.models.checkpoints import CONFIGS, Peer, draw_tokens, write_checkpoint
from tests.toy import VOCAB, Toy

TEXTS = [draw_tokens(9 + 3 * i, seed=i) for i in range(3)]
PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2], [6]]


def make_memory(model: LanguageModel | Toy, budget: str = "4MiB") -> HybridMemory:
    return HybridMemory(model.memory_spec, budget, rollback_window=4, page_tokens=4, poison=True)


def assert_nothing_left(memory: HybridMemory) -> None:
    memory.check()
    usage = memory.usage()
    assert usage.used_bytes == 0 and not usage.by_sequence


# The tests below compare with transformers.


@dataclass(frozen=True)
class Pair:
    """One checkpoint in both libraries.

    Attributes:
        likely: tokens that stand in the best continuations of TEXTS, the most frequent first: as stop tokens they end
            some beams.
    """

    model: LanguageModel
    peer: Peer
    likely: tuple[int, ...]

    def theirs(self, prompt: list[int], options: BeamOptions) -> list[Beam]:
        settings: dict[str, Any] = {
            "num_beams": options.n_beams, "num_return_sequences": options.n_beams, "max_new_tokens": options.max_tokens,
            "length_penalty": options.length_penalty, "early_stopping": options.early_stopping,
            "eos_token_id": list(options.stop_ids) or None, "pad_token_id": 0,
        }  # fmt: skip
        found = self.peer.model.generate(
            torch.tensor([prompt]), **settings, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        beams = []
        for ids, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
            end = next((i for i, t in enumerate(ids, 1) if t in options.stop_ids), len(ids))
            beams.append(Beam(ids[:end], score * end**options.length_penalty, score))
        return beams


@pytest.fixture(scope="module", params=one_in(2, ["jamba", "llama", "bamba"]))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_checkpoint(tmp_path_factory.mktemp("beams"), CONFIGS[request.param]())
    model = load_model(folder)
    free = beam_searches(model, make_memory(model), TEXTS, BeamOptions(6, 12))
    counts = Counter(t for beams in free for beam in beams for t in beam.token_ids[2:])
    return Pair(model, Peer.load(folder), tuple(t for t, _ in counts.most_common()))


STOPPING = (False, True, "never")
SHAPES = ((4, 1.0, 3), (3, 0.0, 6), (5, 2.0, 2), (2, -1.0, 4), (4, 1.0, 0))
"""How many beams, the length penalty, and how many tokens stop."""

COMBINATIONS = [(*shape, STOPPING[(i + j) % 3]) for i, shape in enumerate(SHAPES) for j in range(3 if IS_LONG else 1)]


@few_cases
@pytest.mark.parametrize(("n_beams", "length_penalty", "n_stops", "early_stopping"), COMBINATIONS)
def test_beams_and_scores_are_those_of_transformers(
    pair: Pair, n_beams: int, length_penalty: float, n_stops: int, early_stopping: bool | str
) -> None:
    options = BeamOptions(n_beams, 12, length_penalty, early_stopping, pair.likely[1 : 1 + n_stops])  # type: ignore[arg-type]
    memory = make_memory(pair.model)
    ours = beam_searches(pair.model, memory, TEXTS, options)
    assert_nothing_left(memory)
    for prompt, beams in zip(TEXTS, ours, strict=True):
        theirs = pair.theirs(prompt, options)
        assert [beam.token_ids for beam in beams] == [beam.token_ids for beam in theirs]
        for ours_, theirs_ in zip(beams, theirs, strict=True):
            assert ours_.score == pytest.approx(theirs_.score, abs=1e-3)


@only_in_long
def test_the_options_of_these_tests_matter(pair: Pair) -> None:
    """With other penalties and ways to stop, the search finds other beams, and some of them end early."""
    found, lengths = set(), set()
    for penalty, stopping in itertools.product((-1.0, 0.0, 1.0, 2.0), (False, True, "never")):
        options = BeamOptions(4, 12, penalty, stopping, pair.likely[1:4])  # type: ignore[arg-type]
        searches = beam_searches(pair.model, make_memory(pair.model), TEXTS, options)
        found.add(str([[beam.token_ids for beam in beams] for beams in searches]))
        lengths |= {len(beam.token_ids) for beams in searches for beam in beams}
    assert len(found) > 3 and len(lengths) > 3, (len(found), lengths)


# The tests below compare with an exhaustive search.


def log_probabilities(model: Toy, prompt: list[int], texts: Seq[Seq[int]]) -> list[float]:
    """Return the log probabilities of each text after the prompt.

    All its tokens are read together, without any beam.
    """
    memory = HybridMemory(model.memory_spec, "64MiB", rollback_window=4)
    with memory.step([(memory.open(), [*prompt, *text]) for text in texts], outputs="all") as step:
        rows = [r[len(prompt) - 1 : -1].log_softmax(-1) for r in step.split(model(step))]
    return [float(r.gather(1, torch.tensor([text]).T).sum()) for r, text in zip(rows, texts, strict=True)]


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 3.0])
def test_beams_as_wide_as_everything_find_the_best(length_penalty: float) -> None:
    """The beams hold every text of up to two tokens, and all are complete in the end.

    A text is the stop token, one token with the stop token after it, or two other tokens.
    """
    model, memory, prompt, stop_id = Toy(), make_memory(Toy()), PROMPTS[0], 5
    options = BeamOptions(VOCAB**2, 2, length_penalty, "never", (stop_id,))
    beams = beam_searches(model, memory, [prompt], options)[0]
    assert_nothing_left(memory)
    texts = [(stop_id,), *(pair for pair in itertools.product(range(VOCAB), repeat=2) if pair[0] != stop_id)]
    assert sorted(tuple(beam.token_ids) for beam in beams) == sorted(texts)
    found = zip(log_probabilities(model, prompt, texts), texts, strict=True)
    best = sorted(((log_p / len(text) ** length_penalty, text) for log_p, text in found), reverse=True)
    for beam, (score, text) in list(zip(beams, best, strict=True))[:40]:
        assert tuple(beam.token_ids) == text
        assert beam.score == pytest.approx(score, abs=1e-4)


@only_in_long
def test_beams_as_wide_as_all_prefixes_find_the_best_of_three() -> None:
    model, memory = Toy(window=3), make_memory(Toy(window=3))
    beams = beam_search(model, memory, PROMPTS[1], VOCAB**2, 3)
    assert_nothing_left(memory)
    texts = list(itertools.product(range(VOCAB), repeat=3))
    scores = dict(zip(texts, log_probabilities(model, PROMPTS[1], texts), strict=True))
    best = sorted(texts, key=lambda text: -scores[text])[:30]
    assert [tuple(beam.token_ids) for beam in beams[:30]] == best


# The tests below run beams alone and together.


def test_one_beam_is_greedy() -> None:
    model = Toy()
    memory = make_memory(model)
    engine = Engine(model, memory, None)  # type: ignore[arg-type]
    greedy = [engine.submit(prompt, max_tokens=20) for prompt in PROMPTS]
    engine.run()
    beams = beam_searches(model, memory, PROMPTS, BeamOptions(1, 20))
    assert [found[0].token_ids for found in beams] == [generation.token_ids for generation in greedy]


def test_prompts_of_a_batch_do_not_disturb_each_other() -> None:
    model = Toy()
    memory = make_memory(model)
    options = BeamOptions(4, 15, stop_ids=(0, 1))
    together = beam_searches(model, memory, PROMPTS, options)
    assert together == [beam_searches(model, memory, [prompt], options)[0] for prompt in PROMPTS]
    assert_nothing_left(memory)


def test_scores_are_those_of_the_texts() -> None:
    """Reorderings of a beam leave no trace in its log probability."""
    model = Toy()
    beams = beam_search(model, make_memory(model), PROMPTS[0], 6, 25, length_penalty=0.5)
    for beam, expected in zip(
        beams, log_probabilities(model, PROMPTS[0], [beam.token_ids for beam in beams]), strict=True
    ):
        assert beam.log_probability == pytest.approx(expected, abs=1e-3)
        assert beam.score == beam.log_probability / len(beam.token_ids) ** 0.5


def test_beams_share_their_prompt() -> None:
    """Eight beams of a prompt of 400 tokens hold its pages once."""
    model = Toy()
    memory = make_memory(model)
    prompt = [i % VOCAB for i in range(400)]
    sequence = memory.open()
    memory.run(model, {sequence: prompt})
    alone = memory.usage().by_kind["pages"]
    memory.close(sequence)
    most = 0

    def watched(step: Step) -> Tensor:
        nonlocal most
        most = max(most, memory.usage().by_kind["pages"])
        return model(step)

    beam_search(watched, memory, prompt, 8, 12)
    assert most < 1.5 * alone
    assert_nothing_left(memory)


@pytest.mark.parametrize("search", ["beams", "n best"])
def test_a_failure_closes_everything(search: str) -> None:
    model = Toy()
    for error, fails_at in itertools.product((KeyboardInterrupt, CapacityError), (0, 1, 4)):
        memory, n_steps = make_memory(model), 0

        def fragile(step: Step, error: type[BaseException] = error, fails_at: int = fails_at) -> Tensor:
            nonlocal n_steps
            n_steps += 1
            if n_steps > fails_at:
                raise error("no", needed=1, free=0) if error is CapacityError else error
            return model(step)

        with pytest.raises(error):
            if search == "beams":
                beam_searches(fragile, memory, PROMPTS, BeamOptions(4, 20))
            else:
                n_best(fragile, memory, PROMPTS[0], 4, 20, sampling=Sampling(temperature=1.0))
        assert_nothing_left(memory)


def test_a_memory_too_small_for_all_beams_refuses_and_stays_as_it_was() -> None:
    model = Toy()
    memory = make_memory(model, "16KiB")
    kept = memory.open()
    memory.run(model, {kept: [1, 2, 3]})
    before = memory.usage().used_bytes
    with pytest.raises(CapacityError):
        beam_search(model, memory, PROMPTS[0], 50, 30)
    assert memory.usage().used_bytes == before
    memory.check()


@pytest.mark.parametrize(("n_beams", "max_tokens", "stopping", "word"), [
    (0, 3, False, "n_beams"), (2, 0, False, "max_tokens"), (True, 3, False, "n_beams"),
    (2, 3, "soon", "early_stopping"),
])  # fmt: skip
def test_options_that_cannot_work(n_beams: int, max_tokens: int, stopping: bool, word: str) -> None:
    with pytest.raises(BatchError, match=word):
        BeamOptions(n_beams, max_tokens, early_stopping=stopping)


# The tests below ask for the n best.


def test_n_best_are_sorted_and_repeat_with_their_seed() -> None:
    model = Toy()
    memory = make_memory(model)
    beams = n_best(model, memory, PROMPTS[0], 8, 15, sampling=Sampling(temperature=1.5, seed=7), stop_ids=(3,))
    assert_nothing_left(memory)
    assert len(beams) == 8 and len({tuple(beam.token_ids) for beam in beams}) > 4
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
    for beam, expected in zip(
        beams, log_probabilities(model, PROMPTS[0], [beam.token_ids for beam in beams]), strict=True
    ):
        assert beam.log_probability == pytest.approx(expected, abs=1e-3)
        assert beam.score == beam.log_probability / len(beam.token_ids)
        assert 3 not in beam.token_ids[:-1] and (len(beam.token_ids) == 15 or beam.token_ids[-1] == 3)
    assert beams == n_best(model, memory, PROMPTS[0], 8, 15, sampling=Sampling(temperature=1.5, seed=7), stop_ids=(3,))


def test_n_best_reads_the_prompt_once() -> None:
    model, n_fed = Toy(), 0

    def counted(step: Step) -> Tensor:
        nonlocal n_fed
        n_fed += len(step.token_ids)
        return model(step)

    n_best(counted, make_memory(model), PROMPTS[1], 5, 4, sampling=Sampling(temperature=1.0, seed=1))
    assert n_fed == len(PROMPTS[1]) + 5 * 3


def test_n_best_refuses_none() -> None:
    model = Toy()
    with pytest.raises(BatchError, match="n=0"):
        n_best(model, make_memory(model), PROMPTS[0], 0, 4, sampling=Sampling())
