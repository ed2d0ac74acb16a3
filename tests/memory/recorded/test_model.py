"""Recorded and replayed steps on the CPU are compared with steps that run the same model."""

from __future__ import annotations

import gc
import random
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int64
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Sequence, Step
from hybridmem.memory.blocks.staging import current_watch
from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels.cpu.activation_planner import ActivationPlanner
from hybridmem.memory.kernels.cpu.recording import Recording
from hybridmem.memory.recorded import RecordedModel, run_recorded
from hybridmem.models.layers.decoder import HIDDEN_STATES
from tests.extent import few_cases, one_in, only_in_long, pick
from tests.subjects import IS_FULL, SUBJECTS, Subject, make_subject
from tests.toy import VOCAB, Toy

HAS_EXPERTS = (
    "jamba", "deepseek", "granite-moe", "lfm2-moe", "experts-in-groups", "of-four-experts", "of-three-experts",
    "nemotron-h", "bailing-hybrid", "kimi-linear", "lara-mini", "minimax", "zaya",
)  # fmt: skip
"""Models with these in their names count the tokens of experts on the host, so no step of theirs is recorded."""


class Counted:
    """Counts how often a model runs. A replay does not run it."""

    def __init__(self, subject: Subject) -> None:
        self.memory_spec, self.model, self.n_runs = subject.spec, subject.model, 0

    def __call__(self, step: Step) -> Tensor:
        self.n_runs += 1
        return self.model(step)


class Twins:
    """Holds two memories that get the same calls: one whose model runs, and one whose steps are recorded."""

    def __init__(self, subject: Subject, n_sequences: int = 3) -> None:
        self.subject, self.counted = subject, Counted(subject)
        self.memories = [subject.memory(budget="4MiB") for _ in range(2)]
        self.sequences = [[memory.open() for _ in range(n_sequences)] for memory in self.memories]
        self.random = random.Random(0)
        self.n_steps = 0

    def feed(self, counts: dict[int, int], accept: dict[int, int] | None = None) -> None:
        """Feed sequences i counts[i] random tokens each, and compare all bits of the logits."""
        tokens = {i: [self.random.randrange(VOCAB) for _ in range(n)] for i, n in counts.items()}
        logits = []
        for recorded, memory, sequences in zip((False, True), self.memories, self.sequences, strict=True):
            with memory.step({sequences[i]: ids for i, ids in tokens.items()}, outputs="all") as step:
                logits.append(run_recorded(self.counted, step) if recorded else self.subject.model(step))
                step.accept({sequences[i]: n for i, n in (accept or {}).items()})
        assert torch.isfinite(logits[0]).all()
        assert torch.equal(*logits)
        self.n_steps += 1

    def each(self) -> Iterator[tuple[HybridMemory, list[Sequence]]]:
        return zip(self.memories, self.sequences, strict=True)

    def check(self) -> None:
        for memory in self.memories:
            memory.check()


FEW = (
    *("toy", "toy replay", "toy-window", "toy bfloat16", "toy-quest", "toy-h2o", "mamba", "jamba int8"),
    *("family:kimi_delta", "family:rg_lru", "family:rwkv4", "family:gated_delta defer", "family:mamba1 defer"),
    *("model:bamba", "model:bamba defer", "model:gemma3", "model:lfm2", "model:mamba2", "model:qwen3.5-biases"),
    *("model:rwkv7", "model:zamba2"),
)
"""The subjects that the long form tests: each makes calls that the others do not."""


@few_cases
@pytest.mark.parametrize("name", SUBJECTS if IS_FULL else one_in(2, FEW))
def test_replays_are_the_steps_they_stand_for(name: str, tmp_path: Path) -> None:
    """Steps have one token or several, with changing other sequences.

    Between them come rollbacks, forks and drafts.
    """
    twins = Twins(make_subject(name, tmp_path))
    twins.feed({0: 9, 1: 4, 2: 1})
    for _ in range(pick(20, 40)):
        twins.feed({0: 1, 1: 1, 2: 1})
    n_before, twins.n_steps = twins.counted.n_runs, 0
    for round_ in range(6):
        for _ in range(4):
            twins.feed({0: 1, 1: 1, 2: 1})
        if round_ % 2:
            twins.feed({0: 3, 1: 3}, accept={0: 1, 1: 2})
        for memory, sequences in twins.each():
            memory.rollback(sequences[0], to=sequences[0].length - 2)
            if round_ == 3:
                memory.close(sequences[1])
                sequences[1] = memory.fork(sequences[0])
        twins.check()
    is_replayed = twins.counted.n_runs - n_before < twins.n_steps
    if twins.subject.policy is None and twins.subject.storage is None:
        assert is_replayed != any(part in name for part in HAS_EXPERTS)


@only_in_long
def test_memory_and_model_are_freed_with_what_was_recorded() -> None:
    model = Toy()
    memory = HybridMemory(model.memory_spec, "1MiB")
    step_on(model, memory, memory.open(), 10)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    gone_memory = weakref.ref(memory)
    del memory
    gc.collect()
    assert gone_memory() is None


def step_on(model: object, memory: HybridMemory, sequence: Sequence, n_steps: int, **notes: object) -> list[Tensor]:
    logits = []
    for token in range(n_steps):
        with memory.step({sequence: token % VOCAB}) as step:
            step.notes.update(notes)
            logits.append(run_recorded(model, step))  # type: ignore[arg-type]
    return logits


class Attends:
    """Attends to rows of a table, and multiplies them by what `factor` returns for a step."""

    def __init__(self) -> None:
        self.memory_spec = MemorySpec(((AttentionSpec(3, 1, 16),),), VOCAB)
        self.table = torch.randn(VOCAB, 80, generator=torch.Generator().manual_seed(1))
        self.n_runs = 0

    def factor(self, step: Step, rows: Tensor) -> Tensor | float:
        return 1.0

    def __call__(self, step: Step) -> Tensor:
        self.n_runs += 1
        rows = self.table[step.token_ids]
        q, k, v = (rows * self.factor(step, rows)).split([48, 16, 16], dim=-1)
        y = step.attend(0, q.reshape(-1, 3, 16), k.reshape(-1, 1, 16), v.reshape(-1, 1, 16))
        return step.select(y.flatten(1))


class Counts(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(self.n_runs)


class CountsByTens(Attends):
    """Makes a tensor from a number that two successive steps have in common."""

    def factor(self, step: Step, rows: Tensor) -> Tensor:
        return torch.tensor(float(self.n_runs // 10))


class Lists(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(sum(step.token_ids.tolist()))


class Arrays(Attends):
    """Switches at a position, as scaled rotary angles do."""

    def factor(self, step: Step, rows: Tensor) -> float:
        return 2.0 if step.positions.numpy().max() >= 20 else 1.0


class Converts(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(np.asarray(step.positions).sum())


class Shares(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(np.from_dlpack(step.positions).sum())


class Points(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(c_int64.from_address(step.positions.data_ptr()).value)


class Stores(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(step.positions.untyped_storage()[step.positions.storage_offset() * 8])


class Gathers(Attends):
    def factor(self, step: Step, rows: Tensor) -> Tensor:
        return torch.tensor([step.positions[0], step.token_ids[0]]).sum()


class Splits(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(len(torch.arange(40).tensor_split(step.positions)[0]))


class Asks(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return float(step.sequences[0].length)


class Items(Attends):
    def factor(self, step: Step, rows: Tensor) -> float:
        return 2.0 if bool(rows[0, 0] > 0) else 3.0


class Masks(Attends):
    def factor(self, step: Step, rows: Tensor) -> Tensor:
        return rows[rows > 0].mean()


@few_cases
@pytest.mark.parametrize(
    "kind",
    [
        *(Counts, CountsByTens, Lists, Items, Masks, Arrays, Converts, Shares, Points, Stores, Gathers, Splits, Asks),
    ],
)
def test_what_python_knows_is_not_replayed(kind: type[Attends]) -> None:
    """Such values are numbers on the host, and shapes that depend on numbers. Each of these steps runs."""
    expected, model = kind(), kind()
    memories = [HybridMemory(model.memory_spec, "1MiB", page_tokens=8, poison=True) for _ in range(2)]
    found = step_on(model, memories[0], memories[0].open(), 30)
    sequence = memories[1].open()
    for token, logits in enumerate(found):
        with memories[1].step({sequence: token % VOCAB}) as step:
            assert torch.equal(expected(step), logits)
    assert model.n_runs == 30


class Prepares(Attends):
    """Prepares an argument again in the steps of the given numbers, as products do."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.prepared = at, torch.ones(80)

    def factor(self, step: Step, rows: Tensor) -> Tensor:
        if self.n_runs in self.at:
            self.prepared = self.prepared.clone()
        return self.prepared


@pytest.mark.parametrize(("at", "n_runs"), [((), 7), ((7,), 13), ((7, 13), 19), ((7, 13, 19), 60)])
def test_two_steps_that_differ_once_are_recorded_again(at: tuple[int, ...], n_runs: int) -> None:
    """An argument was prepared anew between the two recordings.

    That is no reason to run all later steps.
    """
    model = Prepares(*at)
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=64)
    step_on(model, memory, memory.open(), 60)
    assert model.n_runs == n_runs


def test_weights_may_change_in_place_and_threads_in_number() -> None:
    model = Attends()
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=8)
    step_on(model, memory, memory.open(), 10)
    n_runs = model.n_runs
    assert n_runs == 7, "one before layouts are wanted, four of this one, and two that are recorded"
    model.table *= 2
    sequence = memory.open()
    found = step_on(model, memory, sequence, 10)[-1]
    assert model.n_runs == n_runs
    (expected,) = (memory.run(model, {memory.open(): list(range(10))}),)
    assert expected is not None and torch.allclose(found, expected, atol=1e-4)
    n_runs = model.n_runs
    n_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads + 1)
        assert torch.isfinite(step_on(model, memory, sequence, 1)[0]).all()
    finally:
        torch.set_num_threads(n_threads)
    assert model.n_runs == n_runs + 1, "with another number of threads it is another recording"


def in_turns(model: Attends, memory: HybridMemory, n_steps: int, *, most: int = 64) -> list[int]:
    """Feed one sequence and two sequences in turn. Return how often the model ran for each."""
    a, b = memory.open(), memory.open()
    n_runs = [0, 0]
    for token in range(n_steps):
        before = model.n_runs
        with memory.step({a: token % VOCAB, b: token % VOCAB} if token % 2 else {a: token % VOCAB}) as step:
            run_recorded(model, step, most=most)
        n_runs[token % 2] += model.n_runs - before
    return n_runs


def test_recordings_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layouts come in turn, and one of them is replayed.

    A recording that has not been used for long leaves its place.
    """
    model = Attends()
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=8)
    assert in_turns(model, memory, 40, most=1) == [20, 6]
    monkeypatch.setattr("hybridmem.memory.recorded.kept._IDLE_STEPS", 10)
    a, b, n_runs = memory.open(), memory.open(), model.n_runs
    for _ in range(30):
        with memory.step({a: 1, b: 1}) as step:
            run_recorded(model, step, most=1)
    assert model.n_runs - n_runs < 15


def test_a_recording_beyond_the_limit_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops no other recording.

    All recordings together, those in progress included, stay below the limit at all times.
    """
    made, most = list[weakref.ref[Recording]](), 0
    make, add = Recording.__init__, ActivationPlanner.add

    def note(recording: Recording) -> None:
        make(recording)
        made.append(weakref.ref(recording))

    def measure(memory: ActivationPlanner, *tensors: list[Tensor]) -> None:
        nonlocal most
        add(memory, *tensors)
        most = max(most, sum(found.n_bytes for own in made if (found := own()) is not None))

    monkeypatch.setattr(Recording, "__init__", note)
    monkeypatch.setattr(ActivationPlanner, "add", measure)
    model = Attends()
    in_turns(model, HybridMemory(model.memory_spec, "1MiB", page_tokens=8), 20)
    n_needed = most
    for limit, n_runs, n_made in ((n_needed, [8, 6], 4), (n_needed - 1, [8, 60], 4), (n_needed // 8, [60, 60], 2)):
        monkeypatch.setattr("hybridmem.memory.recorded.model._MOST_BYTES", limit)
        model, most = Attends(), 0
        made.clear()
        assert in_turns(model, HybridMemory(model.memory_spec, "1MiB", page_tokens=8), 120) == n_runs
        assert len(made) == n_made and most <= limit


class LeavesOut(Attends):
    """Stands for a model that leaves out its attention from the n-th run on."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n_whole = n

    def __call__(self, step: Step) -> Tensor:
        if self.n_runs < self.n_whole:
            return super().__call__(step)
        self.n_runs += 1
        return step.select(self.table[step.token_ids])


def test_a_layer_that_is_left_out_is_missed_in_replays_as_well() -> None:
    model = LeavesOut(0)
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=8)
    sequence = memory.open()
    for _ in range(12):
        with pytest.raises(StepError, match="before the attention memory"):
            step_on(model, memory, sequence, 1)
    assert not sequence.length


def test_settings_of_torch_are_those_of_the_step() -> None:
    """The settings are autocast, a default dtype and another mode.

    What is replayed was computed under the same settings.
    """

    class Multiplies(Attends):
        def factor(self, step: Step, rows: Tensor) -> Tensor:
            return (rows @ rows.T.contiguous() + torch.ones(1)).float()

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            return found * 2 if function is torch.ones else found

    settings: list[Callable[[], AbstractContextManager[object]]] = [
        nullcontext, lambda: torch.autocast("cpu", torch.bfloat16), Doubles, torch.inference_mode
    ]  # fmt: skip
    model, expected = Multiplies(), Multiplies()
    memories = [HybridMemory(model.memory_spec, "1MiB", page_tokens=8) for _ in range(2)]
    a, b = (memory.open() for memory in memories)
    for setting in (*settings, *reversed(settings)):
        for token in range(10):
            with setting(), memories[0].step({a: token}) as one, memories[1].step({b: token}) as two:
                assert torch.equal(run_recorded(model, one), expected(two)), setting
    assert model.n_runs < expected.n_runs


def test_an_interrupt_leaves_no_mode_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes at every bytecode from the recording's begin to its end, outside of the model."""
    model = Attends()
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=8)
    sequence = memory.open()
    step_on(model, memory, sequence, 5)
    names, count, at = ("recording.py", "staging.py", "model.py", "kept.py"), 0, 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = frame.f_code.co_filename.endswith(names) and "memory" in frame.f_code.co_filename
        if event == "opcode":
            count += 1
            if count == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    places = 0
    # A process in the background ignores this signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        at += 1 + at // 12
        count = 0
        kept = HybridMemory(model.memory_spec, "1MiB", page_tokens=8)
        sequence = kept.open()
        step_on(model, kept, sequence, 5)
        try:
            with kept.step({sequence: 1}) as step:
                sys.settrace(trace)
                try:
                    run_recorded(model, step)
                finally:
                    sys.settrace(None)
        except KeyboardInterrupt:
            places += 1
        else:
            break
        assert not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
        assert current_watch() is None
    signal.signal(signal.SIGINT, before)
    assert places > 20


def test_what_a_dead_recording_left_is_ignored_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt may come while the traces of the first one are removed."""
    model = Attends()
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=8)
    sequence = memory.open()
    step_on(model, memory, sequence, 5)
    made = list[Recording]()
    make = Recording.__init__

    def note(recording: Recording) -> None:
        make(recording)
        made.append(recording)

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "__init__", note)
        patch.setattr(Recording, "_end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step_on(model, memory, sequence, 1)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 1
    torch.ones(4) * 2
    assert not made[0].n_bytes and current_watch() is None
    step_on(model, memory, sequence, 1)
    assert not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def test_a_recorded_model_is_not_recorded_again() -> None:
    """Otherwise the outer recording would lack what the inner one holds."""
    model = Attends()
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=8)
    sequence, outer = memory.open(), RecordedModel(model)
    found = step_on(outer, memory, sequence, 16)
    assert not outer.is_recordable and model.n_runs == 7
    for token, logits in enumerate(step_on(model, memory, memory.open(), 16)):
        assert torch.equal(logits, found[token])


def test_a_step_with_notes_runs(tmp_path: Path) -> None:
    """Notes ask for other results, such as hidden states instead of logits. They are no part of a recording."""
    model = make_subject("model:llama", tmp_path).model
    memory = HybridMemory(model.memory_spec, "1MiB")
    logits = step_on(model, memory, memory.open(), 10)[-1]
    hidden = step_on(model, memory, memory.open(), 10, **{HIDDEN_STATES: True})[-1]
    assert hidden.shape != logits.shape


def test_a_step_that_is_left_by_an_error_changes_nothing(tmp_path: Path) -> None:
    twins = Twins(make_subject("model:mamba2", tmp_path), 2)
    for _ in range(40):
        twins.feed({0: 1, 1: 1})
    n_runs, (memory, sequences) = twins.counted.n_runs, (twins.memories[1], twins.sequences[1])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), memory.step(dict.fromkeys(sequences, 3), outputs="all") as step:
            run_recorded(twins.counted, step)
            raise KeyboardInterrupt
    twins.check()
    twins.feed({0: 1, 1: 1})
    assert twins.counted.n_runs == n_runs, "all of them were replayed"
    # Two steps are open at once, and neither plan may overwrite the other.
    with memory.step({sequences[0]: 3}) as one, memory.step({sequences[1]: 3}) as two:
        found = [run_recorded(twins.counted, one), run_recorded(twins.counted, two)]
    with twins.memories[0].step(dict.fromkeys(twins.sequences[0], 3)) as step:
        assert torch.allclose(twins.subject.model(step), torch.cat(found), atol=1e-4)
