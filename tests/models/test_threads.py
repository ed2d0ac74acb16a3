"""One model runs in several threads with a memory in each. What a step computes stays in that step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem import models
from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel, load_model
from tests.extent import few_cases, one_in
from tests.models.checkpoints import CONFIGS, draw_tokens, write_checkpoint

FAMILIES = (
    "bailing-hybrid", "bamba", "deepseek-v2", "deepseek-v3", "falcon-h1", "falcon-mamba", "gemma2", "gemma3",
    "gpt-oss", "granite-moe-hybrid", "inkling-log-scale", "inkling2", "inkling2-loop", "jamba", "kimi-linear",
    "lara-mini", "lfm2-moe", "lfm3", "minimax", "olmo-hybrid", "olmo3", "llama",
    "mamba", "mamba2", "nemotron-h", "qwen3-next", "qwen3.5-moe", "qwen4-exp", "recurrent-gemma", "rwkv", "rwkv7",
    "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip
THAT_NOTE = {"llama": {"num_hidden_layers": 2}, "rwkv7": {"num_hidden_layers": 2}}
"""Families whose layers leave something for later layers, in small."""


class Talk:
    """Holds a sequence in a memory of its own, and can compute a next step that leaves the sequence where it is."""

    def __init__(self, model: LanguageModel, n_tokens: int, *next_tokens: int) -> None:
        self._model, self._tokens = model, next_tokens
        self._memory = HybridMemory(model.memory_spec, "2MiB", page_tokens=4)
        self._sequence = self._memory.open()
        self._memory.run(model, {self._sequence: draw_tokens(n_tokens)})

    def __call__(self) -> Tensor:
        with self._memory.step({self._sequence: self._tokens}, outputs="all") as step:
            logits = self._model(step)
            step.accept({self._sequence: 0})
        return logits


def make_model(name: str, folder: Path, **options: Any) -> LanguageModel:
    config = CONFIGS[name]()
    for option, value in options.items():
        setattr(config, option, value)
    return load_model(write_checkpoint(folder, config))


def attributes(thing: object, path: str = "model") -> dict[str, object]:
    """Return all that a model holds, by the place that holds it."""
    found: dict[str, object] = {}
    todo, seen = [(path, thing)], set[int]()
    while todo:
        path, thing = todo.pop()
        found[path] = thing
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping):
            todo += [(f"{path}[{key}]", value) for key, value in thing.items()]
        elif isinstance(thing, list | tuple):
            todo += [(f"{path}[{i}]", value) for i, value in enumerate(thing)]
        elif type(thing).__module__.startswith(("hybridmem.models.", "hybridmem.memory.")) and hasattr(
            thing, "__dict__"
        ):
            todo += [(f"{path}.{name}", value) for name, value in vars(thing).items()]
    return found


@few_cases
@pytest.mark.parametrize("name", one_in(4, FAMILIES))
def test_a_step_leaves_nothing_on_the_model(name: str, tmp_path: Path) -> None:
    """Only the first step may leave something, which follows from the weights alone."""
    model = make_model(name, tmp_path)
    memory = HybridMemory(model.memory_spec, "2MiB", page_tokens=4)
    sequence = memory.open()
    memory.run(model, {sequence: draw_tokens(5)})
    before = attributes(model)
    with memory.step({sequence: [3, 1]}) as step:
        model(step)
        assert [path for path, thing in attributes(model).items() if before.get(path) is not thing] == []
        assert not any(isinstance(thing, type(step)) for thing in before.values())
    assert not step.notes


@pytest.mark.parametrize("name", ["jamba", "mamba2", "rwkv7"])
def test_a_model_that_has_run_can_be_copied(name: str, tmp_path: Path) -> None:
    """A copy of a model keeps its weights when those of the first model are overwritten."""
    model = make_model(name, tmp_path)
    expected = Talk(model, 9, 5, 6)()
    copy = deepcopy(model)
    for thing in attributes(model).values():
        if isinstance(thing, Tensor) and thing.is_floating_point():
            thing.zero_()
    assert torch.equal(Talk(copy, 9, 5, 6)(), expected)
    assert not torch.equal(Talk(model, 9, 5, 6)(), expected)


@contextmanager
def between_bytecodes(folder: str, run: Callable[[], None]) -> Iterator[None]:
    """Call `run` before each bytecode of code below the folder, as another thread might.

    Code that layers share runs it once.
    """
    seen: set[tuple[object, int]] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes = True
        place = frame.f_code, frame.f_lasti
        if event == "opcode" and place not in seen:
            seen.add(place)
            run()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@few_cases
@pytest.mark.parametrize("name", THAT_NOTE)
def test_a_step_may_run_between_any_two_bytecodes_of_another_one(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path, **THAT_NOTE[name])
    here, there = Talk(model, 9, 5, 6), Talk(model, 3, 7)
    expected, expected_there = here(), there()
    n_runs, n_wrong = 0, 0

    def run() -> None:
        nonlocal n_runs, n_wrong
        n_runs += 1
        n_wrong += not torch.equal(there(), expected_there)

    with between_bytecodes(str(Path(models.__file__).parent), run):
        found = here()
    assert n_runs > 100
    assert torch.equal(found, expected) and not n_wrong


@pytest.mark.parametrize("name", one_in(3, ["llama", "jamba", "rwkv7"]))
def test_two_threads_decode_as_one_does(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    talks = Talk(model, 9, 5, 6), Talk(model, 3, 7)
    expected = [talk() for talk in talks]
    n_wrong = [0, 0]

    def talk(i: int) -> None:
        for _ in range(25):
            n_wrong[i] += not torch.equal(talks[i](), expected[i])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=talk, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert n_wrong == [0, 0]
