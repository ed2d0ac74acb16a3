"""Captures decode steps in CUDA graphs, and replays them.

A decode step is some hundreds of small kernels, and the host takes longer to launch them one by one than the device
takes to run them. A graph launches all at once. It runs the same kernels at the same addresses again; what differs
from step to step is the plan, and plans of one layout are uploaded to the same addresses (`memory.blocks.staging`). So
a graph serves every step whose `Step.layout` is that of the captured step: as many requests, of as many tokens each,
with page tables of the same capacity.
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
from memory.blocks.staging import uploads_forbidden
from memory.errors import SpecError
from memory.step import Step

Run = Callable[[], Tensor]


class Recording(Protocol):
    """Holds the kernels that a run launched, to launch them again."""

    output: Tensor
    """The run's result, which each replay writes to the same address."""

    def replay(self) -> None:
        """Launch the captured kernels again."""
        ...


class CudaGraphs:
    """Captures runs as CUDA graphs that share their working memory, so no two may be replayed at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Recording:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return _CudaGraph(run, self._pool)


class _CudaGraph:
    """Holds one run as a CUDA graph: a `Recording`."""

    def __init__(self, run: Run, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = run()

    def replay(self) -> None:
        self._graph.replay()


class _State(Enum):
    """Says why a layout has no graph: it came only once, or it cannot be captured."""

    CAME_ONCE = auto()
    CANNOT_BE = auto()


class RecordedModel:
    """Runs a model with CUDA graphs: steps like an earlier one are replayed. Call it in place of the model.

    The first step of a layout runs kernel by kernel, the second is captured, all others are replayed. Logits are the
    same bits. Some steps have no layout and always run kernel by kernel: those of a memory on the CPU, whose requests
    differ in their number of tokens, that read a choice of old rows (policies), or that fold rows into few bits. So do,
    after one warning, steps in which the model waits for the device: a mixture of experts that counts on the host
    because there are fewer choices than experts, or a recurrence that reads positions there (`States.begins`).

    Use it in one thread at a time, whatever the memories: graphs share their working memory. Make one for each thread.

    Weights may change in place between steps, not be replaced. What the model does may depend on the step's tensors and
    its numbers of tokens, not on which sequences are in it: a replay does not check that.

    Args:
        model: (step) -> logits, such as a `models.LanguageModel`; other attributes are its own.
        most: graphs kept; those not used for longest are dropped.
        record: captures a run; for tests.

    Cost: a capture takes as long as two or three steps, and all graphs together the memory of one step's activations;
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
        if name == "model":  # while a copy is made, it is not set yet
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def n_recordings(self) -> int:
        """Return the number of graphs that it keeps."""
        return sum(not isinstance(recording, _State) for recording in self._recordings.values())

    def __call__(self, step: Step) -> Tensor:
        """Return logits (rows, vocab), as the model does."""
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
        """Capture a step, or warn and return CANNOT_BE. Kernels are only captured here, not run."""
        try:
            with uploads_forbidden(), step.while_captured() as twin:
                return self._record(lambda: self.model(twin))
        except Exception as error:
            if not self._has_warned:
                warnings.warn(
                    f"steps of {self.model!r} cannot be recorded, and run one kernel after the other: {error}",
                    stacklevel=3,
                )
            self._has_warned = True
            return _State.CANNOT_BE
