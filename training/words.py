"""Makes words of any letters, and keeps some of them out of training by their spelling.

A model learns to copy only if it does not know the words. So most words in training are drawn letter by letter or piece
by piece, and are rarely seen twice. `REAL` are words that people use; training shows none of them.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

from hybridmem.chat.simulation.dialogues import TOPICS

Kind = str
"""What a word is the value of: "name", "city", "colour" or "number"."""

REAL: dict[Kind, tuple[str, ...]] = {
    "name": tuple(
        (
            "Tom Bob Max Rex Kit Sam Ben Tim Jim Ann Eva Ada Mia Lily Lucy Alice Sarah Emily Sophie Charlotte "
            "Olivia Grace Chloe Hannah Megan Rachel Rebecca Laura Julia Katharina Susanne Birgit Ingrid Astrid "
            "Sigrid Freya Saoirse Niamh Siobhan Padraig Liam Noah Ethan Lucas Mason Logan James Robert Michael "
            "William Richard Thomas Charles Christopher Matthew Anthony Mark Steven Andrew Kenneth Joshua Kevin "
            "Brian George Edward Ronald Timothy Jason Jeffrey Ryan Jacob Gary Nicholas Eric Jonathan Larry Justin "
            "Scott Brandon Benjamin Samuel Gregory Alexander Patrick Jack Dennis Jerry Tyler Aaron Jose Adam Nathan "
            "Zachary Kyle Ahmed Mohammed Aisha Leila Priya Ravi Arjun Ananya Hiroshi Yuki Sakura Wei Ming Xiuying "
            "Joao Thiago Rafael Ines Beatriz Giuseppe Giulia Chiara Matteo Lorenzo Pierre Juliette Camille Mathilde "
            "Antoine Bjarne Mikkel Torsten Wolfgang Heinz Dmitri Svetlana Katya Ivan Olga Zbigniew Agnieszka "
            "Wojciech Kwame Amara Chidi Ngozi Thandiwe Sipho Fluffy Whiskers Mittens Biscuit Buddy Snowball Tiger "
            "Garfield Tom-Tom Anne-Marie Jean-Luc O'Brien José Zoë Björn Jürgen Łukasz Siân"
        ).split()
    ),
    "city": (
        *(
            "Hamburg Munich Cologne Frankfurt Stuttgart Leipzig Dresden Bremen Zurich Geneva Basel Bern Lyon "
            "Nice Marseille Toulouse Bordeaux Lille Milan Turin Naples Venice Florence Bologna Palermo Barcelona "
            "Seville Valencia Bilbao Porto Amsterdam Rotterdam Utrecht Brussels Antwerp Ghent Copenhagen Stockholm "
            "Gothenburg Helsinki Tallinn Riga Vilnius Krakow Gdansk Budapest Bucharest Sofia Belgrade Zagreb "
            "Ljubljana Sarajevo Istanbul Ankara Moscow Kyiv Odessa Minsk Manchester Liverpool Birmingham Leeds "
            "Bristol Oxford Cambridge Edinburgh Glasgow Cardiff Belfast Cork Galway Seattle Denver Dallas Houston "
            "Austin Phoenix Detroit Memphis Portland Miami Atlanta Vancouver Montreal Ottawa Bogota Santiago "
            "Montevideo Brasilia Lagos Accra Dakar Kampala Johannesburg Mumbai Chennai Kolkata Dhaka Karachi Lahore "
            "Bangkok Hanoi Jakarta Manila Seoul Osaka Beijing Shanghai Shenzhen Melbourne Brisbane Perth Auckland "
            "Wellington München Zürich Málaga Reykjavík"
        ).split(),
        "New York", "Los Angeles", "San Francisco", "Rio de Janeiro", "Buenos Aires", "Mexico City", "Cape Town",
        "Hong Kong", "Kuala Lumpur", "Tel Aviv", "Abu Dhabi", "New Orleans",
    ),
    "colour": (
        *(
            "teal cyan magenta maroon navy olive lime indigo crimson scarlet coral salmon peach apricot amber "
            "mustard khaki ochre bronze copper rust burgundy plum lavender lilac mauve fuchsia aqua azure cobalt "
            "sapphire emerald jade mint ivory cream ebony charcoal tan sepia vermilion chartreuse cerulean "
            "ultramarine aubergine"
        ).split(),
        "sky blue", "dark green", "light grey", "hot pink", "bottle green", "off-white", "blue-green", "pale yellow",
    ),
}  # fmt: skip
"""Words that people use and that training never shows. Numbers are held out as made-up words are."""

_TAUGHT = {value.lower() for topic in TOPICS.values() for value in topic.values}
_HELD_OUT = {word.lower() for words in REAL.values() for word in words}

_VOWELS = "aaaaeeeeeiiiooouuy"
_ONSETS = (
    *"bcdfghjklmnprstvwzbdgklmnrst" * 2, "br", "ch", "cl", "cr", "dr", "fl", "fr", "gl", "gr", "kh", "kr", "ph", "pl",
    "pr", "qu", "sch", "sh", "sl", "sm", "sn", "sp", "st", "str", "sw", "th", "tr", "wh", "x", "zh",
)  # fmt: skip
_CODAS = (
    *("",) * 24, *"nlrstmdkgpx", "ck", "ld", "ll", "lt", "mp", "nd", "ng", "nn", "nt", "rd", "rk", "rn", "rt", "ss",
    "st", "tt", "th", "sz",
)  # fmt: skip
_ENDINGS = tuple(
    "a ia ie y o us er or en in an ina ette ella elle son ton ham burg berg dorf stadt ville bury ford port pool field "
    "land grad polis ovo owa ice ane ish ean".split()
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ACCENTED = "áàâäãåæçéèêëíìîïñóòôöõøúùûüýßčďěğłńňřśšşťůźžżœ"
_OTHERS = (
    "αβγδεζηθικλμνξοπρστυφχψωабвгдежзийклмнопрстуфхцчшщыэюя的一是"
    "在人有中大国上日本東京北あいうえおかきくけこ가나다라마바사ابتجدرسعفقكلمنهوי"
)


def is_held_out_spelling(word: str) -> bool:
    """Return True if training never shows this word: a real one, or one in eight of all spellings."""
    word = word.lower()
    return word in _HELD_OUT or (word not in _TAUGHT and zlib.crc32(f"spelt {word}".encode()) % 8 == 0)


def _syllables(rng: random.Random) -> str:
    n = rng.choice((1, 1, 2, 2, 2, 3))
    word = ""
    for i in range(n):
        word += rng.choice(_ONSETS) * (i > 0 or rng.random() < 0.85) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    return word + rng.choice(_ENDINGS) if rng.random() < 0.3 else word


def _letters(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(1, 8)))


def _accented(rng: random.Random) -> str:
    word = list(_syllables(rng))
    for _ in range(rng.choice((1, 1, 2))):
        word[rng.randrange(len(word))] = rng.choice(_ACCENTED)
    return "".join(word)


def _other_script(rng: random.Random) -> str:
    start = rng.randrange(len(_OTHERS) - 12)
    return "".join(rng.choices(_OTHERS[start : start + 12], k=rng.randint(1, 5)))


def _known(rng: random.Random) -> str:
    """Draw a word of the demo's dialogues as a value of any kind: only its position shall say what it means."""
    return rng.choice(sorted(_TAUGHT))


def _number(rng: random.Random) -> str:
    digits = rng.choice("0123456789"[rng.random() < 0.95 :]) + "".join(rng.choices("0123456789", k=rng.randint(0, 6)))
    mark = rng.random()
    if mark < 0.06 and len(digits) > 2:
        return f"{digits[:-2]}.{digits[-2:]}"
    if mark < 0.12 and len(digits) > 3:
        return f"{digits[:-3]}{rng.choice(',- ')}{digits[-3:]}"
    return digits


_LIKE_WORDS: tuple[tuple[float, Callable[[random.Random], str]], ...] = (
    (0.52, _syllables), (0.16, _letters), (0.08, _accented), (0.04, _other_script), (0.04, _known), (0.03, _number),
)  # fmt: skip


def _changed(rng: random.Random, word: str) -> str:
    """Change one letter of a word, or drop or extend the end, so that two values can begin with the same letters."""
    i, letter = rng.randrange(len(word)), rng.choice("0123456789" if word[-1].isdigit() else _LETTERS)
    return rng.choice((word[:i] + letter + word[i + 1 :], word[: i + 1] + letter, word + letter))


class Words:
    """Makes words of any letters from a seed.

    Args:
        rng: the source of random numbers.
        pieces: texts of a tokenizer's tokens. Some words are made of these, so that the model learns to copy every
            token.
    """

    def __init__(self, rng: random.Random, pieces: tuple[str, ...] = ()) -> None:
        self._rng = rng
        self._pieces = [piece for piece in pieces if piece.strip().isalnum() and piece.isprintable()]

    def make(self, kind: Kind, *, like: str | None = None, held_out: bool = False) -> str:
        """Make a value of a kind. Training uses words that are not held out; measurements use only held-out words.

        Args:
            like: a word that the new word may resemble, such as the value of another fact.
        """
        while True:
            word = self._draw(kind, like)
            if is_held_out_spelling(word) == held_out and word.strip() == word and word:
                return word

    def _draw(self, kind: Kind, like: str | None) -> str:
        rng = self._rng
        if like and rng.random() < 0.12:
            return _changed(rng, like)
        if kind == "number":
            return _number(rng)
        word = self._word()
        if rng.random() < (0.1 if kind in ("city", "colour") else 0.05):
            word += rng.choice((" ", " ", "-", "'")) + self._word()
        style = rng.random()
        if kind == "colour":
            return word.lower() if style < 0.9 else word.title()
        return word.title() if style < 0.8 else word.lower() if style < 0.92 else word.upper() if style < 0.97 else word

    def _word(self) -> str:
        if self._pieces and self._rng.random() < 0.16:
            return "".join(self._rng.choices(self._pieces, k=self._rng.randint(1, 3))).replace(" ", "")
        weights, makers = zip(*_LIKE_WORDS, strict=True)
        return self._rng.choices(makers, weights)[0](self._rng)
