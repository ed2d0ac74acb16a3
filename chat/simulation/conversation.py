"""Plays conversations over one memory.

Each user's turns come one after the other, and all users take part in the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.prompts import Message, Tokenizer, encode_turn
from hybridmem.chat.simulation.dialogues import Turn
from hybridmem.memory import Sequence

MAX_REPLY_TOKENS = 32


@dataclass
class Conversation:
    """Holds a user, the sequence that remembers the conversation, and the messages.

    Attributes:
        told: topic -> the value that the user stated last. Answers are judged by it. The model never sees it.
    """

    name: str
    sequence: Sequence
    messages: list[Message] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)

    def copy(self, name: str, sequence: Sequence) -> Conversation:
        """Return a copy with another name and another sequence, which is a fork."""
        return Conversation(name, sequence, list(self.messages), dict(self.told))


@dataclass(frozen=True)
class Answer:
    """Holds a question, the model's answer and the right one."""

    scene: str
    user: str
    question: str
    answer: str
    expected: str

    @property
    def is_right(self) -> bool:
        return self.answer == self.expected


Script = tuple[Conversation, list[Turn]]
OnWord = Callable[[Conversation, str, str, bool], None]
"""The player calls this after each new token, with the conversation, the user's text, the reply so far, and whether it
is complete.
"""


class Player:
    """Lets any number of conversations talk to the model at once.

    Args:
        engine: an engine with a tokenizer.
        on_word: is called after each new token of a reply.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, on_word: OnWord) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._on_word = on_word

    def play(self, scene: str, scripts: list[Script]) -> list[Answer]:
        """Play each conversation's turns in order. A user's next turn starts as soon as their reply is complete.

        Returns:
            An answer for each question, in the order of `scripts`.
        Raises:
            As `Engine.step`, any error that ended a reply, and FormatError as `encode_turn`.
        """
        lines = [_Line(conversation, list(turns)) for conversation, turns in scripts]
        active = {self._start(line): line for line in lines if line.turns}
        while active:
            for generation in self.engine.step():
                line = active.pop(generation)
                self._finish(scene, line, generation)
                if line.turns:
                    active[self._start(line)] = line
        return [answer for line in lines for answer in line.answers]

    def _start(self, line: _Line) -> Generation:
        """Feed the end of the last reply and the user's text of the next turn, as the chat template renders them."""
        conversation, turn = line.conversation, line.turns[0]
        return self.engine.submit(
            encode_turn(self._tokenizer, conversation.messages, turn.user),
            sequence=conversation.sequence,
            max_tokens=MAX_REPLY_TOKENS,
            keeps_sequence=True,
            remembers_end=True,
            on_token=lambda generation, _: self._on_word(
                conversation, turn.user, generation.text, generation.is_finished
            ),
        )

    def _finish(self, scene: str, line: _Line, generation: Generation) -> None:
        if generation.error is not None:
            raise generation.error
        conversation, turn, reply = line.conversation, line.turns.pop(0), generation.text
        conversation.messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": reply}]
        if turn.is_question:
            line.answers.append(Answer(scene, conversation.name, turn.user, reply, turn.reply))
        elif turn.topic is not None and turn.value is not None:
            conversation.told[turn.topic] = turn.value


@dataclass
class _Line:
    """Holds a conversation's part of a scene: the turns to come and the answers so far."""

    conversation: Conversation
    turns: list[Turn]
    answers: list[Answer] = field(default_factory=list)
