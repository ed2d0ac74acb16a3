"""Records what a step launches on the CPU, kernels and operations of torch, to launch the same again without Python.

For one sequence of a small model, the Python between kernels takes as long as the kernels. A recording keeps each
call with its arguments: numbers, and arrays at addresses that stay, those of weights, of blocks, of the step's plan
(`memory.blocks.staging`) and of what the step itself has computed. To replay it is to make the same calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from memory.blocks.staging import objections_noted
from memory.kernels.cpu.launches import noting

Call = Callable[[], object]

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
    """

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.objection: str | None = None
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._own = _Memory()
        self._keys: list[Callable[[], Hashable]] = []
        with objections_noted(self._object), noting(self._note), _HostReads(self._object), _Operations(self):
            self.output = run()
        self._made_of: list[Hashable] | None = [key() for key in self._keys]
        self._keys.clear()

    @property
    def is_first(self) -> bool:
        """True if it has not been confirmed."""
        return self._made_of is not None

    def confirm(self, earlier: Recording) -> None:
        """Object unless an earlier recording of such a step has made the same calls.

        Arguments may differ only in where lies what the step itself has computed. A recording is confirmed once.
        """
        self.objection = self.objection or earlier.objection
        if self.objection is None and self._made_of != earlier._made_of:
            self._object("two steps of the same layout have made different calls")
        self._made_of = None

    def replay(self) -> Tensor:
        """Make the same calls again, and return the output, which the next replay overwrites."""
        with torch.no_grad():
            for function, arguments in self._calls:
                function(*arguments)
        return self.output

    def _object(self, why: str) -> None:
        self.objection = self.objection or why

    @property
    def n_bytes(self) -> int:
        return self._own.n_bytes

    def _note(self, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._calls.append((function, arguments))
        self._keys.append(lambda: (id(function), self._own.key_of(arguments)))

    def operation(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], found: Any) -> None:
        """Note an operation of torch that has been computed, unless its results are views of its arguments."""
        if self._needs_host(operation, arguments):
            self._object(f"{operation} passes numbers to the host")
        results, given = _tensors_in(found), _tensors_in((arguments, options))
        seen = set(map(_storage, given))
        made = [x for x in results if _storage(x) not in seen]
        self._own.add(made, given)
        is_in_place = operation._schema.is_mutable
        if operation._schema.name in _OF_ANY_CONTENT or not (made or is_in_place):
            return
        if (made and is_in_place) or any(x.layout is not torch.strided for x in results):
            self._object(f"nothing is known about writing the results of {operation} again")
        again = _Again(operation, arguments, options, [] if is_in_place else results)
        self._calls.append((again, ()))
        self._keys.append(lambda: (str(operation), self._own.key_of((*arguments, *sorted(options.items()), *results))))

    @staticmethod
    def _needs_host(operation: Any, arguments: tuple[Any, ...]) -> bool:
        """True if an operation reads numbers on the host, or has results whose shapes depend on numbers."""
        if operation._schema.name in _MAY_INDEX:
            return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in arguments[1])
        return torch.Tag.data_dependent_output in operation.tags or torch.Tag.dynamic_output_shape in operation.tags


class _Again:
    """Computes an operation again, and writes what it returns to where its results were."""

    def __init__(
        self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], results: list[Tensor]
    ) -> None:
        self._operation, self._arguments, self._options, self._results = operation, arguments, options, results

    def __call__(self) -> None:
        found = self._operation(*self._arguments, **self._options)
        if len(self._results) == 1:
            self._results[0].copy_(found)
        elif self._results:
            for old, one in zip(self._results, _tensors_in(found), strict=True):
                old.copy_(one)


class _Memory:
    """Knows the memory that a step has allocated, and names places in it by which allocation it was.

    It keeps all tensors that the step has used, so that nothing else comes to lie where one of them is.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._numbers: dict[int, tuple[int, int]] = {}
        self._begins: list[int] | None = None

    def add(self, made: list[Tensor], given: list[Tensor]) -> None:
        """Keep the results of an operation, and its arguments."""
        self._tensors += made + given
        for storage in filter(None, map(_storage, made)):
            self._numbers.setdefault(storage[0], (len(self._numbers), storage[1]))

    @property
    def n_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self._numbers.values())

    def key_of(self, x: Any) -> Hashable:
        """Return a key of an argument: the same for arguments that two recordings of one step may give."""
        if isinstance(x, tuple | list):
            return tuple(map(self.key_of, x))
        if isinstance(x, Tensor):
            if x.layout is not torch.strided:
                return "opaque", id(x)
            return ("tensor", self._place(x.data_ptr()) if x.numel() else 0, *x.shape, *x.stride(), x.dtype)
        if isinstance(x, np.ndarray):
            return ("array", self._place(x.ctypes.data) if x.size else 0, *x.shape, *x.strides, x.dtype.str)
        if isinstance(x, int) and not isinstance(x, bool):
            return self._place(x)
        return repr(x) if isinstance(x, float | complex | np.generic | None) else (type(x).__name__, str(x))

    def _place(self, address: int) -> Hashable:
        """Return which allocation an address is in, and how far; the address itself if it is in none."""
        if self._begins is None or len(self._begins) != len(self._numbers):
            self._begins = sorted(self._numbers)
        at = bisect_right(self._begins, address) - 1
        if at >= 0:
            begin = self._begins[at]
            number, n_bytes = self._numbers[begin]
            if address < begin + n_bytes:
                return number, address - begin
        return address


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
        self._recording.operation(operation, args, kwargs or {}, found)
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


def _storage(x: Tensor) -> tuple[int, int] | None:
    """Return address and bytes of what a tensor is a view of; None if it has no such thing, as oneDNN's have not."""
    if x.layout is not torch.strided:
        return None
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
