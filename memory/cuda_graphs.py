"""Steps that are recorded once and replayed: CUDA graphs.

A decode step is some hundreds of small kernels, and asking for them one by one takes the host longer than it takes the
device to run them. A graph asks for all at once. It runs the same kernels at the same addresses again; what differs
from step to step is the plan, and plans of one layout lie at one place (`memory.blocks.staging`). So a graph serves
every step whose `Step.layout` is that of the step it was recorded
from: as many requests, of as many tokens each, whose tables of pages have room for as much.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import Enum, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from memory.blocks.arguments import is_integer
from memory.blocks.staging import forbidden
from memory.errors import SpecError
from memory.step import Step

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


class _State(Enum):
    """Of a layout without a recording."""

    CAME_ONCE = auto()
    CANNOT_BE = auto()


class RecordedModel:
    """A model whose steps are replayed where a step of their layout has come twice before: call it in place of the
    model.

    The first step of a layout runs as ever, the second is recorded, all others are replayed. Logits are the same bits.
    Steps of a memory on the CPU have no layout, nor have those whose requests differ in their number of tokens, or that
    read a choice of old rows (policies), or fold rows into few bits: they run as ever. So do, after one warning, steps
    in which the model waits for the device, as a mixture of experts does that counts on the host because there are
    fewer choices than experts, or in which a recurrence asks for positions there (`States.begins`).

    For one thread at a time, whatever its memories: recordings share the place that they work in. Make one for each
    thread.

    Weights may change in place between steps, not be replaced. What the model does may follow from the step's tensors
    and its numbers of tokens, not from which sequences are in it: that is not looked at again.

    Args:
        model: (step) -> logits, such as a `models.LanguageModel`; other attributes are its own.
        most: recordings kept; those not used for longest go.
        record: how a run is recorded, for tests.

    Cost: a recording takes as long as two steps or three, and the memory of one step's activations for all of them;
        logits are copied once.
    """

    def __init__(
        self, model: Callable[[Step], Tensor], *, most: int = 64, record: Callable[[Run], Recording] | None = None
    ) -> None:
        if not is_integer(most, 1):
            raise SpecError(f"most={most!r} recordings; give an integer of at least 1, or use the model as it is")
        self.model = model
        self.most = most
        self._record = CudaGraphs() if record is None else record
        self._recordings: OrderedDict[Hashable, Recording | _State] = OrderedDict()
        self._has_warned = False

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not set yet: while a copy is being made
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def n_recordings(self) -> int:
        return sum(not isinstance(recording, _State) for recording in self._recordings.values())

    def __call__(self, step: Step) -> Tensor:
        """(rows, vocab), as the model gives them."""
        layout = step.layout
        if layout is None:
            return self.model(step)
        found = self._recordings.get(layout)
        if found is _State.CAME_ONCE:
            found = self._try_to_record(step)
        self._recordings[layout] = _State.CAME_ONCE if found is None else found
        self._recordings.move_to_end(layout)
        while len(self._recordings) > self.most:
            self._recordings.popitem(last=False)
        if found is None or isinstance(found, _State):
            return self.model(step)
        step.serve_all()
        found.replay()
        return found.output.clone()

    def _try_to_record(self, step: Step) -> Recording | _State:
        """Nothing has been asked of the device yet when this returns."""
        try:
            with forbidden(), step.while_recorded() as twin:
                return self._record(lambda: self.model(twin))
        except Exception as error:
            if not self._has_warned:
                warnings.warn(
                    f"steps of {self.model!r} cannot be recorded, and run one kernel after the other: {error}",
                    stacklevel=3,
                )
            self._has_warned = True
            return _State.CANNOT_BE
