"""Simulates one user.

The simulated user has the messages and the sequence that remembers them. This module finds where each action continues.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.requests import Generation
from hybridmem.chat.prompts import Message
from hybridmem.chat.simulation.dry import Script, Words
from hybridmem.chat.simulation.report import Tally
from hybridmem.chat.simulation.workload import Event
from hybridmem.memory import CapacityError, HybridMemory, Sequence


@dataclass
class Said:
    """Holds a message of a user, and its tokens [start, end) in the sequence. The reply follows at `end`."""

    event: Event
    index: int
    start: int
    end: int


@dataclass(eq=False)
class SimulatedUser:
    """Holds a conversation.

    Attributes:
        family: the number, in the order of arrival, of the user with whom this conversation began.
        arrival: the event of the user's arrival, with the opening.
        n_opening: the number of tokens in the opening.
        events: the events still to come, each with its index in the family's events.
        sequence: the sequence that remembers the conversation. None before the first message, and after it had to be
            closed for room.
        tokens: the tokens that the sequence held when it was closed for room. The next prompt begins with them.
        told: every value that was told in this conversation, or before it branched, even if it was taken back since.
        doing: the current action.
        n_known: how many tokens of the current prompt were computed before, so that the prefix cache may have them.
        former: the reply that a regeneration replaces.
    """

    name: str
    family: int
    arrival: Event
    n_opening: int
    events: deque[tuple[int, Event]]
    sequence: Sequence | None = None
    tokens: list[int] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    generation: Generation | None = None
    doing: str = ""
    n_known: int = 0
    former: str = ""
    is_paused: bool = False

    def branch(self, name: str, events: deque[tuple[int, Event]]) -> SimulatedUser:
        """Return a user with another name and the same messages. The caller forks the sequence."""
        return SimulatedUser(
            name, self.family, self.arrival, self.n_opening, events,
            said=list(self.said), messages=list(self.messages), told=set(self.told),
        )  # fmt: skip

    @property
    def length(self) -> int:
        return len(self.tokens) if self.sequence is None else self.sequence.length


class Room:
    """Holds the engine and memory of all users. Silent users are swapped out when others need the bytes.

    Attributes:
        here: users whose live sequence is in the budget and takes part in no step. Those that have been silent for
            longest come first.
    """

    def __init__(
        self,
        engine: Engine,
        memory: HybridMemory,
        words: Words,
        tally: Tally,
        *,
        max_tokens: int,
        script: Script | None,
    ) -> None:
        self.engine = engine
        self.memory = memory
        self.words = words
        self.tally = tally
        self.here: dict[SimulatedUser, None] = {}
        self._max_tokens = max_tokens
        self._script = script
        memory.add_reclaimer(self.make_room)

    # The methods below do what users do.

    def say(self, user: SimulatedUser, event: Event, index: int) -> Generation:
        start = user.length if user.said else 0
        ids = self._ids_of(user, event)
        user.said.append(Said(event, index, start, start + len(ids)))
        user.messages.append({"role": "user", "content": event.text or ""})
        return self._go_on(user, start, ids, event)

    def edit(self, user: SimulatedUser, event: Event, index: int) -> Generation:
        """Take back a message and everything after it, and say something else instead."""
        assert event.turn is not None, "an edit says which message"
        start = user.said[event.turn].start
        n_messages = len(user.messages) - 2 * (len(user.said) - event.turn)
        del user.said[event.turn :], user.messages[n_messages:]
        ids = self._ids_of(user, event)
        user.said.append(Said(event, index, start, start + len(ids)))
        user.messages.append({"role": "user", "content": event.text or ""})
        return self._go_on(user, start, ids, event)

    def regenerate(self, user: SimulatedUser, index: int) -> Generation:
        """Take back the last reply and the token before it. That token is fed again to get its logits."""
        last = user.said[-1]
        last.index = index
        user.former = user.messages.pop()["content"]
        last_id = self._tokens_of(user)[last.end - 1]
        return self._go_on(user, last.end - 1, [last_id], last.event)

    def branch(self, user: SimulatedUser, branch: SimulatedUser) -> None:
        """Let the branch continue where its parent is, with a fork or, if there is no room for one, from the tokens."""
        if user.sequence is None:
            branch.tokens = list(user.tokens)
        elif self._bring_back(user):
            user.is_paused = False
            branch.sequence = self.memory.fork(user.sequence)
            self.tally.reused["branch", "fork"] += user.length
            self.here[branch] = None
        else:
            branch.tokens = self._tokens_of(user)

    def pause(self, user: SimulatedUser) -> None:
        user.is_paused = True
        if self._swap_out(user):
            self.tally.swaps["paused"] += 1

    def forget(self, user: SimulatedUser) -> None:
        """Close a user's sequence. The next prompt contains all of its tokens again."""
        self._give_up(user, user.length)

    def leave(self, user: SimulatedUser) -> None:
        self.here.pop(user, None)
        if user.sequence is not None and not user.sequence.closed:
            self.memory.close(user.sequence)
        user.sequence = None

    # The methods below continue a sequence.

    def _ids_of(self, user: SimulatedUser, event: Event) -> list[int]:
        return self.words.later(user.messages, event) if user.said else self.words.first(user.arrival, event)

    def _go_on(self, user: SimulatedUser, start: int, ids: list[int], event: Event) -> Generation:
        """Feed `ids` at position `start` of the user's sequence, and ask for a reply."""
        self.here.pop(user, None)
        user.is_paused = False
        way = self._take_back(user, start)
        if user.sequence is not None:
            user.n_known = 0
            self.tally.reused[user.doing, way] += start
            marks = []
        else:  # The prefix cache's share is counted when the reply is complete.
            user.n_known = start or user.n_opening
            ids, marks = [*user.tokens, *ids], [user.n_known] if user.n_known else []
        generation = self.engine.submit(
            ids, sequence=user.sequence, max_tokens=event.n_reply or self._max_tokens, marks=marks, keeps_sequence=True,
            remembers_end=True, on_token=self.tally.clock_of(self.engine.stats.n_steps).hear,
        )  # fmt: skip
        if self._script is not None:
            self._script.expect(generation, self.words.reply(event))
        return generation

    def _take_back(self, user: SimulatedUser, start: int) -> str:
        """Roll the user's sequence back to `start`, or close it and keep its tokens.

        Return a word for which of the two was done.
        """
        sequence = user.sequence
        if sequence is None:
            del user.tokens[start:]
            return "prefix cache"
        if start == sequence.length:
            return "swapped in" if sequence.is_swapped else "as it stood"
        if start and start >= sequence.horizon and self._bring_back(user):
            self.here.pop(user, None)
            self.memory.rollback(sequence, to=start)
            return "rollback"
        self._give_up(user, start)
        return "prefix cache"

    def _bring_back(self, user: SimulatedUser) -> bool:
        """Swap the user's sequence in if it was swapped out. Return False if it has to be computed again."""
        assert user.sequence is not None
        if user.sequence.is_swapped:
            try:
                self.memory.swap_in(user.sequence)
            except CapacityError:
                return False
            self.here[user] = None
        return True

    def _give_up(self, user: SimulatedUser, n_kept: int) -> None:
        """Close a user's sequence. Its tokens will be computed again unless the prefix cache has them."""
        assert user.sequence is not None
        user.tokens = self._tokens_of(user)[:n_kept]
        self.leave(user)

    def _tokens_of(self, user: SimulatedUser) -> list[int]:
        return user.tokens if user.sequence is None else user.sequence.tokens.tolist()

    # The methods below make room.

    def _swap_out(self, user: SimulatedUser) -> bool:
        """Swap a silent user out. If there is no room outside of the budget either, close the sequence."""
        self.here.pop(user, None)
        if user.sequence is None or user.sequence.is_swapped:
            return False
        try:
            self.memory.swap_out(user.sequence)
        except CapacityError:
            self.tally.swaps["given up"] += 1
            self._give_up(user, user.sequence.length)
            return False
        return True

    def make_room(self, missing_bytes: int) -> bool:
        """Swap out silent users, and then those who wait for their turn. This function is given to `add_reclaimer`."""
        wanted = self.memory.free_bytes + missing_bytes
        has_moved = False
        while self.here and self.memory.free_bytes < wanted:
            has_moved = True
            self.tally.swaps["silent"] += self._swap_out(next(iter(self.here)))
        for sequence in self.engine.waiting_sequences() if self.memory.free_bytes < wanted else ():
            try:
                self.memory.swap_out(sequence)
            except CapacityError:
                break
            has_moved = True
            self.tally.swaps["waiting"] += 1
            if self.memory.free_bytes >= wanted:
                break
        return has_moved
