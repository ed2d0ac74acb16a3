"""Captures runs in CUDA graphs, for `memory.recorded`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

Run = Callable[[], Tensor]


class Recording(Protocol):
    """Holds the kernels that a run has launched, and launches them again."""

    output: Tensor
    """The run's result. Each replay writes its result to the same address."""

    def replay(self) -> None:
        """Launch the captured kernels again."""
        ...


class CudaGraphs:
    """Captures runs as CUDA graphs, which share their working memory, so that no two may be replayed at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Run) -> Recording:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return _CudaGraph(run, self._pool)


class _CudaGraph:
    """Holds one run as a CUDA graph: a `Recording`."""

    def __init__(self, run: Run, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.output = run()
        except BaseException:  # If one comes while the block is being entered, `__exit__` is not called.
            if torch.cuda.is_current_stream_capturing():
                with suppress(RuntimeError):
                    self._graph.capture_end()
            torch.cuda.set_stream(stream)
            raise

    def replay(self) -> None:
        self._graph.replay()
