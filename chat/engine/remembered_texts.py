"""Keeps what a drafter remembers of texts beyond their jobs, and finds it by their tokens.

What a drafter's memory holds of a text is a function of its tokens, as the model's is. So it needs no place in the
model's files: a prefix cache of its own finds it whenever the model continues from a text, after a turn of a session,
a hit, or a load. Its files lie beside the model's. Without them, the drafter is fed the text again if it can be, and
otherwise begins behind it, which changes no reply.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from hybridmem.memory import CapacityError, FormatError, Sequence
from hybridmem.memory.blocks import Int64s
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.storage import SavedFamily

_NO_TOKEN = -1
"""No text contains this token, so a lookup of a text with it at the end may reuse all tokens before it."""


class RememberedTexts:
    """Finds a drafter's checkpoints by the model's texts.

    Args:
        prefixes: a cache of prefixes in the drafter's memory.
        first: the index of the text's token that is the first in the drafter's sequences. It is 1 for draft heads,
            which are fed pairs of a hidden state and the token after it.
    """

    def __init__(self, prefixes: PrefixCache, first: int) -> None:
        self.prefixes, self._first = prefixes, first

    def open(self, token_ids: list[int], owner: Hashable) -> Sequence:
        """Open a sequence with the longest remembered prefix of a text. At least one token of the text is left."""
        tokens = token_ids[self._first :]
        return self.prefixes.open(tokens, owner)[0] if tokens else self.prefixes.memory.open()

    def hold(self, token_ids: Int64s, owner: Hashable) -> bool:
        """Return whether all tokens of a text are remembered."""
        tokens = token_ids[self._first :]
        return self.prefixes.find(np.append(tokens, _NO_TOKEN), owner).reused == len(tokens)

    def insert(self, sequence: Sequence, owner: Hashable) -> None:
        """Remember a sequence as it is now, if there is room."""
        try:
            self.prefixes.insert(sequence, owner)
        except CapacityError:
            return  # Its tokens are fed again, or their drafts are worse.

    # The methods below write files, and read them.

    def pack(self, token_ids: Int64s, owner: Hashable) -> Callable[[str], None] | None:
        """Copy what is remembered of the longest prefix of a text. Return a function that writes it to a path or URL.

        Return None if nothing is remembered, or its swapped file cannot be read. That function may run in any thread,
        and raises what `memory.save` does.
        """
        found = self._checkpoints_of([token_ids], owner)
        try:
            return self.prefixes.memory.archive.pack(found[0]) if found else None
        except (FormatError, OSError):
            return None

    def save(self, texts: Iterable[Int64s], owner: Hashable, path: Path) -> bool:
        """Write what is remembered of prefixes of these texts to a file. Shared bytes are written once.

        Returns False if nothing is remembered, or its swapped file cannot be read; no file is written then. Raises what
        `memory.save` does.
        """
        if found := self._checkpoints_of(texts, owner):
            with suppress(FormatError):
                self.prefixes.memory.save(found[0], path, checkpoints=found[1:])
                return True
        return False

    def load(self, path: str | Path, owner: Hashable) -> int:
        """Remember what a file of `pack` or `save` holds, for this owner. Return the number of prefixes.

        A file that is missing, damaged, or of another draft head or model counts as empty, and so does one for which
        there is no room.
        """
        memory = self.prefixes.memory
        try:
            family = memory.load(path, family=True)
        except (FormatError, CapacityError):
            return 0
        loaded = [*family.checkpoints, family.sequence]
        for sequence in loaded:
            self.insert(sequence, owner)
            memory.close(sequence)
        return len(loaded)

    def read(self, path: str) -> SavedFamily | None:
        """Read a file of `pack`, in any thread, for `add`. Return None where `load` would find it empty."""
        try:
            return self.prefixes.memory.archive.read(path)
        except FormatError:
            return None

    def add(self, saved: SavedFamily, owner: Hashable) -> None:
        """Remember what `read` has read, if there is room."""
        memory = self.prefixes.memory
        try:
            sequence = memory.archive.open(saved)
        except (FormatError, CapacityError):
            return
        self.insert(sequence, owner)
        memory.close(sequence)

    def _checkpoints_of(self, texts: Iterable[Int64s], owner: Hashable) -> list[Sequence]:
        """Return the usable checkpoints of prefixes of these texts, the longest first."""
        found = [mark for text in texts for mark in self.prefixes.checkpoints_of(text[self._first :], owner)]
        return sorted(dict.fromkeys(found), key=lambda mark: -mark.length)
