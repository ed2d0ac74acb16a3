"""Stands for a CUDA graph on the CPU: it repeats torch's operations and interpreted kernels on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor


class Recorder:
    """Records runs.

    It also carries out a run while recording it, which a device does not, so that counts as the first replay.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_replays = 0
        self._calls: list[Callable[[], object]] | None = None
        launch = GridExecutor.__call__

        def launch_and_record(grid: GridExecutor, *args: Any, **options: Any) -> None:
            with _disable_current_modes():
                launch(grid, *args, **options)
            if self._calls is not None:
                self._calls.append(lambda: launch(grid, *args, **options))

        monkeypatch.setattr(GridExecutor, "__call__", launch_and_record)

    def __call__(self, run: Callable[[], Tensor]) -> Recorded:
        self._calls = calls = []
        operations = _Operations(calls)
        try:
            with operations:
                output = run()
        except BaseException:
            operations.undo()
            raise
        finally:
            self._calls = None
        return Recorded(self, calls, output)


class Recorded:
    def __init__(self, recorder: Recorder, calls: list[Callable[[], object]], output: Tensor) -> None:
        self.output = output
        self._recorder, self._calls, self._is_fresh = recorder, calls, True

    def replay(self) -> None:
        if not self._is_fresh:
            for call in self._calls:
                call()
            self._recorder.n_replays += 1
        self._is_fresh = False


class _Operations(TorchDispatchMode):
    def __init__(self, calls: list[Callable[[], object]]) -> None:
        super().__init__()
        self._calls = calls
        self._made: list[Tensor] = []

    def undo(self) -> None:
        """Undo a recorded run.

        A device computes nothing while it records, so new tensors would hold what was there before.
        """
        for tensor in self._made:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = operation(*args, **kwargs)
        name = str(operation)
        _check_waiting(name, args)
        if not name.startswith(("aten.empty", "aten.new_empty")):
            self._calls.append(lambda: _again(operation, args, kwargs, found))
        if all(result.alias_info is None for result in operation._schema.returns):
            self._made += [x for x in tree_flatten(found)[0] if isinstance(x, Tensor)]
        return found


_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "_unique",
    "equal",
    "repeat_interleave.Tensor",
)


def _check_waiting(name: str, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError if the operation `name` would have the host wait for a device."""
    is_mask = name.startswith(("aten.index.", "aten.index_put")) and any(
        x is not None and x.dtype == torch.bool for x in args[1]
    )
    if is_mask or name.removeprefix("aten.").startswith(_WAITING):
        raise RuntimeError(f"{name} waits for the device")


class _NeverWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _check_waiting(str(operation), args)
        return operation(*args, **(kwargs or {}))


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raise RuntimeError inside of the block if the host would have to wait for a device."""

    def wait(*_: object) -> None:
        raise RuntimeError("numbers are taken to the host, which waits for the device")

    launch = GridExecutor.__call__
    with pytest.MonkeyPatch.context() as outside, _NeverWaiting():

        def launch_apart(grid: GridExecutor, *args: Any, **options: Any) -> None:
            with _disable_current_modes(), pytest.MonkeyPatch.context() as inside:
                for name, method in taken.items():
                    inside.setattr(Tensor, name, method)
                launch(grid, *args, **options)

        taken = {name: getattr(Tensor, name) for name in ("tolist", "numpy", "cpu")}
        for name in taken:
            outside.setattr(Tensor, name, wait)
        outside.setattr(GridExecutor, "__call__", launch_apart)
        yield


def _again(operation: Any, args: Any, kwargs: Any, found: Any) -> None:
    """Let the results of an operation go where they went the first time."""
    for old, new in zip(tree_flatten(found)[0], tree_flatten(operation(*args, **kwargs))[0], strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
