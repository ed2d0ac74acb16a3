"""Simulates a fleet of replicas that serves many sessions, with the policies that route real requests.

Time is virtual. A replica computes prompts and replies at a given speed, which its requests share. A replica does not
compute tokens that it can resume or fetch from the store. Only the users' behavior is random.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hybridmem.cluster.routing.index import PrefixIndex
from hybridmem.cluster.routing.policies import make_policy
from hybridmem.cluster.routing.policy import Policy
from hybridmem.cluster.simulation.replicas import SimulatedCache, Sizes
from hybridmem.cluster.simulation.sessions import FleetHabits, Turns, make_turns
from hybridmem.defaults import PREFIX_GRID_TOKENS

_LOADS_EVERY = 2_000
"""The simulation samples the differences of loads after this many turns."""


@dataclass(frozen=True)
class FleetSetup:
    """Holds the fleet that is simulated.

    Attributes:
        budget_bytes: the bytes of each replica for checkpoints.
        prefill_tokens_per_second: a replica's speed for all prompts together. decode_tokens_per_second: a replica's
            speed for each reply.
        store_bytes_per_second: the speed of reading and writing the store. 0: there is no store.
        grid_tokens: the grid of the prefix caches, in tokens.
        imbalance, slack_requests: the bounds of the policy.
    """

    n_replicas: int = 200
    policy: str = "resumable"
    budget_bytes: int = 8 << 30
    prefill_tokens_per_second: float = 20_000.0
    decode_tokens_per_second: float = 50.0
    store_bytes_per_second: float = 1e9
    grid_tokens: int = PREFIX_GRID_TOKENS
    imbalance: float = 1.5
    slack_requests: int = 4


@dataclass(frozen=True)
class SimulatedPrompt:
    """Describes a prompt by the positions at which it could be resumed, without its tokens."""

    session: str
    n_tokens: int
    keys: dict[int, bytes]

    def digests(self, positions: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (position, digest) for those of the asked positions at which the prompt could be resumed, ascending."""
        for position, key in self.keys.items():
            if position in positions:
                yield position, key


@dataclass
class FleetReport:
    """Counts what happened in a simulation.

    Attributes:
        reused_tokens: tokens of prompts that the replica could resume, without the store.
        fetched_tokens, fetched_bytes, stored_bytes: the tokens and bytes that were read from the store, and the bytes
            that were written.
        ideal_tokens: the tokens that one unlimited memory, shared by all replicas, would have reused.
        moves: turns that went to another replica than the session's last turn.
        reasons: the reason of a route -> how often it occurred.
        imbalances: samples of the number of requests of the busiest replica, divided by the mean of all replicas.
        prefill_seconds: a sample of the times to the first token, including waits.
        cpu_seconds: the processor time of the simulation itself.
    """

    n_turns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    fetched_tokens: int = 0
    ideal_tokens: int = 0
    fetched_bytes: int = 0
    stored_bytes: int = 0
    moves: int = 0
    later_turns: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    imbalances: list[float] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the counts, and the shares and percentiles that a table shows."""
        waits = np.array(self.prefill_seconds or [0.0])
        counts = {k: v for k, v in asdict(self).items() if k not in ("imbalances", "prefill_seconds")}
        return counts | {
            "reused_share": self.reused_tokens / max(1, self.prompt_tokens),
            "with_store_share": (self.reused_tokens + self.fetched_tokens) / max(1, self.prompt_tokens),
            "of_ideal": (self.reused_tokens + self.fetched_tokens) / max(1, self.ideal_tokens),
            "moved_share": self.moves / max(1, self.later_turns),
            "imbalance_mean": float(np.mean(self.imbalances or [1.0])),
            "imbalance_p99": float(np.percentile(self.imbalances or [1.0], 99)),
            "first_token_p50_seconds": float(np.percentile(waits, 50)),
            "first_token_p99_seconds": float(np.percentile(waits, 99)),
        }


def simulate_fleet(setup: FleetSetup, habits: FleetHabits, sizes: Sizes, seed: int = 0) -> FleetReport:
    """Play all sessions, and return a report. Cost: about 30 microseconds for each turn and policy."""
    return _Fleet(setup, habits, sizes, seed).play(make_turns(habits, seed))


class _Fleet:
    def __init__(self, setup: FleetSetup, habits: FleetHabits, sizes: Sizes, seed: int) -> None:
        self._setup, self._habits, self._sizes = setup, habits, sizes
        self._names = [f"r{i}" for i in range(setup.n_replicas)]
        bounds: dict[str, float] = {"grid_tokens": 0, "believed_seconds": 1e18, "imbalance": setup.imbalance}
        bounds |= {"slack_requests": setup.slack_requests}
        self._policy: Policy = make_policy(setup.policy, seed=seed, **bounds)
        self._index: PrefixIndex | None = getattr(self._policy, "index", None)
        self._seen_openings = set[int]()
        self._caches = {name: SimulatedCache(setup.budget_bytes, self._loser(name)) for name in self._names}
        self._free_at = dict.fromkeys(self._names, 0.0)
        self._running: list[tuple[float, str]] = []  # This heap holds the end time of each request, and its replica.
        # This maps a session to its replica, and to the positions where its turns ended.
        self._last: dict[int, tuple[str, list[int]]] = {}
        self.report = FleetReport()

    def _loser(self, name: str) -> Callable[[bytes], None]:
        index = self._index
        return (lambda key: index.lose(name, [key])) if index is not None else (lambda key: None)

    def play(self, turns: Turns) -> FleetReport:
        started = time.process_time()
        columns = (turns.session, turns.number, turns.at, turns.opening, turns.n_prompt, turns.n_reply, turns.n_kept)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        is_last = _last_of_sessions(turns)
        for i, (session, number, at, opening, n_prompt, n_reply, n_kept) in enumerate(rows):
            while self._running and self._running[0][0] <= at:
                self._policy.done(heapq.heappop(self._running)[1])
            self._play_turn(session, number, at, opening, n_prompt, n_reply, n_kept)
            if is_last[i]:
                self._last.pop(session, None)
            if i % _LOADS_EVERY == 0:
                self._look_at_loads()
        self.report.cpu_seconds = time.process_time() - started
        return self.report

    def _play_turn(
        self, session: int, number: int, at: float, opening: int, n_prompt: int, n_reply: int, n_kept: int
    ) -> None:
        report, setup = self.report, self._setup
        replica_before, ends = self._last.get(session, ("", []))
        known = [end for end in ends if end <= n_kept]
        prompt = self._prompt(session, opening, n_prompt, known)
        route = self._policy.choose(prompt, self._names, at)
        name = route.first
        cache = self._caches[name]
        reused = max((position for position, key in prompt.keys.items() if key in cache), default=0)
        if reused:
            cache.use(prompt.keys[reused])
        fetched = 0
        if setup.store_bytes_per_second and known and known[-1] > reused:
            fetched = known[-1] - reused
            report.fetched_tokens += fetched
            report.fetched_bytes += self._sizes.own_bytes(known[-1], 0)
        self._finish(prompt, name, at, n_prompt - reused - fetched, n_reply, fetched > 0)
        self._keep(prompt, name, max(reused, known[-1] if fetched else 0), n_prompt + n_reply, session)
        self._last[session] = (name, [*known, n_prompt + n_reply])
        report.n_turns += 1
        report.prompt_tokens += n_prompt
        report.reused_tokens += reused
        opening_tokens = self._habits.opening_tokens if opening in self._seen_openings else 0
        report.ideal_tokens += max([*known[-1:], opening_tokens])
        self._seen_openings.add(opening)
        report.later_turns += number > 0
        report.moves += number > 0 and replica_before not in ("", name)
        report.reasons[route.reason] = report.reasons.get(route.reason, 0) + 1

    def _prompt(self, session: int, opening: int, n_prompt: int, known: list[int]) -> SimulatedPrompt:
        shared = self._habits.opening_tokens
        grid = self._setup.grid_tokens or shared
        keys = {position: b"o%d/%d" % (opening, position) for position in range(grid, shared + 1, grid)}
        keys[shared] = b"o%d/%d" % (opening, shared)
        keys |= {position: b"s%d/%d" % (session, position) for position in known}
        return SimulatedPrompt(str(session), n_prompt, keys)

    def _finish(self, prompt: SimulatedPrompt, name: str, at: float, n_new: int, n_reply: int, moved: bool) -> None:
        """Let the replica compute a turn. Prompts are computed one after the other, and replies at the same time."""
        setup = self._setup
        read = self._sizes.own_bytes(prompt.n_tokens, 0) / setup.store_bytes_per_second if moved else 0.0
        first = max(at + read, self._free_at[name]) + n_new / setup.prefill_tokens_per_second
        self._free_at[name] = first
        self._policy.sent(prompt, name, at)
        heapq.heappush(self._running, (first + n_reply / setup.decode_tokens_per_second, name))
        if self.report.n_turns % 16 == 0:
            self.report.prefill_seconds.append(first - at)

    def _keep(self, prompt: SimulatedPrompt, name: str, reused: int, n_end: int, session: int) -> None:
        """Keep the checkpoints that the engine would keep: that of the opening, and that at the end of the reply.

        The checkpoint at the end of the reply is also written to the store.
        """
        for position, key in prompt.keys.items():
            if position <= self._habits.opening_tokens and key not in self._caches[name]:
                self._add(name, key, position, 0)
        key = b"s%d/%d" % (session, n_end)
        n_bytes = self._add(name, key, n_end, max(reused, self._habits.opening_tokens))
        if self._setup.store_bytes_per_second:
            self.report.stored_bytes += max(n_bytes, self._sizes.own_bytes(n_end, 0))

    def _add(self, name: str, key: bytes, position: int, n_shared: int) -> int:
        n_bytes = self._sizes.own_bytes(position, n_shared)
        if self._index is not None:
            self._index.report_one(name, position, key)
        self._caches[name].add(key, n_bytes)
        return n_bytes

    def _look_at_loads(self) -> None:
        counts = dict.fromkeys(self._names, 0)
        for _, name in self._running:
            counts[name] += 1
        mean = sum(counts.values()) / len(counts)
        if mean >= 1:  # At the beginning and at the end there are too few requests for a sample.
            self.report.imbalances.append(max(counts.values()) / mean)


def _last_of_sessions(turns: Turns) -> list[bool]:
    """Return for each turn whether it is the last one of its session."""
    last = np.zeros(turns.session.max() + 1, np.int64)
    last[turns.session] = np.arange(len(turns))
    is_last = np.zeros(len(turns), bool)
    is_last[last] = True
    return [bool(x) for x in is_last]
