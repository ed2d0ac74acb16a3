"""Speculative decoding gives the same greedy text for any draft, and the same distribution when it samples."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.chat.decoding.acceptance import accept_drawn
from hybridmem.chat.decoding.drafts import Draft, Drafter, DraftModel, DraftRequest, Draws, PromptLookup
from hybridmem.chat.decoding.speculative import SpeculativeBatch
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Message, Tokenizer, encode_turn, find_stop_ids
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.simulation.dialogues import make_dialogue
from hybridmem.memory import HybridMemory, Sequence, SpecError, Step
from hybridmem.memory.quantization import Quantized, Storage
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.models import LanguageModel, load_model
from tests.extent import IS_LONG, few_cases, one_in, only_in_long
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.subjects import POLICIES
from tests.toy import VOCAB, FamilyToy, Toy

PROMPTS = [[18, 12, 3], [2], [8, 18, 3], [11, 3, 11, 3, 5, 11, 3]]
"""What the toy says to the first and the third is long without a loop."""


class Always:
    """Drafts the same tokens for each sequence, however many they are, or none at all."""

    n_draft, vocab_size = 8, None

    def __init__(self, draft: Draft | None) -> None:
        self._draft = draft

    def draft(self, requests: Mapping[Sequence, DraftRequest]) -> dict[Sequence, Draft]:
        return {} if self._draft is None else dict.fromkeys(requests, self._draft)

    def forget(self, sequence: Sequence) -> None:
        pass


class RandomDrafts:
    """Drafts random numbers of tokens.

    A token is random or, with probability `p_right`, the one that plain decoding chose.
    """

    vocab_size = None

    def __init__(self, expected: list[list[int]], n_draft: int, p_right: float) -> None:
        self.n_draft = n_draft
        self._random = random.Random(n_draft)
        self._expected, self._p_right = expected, p_right

    def draft(self, requests: Mapping[Sequence, DraftRequest]) -> dict[Sequence, Draft]:
        drafts = {}
        for sequence, request in requests.items():
            ahead = next(
                text[len(request.text) :] for text in self._expected if text[: len(request.text)] == request.text
            )
            n_tokens = self._random.randint(0, min(request.most_tokens, self.n_draft))
            ids = [
                t if self._random.random() < self._p_right else self._random.randrange(VOCAB) for t in ahead[:n_tokens]
            ]
            if ids:
                drafts[sequence] = Draft(ids)
        return drafts

    def forget(self, sequence: Sequence) -> None: ...


class WrongDrafts:
    """Drafts from another text, which is found by its first token, at the same place."""

    vocab_size = None

    def __init__(self, texts: list[list[int]], n_draft: int) -> None:
        self._texts, self.n_draft = texts, n_draft

    def draft(self, requests: Mapping[Sequence, DraftRequest]) -> dict[Sequence, Draft]:
        return {
            sequence: Draft(text[at : at + min(request.most_tokens, self.n_draft)])
            for sequence, request in requests.items()
            for text in self._texts
            if text[0] == request.text[0] and (at := len(request.text)) < len(text)
        }

    def forget(self, sequence: Sequence) -> None: ...


def plain(
    model: Any, prompts: list[list[int]] = PROMPTS, max_tokens: int = 40, *, stop_ids: tuple[int, ...] = ()
) -> list[list[int]]:
    """Return the reply without drafts."""
    engine = Engine(
        model,
        HybridMemory(model.memory_spec, "16MiB", rollback_window=8, page_tokens=4, poison=True),
        None,
        stop_ids=stop_ids,
    )
    generations = [engine.submit(prompt, max_tokens=max_tokens) for prompt in prompts]
    engine.run()
    return [generation.token_ids for generation in generations]


def decode(batch: SpeculativeBatch, prompts: list[list[int]] = PROMPTS, max_tokens: int = 40) -> list[list[int]]:
    texts: dict[Sequence, list[int]] = {batch.memory.open(): [] for _ in prompts}
    for sequence, prompt in zip(texts, prompts, strict=True):
        batch.add(sequence, prompt, max_tokens)
    while not batch.is_idle:
        for new in batch.step():
            texts[new.sequence].append(new.token_id)
    for sequence in texts:
        batch.discard(sequence)
        batch.memory.close(sequence)
    batch.memory.check()
    assert batch.memory.usage().used_bytes == 0
    return list(texts.values())


def make_memory(model: Toy | FamilyToy, window: int = 8, **options: object) -> HybridMemory:
    return HybridMemory(model.memory_spec, "1MiB", rollback_window=window, page_tokens=4, poison=True, **options)


# The tests below decode greedily.


@pytest.mark.parametrize("fold", ["keep", "replay"])
@pytest.mark.parametrize(("window", "n_draft"), one_in(2, [(8, 8), (8, 3), (4, 4), (16, 5)]))
def test_prompt_lookup_decodes_the_same_text(window: int, n_draft: int, fold: str) -> None:
    model = Toy(window=5)
    expected = plain(model, stop_ids=(0,))
    batch = SpeculativeBatch(model, make_memory(model, window, fold=fold), (0,), PromptLookup(1, n_draft))
    assert decode(batch, PROMPTS) == expected
    assert 0 < batch.acceptance.n_accepted < batch.acceptance.n_drafted, (
        "both must be seen: accepted and rejected tokens"
    )
    assert batch.acceptance.tokens_per_step > 1
    assert batch.acceptance.n_generated == batch.stats.n_generated == sum(map(len, expected))


@few_cases
@pytest.mark.parametrize("p_right", [0.0, 0.5, 0.9, 1.0] if IS_LONG else [0.0, 0.5, 1.0])
@pytest.mark.parametrize("toy", ["hybrid", "attention", "recurrent"])
def test_any_draft_decodes_the_same_text(toy: str, p_right: float) -> None:
    """Random drafts have random lengths, some of them 0, for several sequences in one batch."""
    model = Toy(attention=toy != "recurrent", recurrent=toy != "attention", window=6)
    expected = plain(model)
    drafter = RandomDrafts([p + e for p, e in zip(PROMPTS, expected, strict=True)], 8, p_right)
    batch = SpeculativeBatch(model, make_memory(model), (), drafter, adapts=False)
    assert decode(batch, PROMPTS) == expected
    assert batch.acceptance.n_drafted > 20
    if p_right in (0, 1):
        assert batch.acceptance.rate == p_right or (p_right == 0 and batch.acceptance.rate < 0.2)


@few_cases
@pytest.mark.parametrize(
    ("policy", "storage"),
    [("h2o", None), ("recent", None), ("quest", None), (None, Quantized(4, group=8)), ("tova", Quantized(8, group=4))],
    ids=str,
)
def test_rejected_drafts_change_no_row(policy: str | None, storage: Storage | None) -> None:
    """Attention has a policy or few bits, and all drafts are wrong. The text is that without drafts."""
    model = Toy()
    spec = model.memory_spec.with_policy(policy and POLICIES[policy]).with_storage(storage)

    def say(drafter: Drafter) -> list[list[int]]:
        memory = HybridMemory(spec, "1MiB", rollback_window=8, page_tokens=4, poison=True)
        return decode(SpeculativeBatch(model, memory, (), drafter, adapts=False))

    expected = say(RandomDrafts([], 0, 1.0))
    wrong = [p + [(t + 1) % VOCAB for t in e] for p, e in zip(PROMPTS, expected, strict=True)]
    assert say(WrongDrafts(wrong, 8)) == expected


@pytest.mark.parametrize("family", one_in(3, FAMILIES.values()), ids=one_in(3, FAMILIES))
def test_every_recurrence_decodes_the_same_text(family) -> None:
    model = FamilyToy(family)
    expected = plain(model, max_tokens=24)
    drafter = RandomDrafts([p + e for p, e in zip(PROMPTS, expected, strict=True)], 6, 0.7)
    assert decode(SpeculativeBatch(model, make_memory(model), (), drafter), PROMPTS, 24) == expected


@pytest.mark.parametrize("name", one_in(3, ["jamba", "bamba", "qwen3-next", "lfm2", "mamba"]))
def test_checkpoints_decode_the_same_text(name: str, tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, CONFIGS[name]()))
    memory = HybridMemory(model.memory_spec, "16MiB", rollback_window=8, page_tokens=4, poison=True)
    expected = plain(model)
    drafter = RandomDrafts([p + e for p, e in zip(PROMPTS, expected, strict=True)], 6, 0.8)
    assert decode(SpeculativeBatch(model, memory, (), drafter), PROMPTS) == expected


def test_a_draft_ends_where_the_reply_does() -> None:
    """A token that ends the reply may be inside of an accepted draft.

    The memory then ends before it, or with it if ends are fed.
    """
    model = Toy()
    text = plain(model, PROMPTS[:1])[0]
    stop_id = next(t for i, t in enumerate(text) if i > 3 and t not in text[:i])
    reply = text[: text.index(stop_id) + 1]
    for remembers_end in (False, True):
        memory = make_memory(model)
        drafter = RandomDrafts([PROMPTS[0] + text], 8, 1.0)
        batch = SpeculativeBatch(model, memory, (stop_id,), drafter, remembers_end=remembers_end)
        sequence = memory.open()
        batch.add(sequence, PROMPTS[0], 40)
        news = []
        while not batch.is_idle:
            news += batch.step()
        assert [(new.token_id, new.is_last) for new in news] == [(token_id, token_id == stop_id) for token_id in reply]
        assert sequence.tokens.tolist() == PROMPTS[0] + (reply if remembers_end else reply[:-1])
        memory.check()


def test_no_more_tokens_than_asked_for() -> None:
    model = Toy()
    text = plain(model, PROMPTS[:1])[0]
    for max_tokens in (1, 2, 5, 9, 10):
        batch = SpeculativeBatch(model, make_memory(model), (), RandomDrafts([PROMPTS[0] + text], 8, 1.0))
        assert decode(batch, PROMPTS[:1], max_tokens) == [text[:max_tokens]]
        assert batch.acceptance.n_drafted < max_tokens, "drafts beyond the end are for nothing"


def test_a_step_is_no_larger_than_asked_for() -> None:
    model = Toy()
    texts = plain(model)
    sizes = []

    def watched(step: Step) -> Tensor:
        sizes.append(len(step.token_ids))
        return model(step)

    drafter = RandomDrafts([p + t for p, t in zip(PROMPTS, texts, strict=True)], 8, 1.0)
    batch = SpeculativeBatch(watched, make_memory(model), (), drafter, step_tokens=12)
    assert decode(batch, PROMPTS) == texts
    assert max(sizes) == 12


def test_a_memory_without_room_for_drafts_goes_on_without_them() -> None:
    """One page is left after the prompt. It has room for a token, but not for a draft."""
    model = Toy(recurrent=False)
    page_bytes = make_memory(model).usage().block_bytes["pages"]
    texts = plain(model, [[1, 2, 3]], 5)
    memory = HybridMemory(model.memory_spec, 2 * page_bytes, rollback_window=8, page_tokens=4, poison=True)
    batch = SpeculativeBatch(model, memory, (), Always(Draft([1] * 8)))
    assert decode(batch, [[1, 2, 3]], 5) == texts
    assert batch.acceptance.n_drafted == 0


def test_a_failing_step_changes_nothing() -> None:
    model = Toy()
    expected = plain(model)
    fails = [False]

    def fragile(step: Step) -> Tensor:
        logits = model(step)
        if fails[0]:
            raise KeyboardInterrupt
        return logits

    batch = SpeculativeBatch(fragile, make_memory(model), (), PromptLookup(1, 6))
    texts: list[list[int]] = [[] for _ in PROMPTS]
    sequences = {batch.memory.open(): i for i in range(len(PROMPTS))}
    for sequence, i in sequences.items():
        batch.add(sequence, PROMPTS[i], 40)
    while not batch.is_idle:
        fails[0] = True
        with pytest.raises(KeyboardInterrupt):
            batch.step()
        fails[0] = False
        for new in batch.step():
            texts[sequences[new.sequence]].append(new.token_id)
        batch.memory.check()
    assert texts == expected


# The tests below are about drafters.


def test_prompt_lookup_finds_the_latest_occurrence() -> None:
    """It finds what a search through the whole text finds, while the text grows."""
    memory = make_memory(Toy())
    generator = random.Random(4)
    for n_gram in (1, 2, 3):
        drafter, sequence = PromptLookup(n_gram, 6), memory.open()
        text: list[int] = []
        for _ in range(200):
            text += [generator.randrange(3) for _ in range(generator.randint(1, 3))]
            found = drafter.draft({sequence: DraftRequest(text, 4)})
            starts = [i for i in range(len(text) - n_gram) if text[i : i + n_gram] == text[-n_gram:]]
            if not starts or len(text) <= n_gram:
                assert not found
                continue
            period = len(text) - n_gram - starts[-1]
            expected = list(text)
            for _ in range(4):  # A draft may run over the end of the text, and repeat itself.
                expected.append(expected[-period])
            assert found[sequence].token_ids == expected[-4:]


def test_prompt_lookup_forgets_an_edited_text() -> None:
    drafter, sequence = PromptLookup(2, 2), make_memory(Toy()).open()
    assert drafter.draft({sequence: DraftRequest([1, 2, 3, 4, 1, 2], 2)})[sequence].token_ids == [3, 4]
    assert drafter.draft({sequence: DraftRequest([1, 2, 5, 6, 1, 2], 2)})[sequence].token_ids == [5, 6]


@pytest.mark.parametrize("is_same", [True, False])
def test_a_draft_model_follows_the_text(is_same: bool) -> None:
    model, small = Toy(), Toy() if is_same else Toy(attention=False)
    expected = plain(model, stop_ids=(0,))
    drafter = DraftModel(small, make_memory(small, 4), 4)
    batch = SpeculativeBatch(model, make_memory(model), (0,), drafter)
    assert decode(batch, PROMPTS) == expected
    if is_same:
        assert batch.acceptance.rate == 1 and batch.acceptance.tokens_per_step > 3
    else:
        assert 0 < batch.acceptance.n_accepted < batch.acceptance.n_drafted
    drafter.memory.check()
    assert drafter.memory.usage().used_bytes == 0 and not drafter.memory.usage().by_sequence


def test_a_draft_model_reads_each_token_once() -> None:
    """Accepted drafts are not fed again, and rejected ones are rolled back, not recomputed from the start."""
    model, small = Toy(), Toy(attention=False)
    n_fed = 0

    def counted(step: Step) -> Tensor:
        nonlocal n_fed
        n_fed += len(step.token_ids)
        return small(step)

    batch = SpeculativeBatch(model, make_memory(model), (), DraftModel(counted, make_memory(small), 4), adapts=False)
    decode(batch, PROMPTS[:1])
    rejected = batch.acceptance.n_drafted - batch.acceptance.n_accepted
    assert rejected > 0
    assert n_fed <= len(PROMPTS[0]) + 40 + batch.acceptance.n_drafted


def test_a_draft_model_follows_an_edit_and_a_closed_sequence() -> None:
    model = Toy()
    drafter = DraftModel(model, make_memory(model), 4)
    sequence = make_memory(model).open()
    first = drafter.draft({sequence: DraftRequest([1, 2, 3, 4, 5, 6], 4)})
    again = drafter.draft({sequence: DraftRequest([1, 2, 9], 3)})
    fresh = DraftModel(model, make_memory(model), 4)
    assert again[sequence] == fresh.draft({sequence: DraftRequest([1, 2, 9], 3)})[sequence]
    assert first == drafter.draft({sequence: DraftRequest([1, 2, 3, 4, 5, 6], 4)})
    sequence.closed = True
    drafter.draft({})
    assert not drafter.memory.usage().by_sequence


def test_a_draft_model_without_room_drafts_nothing() -> None:
    model = Toy()
    least = next(n for n in range(512, 1 << 20, 512) if _fits(model, n))
    expected = plain(model)
    drafter = DraftModel(
        model, HybridMemory(model.memory_spec, least, rollback_window=4, page_tokens=4, poison=True), 4
    )
    batch = SpeculativeBatch(model, make_memory(model), (), drafter)
    assert decode(batch, PROMPTS) == expected
    assert not drafter.memory.usage().by_sequence


def _fits(model: Toy, n_bytes: int) -> bool:
    try:
        HybridMemory(model.memory_spec, n_bytes, rollback_window=4, page_tokens=4)
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("options", [{"n_gram": 0}, {"n_draft": 0}, {"n_draft": True}, {"n_gram": 1.5}])
def test_prompt_lookup_refuses_what_cannot_work(options: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        PromptLookup(**options)


def test_drafts_must_fit_the_window_and_the_vocabulary() -> None:
    model = Toy()
    with pytest.raises(SpecError, match="rollback_window=4"):
        SpeculativeBatch(model, make_memory(model, 4), (), PromptLookup(3, 5))
    with pytest.raises(SpecError, match="rollback_window=4"):
        DraftModel(model, make_memory(model, 4), 5)
    other = DraftModel(model, make_memory(model), 4)
    other.vocab_size = VOCAB + 1
    with pytest.raises(SpecError, match="vocabulary"):
        SpeculativeBatch(model, make_memory(model), (), other)


# The tests below are about sampling.


P = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
Q = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.2])
N_DRAWS = 4_000
FAR = 0.04
"""Total variation between 4,000 draws and their distribution: 0.015 is usual over five tokens; a wrong rule is off by
far more.
"""


def frequencies(token_ids: list[int], n: int) -> Tensor:
    return torch.bincount(torch.tensor(token_ids), minlength=n) / len(token_ids)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the total variation of two distributions."""
    return float((a - b).abs().sum()) / 2


@few_cases
@pytest.mark.parametrize("drafted", [0, 1, 3, 4, None])
def test_one_draft_keeps_the_distribution(drafted: int | None) -> None:
    """The draft is a fixed token, or is drawn from Q. The first token of the reply has the distribution P."""
    draws = Draws.of(Sampling(temperature=1.0, seed=3), [])
    rows_KV, found, n_accepted = torch.stack([P.log(), P.log()]), [], 0
    for _ in range(N_DRAWS):
        draft = Draft([draws.draw(Q)], [Q]) if drafted is None else Draft([drafted])
        token_ids = accept_drawn(draft, rows_KV, draws)
        n_accepted += len(token_ids) == 2
        found.append(token_ids[0])
    assert distance(frequencies(found, 5), P) < FAR
    expected = float(torch.minimum(P, Q).sum()) if drafted is None else float(P[drafted])
    assert abs(n_accepted / N_DRAWS - expected) < FAR
    assert distance(Q, P) > 5 * FAR, "always accepting would be seen"


def exact_marginals(model: Toy, prompt: list[int], temperature: float) -> list[Tensor]:
    """Return distributions (V,) of the first, second and third token after a prompt, summed over the tokens before."""
    memory = HybridMemory(model.memory_spec, "256MiB", rollback_window=4)
    prefixes: list[tuple[list[int], float]] = [([], 1.0)]
    marginals = []
    for _ in range(3):
        sequences = {memory.open(): prompt + prefix for prefix, _ in prefixes}
        with memory.step(sequences) as step:
            rows = (model(step) / temperature).softmax(-1)
        for sequence in sequences:
            memory.close(sequence)
        weights = torch.tensor([weight for _, weight in prefixes])
        marginals.append((rows * weights[:, None]).sum(0))
        prefixes = [([*p, t], w * float(r[t])) for (p, w), r in zip(prefixes, rows, strict=True) for t in range(VOCAB)]
    return marginals


def sampled_texts(
    drafter: PromptLookup | DraftModel, model: Toy, prompt: list[int], temperature: float, n: int
) -> tuple[list[list[int]], float]:
    memory = HybridMemory(model.memory_spec, "64MiB", rollback_window=8)
    batch = SpeculativeBatch(model, memory, (), drafter, adapts=False, step_tokens=1 << 14)
    texts: dict[Sequence, list[int]] = {batch.memory.open(): [] for _ in range(n)}
    for seed, sequence in enumerate(texts):
        batch.add(sequence, prompt, 5, sampling=Sampling(temperature=temperature, seed=seed))
    while not batch.is_idle:
        for new in batch.step():
            texts[new.sequence].append(new.token_id)
    return list(texts.values()), batch.acceptance.rate


@only_in_long
@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_sampled_texts_keep_the_distribution(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test compares marginals of three tokens in a row, on which later drafts and rejections have an effect.

    It detects a rule that always accepts.
    """
    model, small, prompt, temperature = Toy(), Toy(attention=False), [4, 9, 4, 9, 4], 2.0
    exact = exact_marginals(model, prompt, temperature)

    def worst(n: int) -> tuple[float, float]:
        small_memory = HybridMemory(small.memory_spec, "64MiB")
        made = PromptLookup(1, 4) if drafter == "lookup" else DraftModel(small, small_memory, 3, step_tokens=1 << 14)
        texts, rate = sampled_texts(made, model, prompt, temperature, n)
        return max(distance(frequencies([text[i] for text in texts], VOCAB), exact[i]) for i in range(3)), rate

    off, rate = worst(1_000)
    assert off < 0.1 and 0.05 < rate < 0.95
    monkeypatch.setattr(
        "hybridmem.chat.decoding.speculative.accept_drawn",
        lambda draft, rows, draws: [*draft.token_ids, draws.draw(rows[-1].softmax(-1))],
    )
    assert worst(200)[0] > 0.2


def test_a_seed_decides_a_sampled_text() -> None:
    model = Toy()

    def texts(seed: int) -> list[list[int]]:
        batch = SpeculativeBatch(model, make_memory(model), (), PromptLookup(1, 4))
        sequence = batch.memory.open()
        batch.add(sequence, PROMPTS[0], 20, sampling=Sampling(temperature=1.0, seed=seed, repetition_penalty=1.2))
        return [[new.token_id for new in batch.step()] for _ in iter(lambda: batch.is_idle, True)]

    assert texts(1) == texts(1) != texts(2)


def test_sampling_at_no_temperature_is_greedy() -> None:
    """This also holds if a repetition penalty makes another token the most likely one."""
    model = Toy()
    for penalty in (1.0, 1.5):
        texts = []
        for drafter in (PromptLookup(1, 4), Always(None)):
            batch = SpeculativeBatch(model, make_memory(model), (), drafter)
            sequence = batch.memory.open()
            batch.add(sequence, PROMPTS[0], 30, sampling=Sampling(repetition_penalty=penalty))
            texts.append([new.token_id for _ in iter(lambda b=batch: b.is_idle, True) for new in batch.step()])
        assert texts[0] == texts[1] and len(texts[0]) == 30


# The tests below count bytes.


@only_in_long
@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_drafts_hold_no_states(fold: str) -> None:
    """Between steps, a sequence holds the states and the tail that plain decoding holds.

    Inside of a step, the body may move while the old one must stay. The head stays at the start until it is known which
    drafts are right. So a step uses at most two more states and one more tail, however long drafts are.
    """
    model, prompt = Toy(), PROMPTS[0]
    text = plain(model, [prompt], 100)[0]
    held: dict[int, tuple[int, int]] = {}
    inside: dict[int, tuple[int, int]] = {}
    for n_draft in (0, 1, 4, 16):
        memory = make_memory(model, 16, fold=fold)
        blocks = memory.usage().block_bytes

        def count(memory: HybridMemory = memory, blocks: dict[str, int] = blocks) -> tuple[int, int]:
            used = memory.usage().by_kind
            return used["states"] // blocks["states"], used["tails"] // blocks["tails"]

        def watched(step: Step, n_draft: int = n_draft, count: Callable[[], tuple[int, int]] = count) -> Tensor:
            inside[n_draft] = tuple(map(max, zip(inside.get(n_draft, (0, 0)), count(), strict=True)))  # type: ignore[assignment]
            return model(step)

        batch = SpeculativeBatch(watched, memory, (), RandomDrafts([prompt + text], n_draft, 0.8), adapts=False)
        batch.add(memory.open(), prompt, 100)
        while not batch.is_idle:
            batch.step()
            held[n_draft] = tuple(map(max, zip(held.get(n_draft, (0, 0)), count(), strict=True)))  # type: ignore[assignment]
    assert held[1] == held[4] == held[16] == held[0] == (3 if fold == "keep" else 2, 1)
    assert max(inside.values()) <= (held[0][0] + 2, 2)


# The tests below are about conversations.


def test_conversations_are_the_same_with_drafts(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """Several users take several turns, and replies end inside of drafts.

    Every memory holds what the chat template renders.
    """
    memory = HybridMemory(embedded.memory_spec, "64MiB", poison=True)
    batch = SpeculativeBatch(
        embedded, memory, find_stop_ids(tokenizer, embedded), PromptLookup(2, 6), remembers_end=True
    )
    users: dict[Sequence, list[Message]] = {memory.open(): [] for _ in range(3)}
    dialogues = {user: make_dialogue(random.Random(i), 3 + i) for i, user in enumerate(users)}
    for turns in itertools.zip_longest(*dialogues.values()):
        replies: dict[Sequence, list[int]] = {
            user: [] for user, turn in zip(users, turns, strict=True) if turn is not None
        }
        for user, turn in zip(replies, filter(None, turns), strict=True):
            batch.add(user, encode_turn(tokenizer, users[user], turn.user), 32)
            users[user].append({"role": "user", "content": turn.user})
        while not batch.is_idle:
            for new in batch.step():
                replies[new.sequence].append(new.token_id)
        for user, ids in replies.items():
            users[user].append({"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)})
    for user, messages in users.items():
        assert [m["content"] for m in messages if m["role"] == "assistant"] == [turn.reply for turn in dialogues[user]]
        assert user.tokens.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert batch.acceptance.n_accepted > 0
    memory.check()
