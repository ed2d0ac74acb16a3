"""Writes safetensors files of two formats, both of version 1: saved sequences, and blocks alone.

    tensors    blocks/NAME OF A POOL (n, block_bytes) uint8; tokens (n,) int64, or those of several sequences
    metadata   format, version, about (JSON), checksum of all else; of saved sequences also members

`memory.storage.family_files` describes the files of saved sequences. Files of blocks alone hold what is swapped out,
and what a prefix cache keeps in a folder. The list of such a folder is a file of this format without blocks.
`memory.storage.reading` reads both formats.

The bytes of blocks are those of the arena, so a loaded sequence continues bit for bit as the saved one would. A memory
of another signature refuses them. Equal sequences make equal files. So this module writes the header itself, with
sorted names: safetensors' own writer puts metadata in an order that changes from call to call. Paths are those of
fsspec: a local file, or a URL such as s3://bucket/name. fsspec is imported only when a file is saved or loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.errors import FormatError, SpecError
from hybridmem.memory.storage.checksums import PIECE_BYTES, bytes_of, checksum_of
from hybridmem.memory.storage.local_files import begin_flush, reserve_space, written_whole

FORMAT_VERSION = "1"
SEQUENCES_FORMAT, BLOCKS_FORMAT = "hybridmem sequences", "hybridmem blocks"
BLOCKS = "blocks/"
CHECKSUM = "checksum"
_ANY_CHECKSUM = "0" * 32
DTYPES = {torch.int64: "I64", torch.uint8: "U8"}


def read_path(option: str, path: Any, wanted: str, error: type[SpecError | FormatError] = SpecError) -> str:
    """Return a path or URL as text. Raises `error` for anything else, with `wanted` as the remedy."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise error(f"{option}={path!r} is no path; give {wanted}")
    return os.fsdecode(path)


def write_blocks(path: str, blocks: Mapping[str, Tensor], about: dict[str, Any], *, is_lasting: bool = True) -> None:
    """Write a file of blocks, as `write_tensors` does.

    Args:
        blocks: pool -> (n, block_bytes).
        about: facts about the blocks, as JSON values. `tokens` may be an array.
    """
    about = dict(about)
    require_bytes(blocks.values())
    tensors = {BLOCKS + name: own for name, own in blocks.items()}
    tensors["tokens"] = torch.from_numpy(np.asarray(about.pop("tokens", ()), np.int64))
    metadata = {"format": BLOCKS_FORMAT, "version": FORMAT_VERSION, "about": json.dumps(about, sort_keys=True)}
    pieces = {name: [tensor] for name, tensor in tensors.items()}
    write_tensors(path, pieces, metadata, lambda: checksum_of(tensors, metadata), is_lasting=is_lasting)


def require_bytes(tensors: Iterable[Tensor]) -> None:
    """Raise SpecError if any of these tensors comes from a dry run, which has no bytes to write."""
    if any(tensor.is_meta for tensor in tensors):
        raise SpecError('a memory on device="meta" holds no bytes that a file could keep; save from a real one')


def write_tensors(
    path: str,
    tensors: Mapping[str, Seq[Tensor]],
    metadata: dict[str, str],
    checksum: Callable[[], str],
    *,
    is_lasting: bool = True,
) -> None:
    """Write a safetensors file completely or not at all: an older file stays until the new one is complete.

    `written_whole` writes a local file. An object store shows an upload only when it is complete.

    Args:
        tensors: name -> the tensor in pieces, which are joined along the first axis.
        checksum: a function that returns the checksum of all content, as hexadecimal text, for the metadata. The header
            of a local file is written last, so the checksum is computed while the disk is busy with the tensors.
        is_lasting: True to wait until a local file has reached the disk. False is for a file that is useless after a
            crash.
    Raises:
        SpecError: the path is a folder, or its folder does not exist. OSError: the file system fails.
    """
    from fsspec.core import url_to_fs

    fs, place = url_to_fs(path)
    if not is_local(path):
        parts: list[bytes | memoryview] = [_header(tensors, metadata | {CHECKSUM: checksum()}), *_contents(tensors)]
        with as_os_errors(path):
            fs.pipe_file(place, b"".join(parts))
        return
    _check_place(path, place)
    n_bytes = sum(piece.nbytes for pieces in tensors.values() for piece in pieces)
    with written_whole(Path(place), is_lasting=is_lasting) as file:
        n_header = len(_header(tensors, metadata | {CHECKSUM: _ANY_CHECKSUM}))
        reserve_space(file, n_header + n_bytes)
        at = file.seek(n_header)
        for piece in _pieces(_contents(tensors)):
            file.write(piece)
            if is_lasting:
                begin_flush(file, at, len(piece))
            at += len(piece)
        file.seek(0)
        file.write(_header(tensors, metadata | {CHECKSUM: checksum()}))


def _check_place(path: str, place: str) -> None:
    """Raise SpecError if a local path is a folder, or its folder does not exist."""
    folder, name = os.path.split(place)
    if os.path.isdir(place):  # noqa: PTH112 - a URL's place may be no Path
        example = os.path.join(place, "alice.safetensors")  # noqa: PTH118
        raise SpecError(f"{path} is a folder; give the path of a file in it, such as {example}")
    if folder and not os.path.isdir(folder):  # noqa: PTH112
        raise SpecError(f"there is no folder {folder} to save {name} in; make it first")


def is_local(path: str) -> bool:
    """True if a path leads to one of this machine's file systems."""
    return local_place(path) is not None


def local_place(path: str) -> str | None:
    """Return the place on this machine's file systems to which a path or URL leads, or None if it leads elsewhere."""
    from fsspec.core import url_to_fs

    fs, place = url_to_fs(path)
    return place if "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol) else None


def check_url(option: str, path: str) -> str:
    """Return the path or URL of a folder, which need not exist yet.

    Raises SpecError for a file, and for a URL that fsspec cannot open, such as one whose plugin is missing.
    """
    if "://" in path:
        from fsspec.core import url_to_fs

        try:
            url_to_fs(path)
        except Exception as error:  # Each kind of store raises its own errors.
            raise SpecError(f"{option}={path!r} cannot be opened: {error}") from error
    elif Path(path).is_file():
        raise SpecError(f"{option}={path!r} is a file; give the path of a folder")
    return path


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """Turn a store's own errors into OSError, which local files raise as well.

    From a local path nothing else comes than OSError and what a handler of a signal raises, which stays what it is.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if is_local(path):
            raise
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error


def make_folder(path: str) -> None:
    """Make a folder with mode 0700, and the folders above it, if it does not exist.

    Raises SpecError if a file is there.
    """
    from fsspec.core import url_to_fs

    fs, place = url_to_fs(path)
    if not is_local(path):
        with as_os_errors(path):
            fs.makedirs(place, exist_ok=True)
        return
    try:
        Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise SpecError(f"{path} is a file; give the path of a folder") from error


def join_path(folder: str, name: str) -> str:
    """Return the path or URL of a file in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def remove_file(path: str) -> None:
    """Remove a file unless it is gone already. Raises OSError."""
    from fsspec.core import url_to_fs

    fs, place = url_to_fs(path)
    if is_local(path):
        Path(place).unlink(missing_ok=True)
        return
    with as_os_errors(path):
        if fs.exists(place):
            fs.rm_file(place)


def list_names(folder: str) -> list[str]:
    """Return the names of all entries in a folder.

    If the folder does not exist, or the store has no files with this prefix, return none.
    """
    from fsspec.core import url_to_fs

    fs, place = url_to_fs(folder)
    with as_os_errors(folder), suppress(FileNotFoundError):
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in fs.ls(place, detail=False))
    return []


def _header(tensors: Mapping[str, Seq[Tensor]], metadata: dict[str, str]) -> bytes:
    """Return the beginning of a safetensors file: the header's length, and the header.

    https://huggingface.co/docs/safetensors describes the format.
    """
    header, at = dict[str, Any](__metadata__=metadata), 0
    for name in _in_order(tensors):
        first, n_rows = tensors[name][0], sum(map(len, tensors[name]))
        end = at + n_rows * first.element_size() * math.prod(first.shape[1:])
        header[name] = {"dtype": DTYPES[first.dtype], "shape": [n_rows, *first.shape[1:]], "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _contents(tensors: Mapping[str, Seq[Tensor]]) -> Iterator[memoryview]:
    """Generate the bytes after the header."""
    return (bytes_of(piece) for name in _in_order(tensors) for piece in tensors[name])


def _pieces(contents: Iterable[memoryview]) -> Iterator[memoryview]:
    return (
        content[begin : begin + PIECE_BYTES] for content in contents for begin in range(0, len(content), PIECE_BYTES)
    )


def _in_order(tensors: Mapping[str, Seq[Tensor]]) -> list[str]:
    """Return the names, widest elements first. So tensors are aligned as in files of safetensors' own writer."""
    return sorted(tensors, key=lambda name: (-tensors[name][0].element_size(), name))
