"""Reads what the operating system says of this process, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_SECONDS = 1.0


class ProcessMetrics(Collector):
    """Holds the newest reading: memory and processor time of this process, and its open files.

    To count open files is a system call for each of them, after which the thread has to get the interpreter's lock
    back. While the engine steps, that takes 20 ms where there are 128 connections; so it is not done in the event loop.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._process = ProcessCollector(registry=None)
        self._newest = list(self._process.collect())
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        return self._newest

    async def keep_reading(self) -> None:
        """Read each second, in a thread, until this is cancelled."""
        while True:
            self._newest = await asyncio.to_thread(lambda: list(self._process.collect()))
            await asyncio.sleep(_SECONDS)
