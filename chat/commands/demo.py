"""Plays the demo: many users talk to one model at once, and every reply can be checked.

A leak between users, a wrong rollback or a fork that shares too much turns into a wrong word. The model's replies are
not scripted: it generates them greedily, token by token, and these tokens stay in the memory and are judged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hybridmem.chat.engine.engine import Engine, EngineStats
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.simulation.conversation import Answer, Conversation, OnWord, Player
from hybridmem.chat.simulation.dialogues import (
    NAMED,
    TOPICS,
    Turn,
    choose_value,
    make_dialogue,
    question,
    small_talk,
    statement,
)
from hybridmem.memory import FormatError, HybridMemory, SpecError
from hybridmem.memory.views import Usage
from hybridmem.models import LanguageModel


@dataclass(frozen=True)
class Reuse:
    """Counts how much of its history a scene reused instead of computing it. Counts are tokens, measured in the engine.

    Attributes:
        n_reused: tokens of history that the rollback kept, or that the forks share.
        n_recomputed: tokens of history that the model computed a second time.
        n_new: tokens of the turns that came after the rollback or the fork.
    """

    scene: str
    means: str
    n_reused: int
    n_recomputed: int
    n_new: int


@dataclass
class Report:
    """Holds the results of a demo. `usage` is taken at the end, with all users, forks and checkpoints still open."""

    speed: EngineStats
    usage: Usage
    answers: list[Answer] = field(default_factory=list)
    reuses: list[Reuse] = field(default_factory=list)

    @property
    def wrong(self) -> list[Answer]:
        return [a for a in self.answers if not a.is_right]

    @property
    def is_ok(self) -> bool:
        """Return whether every reply is right and no history was computed twice."""
        return not self.wrong and all(reuse.n_recomputed == 0 for reuse in self.reuses)


def run_demo(
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    n_users: int = 8,
    n_turns: int = 8,
    seed: int = 0,
    budget: int | str = "1GiB",
    on_word: OnWord = lambda conversation, text, reply, is_last: None,
) -> Report:
    """Play all scenes in one memory, check the memory, and report.

    Args:
        n_users: how many users talk. There must be 2 or more, or no fact could leak from one to another.
        n_turns: turns of each user's dialogue. At least 2: a fact and a question.
        on_word: is called after each new token of a reply.
    Raises:
        SpecError: impossible numbers. FormatError: an unsuitable tokenizer. Also whatever the memory raises, such
        as IntegrityError.
    """
    if n_users < 2 or n_turns < 2:
        raise SpecError(f"{n_users} users with {n_turns} turns each; the demo needs at least 2 of both")
    check_tokenizer(tokenizer)
    memory = HybridMemory(model.memory_spec, budget)
    engine = Engine(model, memory, tokenizer)
    users = [Conversation(f"user {i + 1}", memory.open()) for i in range(n_users)]
    scenes = _Scenes(memory, Player(engine, tokenizer, on_word), seed)
    report = Report(engine.stats, memory.usage())
    report.answers += scenes.talk(users, n_turns)
    scenes.edit(report, users[0], n_later=0)
    # This topic is also new to the first user, so `probe_leaks` can ask that user for what only the second has told.
    scenes.edit(report, users[1], users[0], n_later=3)
    scenes.fork(report, users[-1])
    report.answers += scenes.probe_leaks(users)
    memory.check()
    report.usage = memory.usage()
    return report


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise FormatError unless a tokenizer suits the demo."""
    if not tokenizer.chat_template or tokenizer.eos_token_id is None:
        raise FormatError("the demo needs a tokenizer with a chat template and an end-of-text token")


class _Scenes:
    """Plays the scenes. Each uses conversations that earlier scenes have left in the memory."""

    def __init__(self, memory: HybridMemory, player: Player, seed: int) -> None:
        self._memory = memory
        self._player = player
        self._seed = seed

    def talk(self, users: list[Conversation], n_turns: int) -> list[Answer]:
        """Play the dialogues of all users at once. Their facts never occur in the training data."""
        dialogues = [_make_dialogue(self._rng(user.name), n_turns) for user in users]
        return self._player.play("dialogue", list(zip(users, dialogues, strict=True)))

    def edit(self, report: Report, user: Conversation, *strangers: Conversation, n_later: int) -> None:
        """State a fact, chat for `n_later` turns, take all of it back, state another value, and ask for it.

        Args:
            strangers: users who have not told anything about the topic either.
        """
        rng = self._rng(f"edit {n_later}")
        topic = self._new_topic(rng, user, *strangers)
        first = choose_value(rng, topic, held_out=True)
        second = choose_value(rng, topic, held_out=True, but_not=first)
        before, checkpoint = user.copy(user.name, user.sequence), self._memory.checkpoint(user.sequence)
        self._player.play(
            "taken back", [(user, [statement(rng, topic, first), *(small_talk(rng) for _ in range(n_later))])]
        )

        kept = checkpoint.length
        is_in_window = kept >= user.sequence.horizon
        self._memory.rollback(user.sequence, to=kept if is_in_window else checkpoint)
        self._memory.close(checkpoint)
        user.messages, user.told = before.messages, before.told
        n_fed = self._player.engine.stats.n_fed
        turns = [statement(rng, topic, second), question(rng, topic, second)]
        scene = f"edited by rollback, was {first}"
        report.answers += self._player.play(scene, [(user, turns)])
        n_fed, n_new = self._player.engine.stats.n_fed - n_fed, user.sequence.length - kept
        means = "rollback within the window" if is_in_window else "rollback to a checkpoint"
        report.reuses.append(Reuse(f"{user.name} edits a fact", means, kept, n_fed - n_new, n_new))

    def fork(self, report: Report, user: Conversation) -> None:
        """Tell two forks different values and the original nothing, and ask all three in the same steps."""
        rng = self._rng("fork")
        topic = self._new_topic(rng, user)
        left = choose_value(rng, topic, held_out=True)
        right = choose_value(rng, topic, held_out=True, but_not=left)
        kept, n_fed = user.sequence.length, self._player.engine.stats.n_fed
        forks = [user.copy(f"{user.name}, fork {name}", self._memory.fork(user.sequence)) for name in "AB"]
        scripts = [
            (f, [statement(rng, topic, v), question(rng, topic, v)]) for f, v in zip(forks, (left, right), strict=True)
        ]
        report.answers += self._player.play("forked", [*scripts, (user, [question(rng, topic, None)])])
        n_new = sum(c.sequence.length - kept for c in (*forks, user))
        n_fed = self._player.engine.stats.n_fed - n_fed
        report.reuses.append(Reuse(f"{user.name} is forked", "two forks", len(forks) * kept, n_fed - n_new, n_new))

    def probe_leaks(self, users: list[Conversation]) -> list[Answer]:
        """Ask all users, in the same steps, for something that only another user has told."""
        rng = self._rng("leak")
        scripts: list[tuple[Conversation, list[Turn]]] = []
        for user in users:
            secrets = [(other, topic) for other in users for topic in sorted(other.told) if topic not in user.told]
            if secrets:
                _, topic = rng.choice(secrets)
                scripts.append((user, [question(rng, topic, None)]))
        return self._player.play("told by other users only", scripts)

    def _new_topic(self, rng: random.Random, *users: Conversation) -> str:
        """Return a topic about which none of these users has told anything. Topics with names come first."""
        topics = [topic for topic in sorted(TOPICS) if not any(topic in user.told for user in users)]
        if not topics:
            raise SpecError(f"{users[0].name} has told everything there is to tell; give the demo fewer turns")
        return rng.choice([t for t in topics if t in NAMED] or topics)

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self._seed}/{purpose}")


def _make_dialogue(rng: random.Random, n_turns: int) -> list[Turn]:
    """Make a dialogue that ends in a question. A very short one may end without one."""
    while True:
        turns = make_dialogue(rng, n_turns, held_out=True)
        if turns[-1].is_question:
            return turns
