"""Records which kernels and torch operations a step launches on the CPU, to launch them again without Python.

For one sequence of a small model, the Python code between kernels takes as long as the kernels. A recording keeps each
call with its arguments: numbers, and arrays at addresses that stay. These are the addresses of weights, of blocks, of
the step's plan (`memory.blocks.staging`), and of what the step itself has computed. A replay makes the same calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridmem.memory.blocks.scoped import without_gradients
from hybridmem.memory.blocks.staging import current_watch, set_watch
from hybridmem.memory.kernels.cpu.activation_planner import ActivationPlanner, Calls, storage_of

_OF_ANY_CONTENT = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
"""These operations compute nothing."""

_MAY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
"""The shapes of these operations' results depend on numbers only if an argument is a mask."""

_HOST_READS = {
    "__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "const_data_ptr", "data_ptr", "numpy",
    "storage", "tolist", "untyped_storage",
}  # fmt: skip
"""These functions of tensors give numbers, or an address, to the host. Older versions of torch lack some of them."""

_READ_ARGUMENTS = {"as_tensor", "asarray", "new_tensor", "tensor", "tensor_split"}
"""These functions may read, without an operation, tensors that are given within or after their first argument."""

_OWN = "hybridmem.memory.kernels.cpu."
_PASSES_ADDRESSES = "PASSES_ADDRESSES"
"""With this name, modules outside of these kernels declare that they pass arrays and addresses only to kernels."""

ResultT = TypeVar("ResultT")


class Recording:
    """Holds the calls of a step that it has run and recorded: a `memory.blocks.staging.Watch`.

    An exception may come between any two bytecodes, from a signal's handler or from another thread. So the code that
    catches it removes the modes that `run` has set for torch and for this thread. If that is interrupted as well, the
    modes that are left are ignored, because a recording ends at the latest with its step.

    Attributes:
        output: the output of the run, a tensor or several. Each replay writes to the same addresses.
        objection: why the recording cannot stand for other steps. None: no reason is known.
        n_bytes: the bytes of the step's results, which are kept.
        served: the layer memories that the step has used, under the caller's names.
        is_first: True until the recording is confirmed.
    """

    def __init__(self) -> None:
        self.output: Any = None
        self.objection: str | None = None
        self.is_first = True
        self.served: Any = None
        self._calls: Calls = []
        self._set_up: object = None
        self._own = ActivationPlanner()
        self._packed_bytes = 0
        self._is_going_on: Callable[[], bool] = _never
        self._free_bytes: Callable[[], int] = int

    @property
    def is_open(self) -> bool:
        return self._is_going_on()

    @property
    def n_bytes(self) -> int:
        return self._packed_bytes + self._own.n_bytes

    def run(
        self, run: Callable[[], ResultT], is_going_on: Callable[[], bool], free_bytes: Callable[[], int]
    ) -> ResultT:
        """Run the step, and record it.

        Args:
            run: a function that returns the step's output.
            is_going_on: a function that returns whether the step is open.
            free_bytes: a function that returns how many bytes recordings may still keep.
        """
        before = current_watch(), _n_modes()
        self._is_going_on, self._free_bytes = is_going_on, free_bytes
        try:
            set_watch(self)
            torch._C._push_on_torch_function_stack(_HostReads(self))
            # This is not a `with` block, because torch's context manager also sets flags, which an interrupt would
            # leave set.
            torch._C._push_on_torch_dispatch_stack(_Operations(self))
            self.output = result = run()
            self._end(*before)
            if any(x.requires_grad for x in _tensors_in(self.output)):
                self.refuse("the output has a gradient, which a replay does not compute")
        except BaseException:
            try:
                self._end(*before)
            finally:  # A second exception may interrupt the lines above.
                self._forget()
                self._end(*before)
            raise
        return result

    def _end(self, watch: Any, n_modes: tuple[int, int]) -> None:
        """Remove the modes that `run` has set, and those set after them. It may be called again."""
        self._is_going_on, self._free_bytes = _never, int
        while torch._C._len_torch_dispatch_stack() > n_modes[0]:
            torch._C._pop_torch_dispatch_stack(None)
        while torch._C._len_torch_function_stack() > n_modes[1]:
            torch._C._pop_torch_function_stack()
        set_watch(watch)

    def _forget(self) -> None:
        self._calls, self._own = [], ActivationPlanner()

    def confirm(self, earlier: Recording) -> None:
        """Refuse unless an earlier recording of such a step has made the same calls. A recording is confirmed once.

        Arguments may differ only in the addresses of what the step itself has computed. The results are packed now, and
        the output moves with them.
        """
        self._compare(earlier)
        earlier._forget()
        if self.objection is None:
            calls, output, n_bytes = self._own.pack(self._calls, self.output)
            self._calls = [(getattr(function, "unnoted", function), arguments) for function, arguments in calls]
            for own, last in zip(_tensors_in(output), _tensors_in(self.output), strict=True):
                own.copy_(last)
            self.output = output
            self._packed_bytes = n_bytes
        self.is_first, self._own = False, ActivationPlanner()

    def _compare(self, earlier: Recording) -> None:
        if self.objection is None and earlier.objection is not None:
            self.refuse(earlier.objection)
        if self.objection is None:
            try:
                if (self._keys(), self.served) != (earlier._keys(), earlier.served):
                    self.refuse("two steps of the same layout have made different calls")
            except ValueError as error:
                self.refuse(str(error))

    def replay(self) -> Any:
        """Make the same calls again, and return the output, which the next replay overwrites."""
        with without_gradients():
            for function, arguments in self._calls:
                function(*arguments)
        return self.output

    def _keys(self) -> list[Hashable]:
        return [(id(function), self._own.key_of(arguments)) for function, arguments in self._calls]

    def refuse(self, why: str) -> None:
        """Remember why this recording cannot stand for other steps. Then nothing more is recorded or kept."""
        if self.objection is None:
            self.objection = why
            self._forget()

    def note(self, function: Callable[..., object], arguments: tuple[Any, ...], *, sets_up: bool = False) -> None:
        """Record a call.

        A call that sets up later ones, such as their threads, is left out if it repeats the last such call.
        """
        if self.objection is not None:
            return
        if sets_up:
            if self._set_up == (function, arguments):
                return
            self._set_up = function, arguments
        self._calls.append((function, arguments))

    def add_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], found: Any) -> None:
        """Record an operation of torch that has been computed, unless its results are views of its arguments."""
        if self.objection is not None:
            return
        if self._needs_host(operation, arguments):
            self.refuse(f"{operation} passes numbers to the host")
            return
        results, given = _tensors_in(found), _tensors_in((arguments, options))
        seen = set(map(storage_of, given))
        made = [x for x in results if storage_of(x) not in seen]
        if sum(n_bytes for _, n_bytes in filter(None, map(storage_of, made))) > self._free_bytes():
            self.refuse("what the step computes has no room beside other recordings, or is more than all may keep")
            return
        self._own.add(made, given)
        is_in_place = operation._schema.is_mutable
        if operation._schema.name in _OF_ANY_CONTENT or not (made or is_in_place):
            return
        if (made and is_in_place) or any(x.layout is not torch.strided for x in results):
            self.refuse(f"nothing is known about writing the results of {operation} again")
            return
        self._calls.append((_compute_again, (operation, arguments, options, [] if is_in_place else results)))

    @staticmethod
    def _needs_host(operation: Any, arguments: tuple[Any, ...]) -> bool:
        """True if an operation reads numbers on the host, or has results whose shapes depend on numbers."""
        if operation._schema.name in _MAY_INDEX:
            return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in arguments[1])
        return torch.Tag.data_dependent_output in operation.tags or torch.Tag.dynamic_output_shape in operation.tags


def _compute_again(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], results: list[Tensor]) -> None:
    """Compute an operation, and write its results to where the recorded results were."""
    found = operation(*arguments, **options)
    if len(results) == 1:
        results[0].copy_(found)
    elif results:
        for old, new in zip(results, _tensors_in(found), strict=True):
            old.copy_(new)


class _Operations(TorchDispatchMode):
    """Passes operations of torch to a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, so torch's compiler needs no instruction to skip it.

        If this returned True, torch would import its compiler, which takes a second.
        """
        return False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        if self.recording.is_open:
            self.recording.add_operation(operation, args, kwargs or {}, found)
        return found


class _HostReads(TorchFunctionMode):
    """Notices when numbers are read without an operation of torch."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = kwargs or {}, getattr(function, "__name__", "")
        if self.recording.is_open and self._reads(name, args, options) and not _is_for_kernels():
            self.recording.refuse(f"the model reads numbers on the host, by {name}")
        return function(*args, **options)

    @staticmethod
    def _reads(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        if name in _READ_ARGUMENTS:
            own = [x for x in arguments[:1] if not isinstance(x, Tensor)]
            return bool(_tensors_in((own, arguments[1:], options)))
        return name in _HOST_READS


def _is_for_kernels() -> bool:
    """True if the caller of a torch function passes the results only to compiled kernels, and reads none of them."""
    frame = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "torch":
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return False
    return str(frame.f_globals.get("__name__")).startswith(_OWN) or _PASSES_ADDRESSES in frame.f_globals


def _never() -> bool:
    return False


def _n_modes() -> tuple[int, int]:
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def _is_over(mode: object) -> bool:
    return isinstance(mode, _Operations | _HostReads) and not mode.recording.is_open


def has_modes() -> bool:
    """True if a mode observes or changes what torch does in this thread. Modes of finished recordings are removed.

    A recording would take the mode's operations for the model's, and a replay would bypass the mode.
    """
    while (n := torch._C._len_torch_dispatch_stack()) and _is_over(torch._C._get_dispatch_stack_at(n - 1)):
        torch._C._pop_torch_dispatch_stack(None)
    while (n := torch._C._len_torch_function_stack()) and _is_over(torch._C._get_function_stack_at(n - 1)):
        torch._C._pop_torch_function_stack()
    return _n_modes() != (0, 0)


def _tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree of tuples, lists and dictionaries. Torch's own function takes five times as long."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [x for own in tree for x in _tensors_in(own)]
