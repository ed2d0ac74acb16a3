"""Collects new text of replies during a step, and passes it to their callbacks after the step."""

from __future__ import annotations

from hybridmem.chat.engine.requests import Job
from hybridmem.chat.engine.scheduling import Scheduler
from hybridmem.memory.sequences import uninterrupted


class Callbacks:
    """Holds the new text of each job until the job's `on_token` is called.

    A callback that raises is not called again. The job's generation ends with that error.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pieces: dict[Job, str] = {}

    def add(self, job: Job, piece: str) -> None:
        """Add text that became visible by a new token, or by the end of the reply."""
        self._pieces[job] = self._pieces.get(job, "") + piece

    def call(self) -> bool:
        """Call all callbacks, also for text that is added while they run. Return whether there was any text."""
        has_any = bool(self._pieces)
        while self._pieces:
            job = next(iter(self._pieces))
            piece = self._pieces.pop(job)
            if job.request.on_token is None or job.has_failing_callback:
                continue
            try:
                job.request.on_token(job.generation, piece)
            except Exception as error:  # The callback is the caller's code. Its errors must not end other generations.
                with uninterrupted():
                    job.has_failing_callback = True
                    job.generation.error = job.generation.error or error
                    if job.outcome is None:
                        self._scheduler.end(job, "error", error)
        return has_any
