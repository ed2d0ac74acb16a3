"""Steps that are recorded once and replayed: CUDA graphs.

A decode step is some hundreds of small kernels, and asking for them one by one takes the host longer than it takes the device to run them.
A graph asks for all at once. It runs the same kernels at the same addresses again; what differs from step to step is the plan, and plans of
one layout lie at one place (`memory.uploads`). So a graph serves every step whose `Step.layout` is that of the step it was recorded from:
as many requests, of as many tokens each, whose tables of pages have room for as much.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from memory.errors import SpecError
from memory.step import Step
from memory.uploads import forbidden

Run = Callable[[], Tensor]


class Recording(Protocol):
    """What a run asked of the device."""

    output: Tensor
    """The run's result, written by each replay to the same place."""

    def replay(self) -> None: ...


class CudaGraphs:
    """Records runs as CUDA graphs, which share the memory that they work in: no two are replayed at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Recording:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return _CudaGraph(run, self._pool)


class _CudaGraph:
    def __init__(self, run: Run, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = run()

    def replay(self) -> None:
        self._graph.replay()


class RecordedModel:
    """A model whose steps are replayed where a step of their layout has come twice before: call it in place of the model.

    The first step of a layout runs as ever, the second is recorded, all others are replayed. Logits are the same bits. Steps of a memory
    on the CPU have no layout, nor have those whose requests differ in their number of tokens, or that read a choice of old rows (policies),
    or fold rows into few bits: they run as ever. So does everything, after one warning, if the model itself cannot be recorded: because it
    waits for the device, as mixtures of experts do that count on the host.

    Weights may change in place between steps, not be replaced.

    Args:
        model: (step) -> logits, such as a `models.LanguageModel`; other attributes are its own.
        most: recordings kept; those not used for longest go.
        record: how a run is recorded, for tests.

    Cost: a recording takes as long as two steps or three, and the memory of one step's activations for all of them; logits are copied once.
    """

    def __init__(self, model: Callable[[Step], Tensor], *, most: int = 64, record: Callable[[Run], Recording] | None = None) -> None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise SpecError(f"most={most!r} recordings; give an integer of at least 1, or use the model as it is")
        self.model = model
        self.most = most
        self._record = CudaGraphs() if record is None else record
        self._recordings: OrderedDict[Hashable, Recording | None] = OrderedDict()  # None: a layout that has come once
        self._refused = False

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet: while a copy is being made
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def n_recordings(self) -> int:
        return sum(recording is not None for recording in self._recordings.values())

    def __call__(self, step: Step) -> Tensor:
        """(rows, vocab), as the model gives them."""
        layout = None if self._refused else step.layout
        if layout is None:
            return self.model(step)
        is_new = layout not in self._recordings
        recording = self._recordings.setdefault(layout, None)
        self._recordings.move_to_end(layout)
        while len(self._recordings) > self.most:
            self._recordings.popitem(last=False)
        if is_new:
            return self.model(step)
        if recording is None:
            recording = self._recordings[layout] = self._try_to_record(step)
        if recording is None:
            return self.model(step)
        step.serve_all()
        recording.replay()
        return recording.output.clone()

    def _try_to_record(self, step: Step) -> Recording | None:
        """Nothing has been asked of the device yet when this returns."""
        try:
            with forbidden():
                return self._record(lambda: self.model(step))
        except Exception as error:
            warnings.warn(f"steps of {self.model!r} cannot be recorded, and run one kernel after the other: {error}", stacklevel=3)
            self._refused = True
            step.serve_none()
            return None
