"""Records decode steps and replays them for similar steps: as CUDA graphs, or as a list of calls on the CPU.

A decode step consists of some hundreds of small kernels. A GPU runs them faster than the host can launch them one by
one. For one sequence on a CPU, the Python code between the kernels takes as long as the kernels do. A recording runs
the same kernels at the same addresses again. Only the plan differs from step to step, and plans of one layout are at
the same addresses (`memory.blocks.staging`). So a recording serves every step whose `Step.layout()` is that of the
recorded step, under the same settings of torch. Equal layouts mean as many requests, of as many tokens each, with page
tables of the same capacity.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.blocks.staging import current_watch, is_apart, set_watch
from hybridmem.memory.errors import SpecError, StepError
from hybridmem.memory.layer_memories import PlaceKey
from hybridmem.memory.recorded.cuda_graphs import CudaGraphs, Run
from hybridmem.memory.recorded.cuda_graphs import Recording as Graph
from hybridmem.memory.recorded.kept import Kept
from hybridmem.memory.sequences.interrupts import uninterrupted
from hybridmem.memory.step import Step

if TYPE_CHECKING:
    from hybridmem.memory.kernels.cpu.recording import Recording

_LOG = logging.getLogger("hybridmem.memory")
_MOST = 64
_MOST_ROWS = 64
"""A step on the CPU is recorded if it has at most this many tokens.

With more tokens, Python takes little of the time.
"""
_MOST_BYTES = 256 << 20
"""The most bytes that all recordings of one model in a memory hold, including unfinished recordings."""
_ENOUGH = 4
"""How many first steps of a layout run without recording, because recording a step takes longer than running it."""

_PENDING_STEPS = 64
"""Within how many steps a layout must occur again for its second recording. Meanwhile no other layout is recorded."""
_NEVER = 1 << 62
_MOST_UNLIKE = 3
"""A layout is refused once so many pairs of its steps have made different calls. Fewer may be by chance: for example,
products prepare their arguments anew between two steps.
"""

Model = Callable[[Step], Tensor]
ResultT = TypeVar("ResultT", bound=Tensor | tuple[Tensor, ...])


def run_recorded(
    model: Callable[[Step], ResultT], step: Step, *, most: int = _MOST, most_tokens: int | None = None
) -> ResultT:
    """Run a model on a step, or replay a recording of a similar step. It replays only on the CPU and for few tokens.

    The first four steps of a layout are run. The next two are recorded. If both made the same calls, all later steps
    are replayed: the same kernels run on the same numbers, so logits have the same bits. A step is also run, not
    replayed, in these cases: the caller has put something into its `notes`; its memory evicts or folds rows in it; it
    is within `torch.autocast` or another mode that intercepts torch's operations; or the model reads on the host which
    sequences are in the step, or numbers (`tolist`, `numpy`), as mixtures of experts do.

    The model's result may depend on the step's tensors and its numbers of tokens. It must not depend on anything that
    the model's Python code counts or remembers, because a replay does not run Python code. Between steps, weights may
    change in place, but must not be replaced. The next step overwrites `Step.token_ids` and `Step.positions`.

    Args:
        model: (step) -> logits, or several results.
        most: how many recordings of each model a memory keeps. A new recording takes the place of one that was not used
            for 1,024 steps.
        most_tokens: a step in which a request has more tokens is run. By default, it is 16 for steps that return their
            last rows, which keeps prompts out: their lengths hardly recur, and their recordings would take the room of
            others. It is 32 for other steps, such as those that verify drafts.

    Cost: recording a step takes about three times as long as running it. Recordings hold what a step computes: at most
    256 MiB for all recordings of a model in a memory. A step that computes more than 128 MiB is not recorded.
    """
    if is_apart(step.token_ids.device) or step.notes or len(step.token_ids) > _MOST_ROWS or current_watch() is not None:
        return model(step)
    # This is not imported at the top, because on a device no compiler is needed.
    from hybridmem.memory.kernels.cpu.recording import has_modes

    if torch.is_autocast_enabled("cpu") or has_modes():
        return model(step)
    kept: _CpuRecordings | None = step.recordings_of(model, _CpuRecordings)
    layout = step.layout(most_tokens)
    if kept is None or layout is None:
        return model(step)
    key = layout, _settings("cpu")
    found = kept.find(key)
    if found is None and not kept.may_record(key, after=_ENOUGH, most=most):
        return model(step)
    if found is None or found.is_first:
        return kept.record(model, step, key, found)
    step.serve(found.served)
    return _clone(cast(ResultT, found.replay()))


class _CpuRecordings(Kept["Recording"]):
    """Keeps the recordings of a model's steps in a memory, and counts the bytes of all recordings that are in use."""

    def __init__(self) -> None:
        super().__init__()
        self._living: dict[int, weakref.ref[Recording]] = {}
        self._pending: tuple[Hashable, int] | None = None
        self._n_unlike: dict[Hashable, int] = {}

    def may_record(self, key: Hashable, *, after: int, most: int) -> bool:
        """Count a layout as `Kept.may_record` does.

        It is also False while another layout waits for its second recording.
        """
        if self._pending is not None:
            pending, begun_at = self._pending
            if self.n_steps - begun_at <= _PENDING_STEPS:
                after = _NEVER
            else:
                self.forget(pending)
                self._pending = None
        return super().may_record(key, after=after, most=most)

    def record(self, model: Callable[[Step], ResultT], step: Step, key: Hashable, earlier: Recording | None) -> ResultT:
        """Record a step while it runs. The second time, compare the new recording with the first one."""
        from hybridmem.memory.kernels.cpu.recording import Recording

        recording, watched = Recording(), step.watched()
        self._living = {number: own for number, own in self._living.items() if own() is not None}
        self._living[id(recording)] = weakref.ref(recording)
        output = recording.run(lambda: model(watched), lambda: step.is_open, self._free_bytes)
        recording.served = step.served
        is_unlike = False
        if earlier is not None:
            was_possible = recording.objection is None and earlier.objection is None
            recording.confirm(earlier)
            is_unlike = was_possible and recording.objection is not None
        self._pending = None if earlier is not None else (key, self.n_steps)
        if recording.objection is None:
            self.keep(key, recording)
        elif is_unlike and (n_unlike := self._n_unlike.get(key, 0) + 1) < _MOST_UNLIKE:
            self._n_unlike[key] = n_unlike
            self.forget(key)
        else:
            _LOG.info("steps of %s run as ever, because they cannot be recorded: %s", model, recording.objection)
            self._pending = None
            self.refuse(key)
        return _clone(output)

    def _free_bytes(self) -> int:
        """Return how many bytes further recordings may hold."""
        found = (own() for own in list(self._living.values()))
        return _MOST_BYTES - sum(recording.n_bytes for recording in found if recording is not None)


def _clone(result: ResultT) -> ResultT:
    """Copy a result, which the next replay overwrites."""
    return tuple(x.clone() for x in result) if isinstance(result, tuple) else result.clone()  # type: ignore[return-value]


def _settings(device: str) -> Hashable:
    """Return those settings of torch and of the environment that decide how results are computed."""
    return (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
        os.environ.get("HYBRID_MEMORY_KERNELS"),
    )


class _NoUploads:
    """Is a `Watch` that forbids uploads while a step is captured, because a replayed graph would read other data."""

    def __init__(self, step: Step) -> None:
        self._step, self._is_over = step, False

    @property
    def is_open(self) -> bool:
        return not self._is_over and self._step.is_open

    def refuse(self, why: str) -> None:
        raise StepError(why)

    def note(self, function: Callable[..., object], arguments: tuple[Any, ...], *, sets_up: bool = False) -> None:
        """Do nothing, because kernels on the CPU are not part of a CUDA graph."""

    def end(self) -> None:
        self._is_over = True


class RecordedModel:
    """Runs a model, and replays recordings for steps like an earlier one. Call it in place of the model.

    On a GPU, the first step of a layout runs kernel by kernel, the second is captured in a CUDA graph, and all others
    are replayed. Logits have the same bits. Some steps have no layout and always run kernel by kernel: those whose
    requests differ in their number of tokens, that read a choice of old rows (policies), or that fold rows into few
    bits. After one warning, steps in which the model waits for the device also run kernel by kernel. Examples are a
    mixture of experts that counts on the host because there are fewer choices than experts, and a recurrence that reads
    positions there (`States.begins`).

    On the CPU it calls `run_recorded`.

    Use it in one thread at a time, even with several memories, because graphs share their working memory. Make one for
    each thread.

    Between steps, weights may change in place, but must not be replaced. The model's result may depend on the step's
    tensors and its numbers of tokens, but not on which sequences are in it: a replay does not check that.

    Args:
        model: (step) -> logits, such as a `models.LanguageModel`. Other attributes are looked up in it.
        most: how many recordings are kept: in all on a device, in each memory on the CPU. A new recording takes the
            place of one that was not used for 1,024 steps.
        record: captures a run on a device. Tests replace it.

    Cost: a capture takes as long as two or three steps. All graphs together take the memory of one step's activations.
    Logits are copied once.
    """

    is_recordable = False
    """Tells engines that they need not record this model, because it records itself."""

    def __init__(self, model: Model, *, most: int = _MOST, record: Callable[[Run], Graph] | None = None) -> None:
        if not is_integer(most, 1):
            raise SpecError(f"most={most!r} recordings; give an integer of at least 1, or use the model as it is")
        self.model = model
        self.most = most
        self._record = CudaGraphs() if record is None else record
        self._kept = Kept[tuple[Graph, frozenset[PlaceKey]]]()
        self._has_warned = False

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # While a copy of this object is made, `model` is not set yet.
            raise AttributeError(name)
        return getattr(self.model, name)

    @property
    def n_recordings(self) -> int:
        """Return the number of graphs that are kept."""
        return len(self._kept.recordings)

    def __call__(self, step: Step) -> Tensor:
        """Return logits (rows, vocab), as the model does."""
        if not is_apart(step.token_ids.device):
            return run_recorded(self.model, step, most=self.most)
        layout = None if step.notes or current_watch() is not None else step.layout()
        if layout is None:
            return self.model(step)
        key = layout, _settings(step.token_ids.device.type)
        found = self._kept.find(key)
        if found is None and self._kept.may_record(key, after=1, most=self.most):
            found = self._capture(step)
            if found is None:
                self._kept.refuse(key)
            else:
                self._kept.keep(key, found)
        if found is None:
            return self.model(step)
        graph, served = found
        step.serve(served)
        graph.replay()
        return graph.output.clone()

    def _capture(self, step: Step) -> tuple[Graph, frozenset[PlaceKey]] | None:
        """Capture a step without running its kernels, or warn and return None.

        A Ctrl-C waits until the capture ends.
        """
        watch = _NoUploads(step)
        try:
            with uninterrupted(), step.while_captured() as twin:
                set_watch(watch)
                return self._record(lambda: self.model(twin)), twin.served
        except Exception as error:
            if not self._has_warned:
                warnings.warn(
                    f"steps of {self.model!r} cannot be recorded, and run one kernel after the other: {error}",
                    stacklevel=3,
                )
            self._has_warned = True
            return None
        finally:
            watch.end()
            set_watch(None)
