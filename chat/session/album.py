"""Holds the pictures of a conversation: their files, and the token ids that stand for them in prompts."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.special_tokens.marks import mark_of
from hybridmem.memory.sequences import is_soft
from hybridmem.models.vision.pictures import Picture, pictures_of

if TYPE_CHECKING:
    from PIL.Image import Image

_NAME = re.compile("[0-9a-f]{64}")


@dataclass
class _Seen:
    """Holds one picture. Its rows are needed only while its tokens are fed; at other times `picture` may be None."""

    file: bytes
    token_ids: list[int]
    picture: Picture | None = None


class Album:
    """Holds the pictures of a conversation by their names. All sessions that branched from it share them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[str, _Seen] = {}

    def add(self, source: bytes | str | Path | Image) -> str:
        """Read a picture, and return the mark that stands for it in a message's text.

        Raises UnsupportedModelError if the model takes no pictures, and PictureError if this one cannot be read.
        """
        picture = pictures_of(self._engine.model).read(source)
        id_of = getattr(self._engine.tokenizer, "convert_tokens_to_ids", lambda name: None)
        name = picture.digest.hex()
        self._seen[name] = _Seen(picture.file, picture.token_ids(id_of), picture)
        return mark_of(name)

    def picture_ids(self, name: str) -> list[int] | None:
        """Return the token ids of a picture, or None for an unknown one."""
        seen = self._seen.get(name)
        return None if seen is None else seen.token_ids

    def placed(self, token_ids: list[int], id_of: Callable[[str], int | None], n_before: int) -> list[int]:
        """Return a prompt with pictures as the model wants it (`Pictures.placed`)."""
        return pictures_of(self._engine.model).placed(token_ids, id_of, n_before)

    def hold(self, token_ids: Seq[int]) -> list[Picture]:
        """Return the pictures whose rows must be there to feed these tokens. Keep them until the tokens are fed."""
        wanted = {token for token in token_ids if is_soft(token)}
        held = list[Picture]()
        for seen in self._seen.values() if wanted else ():
            if not wanted.isdisjoint(seen.token_ids):
                held.append(seen.picture or pictures_of(self._engine.model).read(seen.file))
                seen.picture = held[-1]
        return held

    def rest(self) -> None:
        """Release the rows of pictures, because their tokens were fed.

        The model keeps the rows of pictures that were used lately.
        """
        for seen in self._seen.values():
            seen.picture = None

    def saved(self, names: Iterable[str]) -> tuple[dict[str, Any], ...]:
        """Return values for JSON that `load` reads, for the pictures of these names."""
        return tuple(
            {"name": name, "file": base64.b64encode(seen.file).decode(), "token_ids": seen.token_ids}
            for name in dict.fromkeys(names)
            if (seen := self._seen.get(name)) is not None
        )

    def load(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Add pictures that were saved, without running the tower. Raises ValueError, KeyError or TypeError."""
        for entry in saved:
            if not _NAME.fullmatch(name := str(entry["name"])):
                raise ValueError(f"a picture called {name!r:.80}")
            try:
                file = base64.b64decode(entry["file"], validate=True)
            except binascii.Error as error:
                raise ValueError(f"the picture {name:.12}: {error}") from error
            self._seen[name] = _Seen(file, [int(token) for token in entry["token_ids"]])
