"""Simulates chats of many users with one engine and one memory, and checks every answer that can be checked.

Users come and go as a workload says (`chat.simulation.workload`). Each action waits for its time, and for the reply
before it. Time is

- the wall clock, `speed` times faster, if a speed is given: users arrive as they would at a server;
- otherwise a virtual clock: each step of the engine takes `STEP_SECONDS`, and while no user has anything to do, it
  jumps to the next event. Then everything except the timings depends only on the workload and the setup. Dry runs
  always use the virtual clock.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.requests import Generation
from hybridmem.chat.prompts import Tokenizer, find_stop_ids
from hybridmem.chat.simulation.dry import NoModel, Script, Words
from hybridmem.chat.simulation.report import STEP_SECONDS, Answer, Report, Sample, Tally
from hybridmem.chat.simulation.user import Room, SimulatedUser
from hybridmem.chat.simulation.workload import Event, Family, Workload
from hybridmem.defaults import PREFIX_GRID_TOKENS, ROLLBACK_WINDOW, STEP_TOKENS
from hybridmem.memory import HybridMemory, MemorySpec, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel

_MOST_SLEEP_SECONDS = 0.05
"""The simulation sleeps at most this long, so that the live view goes on while nobody does anything."""


@dataclass(frozen=True)
class Setup:
    """Holds the engine and the parts that simulated users talk to.

    Attributes:
        spec: the model's spec.
        model: the model. None is a dry run, with all bookkeeping on device="meta" and made-up replies.
        tokenizer: encodes messages. None: users can only say made-up tokens.
        stop_ids: the stop ids of a dry run without tokenizer. Otherwise `find_stop_ids` finds them.
        budget, host_budget, swap_dir, rollback_window, poison: the options of the memory. With a swap_dir and no
            host_budget, everything is swapped out to files.
        grid_tokens: the grid of the prefix cache, in tokens. None: there is no cache.
        max_tokens: the most tokens of a reply, if the workload names no number.
        speed: how many times faster than the wall clock users act. None: time is virtual.
        is_checked: whether to judge the answers word for word. This suits the embedded model, and others trained on
            `chat.simulation.dialogues`.
        resends: whether each prompt contains the user's whole history, as prompts of a chat API do. Then only the
            prefix cache remembers the history. Otherwise the user's sequence stays open.
        seed: the seed of made-up tokens.
    """

    spec: MemorySpec
    model: LanguageModel | None
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...] = ()
    budget: int | str = "1GiB"
    host_budget: int | str | None = None
    swap_dir: Path | None = None
    rollback_window: int = ROLLBACK_WINDOW
    grid_tokens: int | None = PREFIX_GRID_TOKENS
    step_tokens: int = STEP_TOKENS
    max_running: int = 64
    max_tokens: int = 32
    speed: float | None = None
    is_checked: bool = False
    poison: bool = False
    resends: bool = False
    seed: int = 0

    @property
    def is_dry(self) -> bool:
        return self.model is None


class Simulation:
    """Plays a workload to its end with `run`, once.

    Attributes:
        latest: the newest replies, as (user, what they said, reply).
        n_users: how many users have an open conversation. n_generating, n_paused: how many of these wait for a reply,
            and how many pause.
    """

    def __init__(self, setup: Setup, workload: Workload) -> None:
        self.setup = setup
        self.memory = _make_memory(setup)
        self.cache = None if setup.grid_tokens is None else PrefixCache(self.memory, grid_tokens=setup.grid_tokens)
        stop_ids = _find_stop_ids(setup)
        self._script = Script(stop_ids[0]) if setup.is_dry else None
        self.engine = _make_engine(setup, self.memory, self.cache, stop_ids, self._script)
        self.tally = Tally(self.engine.stats, setup.is_dry)
        words = Words(setup.tokenizer, setup.spec.vocab_size, self.engine.stop_ids, setup.seed, is_dry=setup.is_dry)
        self.latest: deque[tuple[str, str, str]] = deque(maxlen=8)
        self.n_users = self.n_paused = 0
        self.seconds = 0.0  # This is the time on the clock of the simulated users.
        self.n_families = 0
        self._words = words
        self._room = Room(self.engine, self.memory, words, self.tally, max_tokens=setup.max_tokens, script=self._script)
        self._families: Iterator[Family] = iter(workload)
        self._next_family = next(self._families, None)
        # This maps a family and a branch's name to the events of a branch that has not begun.
        self._unborn: dict[tuple[int, str], deque[tuple[int, Event]]] = {}
        self._due: list[tuple[float, int, SimulatedUser]] = []
        self._n_scheduled = 0
        self._speaking: dict[Generation, SimulatedUser] = {}
        self._n_given_up = 0
        self._jumped_seconds = 0.0
        self._peak_bytes = 0

    @property
    def n_generating(self) -> int:
        return len(self._speaking)

    # The methods below let time pass.

    def run(self, on_step: Callable[[Simulation], None] = lambda simulation: None) -> Report:
        """Play all events, check the memory, and close everything.

        Args:
            on_step: is called after each step, and occasionally while no user does anything.
        Raises:
            Whatever the memory raises, IntegrityError included; FormatError for texts that the tokenizer cannot render.
        """
        start_bytes, started = self.memory.usage().used_bytes, time.perf_counter()
        while True:
            self._set_time(started)
            self._begin_due()
            if not self.engine.is_idle:
                for generation in self.engine.step():
                    self._finish(generation)
            elif not self._wait_for_next():
                break
            self._sample()
            on_step(self)
        seconds = time.perf_counter() - started
        n_evicted = self._n_evicted()
        if self.cache is not None:
            self.cache.clear()
        self.memory.check()
        swaps = self.memory.counters.swaps
        counts = {"host": swaps.n_to_host, "disk": swaps.n_to_disk, "back": swaps.n_back}
        return Report(
            self.tally, self.n_families, "virtual" if self.setup.speed is None else "wall", start_bytes,
            self.memory.usage().used_bytes, self._peak_bytes, n_evicted, counts, seconds, self.seconds,
            self._n_given_up, self.setup.is_checked,
        )  # fmt: skip

    def _set_time(self, started: float) -> None:
        if self.setup.speed is None:
            self.seconds = max(self.seconds, self.engine.stats.n_steps * STEP_SECONDS + self._jumped_seconds)
        else:
            self.seconds = (time.perf_counter() - started) * self.setup.speed

    def _wait_for_next(self) -> bool:
        """Let time pass until the next event. Return False if there is none."""
        times = [self._due[0][0]] if self._due else []
        times += [self._next_family[0].at] if self._next_family else []
        if not times:
            return False
        missing = min(times) - self.seconds
        if self.setup.speed is None:
            self._jumped_seconds += max(missing, 0.0)
            self.seconds = max(self.seconds, min(times))
        else:
            time.sleep(min(max(missing / self.setup.speed, 0.0), _MOST_SLEEP_SECONDS))
        return True

    def _begin_due(self) -> None:
        """Begin all events whose time has come, in the order of those times."""
        while True:
            arrives_at = self._next_family[0].at if self._next_family else float("inf")
            acts_at = self._due[0][0] if self._due else float("inf")
            if min(arrives_at, acts_at) > self.seconds:
                return
            if arrives_at <= acts_at:
                self._arrive()
            else:
                self._act(heapq.heappop(self._due)[2])

    def _schedule(self, user: SimulatedUser) -> None:
        """Schedule a user's next event, because the one before is over. A user without a further event leaves."""
        if not user.events:
            self._leave(user)
            return
        self._n_scheduled += 1
        heapq.heappush(self._due, (user.events[0][1].at, self._n_scheduled, user))

    # The methods below are about events.

    def _arrive(self) -> None:
        family = self._next_family
        assert family is not None
        self._next_family = next(self._families, None)
        number, self.n_families = self.n_families, self.n_families + 1
        events: dict[str, deque[tuple[int, Event]]] = {}
        for i, event in enumerate(family):
            events.setdefault(event.user, deque()).append((i, event))
        arrival = family[0]
        user = SimulatedUser(arrival.user, number, arrival, len(self._words.opening(arrival)), events.pop(arrival.user))
        user.messages = [{"role": role, "content": content} for role, content in arrival.opening]
        self._unborn |= {(number, branch): its_events for branch, its_events in events.items()}
        user.events.popleft()
        self.tally.actions["arrive"] += 1
        self.n_users += 1
        self._schedule(user)

    def _act(self, user: SimulatedUser) -> None:
        index, event = user.events.popleft()
        self.tally.actions[event.action] += 1
        self.n_paused -= user.is_paused
        user.doing = event.action
        if event.value is not None and not event.asks:
            user.told.add(event.value)
            self.tally.tell(event.value)
        if event.action == "say":
            self._speaking[self._room.say(user, event, index)] = user
        elif event.action == "edit":
            self._speaking[self._room.edit(user, event, index)] = user
        elif event.action == "regenerate":
            self._speaking[self._room.regenerate(user, index)] = user
        else:
            if event.action == "branch":
                self._branch(user, event)
            elif event.action == "pause":
                self._room.pause(user)
            self.n_paused += user.is_paused
            if event.action == "leave":
                user.events.clear()
            self._schedule(user)

    def _branch(self, user: SimulatedUser, event: Event) -> None:
        assert event.into is not None, "a branch has a name"
        branch = user.branch(event.into, self._unborn.pop((user.family, event.into), deque()))
        self._room.branch(user, branch)
        self.n_users += 1
        self._schedule(branch)

    def _finish(self, generation: Generation) -> None:
        user = self._speaking.pop(generation)
        if self._script is not None:
            self._script.forget(generation)
        user.sequence, user.tokens = generation.sequence, []
        self._count_lookup(user, generation)
        if generation.error is not None or user.sequence is None:
            self.tally.failed[f"{type(generation.error).__name__}: {generation.error}"] += 1
            self._n_given_up += 1
            user.events.clear()
            self._leave(user)
            return
        last = user.said[-1]
        reply = (last.event.reply or "") if self.setup.is_dry else generation.text
        user.messages.append({"role": "assistant", "content": reply})
        if user.doing == "regenerate":
            self.tally.regenerated["same words" if reply == user.former else "other words"] += 1
        if last.event.asks and self.setup.is_checked and not self.setup.is_dry:
            self._judge(user, reply)
        self.latest.append(
            (
                user.name,
                last.event.text or f"({last.event.n_tokens} tokens)",
                reply or f"({len(generation.token_ids)} tokens)",
            )
        )
        if self.setup.resends:
            self._room.forget(user)
        else:
            self._room.here[user] = None
        self._schedule(user)

    def _judge(self, user: SimulatedUser, reply: str) -> None:
        last = user.said[-1]
        foreign = self.tally.foreign_values(reply, user.told)
        answer = Answer(
            user.name, user.family, last.index, last.event.text or "", reply, last.event.reply or "", foreign
        )
        self.tally.answers.append(answer)

    def _count_lookup(self, user: SimulatedUser, generation: Generation) -> None:
        """Count the tokens of a prompt's known part that came from the prefix cache, and those that did not."""
        if not user.n_known and generation.lookup is None:
            return
        found = generation.lookup
        reused, matched = (found.reused, min(found.by_attention, user.n_known)) if found is not None else (0, 0)
        tally, doing = self.tally, user.doing
        tally.reused[doing, "prefix cache"] += reused
        tally.recomputed[doing, "seen before, but no state kept there"] += max(0, matched - reused)
        # Otherwise the tokens are an opening that its first user has to compute.
        if doing != "say" or user.said[-1].start:
            tally.recomputed[doing, "not in the prefix cache"] += max(0, user.n_known - max(matched, reused))
        user.n_known = 0

    def _leave(self, user: SimulatedUser) -> None:
        self.n_paused -= user.is_paused
        user.is_paused = False
        self.n_users -= 1
        self._room.leave(user)

    # The methods below take samples.

    def _sample(self) -> None:
        counters, stats, load = self.memory.counters, self.engine.stats, self.engine.load
        self._peak_bytes = max(self._peak_bytes, used_bytes := counters.used_bytes)
        if not self.tally.samples.is_due(stats.n_steps):
            return
        host_bytes, disk_bytes = counters.swapped_bytes
        by_kind = counters.bytes_by_pool()
        assert sum(by_kind.values()) == used_bytes, "every byte in use is of some kind"
        n_silent = self.n_users - len(self._speaking) - self.n_paused
        reused, recomputed = self.tally.reused.total(), self.tally.recomputed.total()
        self.tally.samples.add(
            Sample(
                stats.n_steps, self.seconds, load.running, load.waiting + load.preempted, n_silent, self.n_paused,
                len(counters.swaps),
                by_kind,
                host_bytes, disk_bytes, stats.n_generated, reused, recomputed,
            )
        )  # fmt: skip

    def _n_evicted(self) -> int:
        return 0 if self.cache is None else self.cache.stats().n_evicted


def simulate(
    setup: Setup, workload: Workload, on_step: Callable[[Simulation], None] = lambda simulation: None
) -> Report:
    """Play a workload. The arguments and errors are those of `Simulation`."""
    return Simulation(setup, workload).run(on_step)


def _make_memory(setup: Setup) -> HybridMemory:
    host_budget = 1 if setup.swap_dir is not None and setup.host_budget is None else setup.host_budget
    if setup.is_dry and setup.swap_dir is not None:
        raise SpecError(
            f"swap_dir={setup.swap_dir}: a dry run has no bytes to write; leave it out, and read what host memory "
            "would hold"
        )
    return HybridMemory(
        setup.spec, setup.budget, rollback_window=setup.rollback_window, device="meta" if setup.is_dry else None,
        poison=setup.poison, host_budget=host_budget, swap_dir=setup.swap_dir,
    )  # fmt: skip


def _find_stop_ids(setup: Setup) -> tuple[int, ...]:
    if setup.stop_ids:
        return setup.stop_ids
    if setup.model is None:
        return (setup.tokenizer.eos_token_id,) if setup.tokenizer is not None else (0,)
    return find_stop_ids(setup.tokenizer, setup.model) if setup.tokenizer is not None else ()


def _make_engine(
    setup: Setup, memory: HybridMemory, cache: PrefixCache | None, stop_ids: tuple[int, ...], script: Script | None
) -> Engine:  # fmt: skip
    options: dict[str, Any] = {
        "stop_ids": stop_ids,
        "prefixes": cache,
        "step_tokens": setup.step_tokens,
        "max_running": setup.max_running,
    }
    if script is None:
        return Engine(setup.model, memory, setup.tokenizer, **options)  # type: ignore[arg-type]
    return Engine(NoModel(memory.spec), memory, None, choose=script.choose, **options)  # type: ignore[arg-type]
