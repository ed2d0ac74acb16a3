"""Computes the checksums of saved files.

The checksums find damage by disks and transfers, not changes that somebody made on purpose. Whoever changes a file can
also write its checksum anew, so it need not be a cryptographic one: it is XXH3 with 128 bits (https://xxhash.com),
which is as fast as memory can be read. The checksum of a tensor is computed from those of its pieces of 1 MiB. So
several threads can work on it, each while its piece is in the processor's cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from types import MappingProxyType
from typing import TypeVar

from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_128

PIECE_BYTES = 1 << 20
_LEAST_JOBS = 4
"""Another thread is started only for at least this many jobs, because starting a thread takes time."""
NOTHING_KNOWN: Mapping[str, bytes] = MappingProxyType({})
JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the host."""
    return tensor.contiguous().view(-1).numpy().data.cast("B")


def in_threads(work: Callable[[JobT], ResultT], jobs: Seq[JobT]) -> list[ResultT]:
    """Call `work` for each job, in a thread per processor of the machine, at most 8, or without threads for few jobs.

    Each thread gets consecutive jobs, because starting a thread takes longer than a job.
    """
    n_threads = min(8, os.cpu_count() or 1, len(jobs) // _LEAST_JOBS)
    if n_threads < 2:
        return [work(job) for job in jobs]
    bounds = [len(jobs) * i // n_threads for i in range(n_threads + 1)]
    with ThreadPoolExecutor(n_threads - 1) as threads:
        others = [threads.submit(lambda own: [work(job) for job in own], jobs[a:b]) for a, b in pairwise(bounds[1:])]
        own = [work(job) for job in jobs[: bounds[1]]]
        return [*own, *chain.from_iterable(other.result() for other in others)]


def checksum_of(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], known: Mapping[str, bytes] = NOTHING_KNOWN
) -> str:
    """Return the checksum of a file's content as 32 hexadecimal digits.

    Args:
        known: name of a tensor -> the checksums of its pieces, for tensors whose pieces have been checksummed already.
    """
    digest = xxh3_128(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        digest.update(known[name] if name in known else _pieces_of(bytes_of(tensors[name])))
    return digest.hexdigest()


def checksum_of_piece(piece: memoryview) -> bytes:
    """Return the checksum (8 bytes) of a piece of at most PIECE_BYTES."""
    return xxh3_64_digest(piece)


def _pieces_of(content: memoryview) -> bytes:
    pieces = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
    return b"".join(in_threads(checksum_of_piece, pieces))


class RangesChecksum:
    """Computes one checksum, 32 hexadecimal digits, of ranges of several tensors that come in parts of any size."""

    def __init__(self) -> None:
        self._digest = xxh3_128()

    def begin(self, name: str, start: int, end: int) -> None:
        """Start the rows [start, end) of the tensor `name`."""
        self._digest.update(f"{name} {start} {end} ".encode())

    def update(self, rows: Tensor) -> None:
        """Add the next rows of the range to the checksum."""
        if len(rows):
            self._digest.update(bytes_of(rows))

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
