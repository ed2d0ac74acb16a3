"""Reads the operating system's numbers about this process, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_SECONDS = 1.0


class ProcessMetrics(Collector):
    """Holds the newest reading of the memory, the processor time and the open files of this process.

    Counting open files needs a system call for each of them. After each call the thread has to get the interpreter's
    lock back. While the engine steps, that takes 20 ms with 128 connections, so the event loop does not count them.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._process = ProcessCollector(registry=None)
        self._newest = list(self._process.collect())
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return self._newest

    async def keep_reading(self) -> None:
        """Read the numbers each second, in a thread, until this is cancelled."""
        while True:
            self._newest = await asyncio.to_thread(lambda: list(self._process.collect()))
            await asyncio.sleep(_SECONDS)
