"""Lets one replica at a time advance a session, by files that are created once.

A session's lease is the file of the highest number in its folder. To take it, a replica creates the next number, which
only one of several can do; what the file says is who holds it, until when, and where the session stands. Only the
holder writes it again. A holder that was slow and has lost its lease writes a file that nobody reads any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Protocol


class Shelf(Protocol):
    """Declares what leases need of a `Place`."""

    def read(self, name: str) -> bytes | None: ...
    def write(self, name: str, content: bytes) -> None: ...
    def create(self, name: str, content: bytes) -> bool: ...
    def names(self, folder: str) -> list[str]: ...
    def remove(self, name: str) -> None: ...


@dataclass(frozen=True)
class Stand:
    """Says where a session stands: its last stored prefix.

    Attributes:
        digest: of the owner and the tokens, hexadecimal.
    """

    digest: str
    n_tokens: int


@dataclass(frozen=True)
class Lease:
    """Holds what the file of a lease says.

    Attributes:
        number: of the file; one that is higher supersedes it.
        holder: of the lease.
        until: when it ends unless it is renewed, in unix seconds by the holder's clock; 0: it has been released.
        seconds: for which it was taken.
        stand: None before the first turn was stored.
    """

    session: str
    number: int
    holder: str
    until: float
    stand: Stand | None = None
    seconds: float = 0.0


class Leases:
    """Takes, renews and releases leases for one holder. All calls may raise OSError: the place has failed.

    Args:
        holder: FLEET/REPLICA.
        seconds: for which a lease holds unless it is renewed.
        clock: returns unix seconds. Clocks of machines may differ by less than `seconds`.
    """

    def __init__(self, shelf: Shelf, holder: str, seconds: float, clock: Callable[[], float]) -> None:
        self.holder = holder
        self.seconds = seconds
        self._shelf = shelf
        self._clock = clock

    def look(self, session: str) -> Lease | None:
        """Return the lease of a session, whoever has it; None if there never was one."""
        numbers = self._numbers(session)
        content = self._shelf.read(_name(session, numbers[-1])) if numbers else None
        return None if content is None else _lease_in(content, session, numbers[-1])

    def take(self, session: str, alive: Collection[str] | None = None) -> Lease | None:
        """Take the lease of a session; None if another holds it, or takes it at this moment.

        Args:
            alive: all replicas of this fleet that live: a lease that another one of it holds has ended.
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
        if numbers[-1:] != [number]:  # it was taken and released since the look, and old files were removed
            self._shelf.remove(_name(session, number))
            return None
        for old in numbers[:-1]:
            self._shelf.remove(_name(session, old))
        return lease

    def renew(self, lease: Lease) -> Lease | None:
        """Hold a lease for longer; None if it has been lost."""
        return self._rewrite(replace(lease, until=self._clock() + self.seconds))

    def release(self, lease: Lease, stand: Stand | None = None) -> bool:
        """Release a lease, and note where the session stands, if it has moved; False if it has been lost."""
        return self._rewrite(replace(lease, until=0.0, stand=stand or lease.stand)) is not None

    def _rewrite(self, lease: Lease) -> Lease | None:
        if self._numbers(lease.session)[-1:] != [lease.number]:
            return None
        self._shelf.write(_name(lease.session, lease.number), _content(lease))
        return lease

    def _is_running(self, lease: Lease, now: float) -> bool:
        """True if a lease has not ended by its time.

        One that seems to have been taken later than now by more than its own time and a reader's is of a clock that is
        wrong. It would hold until that hour, so it does not count: the worst is that two replicas compute the same.
        """
        return now < lease.until <= now + 2 * lease.seconds + self.seconds

    def _has_ended(self, holder: str, alive: Collection[str] | None) -> bool:
        """True if a holder is this one, from before it began anew, or of this fleet and no longer in it."""
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
    except DAMAGE:  # as if it had been released without a turn
        return Lease(session, number, "", 0.0)


DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading JSON of another shape raises."""
