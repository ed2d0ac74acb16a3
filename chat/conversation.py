"""Conversations over one memory: each user's turns, one after the other; all users in the same steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chat.dialogues import Turn
from chat.generation import Batch
from chat.prompts import Message, Tokenizer, encode_turn
from memory import Sequence

MAX_REPLY_TOKENS = 32


@dataclass
class Conversation:
    """A user, the sequence that remembers them, and what was said.

    Attributes:
        told: topic -> value, as the user stated them last: what a right answer is judged by, never shown to the model.
    """

    name: str
    sequence: Sequence
    messages: list[Message] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)

    def copy(self, name: str, sequence: Sequence) -> Conversation:
        """The same words under another name and on another sequence: what belongs to a fork of the memory."""
        return Conversation(name, sequence, list(self.messages), dict(self.told))


@dataclass(frozen=True)
class Answer:
    """A question that was asked, what the model said and what was right."""

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
"""Called after each new token with the conversation, the user's text, the reply so far, and whether it is complete."""


class Player:
    """Lets any number of conversations talk to the model at once.

    Args:
        batch: must feed the ends of replies (`remembers_end`), so that memories hold what the chat template would render.
        on_word: watches the replies grow.
    """

    def __init__(self, batch: Batch, tokenizer: Tokenizer, on_word: OnWord) -> None:
        self.batch = batch
        self._tokenizer = tokenizer
        self._on_word = on_word

    def play(self, scene: str, scripts: list[Script]) -> list[Answer]:
        """Play each conversation's turns in order. A user's next turn starts as soon as their reply is complete.

        Returns:
            An answer for each question, in the order of `scripts`.
        Raises:
            As `Batch.step`, and FormatError as `encode_turn`.
        """
        lines = [_Line(conversation, list(turns)) for conversation, turns in scripts]
        active = {line.conversation.sequence: line for line in lines}
        for line in lines:
            self._start(line)
        while not self.batch.is_idle:
            for new in self.batch.step():
                self._hear(scene, active[new.sequence], new.token_id, is_last=new.is_last)
        return [answer for line in lines for answer in line.answers]

    def _start(self, line: _Line) -> None:
        """Feed the next turn's user text, if there is one left."""
        if line.turns:
            conversation = line.conversation
            token_ids = encode_turn(self._tokenizer, conversation.messages, line.turns[0].user)
            self.batch.add(conversation.sequence, token_ids, MAX_REPLY_TOKENS)

    def _hear(self, scene: str, line: _Line, token_id: int, *, is_last: bool) -> None:
        conversation, turn = line.conversation, line.turns[0]
        line.reply_ids.append(token_id)
        reply = self._tokenizer.decode(line.reply_ids, skip_special_tokens=True)
        if is_last:
            self._finish(scene, line, reply)
        self._on_word(conversation, turn.user, reply, is_last)

    def _finish(self, scene: str, line: _Line, reply: str) -> None:
        conversation, turn = line.conversation, line.turns.pop(0)
        line.reply_ids.clear()
        conversation.messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": reply}]
        if turn.is_question:
            line.answers.append(Answer(scene, conversation.name, turn.user, reply, turn.reply))
        elif turn.topic is not None and turn.value is not None:
            conversation.told[turn.topic] = turn.value
        self._start(line)


@dataclass
class _Line:
    """A conversation's part of a scene: the turns to come and the reply that is growing."""

    conversation: Conversation
    turns: list[Turn]
    reply_ids: list[int] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
