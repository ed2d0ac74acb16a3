"""One replica at a time holds a session, and no longer than it may."""

from __future__ import annotations

import pytest

from hybridmem.cluster.store.leases import Lease, Leases, Stand


class Shelf:
    """Holds files in a dict.

    `at_create` runs before a file is created, and does what another replica does meanwhile.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.at_create = lambda: None

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    def write(self, name: str, content: bytes) -> None:
        self.files[name] = content

    def create(self, name: str, content: bytes) -> bool:
        at_create, self.at_create = self.at_create, lambda: None
        at_create()
        return self.files.setdefault(name, content) is content

    def names(self, folder: str) -> list[str]:
        return [name.rpartition("/")[2] for name in self.files if name.rpartition("/")[0] == folder]

    def remove(self, name: str) -> None:
        self.files.pop(name, None)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def taken(leases: Leases, alive: list[str] | None = None) -> Lease:
    lease = leases.take("s", alive)
    assert lease is not None
    return lease


def test_a_lease_is_held_by_one_until_it_is_released(shelf: Shelf, clock: Clock) -> None:
    a, b = Leases(shelf, "f/a", 30, clock), Leases(shelf, "f/b", 30, clock)
    lease = taken(a)
    assert b.take("s") is None
    assert a.release(lease, Stand("ab", 7))
    assert taken(b).stand == Stand("ab", 7)
    assert a.take("s") is None and len(shelf.files) == 1


def test_no_lease_outlives_its_holder_by_more_than_its_time(shelf: Shelf, clock: Clock) -> None:
    a, b = Leases(shelf, "f/a", 30, clock), Leases(shelf, "f/b", 30, clock)
    lease = taken(a)
    clock.now += 20
    lease = a.renew(lease) or lease
    clock.now += 29.9
    assert b.take("s") is None
    clock.now += 0.1
    assert taken(b).number == 2
    assert a.renew(lease) is None and not a.release(lease, Stand("cd", 9))
    assert a.take("s") is None, "what the slow holder wrote does not count"


def test_a_holder_that_the_fleet_has_lost_holds_nothing(shelf: Shelf, clock: Clock) -> None:
    a, b = Leases(shelf, "f/a", 30, clock), Leases(shelf, "f/b", 30, clock)
    other = Leases(shelf, "another fleet/x", 30, clock)
    taken(a)
    assert b.take("s", ["a", "b"]) is None
    assert other.take("s", ["x"]) is None, "it does not know the replicas of other fleets"
    assert taken(b, ["b"]).holder == "f/b"


def test_of_two_that_try_at_once_one_gets_it(shelf: Shelf, clock: Clock) -> None:
    a, b = Leases(shelf, "f/a", 30, clock), Leases(shelf, "f/b", 30, clock)
    assert a.release(taken(a))
    shelf.at_create = lambda: taken(b)
    assert a.take("s") is None and b.look("s").holder == "f/b"


def test_a_file_that_was_removed_meanwhile_gives_no_lease(shelf: Shelf, clock: Clock) -> None:
    """Between the look and the creation, two others took and released the lease.

    They removed the file of that number.
    """
    a, b, c = (Leases(shelf, f"f/{name}", 30, clock) for name in "abc")
    assert a.release(taken(a))

    def others() -> None:
        assert b.release(taken(b))
        taken(c)

    shelf.at_create = others
    assert a.take("s") is None and a.look("s").holder == "f/c"


@pytest.mark.parametrize(("seconds_ahead", "holds"), [(-20, True), (29, True), (-31, False), (3600, False)])
def test_a_holder_whose_clock_is_wrong_holds_no_longer_than_a_lease_lasts(
    shelf: Shelf, clock: Clock, seconds_ahead: int, holds: bool
) -> None:
    other = Clock()
    other.now = clock.now + seconds_ahead
    lease = taken(Leases(shelf, "f/a", 30, other))
    b = Leases(shelf, "g/b", 30, clock)
    assert (b.take("s") is None) == holds
    if not holds:
        a = Leases(shelf, "f/a", 30, other)
        assert a.renew(lease) is None and not a.release(lease, Stand("ab", 7)), "what it does then does not count"
    clock.now += 61
    assert b.take("s") is not None


@pytest.mark.parametrize("content", [
    b"{", b"[1]", b"[" * 100_000, b'{"holder": "f/a", "until": 1e9, "stand": {"digest": "ab", "n_tokens": 1e999}}',
    b'{"holder": "f/a", "until": 1e9, "stand": {"digest": 5, "n_tokens": 1}}',
])  # fmt: skip
def test_a_damaged_file_counts_as_released(shelf: Shelf, clock: Clock, content: bytes) -> None:
    a = Leases(shelf, "f/a", 30, clock)
    taken(a)
    (name,) = shelf.files
    shelf.files[name] = content
    assert taken(Leases(shelf, "f/b", 30, clock)).stand is None
