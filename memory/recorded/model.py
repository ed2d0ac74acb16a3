"""Records decode steps, and replays them for steps like them: as CUDA graphs, or as a list of calls on the CPU.

A decode step is some hundreds of small kernels. A GPU runs them faster than the host can launch them one by one, and
for one sequence on a CPU, the Python between them takes as long as they do. A recording runs the same kernels at the
same addresses again; what differs from step to step is the plan, and plans of one layout are at the same addresses
(`memory.blocks.staging`). So a recording serves every step whose `Step.layout` is that of the recorded step: as many
requests, of as many tokens each, with page tables of the same capacity.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memory.blocks.arguments import is_integer
from memory.blocks.staging import is_apart, is_recording, uploads_forbidden
from memory.errors import SpecError
from memory.recorded.cuda_graphs import CudaGraphs, Run
from memory.recorded.cuda_graphs import Recording as Graph
from memory.step import Step

if TYPE_CHECKING:
    from memory.kernels.cpu.recording import Recording

_LOG = logging.getLogger("memory")
_MOST = 64
_MOST_ROWS = 64
"""Tokens of a step up to which it is recorded on the CPU: beside products of more rows, Python takes little time."""
_MOST_BYTES = 256 << 20
"""Bytes that recordings of one model keep in a memory: all that a step computes, layer by layer."""
_ENOUGH = 4
"""The first steps of a layout, so many, run as ever: it takes longer to record a step than to run it."""

Model = Callable[[Step], Tensor]


class _State(Enum):
    """Says why a layout has no recording: it came only once, or it cannot be recorded."""

    CAME_ONCE = auto()
    CANNOT_BE = auto()


def run_recorded(model: Model, step: Step, *, most: int = _MOST) -> Tensor:
    """Run a model on a step, or replay what it did in a step like it: on the CPU, with few tokens; else just run it.

    The first four steps of a layout run as ever, the next two are recorded, and if both have made the same calls, all
    others are replayed: the same kernels on the same numbers, so logits are the same bits. A step runs as ever, too, if
    the caller has put something into its `notes`; if its memory evicts or folds rows in it; or if the model reads
    numbers on the host (`tolist`), as experts do.

    What the model does may depend on the step's tensors and its numbers of tokens, not on which sequences are in it,
    nor on anything that its Python counts or remembers, for a replay does not run that. Weights may change in place
    between steps, not be replaced. The next step overwrites `Step.token_ids` and `Step.positions`.

    Args:
        most: recordings of each model that a memory keeps; those not used for longest are dropped.

    Cost: to record takes about three times as long as to run. A recording keeps all that a step computes, which is at
        most 256 MiB for all recordings of a model in a memory.
    """
    if is_apart(step.token_ids.device) or step.notes or len(step.token_ids) > _MOST_ROWS or is_recording():
        return model(step)
    kept, layout = step.recordings_of(model), step.layout
    if kept is None or layout is None:
        return model(step)
    key = layout, torch.get_num_threads(), torch.is_inference_mode_enabled(), os.environ.get("HYBRID_MEMORY_KERNELS")
    found = kept.get(key, 0)
    if (isinstance(found, int) and found < _ENOUGH) or found is _State.CANNOT_BE:
        _keep(kept, key, found + 1 if isinstance(found, int) else found, most)
        return model(step)
    if isinstance(found, int) or found.is_first:
        return _record(model, step, kept, key, found, most)
    step.serve_all()
    _keep(kept, key, found, most)
    replayed: Recording = found
    return replayed.replay().clone()


def _record(
    model: Model, step: Step, kept: OrderedDict[Hashable, Any], key: Hashable, earlier: Any, most: int
) -> Tensor:
    """Record a step while it runs; the second time, compare it with the first."""
    from memory.kernels.cpu.recording import Recording  # not at import time: a device needs no compiler

    recording = Recording(lambda: model(step))
    if not isinstance(earlier, int):
        recording.confirm(earlier)
    if recording.objection is not None:
        _LOG.info("steps of %s run as ever, because they cannot be recorded: %s", model, recording.objection)
    _keep(kept, key, _State.CANNOT_BE if recording.objection is not None else recording, most)
    while sum(getattr(found, "n_bytes", 0) for found in kept.values()) > _MOST_BYTES:
        kept.popitem(last=False)
    return recording.output.clone()


def _keep(kept: OrderedDict[Hashable, Any], key: Hashable, found: object, most: int) -> None:
    """Keep what was found for a layout, and drop what was not used for longest."""
    kept[key] = found
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


class RecordedModel:
    """Runs a model, and replays steps like an earlier one. Call it in place of the model.

    On a GPU the first step of a layout runs kernel by kernel, the second is captured in a CUDA graph, all others are
    replayed. Logits are the same bits. Some steps have no layout and always run kernel by kernel: those whose requests
    differ in their number of tokens, that read a choice of old rows (policies), or that fold rows into few bits. So do,
    after one warning, steps in which the model waits for the device: a mixture of experts that counts on the host
    because there are fewer choices than experts, or a recurrence that reads positions there (`States.begins`).

    On the CPU it calls `run_recorded`.

    Use it in one thread at a time, whatever the memories: graphs share their working memory. Make one for each thread.

    Weights may change in place between steps, not be replaced. What the model does may depend on the step's tensors and
    its numbers of tokens, not on which sequences are in it: a replay does not check that.

    Args:
        model: (step) -> logits, such as a `models.LanguageModel`; other attributes are its own.
        most: recordings kept, on the CPU by each memory; those not used for longest are dropped.
        record: captures a run on a device; for tests.

    Cost: a capture takes as long as two or three steps, and all graphs together the memory of one step's activations;
        logits are copied once.
    """

    is_recordable = False
    """Says to engines that nothing is left for them to record."""

    def __init__(self, model: Model, *, most: int = _MOST, record: Callable[[Run], Graph] | None = None) -> None:
        if not is_integer(most, 1):
            raise SpecError(f"most={most!r} recordings; give an integer of at least 1, or use the model as it is")
        self.model = model
        self.most = most
        self._record = CudaGraphs() if record is None else record
        self._recordings: OrderedDict[Hashable, Graph | _State] = OrderedDict()
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
        if not is_apart(step.token_ids.device):
            return run_recorded(self.model, step, most=self.most)
        layout = None if step.notes else step.layout
        if layout is None:
            return self.model(step)
        found = self._recordings.get(layout)
        if found is _State.CAME_ONCE:
            found = self._try_to_record(step)
        _keep(self._recordings, layout, _State.CAME_ONCE if found is None else found, self.most)
        if found is None or isinstance(found, _State):
            return self.model(step)
        step.serve_all()
        found.replay()
        return found.output.clone()

    def _try_to_record(self, step: Step) -> Graph | _State:
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
