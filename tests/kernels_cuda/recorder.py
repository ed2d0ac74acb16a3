"""What a CUDA graph does, for torch's operations and interpreted kernels on the CPU: the same calls on the same tensors, once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor


class Recorder:
    """Records runs. A run is carried out while it is recorded, which a device does not do, so the first replay is that one."""

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
        try:
            with _Operations(calls):
                output = run()
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

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = operation(*args, **kwargs)
        name = str(operation)
        if "_local_scalar_dense" in name or name.startswith(("aten.nonzero", "aten.masked_select", "aten.bincount")):
            raise RuntimeError(f"{name} waits for the device")
        if not name.startswith(("aten.empty", "aten.new_empty")):
            self._calls.append(lambda: _again(operation, args, kwargs, found))
        return found


def _again(operation: Any, args: Any, kwargs: Any, found: Any) -> None:
    """The operation's results go where they went the first time."""
    for old, new in zip(tree_flatten(found)[0], tree_flatten(operation(*args, **kwargs))[0], strict=True):
        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)
