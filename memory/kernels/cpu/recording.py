"""Records what a step launches on the CPU, kernels and operations of torch, to launch the same again without Python.

For one sequence of a small model, the Python between kernels takes as long as the kernels. A recording keeps each
call with its arguments: numbers, and arrays at addresses that stay, those of weights, of blocks, of the step's plan
(`memory.blocks.staging`) and of what the step itself has computed. To replay it is to make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from memory.blocks.staging import objections_noted
from memory.kernels.cpu.launches import noting
from memory.kernels.cpu.step_memory import Calls, StepMemory, storage_of

_OF_ANY_CONTENT = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
"""Operations that compute nothing."""

_MAY_INDEX = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
"""Operations whose results have shapes that depend on numbers only if they are given a mask."""


class Recording:
    """Holds the calls of a step. Making one runs the step.

    Attributes:
        output: of the run. Each replay writes to the same address.
        objection: why it cannot stand for other steps; None if nothing is known that speaks against it.
        n_bytes: of what the step has computed, which is kept.
        is_first: whether it has not been confirmed.
    """

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.objection: str | None = None
        self.is_first = True
        self._calls: Calls = []
        self._set_up: object = None
        self._own = StepMemory()
        with objections_noted(self._object), noting(self._note), _HostReads(self._object), _Operations(self):
            self.output = run()
        self.n_bytes = self._own.n_bytes

    def confirm(self, earlier: Recording) -> None:
        """Object unless an earlier recording of such a step has made the same calls. A recording is confirmed once.

        Arguments may differ only in where lies what the step itself has computed. That is packed now, and the output
        moves with it.
        """
        self.objection = self.objection or earlier.objection
        if self.objection is None and self._keys() != earlier._keys():
            self._object("two steps of the same layout have made different calls")
        if self.objection is None:
            calls, output, self.n_bytes = self._own.pack(self._calls, self.output)
            self._calls = [(getattr(function, "unnoted", function), arguments) for function, arguments in calls]
            self.output = output.copy_(self.output)
        self.is_first, self._own = False, StepMemory()

    def replay(self) -> Tensor:
        """Make the same calls again, and return the output, which the next replay overwrites."""
        with torch.no_grad():
            for function, arguments in self._calls:
                function(*arguments)
        return self.output

    def _keys(self) -> list[Hashable]:
        return [(id(function), self._own.key_of(arguments)) for function, arguments in self._calls]

    def _object(self, why: str) -> None:
        self.objection = self.objection or why

    def _note(self, function: Callable[..., object], arguments: tuple[Any, ...], *, sets_up: bool = False) -> None:
        """Note a call; one that sets up later ones, such as their threads, only if the last of these did otherwise."""
        if sets_up:
            if self._set_up == (function, arguments):
                return
            self._set_up = function, arguments
        self._calls.append((function, arguments))

    def add_operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], found: Any) -> None:
        """Note an operation of torch that has been computed, unless its results are views of its arguments."""
        if self._needs_host(operation, arguments):
            self._object(f"{operation} passes numbers to the host")
        results, given = _tensors_in(found), _tensors_in((arguments, options))
        seen = set(map(storage_of, given))
        made = [x for x in results if storage_of(x) not in seen]
        self._own.add(made, given)
        is_in_place = operation._schema.is_mutable
        if operation._schema.name in _OF_ANY_CONTENT or not (made or is_in_place):
            return
        if (made and is_in_place) or any(x.layout is not torch.strided for x in results):
            self._object(f"nothing is known about writing the results of {operation} again")
        self._calls.append((_compute_again, (operation, arguments, options, [] if is_in_place else results)))

    @staticmethod
    def _needs_host(operation: Any, arguments: tuple[Any, ...]) -> bool:
        """True if an operation reads numbers on the host, or has results whose shapes depend on numbers."""
        if operation._schema.name in _MAY_INDEX:
            return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in arguments[1])
        return torch.Tag.data_dependent_output in operation.tags or torch.Tag.dynamic_output_shape in operation.tags


def _compute_again(operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], results: list[Tensor]) -> None:
    """Compute an operation, and write what it returns to where its results were."""
    found = operation(*arguments, **options)
    if len(results) == 1:
        results[0].copy_(found)
    elif results:
        for old, new in zip(results, _tensors_in(found), strict=True):
            old.copy_(new)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes operations of torch to a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing here is compiled, and torch would import its compiler, for a second, to forbid that."""
        return False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        self._recording.add_operation(operation, args, kwargs or {}, found)
        return found


class _HostReads(TorchFunctionMode):
    """Notices that numbers are read without an operation of torch."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.tolist:
            self._tell("the model reads a list of numbers on the host")
        return function(*args, **(kwargs or {}))


def _tensors_in(tree: Any) -> list[Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, Tensor)]
