"""Makes dialogues that test a memory: users state facts, chat, change facts, and ask for them later.

The embedded checkpoint is trained on these dialogues and the demo plays them, so an answer is right or wrong by
construction: a leak between users, a wrong rollback or a dropped state turns into a wrong word.

Some (topic, value) pairs are held out: they never occur in training, so an answer that names one was read from the
dialogue, not from the weights.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

UNKNOWN = "You have not told me that."
NOTED = "Okay, noted."

_NAMES = (
    "Milo Otis Luna Bella Rocky Simba Nala Felix Oscar Ruby Jasper Hazel Pepper Ginger Shadow Smokey Anna Boris Clara "
    "David Elena Frank Greta Henry Irene Jonas Karin Leo Maria Nora Oliver Paula Quinn Rosa Stefan Tina Ulrich Vera "
    "Walter Xenia Yusuf Zoe Amir Bruno Carla Diego Emma Fatima"
).split()
_COLOURS = "red blue green yellow purple orange black white brown pink grey silver gold turquoise violet beige".split()
_CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Warsaw Lisbon Oslo Dublin Athens Cairo Tokyo Delhi Lima Quito "
    "Havana Toronto Boston Chicago Sydney Nairobi Kyoto"
).split()
_FOODS = "pizza pasta rice soup salad curry bread cheese sushi tacos noodles pancakes apples beans eggs fish".split()
_NUMBERS = [str(n) for n in range(11, 100, 3)]


@dataclass(frozen=True)
class Topic:
    """Holds the texts with which a user states, changes and asks for a fact, and the reply.

    `{}` stands for the value.
    """

    values: tuple[str, ...]
    say: tuple[str, ...]
    change: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str


def _named(thing: str) -> Topic:
    return Topic(
        values=tuple(_NAMES),
        say=(f"My {thing} is called {{}}.", f"The name of my {thing} is {{}}.", f"I have a {thing} called {{}}."),
        change=(f"Actually my {thing} is called {{}}.", f"Sorry, the name of my {thing} is {{}}."),
        ask=(
            f"What is my {thing} called?",
            f"What is the name of my {thing}?",
            f"Do you remember the name of my {thing}?",
        ),
        answer=f"Your {thing} is called {{}}.",
    )


def _valued(thing: str, values: list[str]) -> Topic:
    return Topic(
        values=tuple(values),
        say=(f"My {thing} is {{}}.", f"By the way, my {thing} is {{}}."),
        change=(f"Actually my {thing} is {{}}.", f"I changed my mind, my {thing} is {{}}."),
        ask=(f"What is my {thing}?", f"Do you remember my {thing}?"),
        answer=f"Your {thing} is {{}}.",
    )


NAMED = ("cat", "dog", "sister", "brother", "boss", "neighbour", "teacher", "horse")

TOPICS: dict[str, Topic] = {
    **{name: _named(name) for name in NAMED},
    **{f"{what} colour": _valued(f"{what} colour", _COLOURS) for what in ("favourite", "car", "door")},
    **{f"{what} city": _valued(f"{what} city", _CITIES) for what in ("home", "favourite", "holiday")},
    **{f"{what} food": _valued(f"{what} food", _FOODS) for what in ("favourite", "party")},
    **{f"{what} number": _valued(f"{what} number", _NUMBERS) for what in ("lucky", "house")},
}

_SMALL_TALK = (
    ("It {} all {}.",
     ("rained", "snowed", "was sunny", "was windy"), ("morning", "day", "week"), "The weather keeps changing."),
    ("I {} a {} today.", ("read", "bought", "found"), ("book", "map", "lamp", "chair"), "That sounds nice."),
    ("I went {} with {}.",
     ("swimming", "running", "shopping", "hiking"), ("friends", "family", "nobody"), "I hope you had fun."),
    ("The {} was {}.", ("train", "bus", "plane"), ("late", "early", "full", "empty"), "Travel is never boring."),
    ("I am {} and a bit {}.", ("tired", "busy", "happy"), ("hungry", "cold", "bored"), "Take good care of yourself."),
    ("We {} the {} yesterday.",
     ("cleaned", "painted", "sold"), ("house", "garden", "kitchen"), "That was a lot of work."),
    ("I will {} on {}.", ("travel", "rest", "work"), ("Monday", "Friday", "Sunday"), "Good luck with your plans."),
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """Holds a user's message and the right reply. `topic` and `value` are None in small talk."""

    user: str
    reply: str
    topic: str | None = None
    value: str | None = None
    is_question: bool = False


def is_held_out(topic: str, value: str) -> bool:
    """Return whether training never shows this pair. About one pair in eight is held out."""
    return zlib.crc32(f"{topic}/{value}".encode()) % 8 == 0


def small_talk(rng: random.Random) -> Turn:
    pattern, first, second, reply = rng.choice(_SMALL_TALK)
    return Turn(pattern.format(rng.choice(first), rng.choice(second)), reply)


def statement(rng: random.Random, topic: str, value: str, *, is_change: bool = False) -> Turn:
    """Make the turn in which the user states `value`, for the first time or in place of an older one."""
    patterns = TOPICS[topic].change if is_change else TOPICS[topic].say
    return Turn(rng.choice(patterns).format(value), NOTED, topic, value)


def question(rng: random.Random, topic: str, value: str | None) -> Turn:
    """Make the turn in which the user asks for a fact.

    `value` is the value stated last. None: the user never stated one.
    """
    reply = UNKNOWN if value is None else TOPICS[topic].answer.format(value)
    return Turn(rng.choice(TOPICS[topic].ask), reply, topic, value, is_question=True)


def choose_value(rng: random.Random, topic: str, *, held_out: bool | None, but_not: str | None = None) -> str:
    """Choose a value for `topic`: only held-out pairs (True), none of them (False), or any (None)."""
    values = [v for v in TOPICS[topic].values if v != but_not]
    if held_out is not None:
        values = [v for v in values if is_held_out(topic, v) == held_out] or values
    return rng.choice(values)


def invent_name(rng: random.Random) -> str:
    """Invent a name of two or three syllables, which has several tokens. A model cannot know it, only remember it."""
    syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3))))
    return ("".join(syllables) + rng.choice(("", "", "n", "l", "x"))).capitalize()


def make_dialogue(
    rng: random.Random, n_turns: int, *, held_out: bool | None = False, talk: float = 0.35, invented: float = 0.0
) -> list[Turn]:
    """Make a dialogue of `n_turns` turns that ends in a question.

    Args:
        held_out: which (topic, value) pairs it may use; see `choose_value`.
        talk: the share of small talk, which determines how far questions are from their facts.
        invented: the share of names that are invented.
    """
    known: dict[str, str] = {}
    turns: list[Turn] = []
    while len(turns) < n_turns:
        is_last = len(turns) == n_turns - 1
        roll = rng.random()
        if not is_last and roll < talk:
            turns.append(small_talk(rng))
        elif not known or (not is_last and roll < talk + 0.6 * (1 - talk)):
            is_change = bool(known) and rng.random() < 0.25
            topic = rng.choice(sorted(known) if is_change else sorted(TOPICS))
            is_change = topic in known
            if invented and topic in NAMED and rng.random() < invented:
                value = invent_name(rng)
            else:
                value = choose_value(rng, topic, held_out=held_out, but_not=known.get(topic))
            turns.append(statement(rng, topic, value, is_change=is_change))
            known[topic] = value
        else:
            is_unknown = rng.random() < 0.15
            topic = rng.choice(sorted(TOPICS) if is_unknown else sorted(known))
            turns.append(question(rng, topic, known.get(topic)))
    return turns


def messages(turns: list[Turn]) -> list[dict[str, str]]:
    """Return the turns as chat messages, for a tokenizer's chat template."""
    pairs = (({"role": "user", "content": t.user}, {"role": "assistant", "content": t.reply}) for t in turns)
    return [message for pair in pairs for message in pair]
