"""Pieces of a stream make up the text, characters are whole, and stop strings are found wherever tokens cut them."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from hybridmem.chat.engine.streaming import TextStream
from hybridmem.chat.prompts import Tokenizer

TEXTS = [
    "Okay, noted. Your cat is called Zoe.",
    "naïve café — 😀 日本語 ok",
    "😀😀 ends with one 🎉",
    " leading and  double   spaces\n\nnew lines ",
]


def split(tokenizer: Tokenizer, text: str, *, by_bytes: bool = False) -> list[int]:
    """Return token ids of a text. With `by_bytes`, no token holds a whole character beyond ASCII."""
    if not by_bytes:
        return list(tokenizer.encode(text, add_special_tokens=False))
    single = {ids[0]: tokenizer.convert_ids_to_tokens(ids[0]) for ids in ([i] for i in range(len(tokenizer)))}
    by_text = {token: i for i, token in single.items() if len(token) == 1}
    return [by_text[character] for token in tokenizer.tokenize(text) for character in token]


def stream(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str]]:
    text_stream = TextStream(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(text_stream.add(token_id))
        if text_stream.stopped_by is not None:
            break
    return text_stream, [*pieces, text_stream.flush()]


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text_and_hold_whole_characters(tokenizer: Tokenizer, text: str, by_bytes: bool) -> None:
    ids = split(tokenizer, text, by_bytes=by_bytes)
    assert tokenizer.decode(ids) == text and (not by_bytes or len(ids) == len(text.encode()))
    text_stream, pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text_stream.text == text
    assert pieces[-1] == "", "nothing was left to hold back"
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_every_part_of_a_text_stops_it(tokenizer: Tokenizer, text: str, by_bytes: bool) -> None:
    ids = split(tokenizer, text, by_bytes=by_bytes)
    for start in range(len(text)):
        for end in range(start + 1, min(start + 12, len(text)) + 1):
            stop = text[start:end]
            text_stream, pieces = stream(tokenizer, ids, (stop,))
            assert text_stream.stopped_by == stop
            assert "".join(pieces) == text_stream.text == text[: text.find(stop)]


def test_the_stop_string_that_is_complete_first_wins_however_tokens_are_cut(tokenizer: Tokenizer) -> None:
    generator = random.Random(0)
    for text in TEXTS:
        for _ in range(100):
            starts = [generator.randrange(len(text)) for _ in range(3)]
            stops = tuple(text[start : start + generator.randint(1, 6)] for start in starts)
            end, start = min((text.find(stop) + len(stop), text.find(stop)) for stop in stops)
            for by_bytes in (False, True):
                text_stream, _ = stream(tokenizer, split(tokenizer, text, by_bytes=by_bytes), stops)
                assert (text_stream.text, text_stream.stopped_by) == (text[:start], text[start:end])


def test_what_looked_like_a_stop_string_is_shown_when_it_is_none(tokenizer: Tokenizer) -> None:
    text = "a ST and a STO and a STOP"
    text_stream, pieces = stream(tokenizer, split(tokenizer, text, by_bytes=True), ("STOPS", "X"))
    assert text_stream.stopped_by is None and "".join(pieces) == text
    assert pieces[-1] == "STOP"
    shown = ""
    for piece in pieces[:-1]:
        shown += piece
        assert not any(shown.endswith("STOPS"[:n]) for n in range(1, 5))


def test_bytes_that_are_no_character_show_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = split(tokenizer, "ab😀", by_bytes=True)
    text_stream, pieces = stream(tokenizer, ids[:-1])
    assert pieces[:2] == ["a", "b"] and pieces[2:-1] == ["", "", ""]
    assert text_stream.text == tokenizer.decode(ids[:-1])
    broken = [*ids[:4], *split(tokenizer, "xy")]  # A character never becomes whole, and text follows it.
    text_stream, pieces = stream(tokenizer, broken)
    assert "".join(pieces) == tokenizer.decode(broken) and pieces[-1] == ""


def test_random_tokens_give_the_text_of_all_of_them(tokenizer: Tokenizer) -> None:
    generator = random.Random(1)
    for _ in range(50):
        ids = [generator.randrange(len(tokenizer)) for _ in range(60)]
        text_stream, pieces = stream(tokenizer, ids)
        assert "".join(pieces) == text_stream.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_without_a_tokenizer_there_is_no_text() -> None:
    text_stream, pieces = stream(None, [1, 2, 3])
    assert pieces == [""] * 4 and text_stream.text == ""


@pytest.mark.parametrize("n_before", [1, 2, 3])
def test_a_text_that_continues_another_keeps_its_first_space(n_before: int) -> None:
    """SentencePiece's decoders drop the space before the first word, because the tokenizer itself adds it there."""
    backend = Tokenizers(models.WordLevel({"▁The": 0, "▁is": 1, "▁Paris": 2, ",": 3, "<s>": 4}, "<s>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    for before, expected in ((([4, 0, 1][-n_before:]), " Paris, The"), ((), "Paris, The")):
        own = TextStream(tokenizer, before=before)
        assert "".join([*map(own.add, [2, 3, 0]), own.flush()]) == own.text == expected
