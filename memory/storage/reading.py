"""Reads the safetensors files of `memory.storage.files`, and checks that every byte is as it was written.

A local file is read in pieces directly into the memory of its tensors. The checksum of each piece is computed right
after it is read, while the piece is in the processor's cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridmem.memory.errors import FormatError
from hybridmem.memory.storage.checksums import PIECE_BYTES, checksum_of, checksum_of_piece, in_threads
from hybridmem.memory.storage.files import (
    BLOCKS,
    BLOCKS_FORMAT,
    CHECKSUM,
    DTYPES,
    FORMAT_VERSION,
    SEQUENCES_FORMAT,
    as_os_errors,
    local_place,
)

_BEGINNING_BYTES = 1 << 16
"""How many bytes are read first. The headers of most files are shorter than this."""
_reading = Lock()
_CONTRADICTIONS = (ValueError, KeyError, TypeError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class Content:
    """Holds the content of a file.

    Attributes:
        checksums: name of a tensor -> the checksums of its pieces, if they were computed while the file was read.
    """

    path: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    checksums: Mapping[str, bytes] = field(default_factory=dict)

    def check(self, *, covers_tensors: bool = True) -> None:
        """Raise FormatError unless the checksum in the metadata fits the other metadata and the tensors."""
        others = {name: text for name, text in self.metadata.items() if name != CHECKSUM}
        try:
            found = checksum_of(self.tensors if covers_tensors else {}, others, self.checksums)
        except TypeError as error:  # Numpy does not have the tensor's dtype.
            raise _never_written(self.path, error) from error
        if found != self.metadata.get(CHECKSUM):
            raise FormatError(
                f"{self.path} is damaged: its checksum is not that of its content; save the sequence again"
            )


def read_blocks(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of `write_blocks`. Return its blocks and `about`, which has `tokens` as an array, and the `version`.

    Raises FormatError unless every byte is as it was written.
    """
    content = read_content(path, BLOCKS_FORMAT)
    content.check()
    try:
        about = json.loads(content.metadata["about"])
        tokens = content.tensors["tokens"].numpy()
        about = {**about, "tokens": tokens, "version": int(content.metadata["version"])}
    except (KeyError, ValueError) as error:
        raise FormatError(f"{path} lacks {error}, which is always written; save it again") from error
    except (TypeError, RecursionError) as error:
        raise _never_written(path, error) from error
    return {name.removeprefix(BLOCKS): own for name, own in content.tensors.items() if name.startswith(BLOCKS)}, about


def read_content(path: str, format: str) -> Content:
    """Read a file of one of the two formats, without comparing checksums. Raises FormatError."""
    try:
        place = local_place(path)
        return _read_from_store(path, format) if place is None else _read_locally(path, Path(place), format)
    except IsADirectoryError as error:
        raise FormatError(f"{path} is a folder; give the path of a saved sequence, a file") from error
    except FormatError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise FormatError(
            f"{path} cannot be read: {str(error) or type(error).__name__}; give the path of a saved sequence"
        ) from error


def _read_from_store(path: str, format: str) -> Content:
    from fsspec.core import url_to_fs

    fs, place = url_to_fs(path)
    with as_os_errors(path):
        data = np.frombuffer(bytearray(fs.cat_file(place)), np.uint8)
    header = _Header.of(path, data, format)
    return Content(path, header.tensors_in(data[header.n_bytes :]), header.metadata)


def _read_locally(path: str, place: Path, format: str) -> Content:
    """Read a local file into new memory. If it were mapped, a failing disk would end the process. Raises OSError."""
    with place.open("rb", buffering=0) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        beginning = np.empty(min(n_bytes, _BEGINNING_BYTES), np.uint8)
        _fill(file.fileno(), beginning, 0)
        if (end := 8 + _header_bytes(beginning)) > len(beginning) and end <= n_bytes:
            beginning = np.empty(end, np.uint8)
            _fill(file.fileno(), beginning, 0)
        header = _Header.of(path, beginning, format)
        data = np.empty(n_bytes - header.n_bytes, np.uint8)

        def read(piece: tuple[str, int, int]) -> bytes:
            _, begin, end = piece
            _fill(file.fileno(), data[begin:end], header.n_bytes + begin)
            return checksum_of_piece(data[begin:end].data)

        pieces = [
            (name, first, min(first + PIECE_BYTES, end))
            for name, (begin, end) in header.places(len(data)).items()
            for first in range(begin, end, PIECE_BYTES)
        ]
        found = in_threads(read, pieces)
    checksums = dict[str, bytes]()
    for (name, _, _), own in zip(pieces, found, strict=True):
        checksums[name] = checksums.get(name, b"") + own
    return Content(path, header.tensors_in(data), header.metadata, checksums)


def _fill(descriptor: int, data: NDArray[np.uint8], begin: int) -> None:
    """Fill an array with the bytes of a file from `begin` on. Raises OSError."""
    at = 0
    while at < len(data):
        if not (n := _read_at(descriptor, data[at:].data, begin + at)):
            raise OSError(f"it was cut to {begin + at:,} bytes while it was read")
        at += n


def _read_at(descriptor: int, part: memoryview, begin: int) -> int:
    """Read bytes of a file from `begin` on into a part of an array. Return how many bytes were read."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [part], begin)
    with _reading:  # Windows has no such call: threads take turns at the one position of the file.
        os.lseek(descriptor, begin, os.SEEK_SET)
        found = os.read(descriptor, len(part))
        part[: len(found)] = found
    return len(found)


def _header_bytes(data: NDArray[np.uint8]) -> int:
    return int.from_bytes(data[:8].tobytes(), "little")


@dataclass(frozen=True)
class _Header:
    """Holds the beginning of a file.

    Attributes:
        n_bytes: the bytes of the header, and of the 8 bytes before it that contain its length.
        entries: name of a tensor -> the header's unchecked entry for it, which may have any type.
    """

    path: str
    n_bytes: int
    entries: dict[str, Any]
    metadata: dict[str, str]

    @staticmethod
    def of(path: str, data: NDArray[np.uint8], format: str) -> _Header:
        """Read a file's header. Raises FormatError unless format and version are ones that this library reads."""
        n_bytes = 8 + _header_bytes(data)
        try:
            header = json.loads(data[8:n_bytes].tobytes())
            metadata = dict(header.pop("__metadata__", {}))
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            raise FormatError(
                f"{path} is no safetensors file, or a damaged one ({error}); save the sequence again"
            ) from error
        if (found := metadata.get("format")) != format:
            what = "blocks that were swapped out, not a saved sequence" if found == BLOCKS_FORMAT else "no sequence"
            wanted = "memory.save" if format == SEQUENCES_FORMAT else "PrefixCache.save"
            raise FormatError(f"{path} holds {what} of a HybridMemory; give a file that {wanted} wrote")
        if (version := metadata.get("version")) != FORMAT_VERSION:
            raise FormatError(
                f"{path} has format version {version}, this library reads {FORMAT_VERSION}; use the one that wrote it"
            )
        return _Header(path, n_bytes, header, metadata)

    def tensors_in(self, data: NDArray[np.uint8]) -> dict[str, Tensor]:
        """Return the tensors as views of these bytes. Raises FormatError."""
        dtypes = {name: dtype for dtype, name in DTYPES.items()}
        # Numpy gives an empty array no stride that torch can use.
        whole = torch.from_numpy(data) if len(data) else torch.empty(0, dtype=torch.uint8)

        def view(name: str, begin: int, end: int) -> Tensor:
            return whole[begin:end].view(dtypes[self.entries[name]["dtype"]]).view(self.entries[name]["shape"])

        with self._refusing():
            return {name: view(name, *place) for name, place in self.places(len(data)).items()}

    def places(self, n_bytes: int) -> dict[str, tuple[int, int]]:
        """Return where each tensor begins and ends within the `n_bytes` bytes of all tensors, in their order.

        Raises FormatError unless each tensor begins where the one before ends, and no other bytes are there.
        """
        with self._refusing():
            places = {name: _offsets_in(entry) for name, entry in self.entries.items()}
            places = dict(sorted(places.items(), key=lambda place: place[1]))
            at = 0
            for name, (begin, end) in places.items():
                if begin != at or not begin <= end <= n_bytes:
                    raise ValueError(f"{name:.80} in bytes [{begin}, {end}) of {n_bytes}")
                at = end
            if at != n_bytes:
                raise ValueError(f"bytes [{at}, {n_bytes}) of no tensor")
            return places

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn errors about a file's content into FormatError."""
        try:
            yield
        except _CONTRADICTIONS as error:
            raise _never_written(self.path, error) from error


def _offsets_in(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int:
        raise ValueError(f"bytes [{begin!r:.40}, {end!r:.40})")
    return begin, end


def _never_written(path: str, error: Exception) -> FormatError:
    return FormatError(f"{path} holds what memory.save never writes ({error}); save the sequence again")
