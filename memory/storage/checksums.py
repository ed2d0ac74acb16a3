"""Computes the checksums of saved files. They find damage by disks and transfers, not what somebody has changed.

Whoever changes a file can write its checksum anew, so the bytes of tensors need no cryptographic one. A piece of a
tensor is a table of integers, 256 a row; its checksum is the CRC-32 of the sums of all rows and of all columns, modulo
2**64. Bytes that are lost, zeroed, moved or flipped change sums of both kinds, unless four integers or more change so
that each row and each column makes up for it. The sums take one pass at the speed of memory, many times that of CRC-32
and of SHA-256. A SHA-256 of the metadata and of the checksums of all pieces covers the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, pairwise
from types import MappingProxyType
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
_COLUMNS = 256
_LEAST_JOBS = 4
"""For which a thread is worth its start."""
NOTHING_KNOWN: Mapping[str, bytes] = MappingProxyType({})
JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the host."""
    return tensor.contiguous().view(-1).numpy().data.cast("B")


def in_threads(work: Callable[[JobT], ResultT], jobs: Seq[JobT]) -> list[ResultT]:
    """Do jobs on a piece each, in as many threads as the machine has processors, at most 8, or at once if it is little.

    Each thread does jobs that follow each other: a thread takes longer to start than a job takes.
    """
    n_threads = min(8, os.cpu_count() or 1, len(jobs) // _LEAST_JOBS)
    if n_threads < 2:
        return [work(job) for job in jobs]
    bounds = [len(jobs) * i // n_threads for i in range(n_threads + 1)]
    with ThreadPoolExecutor(n_threads - 1) as threads:
        others = [threads.submit(lambda own: [work(job) for job in own], jobs[a:b]) for a, b in pairwise(bounds[1:])]
        own = [work(job) for job in jobs[: bounds[1]]]
        return [*own, *chain.from_iterable(other.result() for other in others)]


def digest_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], known: Mapping[str, bytes] = NOTHING_KNOWN
) -> str:
    """Return the checksum of a file's content, as hexadecimal text: a SHA-256.

    It is that of the metadata and of the checksums of pieces of the tensors, which are computed side by side; before
    version 5, of the tensors themselves.

    Args:
        known: name of a tensor -> the checksums of its pieces in version 6, where they have been computed.
    """
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    version = metadata.get("version")
    contents = {name: bytes_of(tensors[name]) for name in sorted(tensors)}
    if version not in _WHOLE:
        check, n_bytes = (_sha256, _PIECE_BYTES_5) if version in _BY_PIECE else (sums_of, PIECE_BYTES)
        pieces = {
            name: [content[at : at + n_bytes] for at in range(0, len(content), n_bytes)]
            for name, content in contents.items()
            if name not in known
        }
        checksums = iter(in_threads(check, list(chain.from_iterable(pieces.values()))))
        known = {**known, **{name: b"".join(islice(checksums, len(own))) for name, own in pieces.items()}}
    for name, content in contents.items():
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        digest.update(content if version in _WHOLE else known[name])
    return digest.hexdigest()


def has_sums(metadata: Mapping[str, str]) -> bool:
    """True if the checksum of a file with this metadata is made of `sums_of` the pieces of its tensors."""
    return metadata.get("version") == str(VERSION) and "members" not in metadata


def sums_of(piece: memoryview) -> bytes:
    """Return the checksum of a piece of at most PIECE_BYTES, 4 bytes."""
    from hybridmem.memory.kernels.cpu.byte_sums import column_and_row_sums  # numba takes a while to import

    n_bytes = len(piece) // (8 * _COLUMNS) * (8 * _COLUMNS)
    crc = 0
    if n_bytes:
        table = np.frombuffer(piece[:n_bytes], "<i8").astype(np.int64, copy=False).reshape(-1, _COLUMNS)
        crc = zlib.crc32(column_and_row_sums(table).astype("<i8", copy=False).data)
    return zlib.crc32(piece[n_bytes:], crc).to_bytes(4, "little")


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
