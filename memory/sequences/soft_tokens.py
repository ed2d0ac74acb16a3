"""Lets rows of embeddings stand in place of tokens: those of a picture, say. Each row has a token id of its own.

The ids of a passage follow from a digest of its content. So whatever compares tokens, such as prefixes, edits and
histories, tells two pictures apart, and finds the same picture again, without being told that there are pictures:

    bit 62             set: ids of vocabularies are far below
    bits 16 ... 61     a hash of the digest and the number of the row
    bits 0 ... 15      of the passage's last row: by how many positions text after it is moved back; else 0
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, starts_of
from hybridmem.memory.errors import BatchError, DropError, SpecError
from hybridmem.memory.interface import Dropped, Packed

FIRST_SOFT_ID = 1 << 62
"""The least id of a soft token."""

_BACK_BITS = 16
_HASH_BITS = 46
MOST_ROWS = 1 << _BACK_BITS
"""Most rows of a passage, so that the distance by which it moves text back fits into its last id."""

_KEPT_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Passage:
    """Holds the rows of embeddings of one picture, and the ids that stand for them.

    Attributes:
        digest: tells its content from any other.
        rows: (N, M), the embeddings.
        offsets: (axes, N) how far each row's rotary position on each axis is ahead of its place in the sequence. None:
            rows are rotated by their places, as text is.
        back: by how many positions text after it is moved back.
        about: what whoever added it wants to find with it. The memory does not read it.
    """

    digest: bytes
    rows: Tensor
    offsets: Int64s | None
    back: int = 0
    about: Any = None

    @cached_property
    def token_ids(self) -> Int64s:
        """Return (N,) the id of each row."""
        return _ids_of(self.digest, len(self.rows), self.back)

    @cached_property
    def _order(self) -> Int64s:
        return np.argsort(self.token_ids)

    def row_of(self, token_id: int) -> int:
        """Return the row that an id of this passage stands for."""
        return int(self._order[np.searchsorted(self.token_ids, token_id, sorter=self._order)])

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Run:
    """Says that tokens [at, at + n) of several stand for the rows of a passage from `row` on."""

    at: int
    row: int
    n: int
    passage: Passage


class SoftTokens:
    """Finds the rows that soft tokens stand for. A model that takes any has one, in its memory spec.

    A passage stays as long as somebody holds it. Beyond that, those used last stay up to `kept_bytes`. What has been
    fed needs it no more: sequences, checkpoints and files hold ids, and the memory of what was fed.

    Args:
        placeholder_id: the token of the vocabulary that the model's layers see in `Step.token_ids` for such a row.
        n_axes: how many rotary positions a row has; 3 where pictures have a time, a height and a width (M-RoPE).
        kept_bytes: bytes of rows that nobody holds.
    """

    def __init__(self, placeholder_id: int, *, n_axes: int = 1, kept_bytes: int = _KEPT_BYTES) -> None:
        self.placeholder_id, self.n_axes, self.kept_bytes = placeholder_id, n_axes, kept_bytes
        self._lock = threading.Lock()
        self._living = WeakValueDictionary[bytes, Passage]()
        self._by_id = WeakValueDictionary[int, Passage]()
        self._recent = OrderedDict[bytes, Passage]()
        self._recent_bytes = 0

    def __reduce__(self) -> tuple[type[SoftTokens], tuple[int]]:
        """Make an empty copy elsewhere: rows are on this process's device."""
        return _empty, (self.placeholder_id, self.n_axes, self.kept_bytes)  # type: ignore[return-value]

    def find(self, digest: bytes) -> Passage | None:
        """Return the passage of a digest, or None if its rows are no longer held."""
        with self._lock:
            passage = self._living.get(digest)
            if passage is not None:
                self._keep(passage)
        return passage

    def add(
        self, digest: bytes, rows: Tensor, positions: ArrayLike | None = None, n_positions: int = 0, about: Any = None
    ) -> Passage:
        """Add a passage, and return it; or the one of this digest that is here.

        Args:
            digest: of the content, such as a SHA-256: 16 bytes or more.
            rows: (N, M) embeddings, as the model's layers read them.
            positions: (axes, N) rotary positions of the rows, counted from the passage's first; for several axes. Rows
                may stand before it; what would be before the sequence's first position is there.
            n_positions: how many positions the passage takes; text after it continues from there.
        Raises:
            SpecError: a shape or a number does not fit. BatchError: another passage has one of its ids.
        """
        if not isinstance(digest, bytes) or len(digest) < 16:
            raise SpecError(f"digest={digest!r:.40}; give 16 bytes or more, such as a SHA-256 of the content")
        if not isinstance(rows, Tensor) or rows.dim() != 2 or not 0 < len(rows) < MOST_ROWS:
            found = tuple(rows.shape) if isinstance(rows, Tensor) else f"{rows!r:.40}"
            raise SpecError(f"rows are {found}; give a tensor (N, M) with 0 < N < {MOST_ROWS}")
        return self._insert(Passage(digest, rows.detach(), *self._offsets(len(rows), positions, n_positions), about))

    def restore(self, digest: bytes, rows: Tensor, offsets: Int64s | None, back: int, about: Any) -> Passage:
        """Add a passage that a file holds, with the attributes of `Passage`. Raises ValueError if they do not fit."""
        wanted = None if self.n_axes == 1 else (self.n_axes, len(rows))
        if (None if offsets is None else offsets.shape) != wanted or not 0 <= back <= len(rows) < MOST_ROWS:
            raise ValueError(f"the positions of the picture {digest.hex()}")
        return self._insert(Passage(digest, rows, offsets, back, about))

    def _insert(self, passage: Passage) -> Passage:
        digest = passage.digest
        with self._lock:
            if (known := self._living.get(digest)) is not None:
                self._keep(known)
                return known
            ids = passage.token_ids.tolist()
            if len(set(ids)) < len(ids) or any(id in self._by_id for id in ids):
                raise BatchError(f"passage {digest.hex()} has an id of another one; change its content by a little")
            self._living[digest] = passage
            self._by_id.update(dict.fromkeys(ids, passage))
            self._keep(passage)
        return passage

    def _offsets(self, n_rows: int, positions: ArrayLike | None, n_positions: int) -> tuple[Int64s | None, int]:
        """Return a passage's offsets, and the number of positions by which it moves later text back."""
        if positions is None:
            if self.n_axes > 1:
                raise SpecError(f"positions=None; give ({self.n_axes}, {n_rows}) of them")
            return None, 0
        given = np.asarray(positions, np.int64)
        if given.shape != (self.n_axes, n_rows) or self.n_axes == 1:
            raise SpecError(f"positions have shape {given.shape}; give ({self.n_axes}, {n_rows}), or None for one axis")
        if not 0 <= n_positions <= n_rows or given.max() >= n_positions:
            raise SpecError(
                f"n_positions={n_positions} for {n_rows} rows at {given.min()} ... {given.max()}; give more than the "
                "last of these, and at most one for each row"
            )
        return given - np.arange(n_rows), n_rows - n_positions

    def _keep(self, passage: Passage) -> None:
        """Note that a passage is used, and drop the least recently used ones. The caller holds the lock."""
        if self._recent.pop(passage.digest, None) is None:
            self._recent_bytes += passage.rows.nbytes
        self._recent[passage.digest] = passage
        while self._recent_bytes > self.kept_bytes:
            _, oldest = self._recent.popitem(last=False)
            self._recent_bytes -= oldest.rows.nbytes

    def held(self, token_ids: ArrayLike) -> tuple[Passage, ...]:
        """Return the passages of these ids, so that their rows stay. Raises BatchError if there is one without rows."""
        ids = np.asarray(token_ids)
        soft = ids[ids >= FIRST_SOFT_ID] if ids.dtype == np.int64 else ids[:0]
        return tuple(dict.fromkeys(run.passage for run in self.runs(soft)))

    def known(self, token_ids: Iterable[Int64s]) -> list[Passage]:
        """Return the passages of these arrays of ids whose rows are still held, each once."""
        found = (self._by_id.get(id) for ids in token_ids for id in ids[ids >= FIRST_SOFT_ID].tolist())
        return list(dict.fromkeys(passage for passage in found if passage is not None))

    def runs(self, token_ids: Int64s) -> Iterator[Run]:
        """Generate the runs of soft tokens (T,), in order. Raises BatchError if the rows of one are no longer held."""
        at = (token_ids >= FIRST_SOFT_ID).nonzero()[0]
        i = 0
        while i < len(at):
            start = int(at[i])
            passage = self._by_id.get(token_ids.item(start))
            if passage is None:
                raise BatchError(
                    f"token {token_ids[start]} stands for a row of a picture that is not here; give the picture again, "
                    "model.pictures.read(...), and keep what that returns until its tokens are fed"
                )
            row = passage.row_of(token_ids.item(start))
            most = min(len(passage) - row, len(token_ids) - start)
            differs = (token_ids[start : start + most] != passage.token_ids[row : row + most]).nonzero()[0]
            n = int(differs[0]) if len(differs) else most
            yield Run(start, row, n, passage)
            i += n


def positions_back(token_ids: Int64s) -> Int64s:
    """Return (T,) the number of positions by which each of these tokens moves later text back."""
    return np.where(token_ids >= FIRST_SOFT_ID, token_ids & (MOST_ROWS - 1), 0)


def rotary_positions(packed: Packed, backs: Int64s, runs: list[Run], n_axes: int) -> Int64s:
    """Return the positions by which a step's tokens are rotated: (T,), or (axes, T) if pictures have several axes.

    Text after a picture continues from the greatest position of its rows, however many rows there are.

    Args:
        backs: (S,) by how many positions each request's sequence has moved text back before.
        runs: the step's soft tokens.
    """
    places: Int64s = packed.positions - backs.repeat(packed.counts)
    if not runs:
        return places
    own = positions_back(packed.token_ids)
    before = own.cumsum() - own
    places -= before - before[packed.cu_seqlens[:-1]].repeat(packed.counts)
    axes = np.tile(places, (n_axes, 1))
    for run in runs:
        if run.passage.offsets is not None:
            axes[:, run.at : run.at + run.n] += run.passage.offsets[:, run.row : run.row + run.n]
    return np.maximum(axes, 0)


def kept_back(packed: Packed, kept: Int64s) -> Int64s:
    """Return (S,) the number of positions by which the first kept[i] tokens of each request move later text back."""
    if not has_soft(packed.token_ids):
        return packed.nothing
    before = starts_of(positions_back(packed.token_ids))
    begins = packed.cu_seqlens[:-1]
    back: Int64s = before[begins + kept] - before[begins]
    return back


def has_soft(token_ids: Int64s) -> bool:
    """True if one of these ids (T,) is a soft token's."""
    return bool(len(token_ids)) and int(token_ids.max()) >= FIRST_SOFT_ID


def refuse_to_drop(token_ids: Int64s, dropped: Dropped, *, is_reproducible: bool = False) -> None:
    """Raise DropError if tokens that are to be dropped from the middle of these stand for rows of a picture.

    Raise it for any tokens if the memory is reproducible: what is computed later still depends on the dropped tokens.
    """
    start, end = dropped.start, dropped.end
    if is_reproducible:
        raise DropError(
            f"tokens [{start}, {end}) cannot be dropped from a reproducible memory: rows of later tokens depend "
            f"on them; roll back to {start} and feed the rest again", start=start, end=end,
        )  # fmt: skip
    if has_soft(token_ids[start:end]):
        raise DropError(
            f"tokens [{start}, {end}) hold a picture, and the positions of text behind it count from the picture's; "
            f"roll back to {start} and feed the rest again", start=start, end=end,
        )  # fmt: skip


def is_soft(token_id: int) -> bool:
    """Return whether an id is a soft token's, and in no vocabulary."""
    return token_id >= FIRST_SOFT_ID


def passages_in(token_ids: Seq[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, positions) of each passage that moves later text back, in order."""
    start = None
    for i, token in enumerate(token_ids):
        if token < FIRST_SOFT_ID:
            start = None
            continue
        start = i if start is None else start
        if back := token & (MOST_ROWS - 1):
            yield start, i + 1, i + 1 - start - back
            start = None


def plain_ids(token_ids: Iterable[int]) -> list[int]:
    """Return the ids without those of soft tokens, which are in no vocabulary."""
    return [token for token in token_ids if token < FIRST_SOFT_ID]


def _ids_of(digest: bytes, n_rows: int, back: int) -> Int64s:
    """Return (n_rows,) ids."""
    stream = np.frombuffer(hashlib.shake_128(b"hybrid-memory soft token\n" + digest).digest(8 * n_rows), "<u8")
    ids = ((stream >> np.uint64(64 - _HASH_BITS)) << np.uint64(_BACK_BITS)).astype(np.int64) | FIRST_SOFT_ID
    ids[-1] |= back
    return ids


def _empty(placeholder_id: int, n_axes: int, kept_bytes: int) -> SoftTokens:
    return SoftTokens(placeholder_id, n_axes=n_axes, kept_bytes=kept_bytes)
