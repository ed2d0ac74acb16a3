"""Writes a sequence to a safetensors file, and reads it: a tensor of blocks for each pool, and JSON in the header.

    tensors    tokens (n,) int64; blocks/NAME OF A POOL (n, block_bytes) uint8
    metadata   format, version, records, about (the sequence, and the signature of its memory), sha256 over all of it

The bytes of blocks are those of the arena, so a loaded sequence continues bit for bit as the saved one would; a memory
of another signature refuses them. Equal sequences make equal files. So the header is written here, with its names
sorted: safetensors' own writer puts metadata in an order that changes from call to call. Paths are those of fsspec: a
local file, or a URL such as s3://bucket/name. fsspec and safetensors are imported only when a file is saved or loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memory.errors import FormatError, SpecError
from memory.layer_memories import Snapshot
from memory.storage.local_files import written_whole

_FORMAT, _VERSION, _READ_VERSIONS = "hybrid-memory sequence", 4, ("2", "3", "4")
_BLOCKS = "blocks/"
_DTYPES = {torch.int64: "I64", torch.uint8: "U8"}


def read_path(option: str, path: Any, wanted: str, error: type[SpecError | FormatError] = SpecError) -> str:
    """Return a path or URL as text. Raises `error` for anything else, with `wanted` as the remedy."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise error(f"{option}={path!r} is no path; give {wanted}")
    return os.fsdecode(path)


def write_snapshot(path: str, snapshot: Snapshot, about: dict[str, Any]) -> None:
    """Write a file, whole or not at all: an older file stays until the new one is complete.

    A local file is written by `written_whole`; object stores show an upload when it is complete.

    Args:
        about: facts on the sequence as JSON values; `tokens` may be an array.
    Raises:
        SpecError: a dry run's memory has no bytes to write; or the path is a folder, or leads into one that does not
        exist. OSError: the file system's.
    """
    from fsspec.core import url_to_fs

    if any(blocks.is_meta for blocks in snapshot.blocks.values()):
        raise SpecError('a memory on device="meta" holds no bytes that a file could keep; save from a real one')
    fs, place = url_to_fs(path)
    is_local = "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)
    if is_local:
        _check_place(path, place)
    about = dict(about)
    tensors = {_BLOCKS + name: blocks for name, blocks in snapshot.blocks.items()}
    tensors["tokens"] = torch.from_numpy(np.asarray(about.pop("tokens", ()), np.int64))
    texts = {
        name: json.dumps(value, sort_keys=True) for name, value in (("records", snapshot.records), ("about", about))
    }
    metadata = {"format": _FORMAT, "version": str(_VERSION), **texts}
    parts = _serialized(tensors, metadata | {"sha256": _digest(tensors, metadata)})
    if not is_local:
        fs.pipe_file(place, b"".join(parts))
        return
    with written_whole(Path(place)) as file:
        file.writelines(parts)


def _check_place(path: str, place: str) -> None:
    """Raise SpecError if a local path is a folder, or its folder does not exist."""
    folder, name = os.path.split(place)
    if os.path.isdir(place):  # noqa: PTH112 - a URL's place may be no Path
        example = os.path.join(place, "alice.safetensors")  # noqa: PTH118
        raise SpecError(f"{path} is a folder; give the path of a file in it, such as {example}")
    if folder and not os.path.isdir(folder):  # noqa: PTH112
        raise SpecError(f"there is no folder {folder} to save {name} in; make it first")


def read_snapshot(path: str) -> tuple[Snapshot, dict[str, Any]]:
    """Read a file of `write_snapshot`: its snapshot, and `about` with `tokens` as an array and the file's `version`.

    Raises FormatError unless every byte is as it was written.
    """
    from fsspec.core import url_to_fs
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        fs, place = url_to_fs(path)
        data = fs.cat_file(place)
    except IsADirectoryError as error:
        raise FormatError(f"{path} is a folder; give the path of a saved sequence, a file") from error
    except (OSError, ValueError, ImportError) as error:
        raise FormatError(
            f"{path} cannot be read: {str(error) or type(error).__name__}; give the path of a saved sequence"
        ) from error
    try:
        metadata = dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {}))
        tensors = load(data)
    except (
        SafetensorError,
        ValueError,
        AttributeError,
        TypeError,
        MemoryError,
        OverflowError,
        RecursionError,
    ) as error:
        raise FormatError(
            f"{path} is no safetensors file, or a damaged one ({error}); save the sequence again"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise FormatError(f"{path} holds no sequence of a HybridMemory; give a file that memory.save wrote")
    if (version := metadata.get("version")) not in _READ_VERSIONS:
        raise FormatError(
            f"{path} has format version {version}, this library reads {' and '.join(_READ_VERSIONS)}; use the one that "
            "wrote it"
        )
    try:
        digest = _digest(tensors, {k: v for k, v in metadata.items() if k != "sha256"})
    except TypeError as error:  # of a dtype that numpy lacks
        raise FormatError(f"{path} holds what memory.save never writes ({error}); save the sequence again") from error
    if digest != metadata.get("sha256"):
        raise FormatError(f"{path} is damaged: its checksum is not that of its content; save the sequence again")
    try:
        records = json.loads(metadata["records"])
        about = json.loads(metadata["about"])
        tokens = tensors["tokens"].numpy()
        about = {**about, "tokens": tokens, "version": int(version)}
    except (KeyError, ValueError) as error:
        raise FormatError(f"{path} lacks {error}, which memory.save always writes; save the sequence again") from error
    except (TypeError, RecursionError) as error:
        raise FormatError(f"{path} holds what memory.save never writes ({error}); save the sequence again") from error
    blocks = {name.removeprefix(_BLOCKS): tensor for name, tensor in tensors.items() if name.startswith(_BLOCKS)}
    return Snapshot(records, blocks), about


def _serialized(tensors: dict[str, Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """Generate the pieces of a safetensors file: the header's length, the header, and the tensors.

    https://huggingface.co/docs/safetensors describes the format. Tensors of the widest elements come first, so that
    elements are aligned as in the files of its own writer.
    """
    header, at = dict[str, Any](__metadata__=metadata), 0
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        yield _bytes(tensors[name])


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).numpy().data.cast("B")


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Return the checksum of a file's content, as hexadecimal text."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()
