"""Keeps sessions in the store. Each session is leased and fetched before a request, and stored after it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.serving.mover import Mover
from hybridmem.cluster.store.health import StoreHealth
from hybridmem.cluster.store.leases import Lease, Leases
from hybridmem.cluster.store.timeouts import ASK_SECONDS, Timeouts

log = logging.getLogger("hybrid_memory.cluster")
T = TypeVar("T")

WAIT_SECONDS = 2.0
"""A request waits this many seconds for its session's lease. Then it goes on beside the holder, as a branch: its end is
stored under its own tokens, and the session stands where the holder leaves it. A request contains its whole history, so
its reply does not depend on the holder. Refusing it would help nobody.
"""
FETCH_SECONDS = 30.0
"""A request waits this many seconds for a sequence from the store. After that, computing it is quicker."""
SHARE_SECONDS = 10.0
SWEEP_SECONDS = 300.0
_POLL_SECONDS = 0.05
_MOST_UNWRITTEN = 64
"""At most this many sequences wait to be written. Further turns are not stored, and other replicas would compute them
again.
"""


@dataclass
class Held:
    """Holds a lease of this replica, and the requests that use it."""

    lease: Lease
    n_users: int = 1


@dataclass(frozen=True)
class Visit:
    """Holds the results of `before` for a request.

    Attributes:
        has_lease: whether this replica has the lease of the session.
        fetched_tokens: how many tokens came from the store.
        held_by: the replica that holds the session, if the request goes on without the lease.
    """

    prompt: TokenPrompt
    has_lease: bool = False
    fetched_tokens: int = 0
    held_by: str | None = None


class Keeper:
    """Runs the store's work of one replica in threads.

    Args:
        leases: the leases of this replica.
    """

    def __init__(self, mover: Mover, leases: Leases, health: StoreHealth) -> None:
        self.health = health
        self._mover = mover
        self._leases = leases
        self._held: dict[str, Held] = {}
        self._asking = Timeouts(4, health.note)
        self._moving = Timeouts(2)  # These threads move whole sequences, which may take any amount of time.
        self._writing: set[asyncio.Task[None]] = set()
        self._periodic: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to renew leases, to share prefixes, and to remove old files."""
        periods: list[tuple[float, Callable[[], Any]]] = [
            (self._leases.seconds / 3, self._renew),
            (SHARE_SECONDS, partial(self._move, self._mover.share)),
            (SWEEP_SECONDS, partial(self._move, self._sweep)),
        ]
        self._periodic = [asyncio.create_task(self._repeat(*period)) for period in periods]

    async def stop(self) -> None:
        """Write all waiting sequences, and release all leases."""
        for task in self._periodic:
            task.cancel()
        await asyncio.gather(*self._periodic, *self._writing, return_exceptions=True)
        for held in self._held.values():
            await self._attempt(self._ask, self._leases.release, held.lease)
        self._asking.close()
        self._moving.close()

    async def before(self, prompt: TokenPrompt, alive: Collection[str] | None) -> Visit:
        """Lease the session of a prompt, and fetch a sequence from which it can continue.

        If the store fails, go on without it.

        Args:
            alive: the replicas of this fleet.
        """
        if not prompt.n_tokens:
            return Visit(prompt)
        held = await self._lease(prompt.session, alive) if prompt.session is not None else None
        stand, held_by = None if held is None else held.lease.stand, None
        try:
            if held is None and prompt.session is not None:
                other = await self._attempt(self._ask, self._leases.look, prompt.session)
                stand, held_by = (None, None) if other is None else (other.stand, other.holder)
            fetched = await self._attempt(self._mover.fetch, prompt, stand, seconds=FETCH_SECONDS)
        except BaseException:  # The client may have gone away, for example. Then nobody calls `after`.
            if held is not None:
                self._in_background(self._leave(held))
            raise
        return Visit(prompt, held is not None, fetched or 0, held_by)

    def after(self, visit: Visit) -> None:
        """Store the session as it is after a request, and then release its lease. Return without waiting for either."""
        self._in_background(self._store(visit))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _store(self, visit: Visit) -> None:
        stand = None
        if visit.prompt.n_tokens and len(self._writing) <= _MOST_UNWRITTEN:
            packed = await self._move(self._mover.pack, visit.prompt)
            with suppress(OSError):
                if packed is not None:
                    await self._move(packed[1])
                    stand = packed[0]
        elif visit.prompt.n_tokens:
            self.health.count("dropped")
        if visit.has_lease and visit.prompt.session is not None:
            held = self._held[visit.prompt.session]
            held.lease = replace(held.lease, stand=stand or held.lease.stand)
            await self._leave(held)

    async def _leave(self, held: Held) -> None:
        """Release a lease that nobody else uses. If another request wants it before the release, it is renewed."""
        held.n_users -= 1
        if held.n_users:
            return
        await self._attempt(self._ask, self._leases.release, held.lease)
        if not held.n_users:
            self._held.pop(held.lease.session, None)
        else:
            await self._attempt(self._ask, self._leases.renew, held.lease)

    async def _lease(self, session: str, alive: Collection[str] | None) -> Held | None:
        until = time.monotonic() + WAIT_SECONDS
        while True:
            if (held := self._held.get(session)) is not None:
                held.n_users += 1
                return held
            try:
                lease = await self._asking.run(self._ask, self._leases.take, session, alive)
            except OSError:
                return None
            if lease is not None:
                # Another request of this replica has taken the lease meanwhile. The new lease supersedes that one.
                if session in self._held:
                    self._held[session].lease = lease
                    self._held[session].n_users += 1
                else:
                    self._held[session] = Held(lease)
                return self._held[session]
            if time.monotonic() > until:
                self.health.count("leases_missed")
                return None
            self.health.count("lease_waits")
            await asyncio.sleep(_POLL_SECONDS)

    async def _renew(self) -> None:
        for session, held in list(self._held.items()):
            renewed = await self._attempt(self._ask, self._leases.renew, held.lease)
            if renewed is not None and session in self._held:
                held.lease = replace(held.lease, until=renewed.until)

    def _sweep(self) -> None:
        """Remove old files. Only one replica at a time does so: the one that gets a lease for it."""
        with self.health.asking():
            lease = self._leases.take("sweep")
        if lease is not None:
            self.health.count("swept_bytes", self._mover.sweep())
            with self.health.asking():
                self._leases.release(lease)

    # Threads run the methods below.

    async def _move(self, work: Callable[..., T], *arguments: Any) -> T:
        return await self._moving.run(work, *arguments, seconds=None)

    def _ask(self, work: Callable[..., T], *arguments: Any) -> T:
        with self.health.asking():
            return work(*arguments)

    async def _attempt(self, work: Callable[..., T], *arguments: Any, seconds: float = ASK_SECONDS) -> T | None:
        """Do the work in a thread. Return None if the store fails, or does not answer in time."""
        try:
            return await self._asking.run(work, *arguments, seconds=seconds)
        except OSError:
            return None

    async def _repeat(self, seconds: float, work: Callable[[], Any]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
            except Exception as error:  # Whatever the error was, the next attempt may succeed.
                log.warning("the store failed: %r", error)
