"""Makes dialogues that tell, change and ask for facts in many ways. The words of the facts may have any letters.

They extend `chat.simulation.dialogues`, whose sentences the model learns as well. Here a fact may be about any thing
("My zebra is called Tom."), a message may contain several facts, and capitals and full stops may be missing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from hybridmem.chat.simulation.dialogues import NAMED, NOTED, UNKNOWN, Turn, is_held_out, small_talk
from training.words import Kind, Words

_OTHERS_NAMED = tuple(
    "parrot hamster rabbit snake goldfish fish bird pony cow goat pig duck mouse turtle mother father mum dad son "
    "daughter wife husband uncle aunt cousin friend doctor baby child girlfriend boyfriend grandmother grandfather "
    "boat car school street band team company village ship robot plant house king queen dragon zebra".split()
)
_OWNERS = "favourite home car door house party holiday lucky phone bike office school wall shirt old new second".split()
_SORTS: tuple[tuple[str, Kind], ...] = (
    ("colour", "colour"), ("colour", "colour"), ("colour", "colour"), ("color", "colour"), ("city", "city"),
    ("city", "city"), ("town", "city"), ("country", "city"), ("number", "number"), ("number", "number"),
    ("code", "number"), ("food", "colour"), ("drink", "colour"), ("animal", "colour"), ("name", "name"),
    ("song", "name"), ("word", "colour"),
)  # fmt: skip
_PLAIN: tuple[tuple[str, Kind], ...] = (
    ("name", "name"), ("first name", "name"), ("last name", "name"), ("age", "number"), ("address", "city"),
    ("password", "name"), ("pin", "number"), ("home town", "city"), ("nickname", "name"), ("shoe size", "number"),
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """Holds how a fact is told, changed, asked for and answered; `{}` is its value.

    `joined` tells the fact inside a sentence, after "and".
    """

    key: str
    kind: Kind
    say: tuple[str, ...]
    change: tuple[str, ...]
    ask: tuple[str, ...]
    answer: str
    joined: str


def named(thing: str) -> Fact:
    """Make a fact that gives the name of something or somebody."""
    return Fact(
        thing, "name",
        (f"My {thing} is called {{}}.",) * 4 + (
            f"The name of my {thing} is {{}}.", f"I have a {thing} called {{}}.", f"My {thing}'s name is {{}}.",
            f"I have a {thing} named {{}}.", f"My {thing} is named {{}}.", f"By the way, my {thing} is called {{}}.",
        ),
        (
            f"Actually my {thing} is called {{}}.", f"Sorry, the name of my {thing} is {{}}.",
            f"No, my {thing} is called {{}}.", f"My {thing} is now called {{}}.", f"My {thing} is called {{}}.",
            f"Actually, my {thing} is called {{}}.", f"I changed my mind, my {thing} is called {{}}.",
        ),
        (f"What is my {thing} called?",) * 4 + (
            f"What is the name of my {thing}?", f"Do you remember the name of my {thing}?",
            f"What is my {thing}'s name?", f"What's my {thing} called?", f"How is my {thing} called?",
        ),
        f"Your {thing} is called {{}}.", f"my {thing} is called {{}}",
    )  # fmt: skip


def valued(thing: str, kind: Kind) -> Fact:
    """Make a fact that gives a value of something, such as a colour or a number."""
    return Fact(
        thing, kind,
        (f"My {thing} is {{}}.",) * 3 + (f"By the way, my {thing} is {{}}.",),
        (
            f"Actually my {thing} is {{}}.", f"I changed my mind, my {thing} is {{}}.", f"No, my {thing} is {{}}.",
            f"My {thing} is now {{}}.", f"My {thing} is {{}}.", f"Actually, my {thing} is {{}}.",
            f"Sorry, my {thing} is {{}}.",
        ),
        (f"What is my {thing}?",) * 3 + (f"Do you remember my {thing}?", f"What's my {thing}?"),
        f"Your {thing} is {{}}.", f"my {thing} is {{}}",
    )  # fmt: skip


LIVES = Fact(
    "lives", "city",
    ("I live in {}.", "I live in {}.", "By the way, I live in {}."),
    ("Actually I live in {}.", "I moved to {}.", "No, I live in {}.", "I live in {}.", "I now live in {}."),
    ("Where do I live?", "Where do I live?", "Do you remember where I live?", "In which city do I live?"),
    "You live in {}.", "I live in {}",
)  # fmt: skip
COMES = Fact(
    "comes", "city", ("I come from {}.", "I am from {}."), ("Actually I come from {}.", "No, I come from {}."),
    ("Where do I come from?", "Where am I from?"), "You come from {}.", "I come from {}",
)  # fmt: skip
IS_CALLED = Fact(
    "name", "name", ("My name is {}.", "My name is {}.", "I am called {}."),
    ("Actually my name is {}.", "Sorry, my name is {}.", "No, my name is {}."),
    ("What is my name?", "What is my name?", "What am I called?", "Do you remember my name?"),
    "Your name is {}.", "my name is {}",
)  # fmt: skip
AGE = Fact(
    "age", "number", ("I am {} years old.",), ("Actually I am {} years old.", "No, I am {} years old."),
    ("How old am I?",), "You are {} years old.", "I am {} years old",
)  # fmt: skip


def choose_fact(rng: random.Random, words: Words) -> Fact:
    """Choose what a fact is about: mostly a common thing, and sometimes one that no other dialogue mentions."""
    roll = rng.random()
    if roll < 0.22:
        return named(rng.choice(NAMED))
    if roll < 0.4:
        return named(rng.choice(_OTHERS_NAMED) if rng.random() < 0.8 else words.make("colour"))
    if roll < 0.82:
        sort, kind = rng.choice(_SORTS)
        owner = rng.choice(_OWNERS[:8]) if rng.random() < 0.8 else rng.choice(_OWNERS + list(NAMED))
        return valued(f"{owner} {sort}", kind)
    if roll < 0.88:
        return valued(*rng.choice(_PLAIN[1:]))
    return rng.choice((LIVES, LIVES, IS_CALLED, IS_CALLED, COMES, AGE))


def _roughen(rng: random.Random, text: str, value: str) -> str:
    """Sometimes drop the last full stop or the first capital letter of a text; the value stays unchanged."""
    if rng.random() < 0.1 and not text.startswith(value):
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1:
        text = text.rstrip(".?!")
    return text


def make_facts_dialogue(
    rng: random.Random,
    words: Words,
    n_turns: int,
    *,
    talk: float = 0.35,
    asks: float = 0.5,
    most_facts: int = 6,
    unknown: float = 0.1,
    changes: float = 0.25,
    alike: float = 0.0,
    numbers: float = 0.0,
) -> list[Turn]:
    """Make a dialogue of `n_turns` turns about facts of any words; it ends in a question.

    Args:
        talk: share of turns with small talk, which decides how far questions are from their facts.
        asks: share of questions among the turns without small talk.
        most_facts: how many facts are told at most, not counting changes.
        unknown: share of questions for what was never told.
        changes: share of statements that change an earlier fact.
        numbers: share of new facts that must be numbers or colours, in addition to those that are drawn by chance.
        alike: share of new facts whose values are of the same kind as an earlier value, and so easily confused with it.
    """
    told: dict[str, tuple[Fact, str]] = {}
    turns: list[Turn] = []

    def tell(fact: Fact) -> str:
        like = rng.choice(list(told.values()))[1] if told else None
        value = words.make(fact.kind, like=like)
        while is_held_out(fact.key, value):
            value = words.make(fact.kind, like=like)
        told[fact.key] = (fact, value)
        return value

    def choose() -> Fact:
        fact = choose_fact(rng, words)
        if numbers and rng.random() < numbers:
            sort, kind = rng.choice([pair for pair in _SORTS if pair[1] in ("number", "colour")])
            fact = AGE if rng.random() < 0.1 else valued(f"{rng.choice(_OWNERS)} {sort}", kind)
        elif alike and told and rng.random() < alike:
            kinds = {other.kind for other, _ in told.values()}
            while fact.kind not in kinds:
                fact = choose_fact(rng, words)
        return fact

    while len(turns) < n_turns:
        is_last, roll = len(turns) == n_turns - 1, rng.random()
        if not is_last and roll < talk:
            turns.append(small_talk(rng))
        elif not told or (not is_last and roll < talk + (1 - asks) * (1 - talk)):
            is_change = bool(told) and (len(told) >= most_facts or rng.random() < changes)
            fact = rng.choice(list(told.values()))[0] if is_change else choose()
            is_change = fact.key in told
            value = tell(fact)
            text = rng.choice(fact.change if is_change else fact.say).format(value)
            if len(told) < most_facts and rng.random() < 0.15:
                other = choose()
                if other.key not in told:
                    second = tell(other)
                    joined = other.joined.format(second)
                    ways = ("{0} and {1}.", "{0}, and {1}.", "{0}. {2}.")
                    text = rng.choice(ways).format(text[:-1], joined, joined[0].upper() + joined[1:])
            turns.append(Turn(_roughen(rng, text, value), NOTED, fact.key, value))
        else:
            fact = rng.choice(list(told.values()))[0]
            if rng.random() < unknown:
                fact = choose_fact(rng, words)
            known = told.get(fact.key)
            reply = UNKNOWN if known is None else fact.answer.format(known[1])
            asked = _roughen(rng, rng.choice(fact.ask), "")
            turns.append(Turn(asked, reply, fact.key, None if known is None else known[1], is_question=True))
    return turns


def make_echo_dialogue(rng: random.Random, words: Words, n_turns: int) -> list[Turn]:
    """Make a dialogue in which the model repeats what it was just told: the shortest way to learn how to copy."""
    turns = []
    for _ in range(n_turns):
        told = " ".join(words.make(rng.choice(("name", "city", "colour", "number"))) for _ in range(rng.randint(1, 5)))
        turns.append(Turn(f"Repeat: {told}.", f"I repeat: {told}.", value=told))
    return turns
