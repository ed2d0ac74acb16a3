"""Plans are compared with memories on "meta" that are driven in another way.

Both say to the byte what is held, and how many sequences fit.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridmem.memory import AttentionSpec, CapacityError, CrossAttentionSpec, HybridMemory, MemorySpec, SpecError
from hybridmem.memory.capacity import plan_sequence
from hybridmem.memory.eviction import H2O, PyramidKV, Quest, Recent, SnapKV
from hybridmem.memory.quantization import Float8, Quantized
from hybridmem.memory.recurrences import DeltaRuleShape, SSDShape, mamba1_spec, rwkv7_spec
from hybridmem.memory.specs import LayerSpec
from tests.extent import few_cases

ROOM = 1 << 50
FULL = AttentionSpec(8, 2, 64)
NARROW = AttentionSpec(8, 2, 64, name="narrow", window=300)
LATENT = AttentionSpec(8, 1, 96, value_dim=64)
MAMBA = mamba1_spec(256, 16, 4)
SSD = SSDShape(n_heads=8, head_dim=32, n_groups=1, d_state=64, d_conv=4).spec()
DELTA = DeltaRuleShape(n_heads=4, n_key_heads=2, key_dim=32, value_dim=32, d_conv=4).spec()
RWKV = rwkv7_spec(4, 32)


def spec_of(*layers: LayerSpec, device: str = "cuda") -> MemorySpec:
    return MemorySpec(tuple((m,) for m in layers), 1000, torch.bfloat16, torch.device(device))


HYBRID = spec_of(MAMBA, FULL, MAMBA, FULL, MAMBA)
SPECS = {
    "dense": spec_of(FULL, FULL),
    "latent": spec_of(LATENT, LATENT),
    "window": spec_of(NARROW, FULL, NARROW),
    "mamba": spec_of(MAMBA, MAMBA),
    "mamba on a cpu": spec_of(MAMBA, MAMBA, device="cpu"),
    "hybrid": HYBRID,
    "hybrid on a cpu": spec_of(MAMBA, FULL, SSD, FULL, device="cpu"),
    "ssd": spec_of(SSD, FULL, NARROW),
    "delta": spec_of(DELTA, DELTA, DELTA, FULL),
    "rwkv": spec_of(RWKV, RWKV),
    "recent": HYBRID.with_policy(Recent(100)),
    "h2o": HYBRID.with_policy(H2O(100)),
    "pyramid": HYBRID.with_policy(PyramidKV(100)),
    "quest": HYBRID.with_policy(Quest(128)),
    "8 bits": HYBRID.with_storage(Quantized(8)),
    "4 bits in large groups": spec_of(MAMBA, FULL, device="cpu").with_storage(Quantized(4, group=128)),
    "2 bits": HYBRID.with_storage(Quantized(2)),
    "float8": HYBRID.with_storage(Float8()),
    "both": HYBRID.with_policy(SnapKV(100)).with_storage(Quantized(4)),
    "mixed": HYBRID.with_policy(H2O(64), layers=[1]).with_storage(Float8(), layers=[3]),
}
WINDOWS = [0, 1, 40, 64, 100]


def drive(memory: HybridMemory, *sizes: int) -> tuple[int, int]:
    """Feed a new sequence in steps of these sizes.

    Return the most bytes held after a step, and the most used in one.
    """
    sequence, held, in_step = memory.open(), 0, 0
    for size in sizes:
        with memory.step({sequence: np.ones(size, np.int64)}):
            in_step = max(in_step, ROOM - memory.free_bytes)
        held = max(held, ROOM - memory.free_bytes)
    return held, in_step


def chunks(n_tokens: int, size: int) -> list[int]:
    return [min(size, n_tokens - start) for start in range(0, n_tokens, size)]


@few_cases
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("n_tokens", [17, 600])
def test_a_plan_is_what_a_memory_holds_that_is_fed(name: str, n_tokens: int) -> None:
    spec, window = SPECS[name], WINDOWS[(len(name) + n_tokens) % len(WINDOWS)]
    plan = plan_sequence(spec, n_tokens, step_tokens=128, rollback_window=window)

    def make() -> HybridMemory:
        return HybridMemory(spec, ROOM, device="meta", rollback_window=window)

    token_by_token, _ = drive(make(), *[1] * n_tokens)
    by_steps, in_step = drive(make(), *chunks(n_tokens, 128))
    assert plan.most_bytes == token_by_token >= by_steps
    assert plan.step_bytes == max(0, in_step - plan.most_bytes)
    memory = make()
    memory.run(None, {memory.open(): [1] * plan.most_at})
    usage = memory.usage()
    assert (usage.used_bytes, usage.by_kind, usage.block_bytes) == (plan.most_bytes, plan.by_kind, plan.block_bytes)


@pytest.mark.parametrize("window", WINDOWS)
def test_what_folds_keep_aside_is_one_more_window(window: int) -> None:
    """A policy keeps evicted rows aside, in whole folds.

    A storage keeps as many exact rows, in pages beside their rounded rows.
    """
    h2o, both, storage = (
        plan_sequence(spec, 600, rollback_window=window).by_kind
        for spec in (
            spec_of(FULL).with_policy(H2O(64, every=32)),
            spec_of(FULL).with_policy(H2O(64, every=32)).with_storage(Quantized(4, group=32)),
            spec_of(FULL).with_storage(Quantized(4, group=64)),
        )
    )
    row = 2 * FULL.n_kv_heads * FULL.head_dim * 2  # Keys and values are in bfloat16.
    kept = 4 * 2 * FULL.n_kv_heads  # Each head adds a position and a score.
    aside = -(-window // 32) * 32
    assert h2o["states of attention 0, H2O(64)"] == (64 + aside) * (row + kept)
    tails = "tails of attention 0, H2O(64)"
    of_tail = row + FULL.n_query_heads * FULL.head_dim * 2  # Queries are added, because they score rows.
    n_more = (both[f"{tails} of 4 bits"] - h2o[tails]) / of_tail
    assert aside <= n_more <= aside + aside / 32 + 1  # Rings have a few rows to spare.
    assert storage["exact pages of attention 0, 4 bits"] <= (64 + 2 * window + 16) * row


@few_cases
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("spare", ["none", "all but a line"])
def test_as_many_fit_as_planned_and_no_more(name: str, spare: str) -> None:
    """Each sequence is fed while the others are swapped out.

    Then they come back, one after the other.
    """
    plan = plan_sequence(SPECS[name], 700)
    budget = 5 * plan.most_bytes + {"none": 0, "all but a line": plan.most_bytes - 64}[spare]
    n_planned = plan.fit_into(budget)
    assert n_planned == 5
    memory = HybridMemory(SPECS[name], budget, device="meta")
    sequences = [memory.open() for _ in range(n_planned + 1)]
    for sequence in sequences:
        memory.run(None, {sequence: [1] * plan.most_at})
        memory.swap_out(sequence)
    for sequence in sequences[:-1]:
        memory.swap_in(sequence)
    with pytest.raises(CapacityError):
        memory.swap_in(sequences[-1])
    memory.check()


@pytest.mark.parametrize("name", ["dense", "mamba", "hybrid", "delta"])
def test_sequences_fit_that_are_fed_one_after_the_other(name: str) -> None:
    """No sequence is swapped out, as in real use.

    The steps of the last one find room in what is left, and the next one does not fit.
    """
    plan = plan_sequence(SPECS[name], 700)
    budget = 6 * plan.most_bytes - 64
    memory = HybridMemory(SPECS[name], budget, device="meta")
    assert plan.fit_into(budget) == 5 and plan.step_bytes < plan.most_bytes
    for _ in range(5):
        memory.run(None, {memory.open(): [1] * plan.most_at})
    with pytest.raises(CapacityError):
        memory.run(None, {memory.open(): [1] * plan.most_at})


def test_no_sequence_fits_where_none_can_be_fed() -> None:
    plan = plan_sequence(HYBRID, 700)
    least = plan.most_bytes + plan.step_bytes
    assert [plan.fit_into(n) for n in (64, least - 64, least)] == [0, 0, least // plan.most_bytes]
    short = plan_sequence(HYBRID, 1)
    assert short.fit_into(short.least_bytes - 64) == 0 < short.fit_into(short.least_bytes)
    with pytest.raises(SpecError, match="too small"):
        HybridMemory(HYBRID, short.least_bytes - 64, device="meta")


def test_encoders_are_counted_where_there_are_some() -> None:
    spec = spec_of(FULL, CrossAttentionSpec(8, 2, 64))
    plan = plan_sequence(spec, 100, encoder_tokens=50)
    assert plan.by_kind == {"pages": 7 * 16 * 2 * 2 * 64 * 2, "encoder pages": 4 * 16 * 2 * 2 * 64 * 2}
    with pytest.raises(SpecError, match="how many rows"):
        plan_sequence(spec, 100)
    with pytest.raises(SpecError, match="no encoder"):
        plan_sequence(HYBRID, 100, encoder_tokens=50)


@pytest.mark.parametrize(
    "wrong",
    [{"n_tokens": 0}, {"n_tokens": 1.5}, {"n_tokens": 9, "step_tokens": 0}, {"n_tokens": 9, "rollback_window": -1}],
)
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(SpecError, match=list(wrong)[-1]):
        plan_sequence(HYBRID, **wrong)
