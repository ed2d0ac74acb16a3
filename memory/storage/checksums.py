"""Computes the checksums of saved files. They find damage by disks and transfers, not what somebody has changed.

Whoever changes a file can write its checksum anew, so the bytes of tensors need no cryptographic one. A piece of a
tensor is a table of integers, 256 a row; its checksum is the CRC-32 of the sums of all rows and of all columns, modulo
2**64. Bytes that are lost, zeroed, moved or flipped change sums of both kinds, unless four integers or more change so
that each row and each column makes up for it. The sums are read at the speed of memory, several times that of CRC-32
and ten times that of SHA-256. A SHA-256 of the metadata and of the checksums of all pieces covers the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from typing import TypeVar

import numpy as np
from torch import Tensor

VERSION = 6
_WHOLE = ("2", "3", "4")
"""Versions with one SHA-256 over all tensors."""
_BY_PIECE = ("5",)
"""Versions with a SHA-256 for each piece of 4 MiB."""
READ_VERSIONS = (*_WHOLE, *_BY_PIECE, str(VERSION))
_PIECE_BYTES_5 = 4 << 20
PIECE_BYTES = 1 << 20
_ROW_BYTES = 2048
JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the host."""
    return tensor.contiguous().view(-1).numpy().data.cast("B")


def in_threads(work: Callable[[JobT], ResultT], jobs: Iterable[JobT]) -> list[ResultT]:
    """Do several jobs in as many threads as the machine has processors, at most 8; one job is done at once."""
    if len(jobs := list(jobs)) < 2:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(work, jobs))


@contextmanager
def beside(work: Callable[[], ResultT], n_bytes: int) -> Iterator[Callable[[], ResultT]]:
    """Let the block run beside work on so many bytes, which is done in another thread unless it is little.

    The block gets the function that waits for the result, or does the work.
    """
    if n_bytes <= PIECE_BYTES:
        yield work
        return
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(work).result


def digest_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the checksum of a file's content, as hexadecimal text: a SHA-256.

    It is that of the metadata and of the checksums of pieces of the tensors, which are computed side by side; before
    version 5, of the tensors themselves.
    """
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    names, version = sorted(tensors), metadata.get("version")
    contents = [bytes_of(tensors[name]) for name in names]
    if version in _WHOLE:
        parts: list[list[bytes | memoryview]] = [[content] for content in contents]
    else:
        check, n_bytes = (_sha256, _PIECE_BYTES_5) if version in _BY_PIECE else (_crc_of_sums, PIECE_BYTES)
        pieces = [[c[at : at + n_bytes] for at in range(0, len(c), n_bytes)] for c in contents]
        checksums = iter(in_threads(check, chain.from_iterable(pieces)))
        parts = [list(islice(checksums, len(own))) for own in pieces]
    for name, own in zip(names, parts, strict=True):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        for part in own:
            digest.update(part)
    return digest.hexdigest()


class RangesDigest:
    """Computes the checksum of ranges of several tensors that come in pieces of any size, as hexadecimal text.

    It is a SHA-256 of the CRC-32 of each range; in version 5, of the ranges themselves.

    Args:
        version: of the file's format.
    """

    def __init__(self, version: int) -> None:
        self._digest = hashlib.sha256()
        self._is_crc = str(version) not in _BY_PIECE
        self._crc: int | None = None

    def begin(self, name: str, start: int, end: int) -> None:
        """Go on with the rows [start, end) of the tensor of this name."""
        self._end()
        self._digest.update(f"{name} {start} {end} ".encode())
        self._crc = 0

    def update(self, piece: Tensor) -> None:
        """Add the next rows."""
        if not len(piece):
            return
        if self._crc is None:
            raise ValueError("rows of no range")
        if self._is_crc:
            self._crc = zlib.crc32(bytes_of(piece), self._crc)
        else:
            self._digest.update(bytes_of(piece))

    def hexdigest(self) -> str:
        self._end()
        return self._digest.hexdigest()

    def _end(self) -> None:
        if self._is_crc and self._crc is not None:
            self._digest.update(self._crc.to_bytes(4, "little"))
        self._crc = None


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _crc_of_sums(piece: memoryview) -> bytes:
    n_bytes = len(piece) // _ROW_BYTES * _ROW_BYTES
    crc = 0
    if n_bytes:
        table = np.frombuffer(piece[:n_bytes], "<u8").reshape(-1, _ROW_BYTES // 8)
        crc = zlib.crc32(np.concatenate([table.sum(0), table.sum(1)]).astype("<u8").data)
    return zlib.crc32(piece[n_bytes:], crc).to_bytes(4, "little")
