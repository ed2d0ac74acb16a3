"""Reads the metadata and tensors of GGUF files.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks import ceil_div
from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.gguf.header import Header, StoredTensor, begins_as_gguf
from hybridmem.models.weights.checkpoint import UnsupportedModelError
from hybridmem.models.weights.coded import CodedTensor
from hybridmem.models.weights.gguf_forms import FORMS

SUFFIX = ".gguf"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_AT_ONCE = 1 << 24
"""How many numbers become floats at once. Temporary arrays take a few times their bytes."""


def import_gguf(path: Path) -> Any:
    """Return the `gguf` package, for its tables and its formulas for rare blocks. Raises UnsupportedModelError."""
    try:
        gguf = import_module("gguf")
        import_module("gguf.quants")
    except ImportError as error:
        raise UnsupportedModelError(
            f"{path} needs the gguf package, which is not installed; install hybridmem[gguf]"
        ) from error
    return gguf


def is_gguf(path: Path) -> bool:
    """True if the path names a GGUF file, by its suffix or its first bytes: some stores use no suffix."""
    if path.is_dir():
        return False
    return path.suffix.lower() == SUFFIX or (path.is_file() and begins_as_gguf(path))


def find_gguf(folder: Path) -> Path | None:
    """Return the only model in a folder without safetensors, or the first of its shards, or None if there is none.

    Raises:
        FormatError: there are several models.
    """
    found = list_gguf(folder)
    if not found or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise FormatError(f"{folder} holds several models, {names}; give the path of one of them")
    return found[0]


def list_gguf(folder: Path) -> list[Path]:
    """Return the GGUF models in a folder, sorted. Of a model in several files, it is the first file."""
    return [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not _is_later_shard(path)]


def _is_later_shard(path: Path) -> bool:
    match = _SHARD.fullmatch(path.name)
    return match is not None and int(match[2]) > 1


class GgufFile:
    """Holds an open GGUF model, which may be divided into several files. Tensors are mapped until they are read.

    Attributes:
        architecture: the architecture's name in the file, such as "jamba".

    Raises:
        FormatError: a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        headers = []
        for part in _shards(path):
            if not part.exists():
                raise FormatError(f"{part} is missing; the model is incomplete, download it again")
            try:
                headers.append(Header(part))
            except (ValueError, OSError) as error:
                raise FormatError(f"{part} is no GGUF file, or damaged ({error}); download it again") from error
        self._headers, self._fields = headers, headers[0].fields
        self._tensors: dict[str, StoredTensor] = {name: t for header in headers for name, t in header.tensors.items()}
        self.architecture = str(self.value("general.architecture"))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def value(self, key: str, default: Any = None, *, is_needed: bool = True) -> Any:
        """Return the metadata's value of a key: a number, text, bool or list.

        Raises FormatError if there is no value, unless there is a default or the value is not needed.
        """
        if key not in self._fields:
            if default is None and is_needed:
                raise FormatError(f"{self.path} does not say {key}; convert the model again")
            return default
        return self._fields[key]

    def values_below(self, prefix: str) -> dict[str, Any]:
        """Return the values of all keys that begin with `prefix`. The result's keys are the parts after it."""
        return {key.removeprefix(prefix): self.value(key) for key in self._fields if key.startswith(prefix)}

    def own(self, key: str, default: Any = None, *, is_needed: bool = True) -> Any:
        """Return the metadata's value of a key of this architecture, as `value` does."""
        return self.value(f"{self.architecture}.{key}", default, is_needed=is_needed)

    def header_digest(self) -> str:
        """Return a digest of all fields, and of what the tensors are."""
        return self._headers[0].digest()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. The last axis is the contiguous one."""
        return self._tensors[name].shape

    def stored_dtype(self, name: str) -> str:
        """Return the name of a tensor's type, such as "Q4_K"."""
        return self._tensors[name].type.name

    def n_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in the file."""
        return self._tensors[name].data.nbytes

    def holds_equal(self, name: str, other: str) -> bool:
        """True if two tensors have the same type and shape, and the same bytes."""
        one, another = (self._tensors[n] for n in (name, other))
        if one.type != another.type or one.shape != another.shape:
            return False
        n_parts = ceil_div(max(1, one.data.nbytes), _AT_ONCE)
        pairs = zip(np.array_split(one.data, n_parts), np.array_split(another.data, n_parts), strict=True)
        return all(a.tobytes() == b.tobytes() for a, b in pairs)

    def is_quantised(self) -> bool:
        """True if any tensor has fewer than 16 bits per number."""
        return any(t.type.name not in ("F32", "F16", "BF16") for t in self._tensors.values())

    def release(self) -> None:
        """Release the memory of the tensors that were read. The files stay mapped."""
        for header in self._headers:
            header.release()

    def read_coded(self, name: str, dtype: torch.dtype, index: int | None = None) -> CodedTensor | None:
        """Return a tensor as `read` does, but mapped, in the file's own few bits; None if the file has more bits."""
        stored, form = self._tensors[name], FORMS.get(self.stored_dtype(name))
        if form is None:
            return None
        data = stored.data if index is None else stored.data[index]
        return CodedTensor(form, [torch.from_numpy(data)], stored.shape[-1], dtype)

    def read(self, name: str, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """Return a tensor, or one entry of its first axis. It has its own dtype if it is a float, and else `dtype`."""
        stored = self._tensors[name]
        kind, shape = self.stored_dtype(name), self.shape(name)
        data = stored.data if index is None else stored.data[index]
        shape = shape if index is None else shape[1:]
        if kind in ("F32", "F16"):
            return torch.from_numpy(np.array(data)).reshape(shape)
        if kind == "BF16":
            return torch.from_numpy(np.array(data).view(np.uint16)).view(torch.bfloat16).reshape(shape)
        if (coded := self.read_coded(name, dtype, index)) is not None:
            return coded.dense()
        gguf = import_gguf(self.path)
        rows, number = data.reshape(-1, data.shape[-1]), gguf.GGMLQuantizationType(stored.number)
        out = torch.empty(rows.shape[0], shape[-1], dtype=dtype)
        step = max(1, _AT_ONCE // shape[-1])
        try:
            for i in range(0, len(rows), step):
                out[i : i + step] = torch.from_numpy(gguf.quants.dequantize(rows[i : i + step], number))
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{name} in {self.path} is stored as {kind}, which the gguf package cannot read; give a file in "
                "Q4_K_M, Q5_K_M, Q6_K, Q8_0 or with floats"
            ) from error
        return out.reshape(shape)


def _shards(path: Path) -> list[Path]:
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]
