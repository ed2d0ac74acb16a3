"""Keeps slowly built tokenizers on disk, beside the kernels, for the next start.

SentencePiece's merges follow from the scores of all tokens, which for 262,144 of them takes more than a second. What is
kept is named by the digest of the file's header, so that it belongs to no other vocabulary. It is checked when read.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

import tokenizers
from tokenizers import Tokenizer

from hybridmem.models.loading.gguf.file import GgufFile

_SLOW_SECONDS = 0.7
"""A tokenizer that is built sooner is not kept, because reading it would take as long."""
_MOST_KEPT = 8
"""At most so many tokenizers are kept on this machine. Those that were used last stay."""
_DIGEST_BYTES = hashlib.sha256().digest_size


def kept_tokenizer(file: GgufFile, build: Callable[[], Tokenizer]) -> Tokenizer:
    """Return the tokenizer of a file, which is read from disk if it is kept there. Otherwise `build` makes it.

    Where no file can be written, nothing is kept.
    """
    path = _place_of(file)
    if path is not None and (known := _read(path)) is not None:
        return known
    started = time.perf_counter()
    backend = build()
    if path is not None and time.perf_counter() - started > _SLOW_SECONDS:
        with suppress(OSError):
            _write(path, backend.to_str().encode())
    return backend


def _place_of(file: GgufFile) -> Path | None:
    from hybridmem.memory.kernels.cpu.parts import cache_folder

    folder = cache_folder()
    if folder is None:
        return None
    name = hashlib.sha256(f"{file.header_digest()} {_build()}".encode()).hexdigest()[:32]
    return folder.parent.parent / "tokenizers" / f"{name}.json"


@cache
def _build() -> str:
    """Return a text that changes with everything that turns a header into a tokenizer."""
    digest = hashlib.sha256(tokenizers.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Tokenizer | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, written = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(path.name.encode() + written).digest() != digest:
        return None  # The file is incomplete or was changed. The caller builds the tokenizer and writes the file anew.
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), time.time_ns()))  # `touch` would take the system's coarser clock.
    return Tokenizer.from_str(written.decode())


def _write(path: Path, written: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        part.write_bytes(hashlib.sha256(path.name.encode() + written).digest() + written)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    others = sorted(path.parent.iterdir(), key=lambda other: other.stat().st_mtime, reverse=True)
    for other in others[_MOST_KEPT:]:
        other.unlink(missing_ok=True)
