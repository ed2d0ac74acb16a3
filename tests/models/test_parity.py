"""Our models give transformers' logits on the same random checkpoints, for every way to split a prompt."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedConfig

from hybridmem.memory import UNROTATED, AttentionSpec, DropError, HybridMemory, IndexSpec, RecurrentSpec, Sequence
from hybridmem.memory.blocks.layout import Field
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.models import LanguageModel, load_model, plan_memory, weight_bytes
from hybridmem.models.weights.coded import CodedTensor
from tests.extent import few_cases, named
from tests.inside import store_of
from tests.models.checkpoints import CONFIGS, Peer, draw_tokens, write_checkpoint
from tests.models.routing import alike, with_choices
from tests.models.test_from_transformers import ONE_OF_EACH
from tests.subjects import IS_FULL, feed_together
from tests.tolerances import assert_logits_close, assert_split_close

N_PROMPT, N_STEPS = 24, 16
TOKENS = draw_tokens(N_PROMPT + N_STEPS)
WRONG_IN_TRANSFORMERS = {
    "jamba-no-attention": "its cache cannot be asked for its length",
    "recurrent-gemma-no-attention": "its cache cannot be asked for its length",
    "rwkv-wide": "its states have as many channels as the model, not as the averages",
    "lfm2-no-attention": "its cache cannot be asked for its length",
    "mamba2-tied": "its single steps do not clamp dt",
    "granite-moe-hybrid-no-experts": "its single steps do not clamp dt",
    "falcon-h1-gate-only": "its single steps do not clamp dt",
    "zamba2-no-adapters": "its single steps do not clamp dt",
    "nemotron-h-dt-floor": "its single steps do not clamp dt",
}
"""Checkpoints that transformers itself cannot continue by single tokens, and why; its one-shot logits decide alone."""
UNTURNED = ("glm5", "jamba", "kimi", "nemotron")
"""Models whose attention learns of positions from nowhere but the recurrent layers around it."""
MATTERS = 0.1
"""A logit that is off by this much shows that something was forgotten."""

FAMILIES = (*ONE_OF_EACH, "deepseek-v3.2", "glm5-next", "rwkv7")
IN_BFLOAT16 = ("jamba", "mamba2", "qwen3-next")
VARIANTS = [name for name in CONFIGS if name not in FAMILIES]
each_config = pytest.mark.parametrize(
    "pair", named([*FAMILIES, *VARIANTS[::5]], CONFIGS), indirect=True, scope="session"
)
"""By default, every family, and every fifth one of their other configs."""
each_family = pytest.mark.parametrize("pair", named(FAMILIES, CONFIGS), indirect=True, scope="session")
"""By default, what one config of a family shows is not asked of the family's other configs."""
each_other_family = pytest.mark.parametrize("pair", named(FAMILIES[::2], CONFIGS), indirect=True, scope="session")
"""The same memories are fed in other ways by the suite of conformance."""
in_bfloat16 = pytest.mark.parametrize("pair", named(IN_BFLOAT16, CONFIGS), indirect=True, scope="session")
"""Kernels of another dtype are compiled on their own, which takes seconds for each."""
all_in_full = pytest.mark.parametrize("pair", CONFIGS if IS_FULL else ["jamba"], indirect=True, scope="session")
"""Other tests feed tokens one by one and split."""


@dataclass(frozen=True)
class Pair:
    """Holds one checkpoint in both libraries, and transformers' logits of TOKENS computed at once."""

    name: str
    folder: Path
    model: LanguageModel
    peer: Peer
    expected: Tensor

    def memory(self, model: LanguageModel | None = None, budget: str = "2MiB") -> HybridMemory:
        """Return a memory whose window is so small that states fold inside the test."""
        return HybridMemory((model or self.model).memory_spec, budget, rollback_window=4, page_tokens=4, poison=True)

    def feed(self, memory: HybridMemory, sequence: Sequence, steps: Iterable[list[int]]) -> Tensor:
        logits = []
        for tokens in steps:
            with memory.step({sequence: tokens}, outputs="all") as step:
                logits.append(self.model(step))
        return torch.cat(logits)

    def feed_fresh(self, *steps: list[int]) -> Tensor:
        memory = self.memory()
        return self.feed(memory, memory.open(), steps)


@pytest.fixture(scope="session")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = write_checkpoint(tmp_path_factory.mktemp("parity") / request.param, CONFIGS[request.param]())
    peer = Peer.load(folder)
    return Pair(request.param, folder, load_model(folder), peer, peer.logits(TOKENS))


@few_cases
@each_family
def test_logits_are_large_enough_to_compare(pair: Pair) -> None:
    assert pair.expected.std() >= 1


@few_cases
@each_config
def test_no_weight_is_overlooked_when_bytes_are_counted(pair: Pair) -> None:
    """Everything counts that Python can reach from a model, even what a function holds."""
    found, seen, todo = 0, set[int](), list[object]([pair.model])
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType | np.ndarray | PreTrainedConfig):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor) and not isinstance(thing, CodedTensor):
            found += thing.nbytes
        elif isinstance(thing, FunctionType):
            todo += thing.__closure__ or ()
        else:
            todo += gc.get_referents(thing)
    assert weight_bytes(pair.model) == found


@few_cases
@each_config
def test_a_plan_without_weights_is_what_the_model_says(pair: Pair) -> None:
    plan = plan_memory(pair.model.config, pair.model.config.architectures[0])
    assert plan.same_memories(pair.model.memory_spec)
    assert plan.device.type == "meta" and plan.dtype == torch.float32


@each_config
def test_a_prompt_at_once(pair: Pair) -> None:
    assert_logits_close(pair.feed_fresh(TOKENS), pair.expected)


@few_cases
@each_config
def test_single_steps_after_a_prompt(pair: Pair) -> None:
    logits = pair.feed_fresh(TOKENS[:N_PROMPT], *([token] for token in TOKENS[N_PROMPT:]))
    assert_logits_close(logits, pair.expected)
    if pair.name in WRONG_IN_TRANSFORMERS:
        return
    cache = pair.peer.make_cache()
    steps = [TOKENS[:N_PROMPT], *([token] for token in TOKENS[N_PROMPT:])]
    assert_logits_close(logits, torch.cat([pair.peer.logits(tokens, cache) for tokens in steps]))


@all_in_full
def test_single_steps_from_nothing(pair: Pair) -> None:
    assert_logits_close(pair.feed_fresh(*([token] for token in TOKENS[:N_PROMPT])), pair.expected[:N_PROMPT])


@few_cases
@each_other_family
def test_a_batch_of_different_prompts(pair: Pair) -> None:
    memory = pair.memory()
    prompts = [draw_tokens(n, seed=n) for n in (17, 1, 24, 5, 33, 5)]
    sequences = [memory.open() for _ in prompts]
    with memory.step(zip(sequences, prompts, strict=True), outputs="all") as step:
        parts = step.split(pair.model(step))
    for logits, prompt in zip(parts, prompts, strict=True):
        assert_logits_close(logits, pair.peer.logits(prompt))
    more = [draw_tokens(1 + i % 3, seed=i) for i in range(len(prompts))]
    with memory.step(zip(sequences, more, strict=True)) as step:
        last = pair.model(step)
    for logits, prompt, added in zip(last, prompts, more, strict=True):
        assert_logits_close(logits, pair.peer.logits(prompt + added)[-1])


@few_cases
@each_other_family
def test_every_split_in_two(pair: Pair) -> None:
    prompt = TOKENS[:N_PROMPT]
    whole = pair.feed_fresh(prompt)
    memory = pair.memory(budget="8MiB")
    sequences = {memory.open(): at for at in range(1, N_PROMPT)}
    parts = []
    for requests in ({s: prompt[:at] for s, at in sequences.items()}, {s: prompt[at:] for s, at in sequences.items()}):
        with memory.step(requests, outputs="all") as step:
            parts.append(step.split(pair.model(step)))
    for first, second in zip(*parts, strict=True):
        assert_split_close(torch.cat([first, second]), whole)
    for at in (1, N_PROMPT // 2, N_PROMPT - 1):  # Here nobody runs beside it.
        assert_split_close(pair.feed_fresh(prompt[:at], prompt[at:]), whole)


@all_in_full
@settings(
    max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(splits=st.lists(st.sets(st.integers(1, len(TOKENS) - 1), max_size=12), min_size=8, max_size=8))
def test_any_split(pair: Pair, splits: list[set[int]]) -> None:
    """Eight sequences split the same tokens differently. The n-th step feeds the n-th part of each."""
    memory = pair.memory(budget="8MiB")
    parts: dict[Sequence, list[list[int]]] = {}
    for cuts in splits:
        bounds = [0, *sorted(cuts), len(TOKENS)]
        parts[memory.open()] = [TOKENS[start:end] for start, end in itertools.pairwise(bounds)]
    for logits in feed_together(pair.model, memory, parts).values():
        assert_split_close(logits, pair.expected)


@few_cases
@in_bfloat16
def test_bfloat16_is_close(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = load_model(pair.folder, dtype="bfloat16"), (TOKENS[:20], TOKENS[20:21], TOKENS[21:])
    logits, experts = with_choices(model, pair.memory(model), steps, monkeypatch)
    assert logits.dtype == torch.float32, "the head's sums are not rounded"
    indexes = [m.n_chosen for _, m in pair.model.memory_spec.of_kind("index")]
    # Where an index or a router chooses, 16 bits choose other rows or experts of close scores, as in transformers. The
    # first tokens read all rows.
    _, expected_experts = with_choices(pair.model, pair.memory(), steps, monkeypatch)
    same = alike(experts, expected_experts)[: min(indexes, default=len(TOKENS))].nonzero()[:, 0]
    assert_logits_close(logits[same], pair.expected[same], torch.bfloat16)
    assert torch.isfinite(logits).all()


@few_cases
@each_family
def test_keys_say_how_they_carry_positions(pair: Pair) -> None:
    """Dropping tokens from the middle needs this, because it rotates the keys after them."""
    memories = [memory for layer in pair.model.memory_spec.layers for memory in layer]
    rotations = {memory.rotation for memory in memories if isinstance(memory, AttentionSpec | IndexSpec)}
    assert None not in rotations
    if pair.name.startswith(UNTURNED):
        assert rotations <= {UNROTATED}
    memory = pair.memory()
    sequence = memory.open()
    memory.run(pair.model, {sequence: TOKENS})
    is_recurrent = any(isinstance(m, RecurrentSpec) for m in memories)
    if is_recurrent:
        with pytest.raises(DropError, match="approximate=True"):
            memory.drop(sequence, 1, 4)
    span = max((memory.span_tokens for memory in memories if isinstance(memory, IndexSpec)), default=1)
    if span > 1:  # A key of the index stands for several tokens, which cannot be dropped one by one.
        with pytest.raises(DropError, match=f"give multiples of {span}"):
            memory.drop(sequence, 1, 5, approximate=True)
    memory.drop(sequence, *((1, 4) if span == 1 else (span, 3 * span)), approximate=is_recurrent)
    memory.check()
    with memory.step({sequence: [3, 4]}) as step:
        assert torch.isfinite(pair.model(step)).all()


# The tests below show what these tests can see.


@each_family
def test_a_forgotten_history_would_show(pair: Pair) -> None:
    without = pair.feed_fresh(TOKENS[N_PROMPT:])
    assert float((without - pair.expected[N_PROMPT:]).abs().max()) > MATTERS


@few_cases
@each_other_family
def test_any_forgotten_memory_would_show(pair: Pair) -> None:
    """Each state tensor, keys and values, or what both are made from, is set to nothing in all layers.

    Then the next logits differ.
    """
    spec = pair.model.memory_spec
    states = {s.name for layer in spec.layers for m in layer if isinstance(m, RecurrentSpec) for s in m.states}
    attention = [m for layer in spec.layers for m in layer if isinstance(m, AttentionSpec)]
    rows = {
        name
        for m in attention
        for name in (("keys", "values") if m.value_dim is None else ("latents", "rotary keys"))
        if name != "rotary keys" or m.value_dim != m.head_dim
    }
    indexes = {"index" for layer in spec.layers for m in layer if isinstance(m, IndexSpec)}
    # The memory of an unfinished span shows only in whether a later query chooses that span.
    end = N_PROMPT + (8 if "window" in states else 1)
    for name in sorted(states | rows | indexes):
        memory = pair.memory()
        sequence = memory.open()
        pair.feed(memory, sequence, [TOKENS[:N_PROMPT]])
        forget(memory, name)
        difference = pair.feed(memory, sequence, [TOKENS[N_PROMPT:end]]) - pair.expected[N_PROMPT:end]
        assert float(difference.abs().max()) > MATTERS, name


def forget(memory: HybridMemory, name: str) -> None:
    """Set one kind of memory to what it is before the first token.

    The kind is the state tensors called `name`, or all keys, values, latents, rotary keys or keys of indexes.
    """
    cleared: list[tuple[BlockPool, Field, float]] = []
    part, attention = slice(None), memory.spec.of_kind("attention")
    for group in memory.counters.inventory().groups:
        for pool, layout in group.pools:
            if group.name == "recurrence" and pool.name == "states":
                states = [state for _, spec in group.members for state in spec.states]
                found = zip(states, layout.fields, strict=True)
                cleared += [(pool, field, state.initial) for state, field in found if state.name == name]
            elif "attention" in group.name and name in ("keys", "values"):
                cleared += [(pool, field, 0.0) for field in layout.fields[name == "values" :: 2]]
            elif group.name.startswith("index ") or group.name == "index":
                cleared += [(pool, field, 0.0) for field in layout.fields if name == "index"]
            elif "attention" in group.name and name in ("latents", "rotary keys"):
                (n_latent,) = {spec.value_dim for _, spec in attention}
                part = slice(n_latent) if name == "latents" else slice(n_latent, None)
                cleared += [(pool, field, 0.0) for field in layout.fields]
    assert cleared
    for pool, field, initial in cleared:
        flat, blocks = store_of(memory).flat(field), pool.addresses[pool.counts > 0]
        for address in (blocks // field.dtype.itemsize).tolist():
            flat[address : address + field.n_elements].view(field.shape)[..., part] = initial
