"""The tests try HybridMemory at its limits: bad input, bytes as the spec says, dry runs, and what costs nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

import hybridmem.memory as library
from hybridmem.memory import (
    AttentionSpec,
    BatchError,
    HybridMemory,
    HybridMemoryError,
    IntegrityError,
    MemorySpec,
    RecurrentSpec,
    RollbackError,
    Sequence,
    SequenceError,
    SpecError,
    States,
    StateTensor,
    StepError,
)
from hybridmem.memory.build import kernels_of
from hybridmem.memory.eviction import H2O
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.recurrences import FAMILIES, Fold, GatedPool, SSDShape, mamba1_spec, rg_lru_spec, short_conv_spec
from tests.extent import only_in_long
from tests.inside import books, layer_memories
from tests.toy import VOCAB, Toy


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def hybrid(toy: Toy) -> HybridMemory:
    return HybridMemory(toy.memory_spec, "1MiB", rollback_window=4, poison=True)


def feed(memory: HybridMemory, model: Toy, sequence: Sequence, tokens: object) -> torch.Tensor:
    with memory.step({sequence: tokens}) as step:  # type: ignore[dict-item]
        return model(step)


# The tests below give bad input. It must raise a named error with the value and the remedy, and change nothing.


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([], "no tokens"), ([VOCAB], f"token {VOCAB}"), ([0, -3], "token -3"), ([0.5], "0.5"),
        ("hello", "hello"), ([True], "True"),
        ([[1, 2]], "shape"), ([[1], [2, 3]], "ragged"), (torch.zeros(3), "integers"),
        (torch.zeros(2, device="meta"), "meta"),
        (None, "None"), ({1: 2}, "integers"), (np.zeros(0), "no tokens"),
    ],
)  # fmt: skip
def test_bad_tokens(hybrid: HybridMemory, toy: Toy, tokens: object, named: str) -> None:
    good, bad = hybrid.open(), hybrid.open()
    with pytest.raises(BatchError, match=named), hybrid.step({good: [1], bad: tokens}) as step:  # type: ignore[dict-item]
        toy(step)
    hybrid.check()
    assert good.length == bad.length == 0


@pytest.mark.parametrize(
    "tokens", [3, np.int32(3), [3], (3,), np.array([3], np.uint8), torch.tensor([3]), torch.tensor(3), range(3, 4)]
)
def test_good_tokens(hybrid: HybridMemory, toy: Toy, tokens: object) -> None:
    sequence = hybrid.open()
    feed(hybrid, toy, sequence, tokens)
    assert sequence.tokens.tolist() == [3]


def test_bad_requests(hybrid: HybridMemory) -> None:
    a = hybrid.open()
    for requests, named in (
        ({}, "no requests"),
        ([(a, [1]), (a, [2])], "more than one"),
        ([a], "no request"),
        ({"alice": [1]}, "alice"),
    ):
        with pytest.raises(BatchError, match=named):
            hybrid.step(requests)  # type: ignore[arg-type]
    for nonsense in (None, 5):
        with pytest.raises(BatchError, match=str(nonsense)):
            hybrid.step(nonsense)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match=str(nonsense)):
            hybrid.reorder(nonsense)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="'first'"):
        hybrid.step({a: [1]}, outputs="first")  # type: ignore[arg-type]
    for max_tokens in (0, -1, 1.5, True):
        with pytest.raises(BatchError, match="max_tokens"):
            hybrid.run(Toy(), {a: [1]}, max_tokens=max_tokens)  # type: ignore[arg-type]


def test_bad_handles(hybrid: HybridMemory, toy: Toy) -> None:
    a, other = hybrid.open(), HybridMemory(toy.memory_spec, "1MiB")
    stranger = other.open()
    hybrid.close(a)
    calls = (
        lambda s: hybrid.step({s: [1]}), hybrid.fork, hybrid.checkpoint, hybrid.close,
        lambda s: hybrid.rollback(s, to=0), lambda s: hybrid.can_rollback(s, to=0),
        lambda s: hybrid.resume_point(s, to=0), lambda s: hybrid.reorder({s: s}), lambda s: hybrid.run(toy, {s: [1]}),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(SequenceError, match="closed"):
            call(a)
        with pytest.raises(SequenceError, match="another memory"):
            call(stranger)
    for read in (lambda: a.length, lambda: a.tokens, lambda: a.horizon):
        with pytest.raises(SequenceError, match="closed"):
            read()
    assert "closed" in repr(a)
    with pytest.raises(SequenceError, match="no sequence"):
        hybrid.fork(3)  # type: ignore[arg-type]


def test_entering_a_step_looks_again_at_what_making_it_found_usable(hybrid: HybridMemory, toy: Toy) -> None:
    a, b = hybrid.open(), hybrid.open()
    first, second, third = (hybrid.step({a: [1], b: [2]}) for _ in range(3))
    with first:
        with pytest.raises(SequenceError, match="open step"):
            second.__enter__()
        toy(first)
    hybrid.close(b)
    with pytest.raises(SequenceError, match="closed"):
        third.__enter__()
    assert a.length == 1
    hybrid.check()


def test_a_slot_is_reused_and_its_old_handle_stays_closed(hybrid: HybridMemory, toy: Toy) -> None:
    a = hybrid.open()
    feed(hybrid, toy, a, [1, 2, 3])
    hybrid.close(a)
    b = hybrid.open()
    assert b.slot == a.slot
    assert (b.id, b.length) == (a.id + 1, 0)
    with pytest.raises(SequenceError):
        hybrid.fork(a)


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 0}, {"budget": -5}, {"budget": "lots"}, {"budget": 1.5},
        {"budget": 2000}, {"budget": "1KiB"}, {"rollback_window": -1},
        {"rollback_window": 2.5}, {"page_tokens": 0}, {"page_tokens": True}, {"dtype": torch.int32},
        {"budget": 1 << 60},
        {"device": "abacus"}, {"dtype": "float64"},
    ],
)  # fmt: skip
def test_bad_options(toy: Toy, options: dict[str, object]) -> None:
    with pytest.raises(SpecError) as caught:
        HybridMemory(toy.memory_spec, **options)  # type: ignore[arg-type]
    value = str(next(iter(options.values())))
    assert value in str(caught.value).replace(",", "") or value == "1KiB"


def test_a_budget_for_one_sequence_is_named_and_enough(toy: Toy) -> None:
    with pytest.raises(SpecError, match="too small") as caught:
        HybridMemory(toy.memory_spec, 1024)
    needed = int(str(caught.value).rsplit("give it ", 1)[1].split(" ")[0].replace(",", ""))
    memory = HybridMemory(toy.memory_spec, needed)
    sequence = memory.open()
    for i in range(16):
        feed(memory, toy, sequence, [i])
    memory.check()


def test_bad_specs() -> None:
    for make in (
        lambda: AttentionSpec(3, 2, 4), lambda: AttentionSpec(0, 1, 4),
        lambda: MemorySpec(((AttentionSpec(1, 1, 4),) * 2,), 10),
        lambda: MemorySpec((), 0), lambda: RecurrentSpec("x", (0,), ()), lambda: HybridMemory("jamba"),  # type: ignore[arg-type]
        lambda: RecurrentSpec("x", (2,), (StateTensor("a", (1,)), StateTensor("a", (1,)))),
    ):  # fmt: skip
        with pytest.raises(SpecError):
            make()


def test_another_models_memory(toy: Toy) -> None:
    for spec, named in (
        (replace(toy.memory_spec, layers=toy.memory_spec.layers[:1], model="tiny"), "made for tiny, not for toy"),
        (replace(toy.memory_spec, dtype=torch.bfloat16), "bfloat16"),
    ):
        memory = HybridMemory(spec, "1MiB")
        sequence = memory.open()
        with pytest.raises(StepError, match=named), memory.step({sequence: [1]}) as step:
            toy(step)
        memory.check()
        assert sequence.length == 0


def test_that_one_model_fits_lets_no_other_in(toy: Toy) -> None:
    memory = HybridMemory(toy.memory_spec.with_storage(Quantized(8, group=8)), "1MiB", page_tokens=8)
    sequence, other = memory.open(), Toy(recurrent=False)
    for _ in range(2):
        with memory.step({sequence: [1]}) as step:
            toy(step)
        with pytest.raises(StepError, match="not for"), memory.step({sequence: [1]}) as step:
            other(step)
    assert sequence.length == 2


def test_layers_and_steps_that_disagree(hybrid: HybridMemory) -> None:
    sequence = hybrid.open()
    q, kv, rows = torch.zeros(2, 6, 4), torch.zeros(2, 2, 4), torch.zeros(2, 5)
    keep = Fold(lambda state, row: (state, row))
    bad = {
        "shape": lambda step: step.attend(0, q[:1], kv, kv),
        "float64": lambda step: step.attend(0, q.double(), kv, kv),
        "meta": lambda step: step.attend(0, q, kv.to("meta"), kv),
        "scale=0.0": lambda step: step.attend(0, q, kv, kv, scale=0.0),
        "scale=nan": lambda step: step.attend(0, q, kv, kv, scale=math.nan),
        "layer 9": lambda step: step.attend(9, q, kv, kv),
        "0 attention memories": lambda step: step.attend(1, q, kv, kv),
        "picks none": lambda step: step.recur(1, rows, keep),
        "rows have shape": lambda step: step.recur(1, rows[:, :4], keep, name="slow"),
        "rows are": lambda step: step.recur(1, rows.double(), keep, name="slow"),
        "end states": lambda step: step.recur(1, rows, lambda states, rows: (rows, states), name="slow"),
        "end state 'mean'": lambda step: step.recur(
            1, rows, lambda states, rows: (rows, states.end(rows[:1, :2], rows)), name="slow"
        ),
        "twice": lambda step: [step.attend(0, q, kv, kv) for _ in range(2)],
    }
    for named, call in bad.items():
        with pytest.raises(StepError, match=named), hybrid.step({sequence: [1, 2]}) as step:
            call(step)
        hybrid.check()
    assert sequence.length == 0
    step = hybrid.step({sequence: [1, 2]})
    with pytest.raises(StepError, match="not open"):
        step.attend(0, q, kv, kv)


def test_bad_accepts(hybrid: HybridMemory, toy: Toy) -> None:
    a, b = hybrid.open(), hybrid.open()
    with hybrid.step({a: [1, 2, 3]}) as step:
        logits = toy(step)
        for n_tokens in (-1, 4, 1.0, True, None):
            with pytest.raises(BatchError):
                step.accept({a: n_tokens})  # type: ignore[dict-item]
        with pytest.raises(SequenceError):
            step.accept({b: 1})
        with pytest.raises(BatchError, match="rows"):
            step.split(logits[:0])
        step.accept({a: np.int64(2)})
    assert a.tokens.tolist() == [1, 2]


def test_every_error_is_ours() -> None:
    errors = [getattr(library, name) for name in library.__all__ if name.endswith("Error")]
    assert len(errors) == 11
    assert all(issubclass(error, HybridMemoryError) for error in errors)
    assert [name for name in library.__all__ if not hasattr(library, name)] == []


# The tests below count bytes.


def test_bytes_are_what_the_spec_says(toy: Toy) -> None:
    """The test compares pages, states and tails of each sequence, and their sum in the arena."""
    window, page_tokens = 8, 16
    memory = HybridMemory(toy.memory_spec, "1MiB", rollback_window=window, page_tokens=page_tokens)
    a, b = memory.open(), memory.open()
    feed(memory, toy, a, [1] * 40)
    feed(memory, toy, b, [2] * 5)
    usage = memory.usage()
    # Layer 0 has 2 heads of 4 and layer 2 has 1 head of 4, with keys and values in float32. Every field is a multiple
    # of 64 bytes here.
    page_bytes = 2 * page_tokens * (2 * 4 + 1 * 4) * 4
    # There are four tensors of 5 elements, each in 64 bytes, and a 4 x 4 matrix.
    state_bytes = 4 * (64 // 4) * 4 + 4 * 4 * 4
    assert usage.block_bytes == {
        "pages": page_bytes,
        "states": state_bytes,
        "tails": usage.block_bytes["tails"],
    }
    tail_rows = 2 * window - 1 + 1
    row_elements = 5 + 5 + 8
    assert 0 <= usage.block_bytes["tails"] - tail_rows * row_elements * 4 < 3 * 64
    assert usage.by_sequence[a.id].by_kind == {
        "pages": 3 * page_bytes, "states": 2 * state_bytes, "tails": usage.block_bytes["tails"]
    }  # fmt: skip
    assert usage.by_sequence[b.id].by_kind == {
        "pages": page_bytes, "states": state_bytes, "tails": usage.block_bytes["tails"]
    }  # fmt: skip
    assert sum(s.total_bytes for s in usage.by_sequence.values()) == sum(usage.by_kind.values()) == usage.used_bytes
    assert usage.used_bytes + usage.free_bytes == usage.budget_bytes == 1 << 20
    hidden = usage.padding_bytes
    assert hidden == 3 * (4 * (64 - 20)) + 2 * (usage.block_bytes["tails"] - tail_rows * row_elements * 4)


def test_shared_bytes(hybrid: HybridMemory, toy: Toy) -> None:
    a = hybrid.open()
    feed(hybrid, toy, a, [1] * 40)
    alone = hybrid.usage().by_sequence[a.id]
    assert (alone.shared_bytes, alone.private_bytes) == (0, alone.total_bytes)
    fork = hybrid.fork(a)
    both = hybrid.usage().by_sequence
    assert both[a.id].private_bytes == both[fork.id].private_bytes == 0
    hybrid.close(a)
    assert hybrid.usage().by_sequence[fork.id] == replace(alone, id=fork.id)


def test_a_window_costs_rows_not_states() -> None:
    """A Mamba-1 layer has 16 states for each channel, bfloat16 rows and a float32 state.

    To take back 64 tokens costs at most 2.6 states.
    """
    spec = MemorySpec(((mamba1_spec(4096, 16, 4),),), vocab_size=10, dtype=torch.bfloat16, device=torch.device("meta"))
    memory = HybridMemory(spec, "1GiB", rollback_window=64)  # On a device that is no CPU, the default is fold="replay".
    sequence = memory.open()
    memory.run(None, {sequence: [1] * 500})
    usage = memory.usage().by_sequence[sequence.id].by_kind
    state_bytes = memory.usage().block_bytes["states"]
    assert state_bytes == 16 * 4096 * 4 + 3 * 4096 * 2
    assert usage["tails"] / state_bytes <= 2.6
    assert usage["states"] == 2 * state_bytes


DEFERRING, DEFERRING_SHORT, MOVING = SSDShape(4, 64, 1, 64, 4).spec(), mamba1_spec(32, 16, 4), rg_lru_spec(32, 4)


@pytest.mark.parametrize(
    ("specs", "device", "window", "fold"), [
        ((DEFERRING, short_conv_spec(8, 3)), "cuda", 32, "defer"), ((DEFERRING, MOVING), "cuda", 32, "replay"),
        ((), "cuda", 32, "replay"),
        ((DEFERRING,), "meta", 32, "replay"), ((DEFERRING,), "cpu", 32, "keep"),
        # A token takes 10 bytes for each channel, and a state 64.
        ((DEFERRING_SHORT,), "cuda", 32, "replay"), ((DEFERRING_SHORT,), "cuda", 4, "defer"),
    ],
)  # fmt: skip
def test_how_bodies_move_unless_told(specs: tuple[RecurrentSpec, ...], device: str, window: int, fold: str) -> None:
    layers = tuple((replace(spec, name=str(i)),) for i, spec in enumerate(specs)) or ((AttentionSpec(2, 1, 8),),)
    spec = MemorySpec(layers, vocab_size=10, device=torch.device(device))
    assert HybridMemory(spec, "1GiB", rollback_window=window, device="meta").fold == fold


def test_which_kernels_are_used_can_be_asked(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs here, so nothing is compiled."""
    monkeypatch.setattr("hybridmem.memory.build.warm_up", lambda *_: None)
    spec = MemorySpec(((replace(DEFERRING, family="ssd"), AttentionSpec(6, 2, 4)),), vocab_size=10)
    assert set(HybridMemory(spec, "1MiB").kernels().values()) == {"cpu"}
    for dtype in ("bfloat16", "float16"):
        found = HybridMemory(spec, "1MiB", dtype=dtype, state_dtype=dtype).kernels()
        assert set(found.values()) == {"cpu"}, "no dtype that a memory has falls to plain torch"
    for window in (0, 8):
        found = HybridMemory(spec, "1MiB", rollback_window=window, fold="defer").kernels()
        assert set(found.values()) == {"cpu"}, "what stands behind a tail is compiled too"
    found = HybridMemory(toy.memory_spec.with_policy(H2O(9, recent=2)), "1MiB").kernels()
    in_torch = {name for name, kernels in found.items() if kernels.startswith("plain torch")}
    assert in_torch == {"recurrence average", "recurrence delta", "scores and ranks of H2O(9)"}
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")
    assert set(HybridMemory(spec, "1MiB").kernels().values()) == {"plain torch"}


def test_every_family_of_the_library_has_kernels() -> None:
    """A `Fold` runs in plain torch, and is the user's own.

    `gated_pool` has no state that each token changes: it averages all windows of a step at once, in plain torch.
    """
    for family in FAMILIES.values():
        spec, recurrence = family.example(torch.Generator())
        own = not any("recurrence" in name for name in kernels_of(MemorySpec(((spec,),), vocab_size=10), "keep", 8))
        assert own == (not isinstance(recurrence, Fold | GatedPool)), family.name


def test_states_that_must_move_cannot_be_deferred() -> None:
    spec = MemorySpec(((DEFERRING,), (MOVING,)), vocab_size=10, device=torch.device("meta"))
    with pytest.raises(SpecError, match="not for rg_lru"):
        HybridMemory(spec, fold="defer")


def test_deferred_states_are_one_a_sequence() -> None:
    """A sequence has two while its body moves, which is every 16 tokens of a window of 32.

    No other step takes a block.
    """
    spec = MemorySpec(((DEFERRING,),), vocab_size=10, device=torch.device("meta"))
    memory = HybridMemory(spec, "1GiB", rollback_window=32, fold="defer")
    sequence, moved_at = memory.open(), []
    for length in range(1, 100):
        before = memory.usage().by_kind
        with memory.step({sequence: [1]}):
            block, states = memory.usage().block_bytes["states"], memory.usage().by_kind["states"]
        assert states <= 2 * block
        if states > before["states"]:
            moved_at.append(length)
        assert memory.usage().by_kind["states"] == (block if length >= 48 else 0)
    assert moved_at == [48, 64, 80, 96]


@pytest.mark.parametrize("fold", ["keep", "replay"])
def test_decoding_holds_at_most_three_states_and_its_rows(fold: Literal["keep", "replay"]) -> None:
    spec = MemorySpec(((mamba1_spec(256, 16, 4),),) * 3, vocab_size=10, device=torch.device("meta"))
    memory = HybridMemory(spec, "1GiB", rollback_window=32, fold=fold)
    sequence = memory.open()
    most = 0
    for _ in range(200):
        with memory.step({sequence: [1]}):
            usage = memory.usage()
            most = max(most, usage.by_kind["states"])
            assert usage.by_kind["tails"] == usage.block_bytes["tails"]
    assert most == 3 * memory.usage().block_bytes["states"]


def test_layouts_of_real_models_hardly_pad() -> None:
    """The sizes are those of Jamba-1.5-Mini: 4 attention layers and 28 Mamba layers.

    Alignment adds less than 3 %.
    """
    attention, mamba = AttentionSpec(32, 8, 128), mamba1_spec(8192, 16, 4)
    layers = tuple((attention if i % 8 == 4 else mamba,) for i in range(32))
    memory = HybridMemory(MemorySpec(layers, 65536, torch.bfloat16, torch.device("meta")), "80GiB", rollback_window=64)
    for _ in range(50):
        memory.run(None, {memory.open(): [1] * 1000})
    usage = memory.usage()
    assert usage.padding_bytes <= 0.03 * usage.used_bytes
    assert usage.block_bytes["pages"] == 2 * 4 * 16 * 8 * 128 * 2
    memory.check()


# The tests below are about dry runs, slots, and models that remember nothing.


def test_a_dry_run_keeps_the_same_books(toy: Toy) -> None:
    real = HybridMemory(toy.memory_spec, "1MiB", rollback_window=4)
    dry = HybridMemory(toy.memory_spec, "1MiB", rollback_window=4, device="meta")
    for memory, model in ((real, toy), (dry, None)):
        a = memory.open()
        memory.run(model, {a: [1] * 50})
        b = memory.fork(a)
        memory.run(model, {a: [2], b: [3] * 7})
        memory.rollback(b, to=52)
        memory.checkpoint(b)
        memory.check()
    assert real.usage() == dry.usage()
    with pytest.raises(StepError, match="dry run"), dry.step({dry.open(): [1]}) as step:
        step.attend(0, *[torch.zeros(1)] * 3)
    with pytest.raises(StepError, match="model=None"):
        real.run(None, {real.open(): [1]})


@only_in_long
def test_thousands_of_open_sequences() -> None:
    spec = replace(Toy().memory_spec, device=torch.device("meta"))
    memory = HybridMemory(spec, "1GiB", rollback_window=4)
    sequences = [memory.open() for _ in range(5000)]
    memory.run(None, {s: [1] * (1 + i % 9) for i, s in enumerate(sequences)}, max_tokens=4000)
    chosen = sequences[::37][::-1]
    with memory.step({s: [2] for s in chosen}):
        pass
    assert [s.length for s in chosen] == [2 + sequences.index(s) % 9 for s in chosen]
    memory.check()
    for sequence in sequences:
        memory.close(sequence)
    assert memory.usage().used_bytes == 0


def test_a_model_that_remembers_nothing() -> None:
    memory = HybridMemory(MemorySpec(((), ()), vocab_size=5), 1)
    sequence = memory.open()
    with memory.step({sequence: [1, 2, 3]}, outputs="all") as step:
        assert step.select(step.token_ids).tolist() == [1, 2, 3]
    memory.rollback(sequence, to=1)
    assert sequence.tokens.tolist() == [1]
    memory.check()


def test_positions_and_packing(hybrid: HybridMemory, toy: Toy) -> None:
    a, b = hybrid.open(), hybrid.open()
    feed(hybrid, toy, a, [1, 2, 3])
    with hybrid.step({b: [4, 5], a: [6]}) as step:
        assert step.token_ids.tolist() == [6, 4, 5]
        assert step.positions.tolist() == [3, 0, 1]
        assert step.cu_seqlens.tolist() == [0, 1, 3]
        assert step.sequences == [b, a]
        toy(step)


# The tests below show that check() finds faults.


def test_check_finds_a_lost_and_a_doubled_reference(hybrid: HybridMemory, toy: Toy) -> None:
    a = hybrid.open()
    feed(hybrid, toy, a, [1] * 40)
    for pool in [pool for layers in layer_memories(hybrid).values() for pool, _ in layers.pools]:
        for change in (1, -1):
            pool.counts[0] += change
            with pytest.raises(IntegrityError):
                hybrid.check()
            pool.counts[0] -= change
        hybrid.check()
    books(hybrid)["lengths"][a.slot] += 16
    with pytest.raises(IntegrityError):
        hybrid.check()


def test_views(hybrid: HybridMemory, toy: Toy) -> None:
    assert "0 sequences" in repr(hybrid)
    a = hybrid.open()
    feed(hybrid, toy, a, [1] * 40)
    hybrid.checkpoint(a)
    assert "toy" in repr(hybrid)
    assert "40 tokens" in repr(a)
    html = hybrid._repr_html_()
    assert html.count("<tr>") == 1 + 3 + 1 + 1 + 2, "kinds with their sum, sequences"
    assert "checkpoint" in html
    hostile = HybridMemory(replace(toy.memory_spec, model="<script>"), "1MiB")
    assert "<script>" not in hostile._repr_html_()
    for _ in range(60):
        hybrid.open()
    assert "and 12 more" in hybrid._repr_html_()


def test_rollback_error_carries_its_numbers() -> None:
    error = RollbackError("no", to=3, horizon=5, resume_at=0)
    assert (error.to, error.horizon, error.resume_at) == (3, 5, 0)


# The tests below are about how bodies move.


def test_a_fold_that_does_not_exist(toy: Toy) -> None:
    with pytest.raises(SpecError, match=r"'repaly'.*'keep', 'replay'"):
        HybridMemory(toy.memory_spec, "1MiB", fold="repaly")  # type: ignore[arg-type]


def test_many_sequences_that_were_never_fed_go_back_to_nothing(toy: Toy) -> None:
    memory = HybridMemory(toy.memory_spec, "1MiB")
    for sequence in [memory.open() for _ in range(40)]:
        memory.rollback(sequence, to=0)
        assert sequence.length == 0
    memory.check()


def test_kept_states_make_replay_rare(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """If heads are kept, decoding runs every row once.

    With replay, rows that bodies pass run again.
    """
    rows: list[int] = []
    plain = Fold.__call__

    def counting(self: Fold, states: States, own_rows: torch.Tensor) -> tuple[torch.Tensor, States]:
        rows.append(len(own_rows))
        return plain(self, states, own_rows)

    monkeypatch.setattr(Fold, "__call__", counting)
    n_recurrences = sum(isinstance(m, RecurrentSpec) for layer in toy.memory_spec.layers for m in layer)
    for fold, n_replayed in (("keep", 0), ("replay", 56)):
        memory = HybridMemory(toy.memory_spec, "1MiB", rollback_window=8, fold=fold)  # type: ignore[arg-type]
        sequence = memory.open()
        rows.clear()
        feed(memory, toy, sequence, [1] * 21)
        for _ in range(64):
            feed(memory, toy, sequence, [2])
        assert sum(rows) >= n_recurrences * (21 + 64 + n_replayed)
        assert (sum(rows) == n_recurrences * (21 + 64)) == (fold == "keep")


# The tests below are about dtypes of states.


def test_state_dtype_halves_the_states_and_is_checked() -> None:
    spec = Toy().memory_spec
    plain, halved = (HybridMemory(spec, "1MiB", state_dtype=dtype) for dtype in (None, torch.bfloat16))
    large = MemorySpec(((mamba1_spec(256, 16, 4),),), 9)
    sizes = [HybridMemory(large, "1MiB", state_dtype=dtype).usage().block_bytes for dtype in (None, torch.bfloat16)]
    assert sizes[0]["states"] - sizes[1]["states"] == 256 * 16 * 2, (
        "the state itself; the convolution's rows are the model's"
    )
    assert sizes[0]["tails"] == sizes[1]["tails"]
    with halved.step({halved.open(): [1, 2, 3]}) as step:
        rounded = Toy()(step)  # A model fits its memory whatever the dtype of the states.
    with plain.step({plain.open(): [1, 2, 3]}) as step:
        exact = Toy()(step)
    assert torch.equal(rounded, exact), "within one step nothing is rounded"
    for memory in (halved, plain):
        sequence = memory.open()
        rows = []
        for token in (1, 2, 3):
            with memory.step({sequence: token}) as step:
                rows.append(Toy()(step))
        if memory is plain:
            assert torch.allclose(rows[-1], exact, atol=1e-5)
        else:
            assert 1e-5 < float((rows[-1] - exact).abs().max()) < 0.2, "each step's end is rounded, and only that"
    for wrong in (torch.int8, "int8", "fp8", torch.float64):
        with pytest.raises(SpecError, match="state_dtype"):
            HybridMemory(spec, "1MiB", state_dtype=wrong)  # type: ignore[arg-type]


# The tests below are about attention windows.


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
@pytest.mark.parametrize("window, rollback_window", [(1, 0), (5, 3), (40, 8)])
def test_pages_leave_with_the_window(window: int, rollback_window: int, page_tokens: int) -> None:
    """However long the sequence is, its pages hold the window and what a rollback may need.

    The ends of two pages are added.
    """
    spec = MemorySpec(
        ((AttentionSpec(2, 1, 8, window=window),), (AttentionSpec(2, 1, 8),)), 9, device=torch.device("meta")
    )
    memory = HybridMemory(spec, "10MiB", rollback_window=rollback_window, page_tokens=page_tokens)
    sequence = memory.open()
    for n_tokens in (1, 300, 1, 1, 37):
        with memory.step({sequence: [1] * n_tokens}):
            pass
        memory.check()
    usage = memory.usage()
    n_pages = usage.by_kind[f"pages over {window}"] // usage.block_bytes[f"pages over {window}"]
    assert n_pages <= (window + rollback_window - 2) // page_tokens + 2
    assert usage.by_kind["pages"] // usage.block_bytes["pages"] == -(-340 // page_tokens)
    assert sequence.horizon <= 340 - rollback_window
    fork, mark = memory.fork(sequence), memory.checkpoint(sequence)
    memory.rollback(sequence, to=sequence.horizon)
    memory.check()
    with pytest.raises(RollbackError):
        memory.rollback(sequence, to=sequence.horizon - 1)
    with memory.step({sequence: [1] * 100, fork: [2]}):
        pass
    memory.rollback(sequence, to=mark)
    memory.check()
    for handle in (sequence, fork, mark):
        memory.close(handle)
    assert memory.usage().used_bytes == 0
    memory.check()


def test_window_0_is_refused() -> None:
    for window in (0, -3, 2.5, True):
        with pytest.raises(SpecError, match="window"):
            AttentionSpec(1, 1, 4, window=window)  # type: ignore[arg-type]


def test_a_model_that_remembers_nothing_runs_through_the_same_step() -> None:
    """An encoder or an embedding model remembers nothing.

    Only lengths and tokens are kept, and no byte of the budget.
    """
    spec = MemorySpec(((), ()), 9)
    memory = HybridMemory(spec, 1)
    a, b = memory.open(), memory.open()
    with memory.step({a: [1, 2, 3], b: [4]}, outputs="all") as step:
        rows = step.split(step.select(step.token_ids.float()[:, None]))
    assert [r.flatten().tolist() for r in rows] == [[1.0, 2.0, 3.0], [4.0]]
    with memory.step({b: [5], a: [6, 7, 8]}, outputs=(1, 2)) as step:
        rows = step.split(step.select(step.token_ids.float()[:, None]))
    assert [r.flatten().tolist() for r in rows] == [[5.0], [7.0, 8.0]], "only so many last tokens of each"
    memory.rollback(a, to=1)
    assert a.tokens.tolist() == [1] and memory.usage().used_bytes == 0 and a.horizon == 0
    memory.check()
