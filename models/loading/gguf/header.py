"""Checks the header of a GGUF file: every count and length in it must fit into the file.

The reader of the `gguf` package believes them: an array that says it has 2**60 elements keeps it busy until memory is
full. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type in the file."""

_MOST_DIMENSIONS = 4
_MOST_NESTED = 2
"""Arrays within an array; there are none in files of known writers."""


def check_header(path: Path) -> None:
    """Raise ValueError if a count, a length or a shape of the header leads out of the file. Cost: the header, once."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data).check()


class _Header:
    """Walks over the header of a file from its beginning to its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def check(self) -> None:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._order = "<" if self._data[4:6] != b"\0\0" else ">"
        (version,) = self._numbers("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        n_tensors, n_values = self._numbers("QQ")
        for _ in range(n_values):
            self._skip_string()
            self._skip_value(*self._numbers("I"), depth=0)
        for _ in range(n_tensors):
            self._check_tensor()

    def _check_tensor(self) -> None:
        self._skip_string()
        (n_dimensions,) = self._numbers("I")
        if n_dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {n_dimensions} dimensions")
        shape = self._numbers("Q" * n_dimensions)
        _, offset = self._numbers("IQ")
        # no type takes less than an eighth of a byte an element
        if max(offset, math.prod(shape) // 8) > len(self._data):
            raise ValueError(f"a tensor of shape {list(shape)} at byte {offset}")

    def _take(self, n_bytes: int) -> bytes:
        self._skip(n_bytes)
        return self._data[self._at - n_bytes : self._at]

    def _skip(self, n_bytes: int) -> None:
        if n_bytes > len(self._data) - self._at:
            raise ValueError(f"{n_bytes} bytes at byte {self._at} of {len(self._data)}")
        self._at += n_bytes

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        format = self._order + kinds
        return struct.unpack(format, self._take(struct.calcsize(format)))

    def _skip_string(self) -> None:
        self._skip(*self._numbers("Q"))

    def _skip_value(self, kind: int, *, depth: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            if depth >= _MOST_NESTED:
                raise ValueError("arrays within arrays")
            of, n = self._numbers("IQ")
            if of in _BYTES:
                self._skip(n * _BYTES[of])
                return
            for _ in range(n):
                self._skip_value(of, depth=depth + 1)
        elif kind in _BYTES:
            self._skip(_BYTES[kind])
        else:
            raise ValueError(f"a value of type {kind}")
