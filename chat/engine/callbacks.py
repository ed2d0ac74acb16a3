"""What became visible of replies, until those who asked for them were told."""

from __future__ import annotations

from chat.engine.requests import Job
from chat.engine.scheduling import Scheduler


class News:
    """Text that nobody was told of yet, by job.
    Whose callback raises is told no more, and its generation ends with that error.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pieces: dict[Job, str] = {}

    def add(self, job: Job, piece: str) -> None:
        """There is a new token, or an end, and so much text by it."""
        self._pieces[job] = self._pieces.get(job, "") + piece

    def tell(self) -> bool:
        """Tell everybody, also of what comes up meanwhile; whether there was anything."""
        has_any = bool(self._pieces)
        while self._pieces:
            job = next(iter(self._pieces))
            piece = self._pieces.pop(job)
            if job.request.on_token is None or job.is_deaf:
                continue
            try:
                job.request.on_token(job.generation, piece)
            except Exception as error:  # somebody else's code: it must not end the others
                job.is_deaf = True
                job.generation.error = job.generation.error or error
                if job.outcome is None:
                    self._scheduler.end(job, "error", error)
        return has_any
