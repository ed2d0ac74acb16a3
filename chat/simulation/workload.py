"""Makes the actions and times of simulated users from a seed.

`chat.simulation.traces` writes them to files and reads them.

A workload is an iterable of families, in the order in which they arrive. A family is all events of a user and of the
branches that grew from the user's conversation, in the order of their times. A workload can be iterated any number of
times. One that is made from a seed is never held as a whole.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hybridmem.chat.simulation.dialogues import TOPICS, Turn, question, small_talk, statement
from hybridmem.memory import SpecError

Action = Literal["arrive", "say", "edit", "regenerate", "branch", "pause", "leave"]
ACTIONS: tuple[Action, ...] = ("arrive", "say", "edit", "regenerate", "branch", "pause", "leave")

_TOPICS = sorted(TOPICS)
_CARDS = 4
"""A user takes this many values from each deck, and the next user's values come after them. So the names of users who
arrive together differ.
"""
_SPREAD = 0.6
"""The standard deviation of the logarithm of made-up lengths."""


@dataclass(frozen=True, slots=True)
class Event:
    """Holds an action of a user and its earliest time `at`. The action also waits until the last reply is complete.

    Attributes:
        at: seconds from the start.
        user: the user whose conversation it is. A branch counts as another user.
        text, n_tokens: the text that is said, or a number of made-up tokens. "say" and "edit" have one of the two. With
            "arrive", `n_tokens` makes up an opening; equal `opening`s get equal tokens.
        n_reply: with "say" and "edit", the most tokens of the reply. In a dry run it has exactly as many.
        reply: the right reply, if it is known.
        asks: whether the reply shows what the model remembers, and is therefore judged.
        value: the value that the message tells, or that the right answer names.
        turn: with "edit", the number of the user's message, from 0. The message and all after it are taken back.
        into: with "branch", the name of the user that continues from here beside this one.
        opening: with "arrive", the (role, content) of messages before the user's first one.
    """

    at: float
    user: str
    action: Action
    text: str | None = None
    n_tokens: int | None = None
    n_reply: int | None = None
    reply: str | None = None
    asks: bool = False
    value: str | None = None
    turn: int | None = None
    into: str | None = None
    opening: tuple[tuple[str, str], ...] = ()


Family = list[Event]
Workload = Iterable[Family]


@dataclass(frozen=True)
class Habits:
    """Holds the rates at which simulated users act.

    Attributes:
        turns: the turns of each user, including edits and regenerations. A last question is added.
        rate: how many users arrive in a second, on average. The gaps are exponential (Poisson arrivals).
        think_s, pause_s: the mean seconds between a user's actions, and the mean seconds of a pause.
        edits, regenerations, branches, pauses: the probability of each action at a turn. A user branches at most once.
        n_openings: how many different openings (system prompts) users share. 0: there are no openings.
        system: one system prompt for all users instead, for models whose chat template knows that role.
        message_tokens, reply_tokens: mean lengths of made-up messages and replies, instead of dialogues that can be
            checked.
    Raises:
        SpecError: naming the habit and its value.
    """

    n_users: int = 200
    turns: int = 6
    rate: float = 10.0
    think_s: float = 2.0
    pause_s: float = 10.0
    edits: float = 0.12
    regenerations: float = 0.08
    branches: float = 0.08
    pauses: float = 0.12
    n_openings: int = 4
    system: str | None = None
    message_tokens: int | None = None
    reply_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("n_users", 1), ("turns", 1), ("n_openings", 0)):
            if getattr(self, name) < least:
                raise SpecError(f"{name}={getattr(self, name)!r}; give an integer of at least {least}")
        for name in ("rate", "think_s", "pause_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SpecError(f"{name}={value!r}; give a number above 0")
        shares = (self.edits, self.regenerations, self.branches)
        if min(*shares, self.pauses) < 0 or sum(shares) > 1 or self.pauses > 1:
            raise SpecError(
                f"edits, regenerations and branches are {shares}, pauses {self.pauses}; give shares, the first three "
                "within 1"
            )
        if (self.message_tokens is None) != (self.reply_tokens is None):
            raise SpecError("message_tokens and reply_tokens go together; give both or none")
        if (
            self.message_tokens is not None
            and self.reply_tokens is not None
            and min(self.message_tokens, self.reply_tokens) < 1
        ):
            raise SpecError(
                f"message_tokens={self.message_tokens}, reply_tokens={self.reply_tokens}; give at least 1 token"
            )


@dataclass(frozen=True)
class MadeWorkload:
    """Makes users with these habits. It depends on the seed alone."""

    habits: Habits
    seed: int

    def __iter__(self) -> Iterator[Family]:
        rng, at = random.Random(f"{self.seed}/arrivals"), 0.0
        openings = _make_openings(self.habits, random.Random(f"{self.seed}/openings"))
        for number in range(self.habits.n_users):
            at += rng.expovariate(self.habits.rate)
            yield _Writer(self.habits, self.seed, number, at).write(rng.choice(openings))


def make_workload(habits: Habits, seed: int = 0) -> MadeWorkload:
    return MadeWorkload(habits, seed)


def _make_openings(habits: Habits, rng: random.Random) -> list[tuple[tuple[str, str], ...]]:
    """Make openings, which are short dialogues of small talk.

    The embedded model was trained on small talk, and its template has no system role.
    """
    if habits.system is not None:
        return [(("system", habits.system),)]
    openings = []
    for i in range(habits.n_openings):
        turns = [small_talk(rng) for _ in range(rng.randint(2, 4))]
        pairs = tuple(pair for turn in turns for pair in (("user", turn.user), ("assistant", turn.reply)))
        openings.append((("system", f"opening {i}"),) if habits.message_tokens else pairs)
    return openings or [()]


@dataclass
class _Talker:
    """Holds a conversation while its events are made: the time, and the turns that were not taken back."""

    name: str
    at: float
    turns: list[Turn]
    may_branch: bool

    @property
    def known(self) -> dict[str, str]:
        """Return topic -> the value that was stated last."""
        return {
            turn.topic: turn.value
            for turn in self.turns
            if turn.topic is not None and turn.value is not None and not turn.is_question
        }


class _Writer:
    """Makes the events of one family."""

    def __init__(self, habits: Habits, seed: int, number: int, at: float) -> None:
        self._habits = habits
        self._rng = random.Random(f"{seed}/{number}")
        self._name = f"user {number + 1}"
        self._at = at
        self._number = number
        self._events: list[Event] = []
        self._taken: set[str] = set()

    def write(self, opening: tuple[tuple[str, str], ...]) -> Family:
        n_tokens = 8 * (self._habits.message_tokens or 0) if opening else 0
        self._events.append(Event(self._at, self._name, "arrive", opening=opening, n_tokens=n_tokens or None))
        self._talk(_Talker(self._name, self._at, [], may_branch=True), self._habits.turns)
        return sorted(self._events, key=lambda event: event.at)

    def _talk(self, talker: _Talker, n_turns: int) -> None:
        habits, rng = self._habits, self._rng
        for _ in range(n_turns):
            roll = rng.random()
            if talker.turns and roll < habits.edits:
                self._edit(talker)
            elif talker.turns and roll < habits.edits + habits.regenerations:
                self._add(talker, "regenerate")
            elif talker.turns and talker.may_branch and roll < habits.edits + habits.regenerations + habits.branches:
                self._branch(talker, n_turns)
            else:
                self._say(talker, self._choose(talker))
            if rng.random() < habits.pauses:
                self._add(talker, "pause")
                talker.at += rng.expovariate(1 / habits.pause_s)
        self._say(talker, self._question(talker))
        self._add(talker, "leave")

    def _choose(self, talker: _Talker) -> Turn:
        roll, known = self._rng.random(), talker.known
        if roll < 0.25:
            return small_talk(self._rng)
        if known and roll < 0.6:
            return self._question(talker)
        topic = self._rng.choice(_TOPICS)
        return statement(self._rng, topic, self._deal(topic), is_change=topic in known)

    def _question(self, talker: _Talker) -> Turn:
        """Ask a question, mostly for something that the user has told."""
        known = talker.known
        topic = self._rng.choice(_TOPICS if not known or self._rng.random() < 0.15 else sorted(known))
        return question(self._rng, topic, known.get(topic))

    def _edit(self, talker: _Talker) -> None:
        """Change an earlier message, if possible a statement of a fact, and ask for the new value."""
        stated = [i for i, turn in enumerate(talker.turns) if turn.topic is not None and not turn.is_question]
        at = self._rng.choice(stated or range(len(talker.turns)))
        topic = talker.turns[at].topic if stated else self._rng.choice(_TOPICS)
        assert topic is not None, "statements have topics"
        del talker.turns[at:]
        self._say(talker, statement(self._rng, topic, self._deal(topic), is_change=topic in talker.known), edits=at)
        self._say(talker, question(self._rng, topic, talker.known[topic]))

    def _branch(self, talker: _Talker, n_turns: int) -> None:
        """Branch the conversation. The user tells something only in the new branch, and then asks for it in both."""
        talker.may_branch = False
        name = f"{talker.name}, branch"
        self._add(talker, "branch", into=name)
        branch = _Talker(name, talker.at, list(talker.turns), may_branch=False)
        new = [topic for topic in _TOPICS if topic not in talker.known] or _TOPICS
        topic = self._rng.choice(new)
        self._say(branch, statement(self._rng, topic, self._deal(topic), is_change=topic in branch.known))
        self._say(branch, question(self._rng, topic, branch.known[topic]))
        self._say(talker, question(self._rng, topic, talker.known.get(topic)))
        self._talk(branch, n_turns // 2)

    def _deal(self, topic: str) -> str:
        """Return a value that this family has not told before.

        Families that arrive together get different values, as long as there are enough.
        """
        values = TOPICS[topic].values
        first = _CARDS * self._number
        value = next(
            (v for i in range(len(values)) if (v := values[(first + i) % len(values)]) not in self._taken), None
        )
        if value is None:
            return self._rng.choice(values)
        self._taken.add(value)
        return value

    def _say(self, talker: _Talker, turn: Turn, *, edits: int | None = None) -> None:
        talker.turns.append(turn)
        action: Action = "say" if edits is None else "edit"
        habits = self._habits
        talker.at += self._rng.expovariate(1 / habits.think_s)
        if habits.message_tokens is not None and habits.reply_tokens is not None:
            n_tokens, n_reply = self._length(habits.message_tokens), self._length(habits.reply_tokens)
            self._events.append(Event(talker.at, talker.name, action, n_tokens=n_tokens, n_reply=n_reply, turn=edits))
            return
        self._events.append(
            Event(
                talker.at, talker.name, action, text=turn.user, reply=turn.reply, asks=turn.is_question,
                value=turn.value, turn=edits,
            )
        )  # fmt: skip

    def _add(self, talker: _Talker, action: Action, *, into: str | None = None) -> None:
        talker.at += self._rng.expovariate(1 / self._habits.think_s)
        self._events.append(Event(talker.at, talker.name, action, into=into))

    def _length(self, mean: int) -> int:
        return max(1, round(self._rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))
