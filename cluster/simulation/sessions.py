"""Makes up the sessions of a fleet's users: when each turn is sent, and with which tokens it begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridmem.memory import SpecError


@dataclass(frozen=True)
class FleetHabits:
    """Holds numbers that say how users of a fleet behave.

    Attributes:
        n_sessions: the number of conversations, each of one user.
        turns: the mean number of turns in a session. The distribution is geometric, with at least one turn.
        sessions_per_second: how many sessions begin in a second, at random times.
        think_seconds: the mean time between a reply and the next turn (exponential).
        message_tokens, reply_tokens: the mean lengths of messages and replies (exponential).
        n_openings: the number of system prompts. The k-th one is used with a probability in proportion to 1/k.
        opening_tokens: the length of a system prompt.
        edits: the share of turns that change an earlier message, and continue from before it.
    """

    n_sessions: int = 1_000_000
    turns: float = 4.0
    sessions_per_second: float = 100.0
    think_seconds: float = 30.0
    message_tokens: float = 60.0
    reply_tokens: float = 150.0
    n_openings: int = 64
    opening_tokens: int = 1024
    edits: float = 0.05

    def __post_init__(self) -> None:
        for name in ("n_sessions", "turns", "sessions_per_second", "message_tokens", "reply_tokens", "n_openings"):
            if getattr(self, name) < 1 and not (name == "sessions_per_second" and getattr(self, name) > 0):
                raise SpecError(f"{name}={getattr(self, name)!r}; give at least 1")
        if not 0 <= self.edits <= 1:
            raise SpecError(f"edits={self.edits!r}; give a share from 0 to 1")


@dataclass(frozen=True)
class Turns:
    """Holds all turns of all sessions, in the order in which they are sent.

    Attributes:
        session, number: for each turn, its session, and the number of earlier turns in that session, (n,).
        at: when each turn is sent, in seconds, (n,).
        opening: the number of the session's system prompt, (n,).
        n_prompt: the tokens of the prompt, including the history, (n,).
        n_reply: the tokens of the reply, (n,).
        n_kept: the tokens of the prompt that the session had at the end of its last turn, (n,). These are the whole
            history, or less if the turn edits an earlier message, or 0 at the first turn.
    """

    session: NDArray[np.int64]
    number: NDArray[np.int64]
    at: NDArray[np.float64]
    opening: NDArray[np.int64]
    n_prompt: NDArray[np.int64]
    n_reply: NDArray[np.int64]
    n_kept: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.at)


def make_turns(habits: FleetHabits, seed: int) -> Turns:
    """Draw all turns. Cost: about 100 bytes for each turn, and one sort."""
    rng = np.random.default_rng(seed)
    n_turns = rng.geometric(1 / habits.turns, habits.n_sessions)
    n, last = int(n_turns.sum()), np.cumsum(n_turns)
    first = last - n_turns
    session = np.repeat(np.arange(habits.n_sessions), n_turns)
    number = np.arange(n) - np.repeat(first, n_turns)
    weights = 1 / np.arange(1, habits.n_openings + 1)
    opening = rng.choice(habits.n_openings, habits.n_sessions, p=weights / weights.sum())[session]
    begins = np.sort(rng.uniform(0, habits.n_sessions / habits.sessions_per_second, habits.n_sessions))
    pauses = rng.exponential(habits.think_seconds, n)
    pauses[first] = 0
    at = begins[session] + _sums_within(pauses, first, n_turns)
    message = 1 + rng.exponential(habits.message_tokens, n).astype(np.int64)
    reply = 1 + rng.exponential(habits.reply_tokens, n).astype(np.int64)
    history = _sums_within(message + reply, first, n_turns) - (message + reply)
    n_kept = np.where(number > 0, habits.opening_tokens + history, 0)
    is_edit = (number > 0) & (rng.random(n) < habits.edits)
    # An edited turn continues from somewhere in its history. So the prompt's length stays the same, and its end is new.
    kept = habits.opening_tokens + (history * rng.random(n)).astype(np.int64)
    n_kept = np.where(is_edit, kept, n_kept)
    n_prompt = habits.opening_tokens + history + message
    order = np.argsort(at, kind="stable")
    columns = (session, number, at, opening, n_prompt, reply, n_kept)
    return Turns(*(column[order] for column in columns))  # type: ignore[arg-type]


def _sums_within(values: NDArray[Any], first: NDArray[np.int64], n: NDArray[np.int64]) -> Any:
    """Return the running sums of values within each session, including each turn itself."""
    sums = np.cumsum(values)
    before = np.where(first > 0, sums[first - 1], 0)
    return sums - np.repeat(before, n)
