"""Reads the header of a GGUF file in one pass over its mapped bytes.

Every count and length must lead to a place within the file, so that a damaged file is refused at once. Texts and arrays
become Python objects only when they are read, because a vocabulary has half a million of them, and most callers need
none. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MAGIC = b"GGUF"
_POINTER = b"version https://git-lfs"
_BOOL, _STRING, _ARRAY = 7, 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
"""Maps the type of a number in the file to its format for `struct`."""

_MOST_DIMENSIONS = 4
_MOST_NESTED = 2
"""How deep arrays may be nested in arrays. Files of known writers have no nested arrays."""


class BlockType(NamedTuple):
    """Describes how a type stores numbers: its name, and the numbers and the bytes of a block."""

    name: str
    n_numbers: int
    n_bytes: int


BLOCK_TYPES = {
    number: BlockType(*of)
    for number, of in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip
"""Maps a type's number in the file to the type of tensors."""


def begins_as_gguf(path: Path) -> bool:
    """True if a file's first bytes are those of every GGUF file. A file that cannot be read is none."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class StoredTensor:
    """Describes a tensor of a file.

    Attributes:
        shape: its last axis is the contiguous one.
        type: how the tensor's numbers are stored. `number` is this type's number in the file.
        data: the tensor's bytes, mapped from the file and not writable: (..., bytes of a row), uint8; or float32 or
            float16.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    number: int
    data: np.ndarray[Any, Any]


class Header:
    """Holds the fields and tensors of one file, mapped.

    Attributes:
        fields: key -> value. Reading a value makes its Python objects: a number, a text, a bool or a list.
        tensors: name -> tensor.
    Raises ValueError if a count, a length or a shape leads out of the file. Cost: one pass over the header's lengths.
    """

    def __init__(self, path: Path) -> None:
        if not path.stat().st_size:
            raise ValueError("it is empty")
        with path.open("rb") as file:
            # The mapping is private: pages are copied if somebody writes to them, and the file stays as it is.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._at = 0
        if self._data[: len(_POINTER)] == _POINTER:
            raise ValueError("it is a pointer of Git LFS, for which git lfs pull fetches the file")
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._skip(len(_MAGIC))
        if self._data[4:6] == b"\0\0":
            raise ValueError("its numbers begin with the highest byte, as on few machines; convert the model anew")
        self._u32, self._u64 = struct.Struct("<I"), struct.Struct("<Q")
        (version,) = self._numbers("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        n_tensors, n_values = self._numbers("QQ")
        places = dict[str, tuple[int, int]]()
        for _ in range(n_values):
            key, (kind,) = self._text(), self._numbers("I")
            places[key] = kind, self._at
            self._skip_value(kind, depth=0)
        self.fields: Mapping[str, Any] = _Fields(self, places)
        found = [self._describe_tensor() for _ in range(n_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"an alignment of {alignment!r}")
        self._n_header = self._at
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(name, shape, kind, start + offset) for name, shape, kind, offset in found}

    def release(self) -> None:
        """Release the memory of what was read. The file is mapped again when it is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED)

    def digest(self) -> str:
        """Return a digest of everything that stands before the tensors."""
        with memoryview(self._data) as data:
            return hashlib.sha256(data[: self._n_header]).hexdigest()

    def _describe_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (n_dimensions,) = self._text(), self._numbers("I")
        if n_dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {n_dimensions} dimensions")
        shape = self._numbers("Q" * n_dimensions)
        kind, offset = self._numbers("IQ")
        return name, shape[::-1], kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredTensor:
        if kind not in BLOCK_TYPES:
            raise ValueError(f"{name} is of type {kind}, which this library does not know")
        of, n_numbers = BLOCK_TYPES[kind], math.prod(shape)
        n_last = shape[-1] if shape else 1
        if n_last % of.n_numbers:
            raise ValueError(f"{name} has rows of {n_last} numbers, which are no blocks of {of.name}")
        n_bytes = n_numbers // of.n_numbers * of.n_bytes
        if start + n_bytes > len(self._data):
            raise ValueError(f"{name} should end at byte {start + n_bytes:,}, but the file ends at {len(self._data):,}")
        raw = np.frombuffer(self._data, np.uint8, n_bytes, start)
        if of.name in ("F32", "F16"):
            numbers = raw.view(np.dtype(f"<f{of.n_bytes}"))
            return StoredTensor(name, shape, of, kind, numbers.reshape(shape))
        return StoredTensor(name, shape, of, kind, raw.reshape(*shape[:-1], n_last // of.n_numbers * of.n_bytes))

    # These methods walk over values without making Python objects of them.

    def _take(self, n_bytes: int) -> bytes:
        self._skip(n_bytes)
        return self._data[self._at - n_bytes : self._at]

    def _skip(self, n_bytes: int) -> None:
        if n_bytes > len(self._data) - self._at:
            raise ValueError(
                f"{n_bytes:,} bytes should follow byte {self._at:,}, but the file ends at {len(self._data):,}"
            )
        self._at += n_bytes

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        format = "<" + kinds
        return struct.unpack(format, self._take(struct.calcsize(format)))

    def _text(self) -> str:
        return str(self._take(*self._numbers("Q")), "utf-8", "replace")

    def _skip_value(self, kind: int, *, depth: int) -> None:
        if kind == _STRING:
            self._skip(*self._numbers("Q"))
        elif kind in _FORMATS:
            self._skip(struct.calcsize(f"={_FORMATS[kind]}"))
        elif kind == _ARRAY:
            if depth >= _MOST_NESTED:
                raise ValueError("arrays within arrays")
            of, n = self._numbers("IQ")
            if of in _FORMATS:
                self._skip(n * struct.calcsize(f"={_FORMATS[of]}"))
            elif of == _STRING:
                self._skip_texts(n)
            else:
                for _ in range(n):
                    self._skip_value(of, depth=depth + 1)
        else:
            raise ValueError(f"a value of type {kind}")

    def _skip_texts(self, n: int) -> None:
        """Skip n texts. For a vocabulary, this loop takes most of the time of opening a file."""
        data, at, read = self._data, self._at, self._u64.unpack_from
        try:
            for _ in range(n):
                at += read(data, at)[0] + 8
        except (struct.error, OverflowError):
            raise ValueError(
                f"{n:,} texts should follow byte {self._at:,}, but the file ends at {len(data):,}"
            ) from None
        self._skip(at - self._at)

    # These methods make Python objects of values.

    def value_at(self, kind: int, at: int) -> Any:
        """Return the value at a byte of the file, which the pass over the header has checked."""
        return self._value(kind, at)[0]

    def _value(self, kind: int, at: int) -> tuple[Any, int]:
        """Return a value, and the byte after it."""
        data = self._data
        if kind in _FORMATS:
            format = "<" + _FORMATS[kind]
            return struct.unpack_from(format, data, at)[0], at + struct.calcsize(format)
        if kind == _STRING:
            end = at + 8 + self._u64.unpack_from(data, at)[0]
            return str(data[at + 8 : end], "utf-8", "replace"), end
        of, n = self._u32.unpack_from(data, at)[0], self._u64.unpack_from(data, at + 4)[0]
        at += 12
        if of in _FORMATS:
            format = f"<{n}{_FORMATS[of]}"
            return list(struct.unpack_from(format, data, at)), at + struct.calcsize(format)
        values = list[Any]()
        if of == _STRING:
            read = self._u64.unpack_from
            for _ in range(n):
                start = at + 8
                at = start + read(data, at)[0]
                values.append(str(data[start:at], "utf-8", "replace"))
            return values, at
        for _ in range(n):
            value, at = self._value(of, at)
            values.append(value)
        return values, at


class _Fields(Mapping[str, Any]):
    """Maps keys to values. A value is read from the file when it is asked for."""

    def __init__(self, header: Header, places: dict[str, tuple[int, int]]) -> None:
        self._header, self._places = header, places

    def __getitem__(self, key: str) -> Any:
        return self._header.value_at(*self._places[key])

    def __contains__(self, key: object) -> bool:
        return key in self._places  # `Mapping` would read the value, which may be a whole vocabulary.

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
