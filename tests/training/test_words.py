"""Training shows some words, and never shows others."""

from __future__ import annotations

import random
import re

from training.facts import make_echo_dialogue, make_facts_dialogue
from training.words import REAL, Words, is_held_out_spelling

KINDS = ("name", "city", "colour", "number")


def test_held_out_words_are_never_in_a_dialogue_of_training() -> None:
    rng = random.Random(0)
    words = Words(rng)
    told = {t.value for _ in range(300) for t in make_facts_dialogue(rng, words, 12) if t.value is not None}
    assert len(told) > 1000 and not [value for value in told if is_held_out_spelling(value)]
    assert all(is_held_out_spelling(word) for word in REAL["name"] + REAL["city"] + REAL["colour"])


def test_held_out_words_have_all_kinds_of_letters() -> None:
    words = Words(random.Random(0))
    made = [words.make(kind, held_out=True) for kind in KINDS for _ in range(200)]
    assert all(is_held_out_spelling(word) for word in made)
    letters = ("[a-z]", "[A-Z]", "[0-9]", "[à-ż]", "[α-я]", "[一-龥가-힣]")
    assert not [pattern for pattern in letters if not re.search(pattern, " ".join(made))]


def test_an_answer_is_what_was_told_last() -> None:
    rng = random.Random(0)
    words = Words(rng)
    n_asked = 0
    for _ in range(200):
        told: dict[str, str] = {}
        for turn in make_facts_dialogue(rng, words, 12):
            if turn.topic is None or turn.value is None:
                continue
            if turn.is_question:
                n_asked += 1
                assert turn.value in turn.reply and told.get(turn.topic, turn.value) == turn.value
            else:
                told[turn.topic] = turn.value
    assert n_asked > 500


def test_an_echo_repeats_what_was_said() -> None:
    rng = random.Random(0)
    for turn in make_echo_dialogue(rng, Words(rng), 20):
        assert turn.value is not None and turn.value in turn.user and turn.value in turn.reply
