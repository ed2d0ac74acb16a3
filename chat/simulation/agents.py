"""Makes the traces of coding agents, with long prompts that list tools, many short calls, long results, and subagents.

With every turn, an agent's prompt grows by the model's call and by the tool's result, and the next request begins with
the whole prompt. A subagent continues from its parent's prompt, works on its own, and returns its findings as a tool's
result. The defaults are the medians of published agentic workloads: 43 turns, 142 thousand tokens in the last prompt,
and 444 tokens in each reply.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from hybridmem.chat.simulation.workload import Event, Family
from hybridmem.memory import SpecError


@dataclass(frozen=True)
class AgentHabits:
    """Holds the rates and lengths of simulated agents. Lengths and turns are medians of log-normal distributions.

    Attributes:
        n_agents: the number of agents, not counting subagents.
        rate: how many agents begin in a second, on average (Poisson).
        turns: the turns of each agent. A subagent has a fifth of them.
        system_tokens: the tokens of the system prompt and the tools. All agents of a kind have the same ones; there are
            `n_kinds` kinds.
        result_tokens, reply_tokens: the tokens of a tool's result, and of the reply that calls the tool.
        tool_s: mean seconds that a tool takes.
        subagents, retries: the probability that a turn begins a subagent, and that it asks for the last reply again.
    Raises:
        SpecError: a wrong value. The message names the habit and the value.
    """

    n_agents: int = 60
    rate: float = 0.05
    turns: int = 43
    n_kinds: int = 3
    system_tokens: int = 15_000
    result_tokens: int = 1_550
    reply_tokens: int = 444
    tool_s: float = 8.0
    subagents: float = 0.03
    retries: float = 0.03

    def __post_init__(self) -> None:
        for name in ("n_agents", "turns", "n_kinds", "system_tokens", "result_tokens", "reply_tokens"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name}={getattr(self, name)!r}; give an integer of at least 1")
        for name in ("rate", "tool_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise SpecError(f"{name}={value!r}; give a number above 0")
        if min(self.subagents, self.retries) < 0 or self.subagents + self.retries > 1:
            raise SpecError(
                f"subagents={self.subagents}, retries={self.retries}; give shares of 0 or more, together within 1"
            )


@dataclass(frozen=True)
class AgentWorkload:
    """Makes agents with these habits. It is a `Workload` that depends on the seed alone."""

    habits: AgentHabits
    seed: int = 0

    def __iter__(self) -> Iterator[Family]:
        rng, at = random.Random(f"{self.seed}/agents"), 0.0
        for number in range(self.habits.n_agents):
            at += rng.expovariate(self.habits.rate)
            yield _Writer(self.habits, random.Random(f"{self.seed}/agent {number}")).write(f"agent {number + 1}", at)


class _Writer:
    """Makes the events of one agent and its subagents."""

    def __init__(self, habits: AgentHabits, rng: random.Random) -> None:
        self._habits, self._rng = habits, rng
        self._events: list[Event] = []
        self._n_subagents = 0

    def write(self, name: str, at: float) -> Family:
        opening = (("system", f"tools of agents of kind {self._rng.randrange(self._habits.n_kinds)}"),)
        self._events.append(Event(at, name, "arrive", opening=opening, n_tokens=self._habits.system_tokens))
        self._work(name, at, self._length(self._habits.turns, 0.5), may_delegate=True)
        return sorted(self._events, key=lambda event: event.at)

    def _work(self, name: str, at: float, n_turns: int, *, may_delegate: bool) -> float:
        """Write the turns of an agent from the time `at` on. Return the time at which it is done."""
        habits, rng = self._habits, self._rng
        for turn in range(n_turns):
            roll = rng.random()
            if turn and may_delegate and roll < habits.subagents:
                self._n_subagents += 1
                subagent = f"{name}, subagent {self._n_subagents}"
                self._events.append(Event(at, name, "branch", into=subagent))
                at = self._work(subagent, at, self._length(max(1, habits.turns // 5), 0.5), may_delegate=False)
            elif turn and roll > 1 - habits.retries:
                self._events.append(Event(at, name, "regenerate"))
                at += rng.expovariate(1 / habits.tool_s)
                continue
            n_tokens, n_reply = self._length(habits.result_tokens, 1.0), self._length(habits.reply_tokens, 0.6)
            self._events.append(Event(at, name, "say", n_tokens=n_tokens, n_reply=n_reply))
            at += rng.expovariate(1 / habits.tool_s)
        self._events.append(Event(at, name, "leave"))
        return at

    def _length(self, middle: int, sigma: float) -> int:
        return max(1, round(self._rng.lognormvariate(math.log(middle), sigma)))
