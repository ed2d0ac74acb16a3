"""A request continues without the store if the store hangs, and beside another replica that holds its session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.serving.keeper import Keeper, Visit
from hybridmem.cluster.store.health import StoreHealth
from hybridmem.cluster.store.leases import Leases, Stand
from hybridmem.cluster.store.place import Place
from tests.chat.servers import PATIENCE_SECONDS

PROMPT = TokenPrompt(np.arange(20, dtype="<i4").tobytes(), b"me", "ab" * 16)


class Mover:
    """Fetches nothing, and stores the end of each prompt under the digest that it was given as its name."""

    def __init__(self, name: str, fetch: Callable[[], int] = lambda: 0) -> None:
        self.name, self._fetch = name, fetch

    def fetch(self, prompt: TokenPrompt, stand: Stand | None) -> int:
        return self._fetch()

    def pack(self, prompt: TokenPrompt) -> tuple[Stand, Callable[[], None]]:
        return Stand(self.name, 20), lambda: None


def keeper_of(place: Place, name: str, *fetch: Any) -> Keeper:
    leases = Leases(place, f"f/{name}", 30.0, time.time)
    return Keeper(Mover(name, *fetch), leases, StoreHealth(time.monotonic))  # type: ignore[arg-type]


def test_of_two_replicas_one_advances_a_session_and_the_other_answers_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridmem.cluster.serving.keeper.WAIT_SECONDS", 0.1)
    place = Place(str(tmp_path))

    async def run() -> tuple[Visit, Visit]:
        a, b = keeper_of(place, "aa"), keeper_of(place, "bb")
        holds = await a.before(PROMPT, None)
        beside = await b.before(PROMPT, None)
        b.after(beside)
        await b.stop()
        a.after(holds)
        await a.stop()
        return holds, beside

    holds, beside = asyncio.run(run())
    assert (holds.has_lease, holds.held_by, beside.has_lease, beside.held_by) == (True, None, False, "f/aa")
    lease = Leases(place, "f/c", 30.0, time.time).take(PROMPT.session or "")
    assert lease is not None and lease.stand == Stand("aa", 20), "the session stands where its holder has left it"


def test_a_request_that_ends_while_its_sequence_is_fetched_holds_no_lease(tmp_path: Path) -> None:
    """Its client has gone, or the bytes in the store make no sense."""
    place, is_fetching, may_return = Place(str(tmp_path)), Event(), Event()

    def hang() -> int:
        is_fetching.set()
        may_return.wait(PATIENCE_SECONDS)
        raise ValueError("nonsense")

    async def run() -> None:
        keeper = keeper_of(place, "a", hang)
        visit = asyncio.create_task(keeper.before(PROMPT, None))
        await asyncio.to_thread(is_fetching.wait, PATIENCE_SECONDS)
        visit.cancel()
        await asyncio.gather(visit, return_exceptions=True)
        may_return.set()
        with pytest.raises(ValueError, match="nonsense"):
            await keeper.before(PROMPT, None)
        while Leases(place, "f/b", 30.0, time.time).take(PROMPT.session or "") is None:
            await asyncio.sleep(0.01)
        await keeper.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_SECONDS))


def test_nobody_waits_for_a_store_that_hangs_until_it_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridmem.cluster.serving.keeper.FETCH_SECONDS", 0.05)
    answers, asked = Event(), list[None]()

    def hang() -> int:
        asked.append(None)
        answers.wait(PATIENCE_SECONDS)
        return 7

    async def run() -> None:
        keeper = keeper_of(Place(str(tmp_path)), "a", hang)
        assert (await keeper.before(PROMPT, None)).fetched_tokens == 0
        assert "has not answered" in str(keeper.health.error)
        again = await keeper.before(TokenPrompt(PROMPT.tokens, b"me", "cd" * 16), None)
        assert not again.has_lease and again.fetched_tokens == 0 and len(asked) == 1, "who does not ask does not wait"
        answers.set()
        while (await keeper.before(TokenPrompt(PROMPT.tokens, b"me"), None)).fetched_tokens != 7:
            await asyncio.sleep(0.01)
        await keeper.stop()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_SECONDS))
