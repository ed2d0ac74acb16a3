"""Marks the places of pictures in texts. A mark names a picture that is sent with the text.

The picture's tokens replace the mark.

So messages stay texts for everybody who handles them: templates, histories, edits and stores. A mark is written with a
character that Unicode reserves for internal use. Somebody may still write a mark into a message, but it can only name a
picture that is sent with the same message.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Protocol

_SIGN = "\U0010fffe"
MARK = re.compile(f"{_SIGN}([0-9a-f]{{64}}){_SIGN}")


class KnownPictures(Protocol):
    """Knows the pictures of a prompt."""

    def picture_ids(self, name: str) -> list[int] | None:
        """Return the token ids of a picture by its name of 64 hexadecimal digits. None: it is not known."""
        ...

    def placed(self, token_ids: list[int], id_of: Callable[[str], int | None], n_before: int) -> list[int]:
        """Return a prompt with pictures as the model wants it (`Pictures.placed`)."""
        ...


def name_of_source(url: str, detail: str) -> str:
    """Return the name of a picture that comes by a URL, which may hold its data."""
    return hashlib.sha256(f"{detail}\n{url}".encode(errors="surrogatepass")).hexdigest()


def mark_of(name: str) -> str:
    """Return the mark of a picture by its name, 64 hexadecimal digits."""
    return f"{_SIGN}{name}{_SIGN}"


def names_in(text: str) -> list[str]:
    """Return the names of the pictures in a text, in order."""
    return MARK.findall(text) if _SIGN in text else []


def without_marks(text: str, instead: str = "") -> str:
    """Return a text in which `instead` replaces each mark."""
    return MARK.sub(lambda _: instead, text) if _SIGN in text else text


def split_at_marks(text: str, start: int, end: int) -> Iterator[tuple[int, int, str | None]]:
    """Yield the parts of text[start:end]: the bounds of each, and the name of the picture if the part is a mark."""
    at = start
    for found in MARK.finditer(text, start, end) if text.find(_SIGN, start, end) >= 0 else ():
        yield at, found.start(), None
        yield found.start(), found.end(), found[1]
        at = found.end()
    yield at, end, None
