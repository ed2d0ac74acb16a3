"""Steps that are recorded and replayed are compared with steps of plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, RecurrentSpec, StateTensor, Step, StepError
from hybridmem.memory.blocks.staging import current_watch
from hybridmem.memory.eviction import Quest
from hybridmem.memory.kernels.cuda import tiles
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.recorded import RecordedModel
from hybridmem.memory.recurrences import FAMILIES, Fold
from hybridmem.memory.specs import LayerSpec
from hybridmem.memory.state.access import States
from tests.kernels_cuda.recorder import Recorded, Recorder
from tests.subjects import make_subject
from tests.tolerances import assert_split_close
from tests.toy import VOCAB, average, project

N_MODEL, WINDOW = 12, 10


class Hybrid:
    """Has attention, attention over a window, a gated delta rule and a short convolution. Its weights never move."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        attention: list[LayerSpec] = [AttentionSpec(3, 1, 16), AttentionSpec(3, 1, 16, window=WINDOW)]
        examples = [FAMILIES[name].example(generator) for name in ("gated_delta", "short_conv")]
        self._recurrences = [recurrence for _, recurrence in examples]
        self._shapes = [spec.row_shape for spec, _ in examples]
        self._embedding = torch.randn(VOCAB, N_MODEL, generator=generator)
        self._qkv, self._out = (
            torch.randn(80, N_MODEL, generator=generator),
            torch.randn(N_MODEL, 48, generator=generator),
        )
        sizes = [int(torch.Size(shape).numel()) for shape in self._shapes]
        self._rows = [torch.randn(n, N_MODEL, generator=generator) for n in sizes]
        self._mix = torch.randn(N_MODEL, 64, generator=generator)
        self.memory_spec = MemorySpec(
            tuple((m,) for m in [*attention, *(spec for spec, _ in examples)]), VOCAB, model="hybrid"
        )

    def __call__(self, step: Step) -> Tensor:
        step.check_model(self.memory_spec)
        x = self._embedding[step.token_ids] + 0.01 * step.positions[:, None]
        for layer in range(2):
            q, k, v = project(torch.tanh(x), self._qkv).split([48, 16, 16], dim=-1)
            y = step.attend(layer, q.view(-1, 3, 16), k.reshape(-1, 1, 16), v.reshape(-1, 1, 16))
            x = x + torch.tanh(project(y.flatten(1), self._out))
        for layer, recurrence in enumerate(self._recurrences):
            rows = torch.tanh(project(x, self._rows[layer])).reshape(len(x), *self._shapes[layer])
            y = step.recur(2 + layer, rows, recurrence).flatten(1)
            x = x + torch.tanh(project(y, self._mix[:, : y.shape[1]]))
        return project(step.select(x), self._embedding)


@pytest.fixture(autouse=True)
def in_the_interpreter(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        pytest.skip("a device records by itself: tests/gpu")
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "triton")
    monkeypatch.setattr(tiles, "SPLIT_ROWS", 16)
    monkeypatch.setattr(tiles, "WHOLE_TILES", 16)


class Twins:
    """Holds two memories that get the same calls: one in plain torch, and one whose model is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_sequences: int) -> None:
        self.plain = Hybrid()
        self.recorder = Recorder(monkeypatch)
        self.recorded = RecordedModel(self.plain, record=self.recorder)
        self.memories = []
        for kernels in ("reference", "triton"):
            monkeypatch.setenv("HYBRID_MEMORY_KERNELS", kernels)
            memory = HybridMemory(
                self.plain.memory_spec, "4MiB", rollback_window=8, page_tokens=8, fold="defer", poison=True
            )
            self.memories.append(memory)
        self.sequences = [[memory.open() for _ in range(n_sequences)] for memory in self.memories]
        self.generator = torch.Generator().manual_seed(0)

    def feed(self, counts: dict[int, int], accept: dict[int, int] | None = None) -> None:
        tokens = {i: torch.randint(VOCAB, (n,), generator=self.generator).tolist() for i, n in counts.items()}
        logits = []
        for model, memory, sequences in zip((self.plain, self.recorded), self.memories, self.sequences, strict=True):
            with memory.step({sequences[i]: ids for i, ids in tokens.items()}, outputs="all") as step:
                logits.append(model(step))
                step.accept({sequences[i]: n for i, n in (accept or {}).items()})
            memory.check()
        assert logits[0].std() > 1
        assert_split_close(logits[1], logits[0])


def test_replays_are_the_steps_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single tokens are fed while pages fill, rows are split among programs, and windows and bodies move.

    The other sequences of a step change.
    """
    twins = Twins(monkeypatch, 3)
    twins.feed({0: 14, 1: 7, 2: 2})
    for _ in range(6):
        twins.feed({0: 1, 1: 1})
    assert twins.recorder.n_replays >= 2
    for memory, sequences in zip(twins.memories, twins.sequences, strict=True):
        memory.rollback(sequences[0], to=sequences[0].length - 2)
        sequences[1] = memory.fork(sequences[0])
        memory.swap_out(sequences[2])
    n_replays = twins.recorder.n_replays
    for _ in range(3):
        twins.feed({1: 1, 0: 1})
    assert twins.recorder.n_replays > n_replays
    for memory, sequences in zip(twins.memories, twins.sequences, strict=True):
        memory.swap_in(sequences[2])
    twins.feed({2: 1, 0: 1})


def test_drafts_a_step_that_fails_and_two_steps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(monkeypatch, 2)
    twins.feed({0: 9, 1: 4})
    for kept in (1, 3):
        twins.feed({0: 3, 1: 3}, accept={0: kept, 1: 3 - kept})
    (plain, memory), sequences = twins.memories, twins.sequences
    with pytest.raises(KeyboardInterrupt), memory.step({s: [1, 2, 3] for s in sequences[1]}, outputs="all") as step:
        twins.recorded(step)
        raise KeyboardInterrupt
    memory.check()
    twins.feed({0: 3, 1: 3}, accept={0: 2, 1: 0})
    assert twins.recorder.n_replays == 2
    # Neither plan may overwrite the other.
    with memory.step({sequences[1][0]: 3}) as one, memory.step({sequences[1][1]: 3}) as two:
        found = [twins.recorded(one), twins.recorded(two)]
    with plain.step({sequences[0][0]: 3, sequences[0][1]: 3}) as step:
        assert_split_close(torch.cat(found), twins.plain(step))


def test_replays_read_pages_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps have equally many tokens and pages, in host memory or not.

    A recording of one kind does not serve the other.
    """
    spec, weights = AttentionSpec(3, 1, 16), torch.randn(VOCAB, 80, generator=torch.Generator().manual_seed(1))

    def model(step: Step) -> Tensor:
        q, k, v = weights[step.token_ids].split([48, 16, 16], dim=-1)
        return step.select(step.attend(0, q.view(-1, 3, 16), k.reshape(-1, 1, 16), v.reshape(-1, 1, 16)).flatten(1))

    memory = HybridMemory(MemorySpec(((spec,),), VOCAB), "1MiB", page_tokens=8, host_pages="1MiB", poison=True)
    recorder = Recorder(monkeypatch)
    recorded = RecordedModel(model, record=recorder)
    a, b = memory.open(), memory.open()
    memory.run(model, {a: list(range(6)), b: list(range(3, 9))})
    stay = [memory.fork(a), memory.fork(b)]
    n_replays = []
    for move, sequence, n_steps in (
        (memory.to_device, a, 3),
        (memory.to_host, a, 3),
        (memory.to_host, b, 2),
        (memory.to_device, a, 1),
    ):
        move(sequence)
        before = recorder.n_replays
        for token in range(n_steps):
            with memory.step({a: token, b: token + 1}) as step:
                found = recorded(step)
            with memory.step({stay[0]: token, stay[1]: token + 1}) as step:
                assert torch.equal(found, model(step))
            memory.check()
        n_replays.append(recorder.n_replays - before)
    assert n_replays == [1, 1, 0, 1], (
        "all on the device; one of each; all in host memory, which is not recorded; one of each again"
    )


def test_what_cannot_be_recorded_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model waits for the device. Another one treats the beginning of a sequence in another way.

    The host knows where a sequence begins, and a recording does not.
    """
    spec, recurrence = FAMILIES["linear_attention"].example(torch.Generator().manual_seed(1))
    weights = torch.randn(VOCAB, int(torch.Size(spec.row_shape).numel()))

    def waits(step: Step) -> Tensor:
        y = step.recur(0, weights[step.token_ids].view(-1, *spec.row_shape), recurrence)
        return y / y.abs().max().item()

    def looks(step: Step) -> Tensor:
        def look(states: States, rows: Tensor) -> tuple[Tensor, States]:
            return recurrence(states, rows / 2 if (states.begins == 0).any() else rows)

        return step.recur(0, weights[step.token_ids].view(-1, *spec.row_shape), look)

    for model in (waits, looks):
        memory = HybridMemory(MemorySpec(((spec,),), VOCAB), "4MiB", rollback_window=8, fold="defer")
        recorded, sequences = RecordedModel(model, record=Recorder(monkeypatch)), (memory.open(), memory.open())
        for token in range(5):
            with memory.step({sequences[0]: token}) as step:
                expected = model(step)
            with warnings.catch_warnings(record=True) as caught, memory.step({sequences[1]: token}) as step:
                warnings.simplefilter("always")
                assert torch.equal(recorded(step), expected)
            assert [str(w.message)[-60:] for w in caught if "cannot be recorded" not in str(w.message)] == []
            assert len(caught) == (token == 1)
        assert recorded.n_recordings == 0


@pytest.mark.parametrize("name", ["average", "rg_lru"])
def test_recurrences_whose_states_move_are_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some run in plain torch. In one, the first token counts more, and only the device knows which token that is.

    A warning would be an error.
    """
    spec, recurrence = FAMILIES["rg_lru"].example(torch.Generator().manual_seed(1))
    if name == "average":
        means = (StateTensor("mean", (5,)), StateTensor("highest", (5,)))
        spec, recurrence = RecurrentSpec("average", (5,), means), Fold(average)
    weights = torch.randn(VOCAB, *spec.row_shape, generator=torch.Generator().manual_seed(1))

    def model(step: Step) -> Tensor:
        return step.recur(0, weights[step.token_ids], recurrence)

    memory = HybridMemory(MemorySpec(((spec,),), VOCAB), "4MiB", rollback_window=8, fold="replay", poison=True)
    recorder = Recorder(monkeypatch)
    recorded, a, b = RecordedModel(model, record=recorder), memory.open(), memory.open()
    for token in range(14):
        if token == 9:
            a, b = memory.open(), memory.open()
        with memory.step({a: token}) as step:
            expected = model(step)
        with memory.step({b: token}) as step:
            assert torch.equal(recorded(step), expected)
    assert recorder.n_replays > 8


def test_groups_are_chosen_without_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's books decide from how many groups queries choose, so such steps are not recorded.

    Steps that read all groups are recorded. A warning would be an error.
    """
    spec = AttentionSpec(3, 1, 16, policy=Quest(16, recent=1), storage=Quantized(8, group=8))
    weights = torch.randn(VOCAB, 80, generator=torch.Generator().manual_seed(1))

    def model(step: Step) -> Tensor:
        q, k, v = weights[step.token_ids].split([48, 16, 16], dim=-1)
        return step.select(step.attend(0, q.view(-1, 3, 16), k.reshape(-1, 1, 16), v.reshape(-1, 1, 16)).flatten(1))

    memory = HybridMemory(MemorySpec(((spec,),), VOCAB), "1MiB", rollback_window=4, page_tokens=8, poison=True)
    recorder = Recorder(monkeypatch)
    recorded, a, b = RecordedModel(model, record=recorder), memory.open(), memory.open()
    for n_prompt, replays in ((8, True), (30, False)):
        memory.run(model, {s: [t % VOCAB for t in range(n_prompt)] for s in (a, b)})
        before = recorder.n_replays
        for token in range(3):
            with memory.step({a: token}) as step:
                expected = model(step)
            with memory.step({b: token}) as step:
                assert torch.equal(recorded(step), expected)
        assert (recorder.n_replays > before) == replays


def test_what_a_recording_that_failed_left_behind_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles of a step's positions are computed once for all layers.

    A recording that fails later never computes them, so the step must not use its angles.
    """
    subject = make_subject("model:deepseek-v2-three-of-eight-experts-in-groups", tmp_path)
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "triton")
    memory = HybridMemory(
        subject.spec, "4MiB", rollback_window=8, page_tokens=subject.page_tokens, fold="defer", poison=True
    )
    recorded, (a, b) = RecordedModel(subject.model, record=Recorder(monkeypatch)), (memory.open(), memory.open())
    for token in range(3):
        with memory.step({a: token}) as step:
            expected = subject.model(step)
        with warnings.catch_warnings(record=True) as caught, memory.step({b: token}) as step:
            warnings.simplefilter("always")
            assert torch.equal(recorded(step), expected)
        assert len(caught) == (token == 1)
    assert recorded.n_recordings == 0


def test_a_model_is_run_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for replays. Otherwise states would advance twice."""
    twins = Twins(monkeypatch, 2)
    twins.feed({0: 3, 1: 5})
    for _ in range(3):
        twins.feed({0: 1, 1: 1})
    assert twins.recorder.n_replays
    sequences = twins.sequences[1]
    for first in (twins.plain, twins.recorded):
        with (
            pytest.raises(StepError, match="used twice"),
            twins.memories[1].step(dict.fromkeys(sequences, 1), outputs="all") as step,
        ):
            first(step)
            twins.recorded(step)
        twins.memories[1].check()
    twins.feed({0: 1, 1: 1})


def test_a_real_model_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch does not see products that numba compiled, so a recording on a CPU cannot hold them.
    monkeypatch.setattr("hybridmem.models.products.kernels.KERNELS", {})
    subject = make_subject("model:bamba defer", tmp_path)
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "triton")
    recorder = Recorder(monkeypatch)
    logits = []
    for model in (subject.model, RecordedModel(subject.model, record=recorder)):
        memory = HybridMemory(
            subject.spec, "4MiB", rollback_window=8, page_tokens=subject.page_tokens, fold="defer", poison=True
        )
        sequence = memory.open()
        for token in range(4):
            found = memory.run(model, {sequence: token})
            assert found is not None
            logits.append(found)
    assert recorder.n_replays == 2
    assert torch.equal(torch.cat(logits[:4]), torch.cat(logits[4:]))


def test_a_captured_step_counts_what_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays refuse a model that leaves a layer out, too. An interrupt leaves nothing of a capture."""
    spec, weights = AttentionSpec(3, 1, 16), torch.randn(VOCAB, 80, generator=torch.Generator().manual_seed(1))
    layers = [0, 1]

    def model(step: Step) -> Tensor:
        q, k, v = weights[step.token_ids].split([48, 16, 16], dim=-1)
        for layer in layers:
            y = step.attend(layer, q.view(-1, 3, 16), k.reshape(-1, 1, 16), v.reshape(-1, 1, 16))
        return step.select(y.flatten(1))

    memory = HybridMemory(MemorySpec(((spec,), (spec,)), VOCAB), "1MiB", page_tokens=8)
    recorder, sequence, is_interrupted = Recorder(monkeypatch), memory.open(), True

    def record(run: Callable[[], Tensor]) -> Recorded:
        found = recorder(run)
        if is_interrupted:
            raise KeyboardInterrupt
        return found

    recorded = RecordedModel(model, record=record)
    memory.run(recorded, {sequence: 1})
    with pytest.raises(KeyboardInterrupt), memory.step({sequence: 2}) as step:
        recorded(step)
    assert current_watch() is None and not recorded.n_recordings
    is_interrupted = False
    memory.run(recorded, {sequence: 2})
    assert recorded.n_recordings == 1
    with torch.autocast("cpu", torch.bfloat16):
        memory.run(recorded, {sequence: 3})
    assert recorded.n_recordings == 1 and recorder.n_replays == 0, "it is another one within autocast"
    layers, recorded = [0], RecordedModel(model, record=record)
    for _ in range(4):
        with pytest.raises(StepError, match="before the attention memory"), memory.step({sequence: 4}) as step:
            recorded(step)
    assert sequence.length == 3
