"""Lets one replica at a time advance a session, by files that only one replica can create.

A session's lease is the file with the highest number in its folder. To take the lease, a replica creates the file with
the next number, which only one of several can do. The file says who holds the lease, until when, and which prefix of
the session was stored last. Only the holder writes the file again. A slow holder that has lost its lease writes a file
that nobody reads any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Protocol


class Shelf(Protocol):
    """Declares the methods of a `Place` that leases need."""

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, content: bytes) -> None: ...
    def create(self, name: str, content: bytes) -> bool: ...
    def names(self, folder: str) -> list[str]: ...
    def remove(self, name: str) -> None: ...


@dataclass(frozen=True)
class Stand:
    """Describes the last stored prefix of a session.

    Attributes:
        digest: the digest of the owner and the tokens, hexadecimal.
    """

    digest: str
    n_tokens: int


@dataclass(frozen=True)
class Lease:
    """Holds the contents of a lease's file.

    Attributes:
        number: the number of the file. A file with a higher number supersedes it.
        holder: the holder of the lease.
        until: when the lease ends unless it is renewed, in unix seconds by the holder's clock. 0: it has been released.
        seconds: the time for which the lease was taken.
        stand: the last stored prefix of the session. None: no turn was stored yet.
    """

    session: str
    number: int
    holder: str
    until: float
    stand: Stand | None = None
    seconds: float = 0.0


class Leases:
    """Takes, renews and releases leases for one holder. All calls raise OSError if the place fails.

    Args:
        holder: the holder's name, FLEET/REPLICA.
        seconds: how long a lease holds unless it is renewed.
        clock: returns unix seconds. Clocks of machines may differ by less than `seconds`.
    """

    def __init__(self, shelf: Shelf, holder: str, seconds: float, clock: Callable[[], float]) -> None:
        self.holder = holder
        self.seconds = seconds
        self._shelf = shelf
        self._clock = clock

    def look(self, session: str) -> Lease | None:
        """Return the lease of a session, whoever holds it. None: there never was one."""
        numbers = self._numbers(session)
        content = self._shelf.read(_name(session, numbers[-1])) if numbers else None
        return None if content is None else _lease_in(content, session, numbers[-1])

    def take(self, session: str, alive: Collection[str] | None = None) -> Lease | None:
        """Take the lease of a session. Return None if another replica holds it, or takes it at this moment.

        Args:
            alive: all living replicas of this fleet. If a lease's holder belongs to this fleet and is not among them,
                the lease has ended.
        """
        last, now = self.look(session), self._clock()
        if last is not None and self._is_running(last, now) and not self._has_ended(last.holder, alive):
            return None
        number = 1 if last is None else last.number + 1
        stand = None if last is None else last.stand
        lease = Lease(session, number, self.holder, now + self.seconds, stand, self.seconds)
        if not self._shelf.create(_name(session, number), _content(lease)):
            return None
        numbers = self._numbers(session)
        # Since the last look, the lease was taken and released, and old files were removed.
        if numbers[-1:] != [number]:
            self._shelf.remove(_name(session, number))
            return None
        for old in numbers[:-1]:
            self._shelf.remove(_name(session, old))
        return lease

    def renew(self, lease: Lease) -> Lease | None:
        """Renew a lease. Return None if it has been lost."""
        return self._rewrite(replace(lease, until=self._clock() + self.seconds))

    def release(self, lease: Lease, stand: Stand | None = None) -> bool:
        """Release a lease, and store the session's new stand, if there is one.

        Return False if the lease has been lost.
        """
        return self._rewrite(replace(lease, until=0.0, stand=stand or lease.stand)) is not None

    def _rewrite(self, lease: Lease) -> Lease | None:
        if self._numbers(lease.session)[-1:] != [lease.number]:
            return None
        self._shelf.write(_name(lease.session, lease.number), _content(lease))
        return lease

    def _is_running(self, lease: Lease, now: float) -> bool:
        """Return whether the time of a lease has not ended.

        If a lease seems to have been taken in the future, by more than the times of its holder and its reader together,
        the holder's clock is wrong. Such a lease would hold until that time, so it does not count. At worst, two
        replicas compute the same tokens.
        """
        return now < lease.until <= now + 2 * lease.seconds + self.seconds

    def _has_ended(self, holder: str, alive: Collection[str] | None) -> bool:
        """Return whether a holder has ended.

        It has ended if it is an earlier process of this replica, or a replica that has left this fleet.
        """
        fleet, _, name = holder.rpartition("/")
        if holder == self.holder:
            return True
        return alive is not None and fleet == self.holder.rpartition("/")[0] and name not in alive

    def _numbers(self, session: str) -> list[int]:
        names = self._shelf.names(_folder(session))
        return sorted(int(name[:-5]) for name in names if name[:-5].isdigit() and name.endswith(".json"))


def _folder(session: str) -> str:
    return f"sessions/{session[:2]}/{session}"


def _name(session: str, number: int) -> str:
    return f"{_folder(session)}/{number}.json"


def _content(lease: Lease) -> bytes:
    stand = None if lease.stand is None else asdict(lease.stand)
    about = {"holder": lease.holder, "until": lease.until, "seconds": lease.seconds, "stand": stand}
    return json.dumps(about).encode()


def _lease_in(content: bytes, session: str, number: int) -> Lease | None:
    try:
        value = json.loads(content)
        stand = None
        if (found := value["stand"]) is not None:
            stand = Stand(bytes.fromhex(found["digest"]).hex(), int(found["n_tokens"]))
        return Lease(
            session, number, str(value["holder"]), float(value["until"]), stand, float(value.get("seconds", 0.0))
        )
    except DAMAGE:  # A damaged file counts as a released lease without a turn.
        return Lease(session, number, "", 0.0)


DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""The errors that reading JSON of an unexpected shape may raise."""
