"""Compiles kernels once for a machine and keeps them on disk: `compiled` is used in place of `numba.njit(cache=True)`.

numba's own cache is next to the source or in the user's home, and importing fails if neither can be written. It also
checks only whether one file has changed, although kernels inline functions of other files. This cache is in the
system's folder for users' caches. Each kernel and signature has one file, which is named by everything on which its
machine code depends, and checked against that: if a file is incomplete, damaged or of something else, the kernel is
compiled again. If nothing can be written, kernels are compiled in memory. If several processes need the same kernel at
once, one of them compiles it; see `locks`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import llvmlite
import numba
import numpy
from numba.core import config
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from platformdirs import user_cache_path

from hybridmem.memory.blocks.scoped import Scoped
from hybridmem.memory.kernels.cpu import progress
from hybridmem.memory.kernels.cpu.launches import NotedDispatcher
from hybridmem.memory.kernels.cpu.locks import FileLock
from hybridmem.memory.kernels.cpu.rules import AS_WRITTEN, subroutine
from hybridmem.memory.kernels.cpu.threads import MAY_OVERLAP

_LOG = logging.getLogger("hybridmem.memory")
_PLACE = "HYBRID_MEMORY_CACHE"
_MOST_BUILDS = 8
"""How many versions of the kernels are kept on this machine. Older ones are removed."""

_ABANDONED_SECONDS = 600.0
"""After this many seconds a kernel's file has certainly been written, so an unfinished one was abandoned."""

_DIGEST_BYTES = hashlib.sha256().digest_size


def sources_digest(folder: Path) -> str:
    """Compute a digest of all Python files in a folder: their names and their content."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


_digest_beside = cache(sources_digest)

# This is computed at import: files may change while a process runs, but the process goes on compiling the old code.
_BUILD = repr(
    (
        sources_digest(Path(__file__).parent.parent),
        numba.__version__,
        llvmlite.__version__,
        numpy.__version__,
        sys.implementation.cache_tag,
    )
)


def cache_folder() -> Path | None:
    """Return the folder in which this version's kernels are kept, or None if the user has no home directory.

    The folder is in HYBRID_MEMORY_CACHE if the environment has this variable, else in the system's folder for caches.
    """
    if place := os.environ.get(_PLACE):
        root = Path(place).absolute()
    else:
        try:
            root = user_cache_path("hybrid-memory", appauthor=False)
        except RuntimeError:
            return None
        if not root.is_absolute():  # Older versions of the library leave "~" in the path if there is no home directory.
            return None
    return root / "kernels" / hashlib.sha256(_BUILD.encode()).hexdigest()[:16]


def is_kept() -> bool:
    """True if files can be written to `cache_folder()`, which is created."""
    try:
        if (folder := cache_folder()) is None:
            return False
        _make(folder)
        return os.access(folder, os.W_OK)
    except OSError:
        return False


class NotCompiledError(Exception):
    """A kernel is not on disk, and `on_a_miss` forbids to compile it."""


_Miss = Literal["compile", "skip", "skip if another does"]
_on_a_miss = Scoped[_Miss]("on_a_miss", "compile")


def on_a_miss(rule: _Miss) -> AbstractContextManager[None]:
    """Set what happens to kernels that are not on disk: "skip" raises NotCompiledError instead of compiling them."""
    return _on_a_miss.set_to(rule)


def compiled(
    rules: set[str] = AS_WRITTEN, *, parallel: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate like `subroutine`, and keep the machine code in `cache_folder()`.

    A kernel runs without the interpreter's lock, so that a server can answer meanwhile. A parallel kernel does so only
    if several of them may run at once.
    """
    is_free = MAY_OVERLAP or not parallel

    def compile_lazily(function: Callable[..., Any]) -> Any:
        kernel = subroutine(rules, parallel=parallel, nogil=is_free, **options)(function)
        kernel.__class__ = NotedDispatcher
        try:
            kernel._cache = KernelCache(function, is_free=is_free)
        except OSError as error:  # The kernel's source is in no file.
            _warn_once(error)
        return kernel

    return compile_lazily


class KernelCache(_Cache):
    """Reads and writes the files of one kernel. Numba calls it when it needs the kernel for some types of arguments."""

    def __init__(self, function: Callable[..., Any], *, is_free: bool) -> None:
        source = Path(function.__code__.co_filename)
        self._name = f"{source.stem}.{function.__qualname__}"
        self._is_free = is_free
        self._locks: tuple[Path | None, FileLock] | None = None
        # The source may be outside of the folder of `_BUILD`, and use functions of files next to it.
        self._source = _digest_beside(source.parent)

    @property
    def cache_path(self) -> Path | None:
        return cache_folder()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load the kernel for a signature. None if there is no valid file, so that this process must compile it."""
        target_context.refresh()
        key, name = self._key(sig, target_context.codegen())
        if (payload := _read(key, name)) is None:
            if (rule := _on_a_miss.get()) == "skip":
                raise NotCompiledError(self._name)
            progress.tell(self._name.partition(".")[0])
            if not self._lock.acquire(waits=rule == "compile") and rule != "compile":
                raise NotCompiledError(self._name)
            if (payload := _read(key, name)) is None:
                return None
            self._lock.release()  # Another process has compiled the kernel meanwhile.
        return CompileResult._rebuild(target_context, *pickle.loads(payload))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write a kernel's file, if that is possible."""
        try:
            if data.library.has_dynamic_globals:
                return  # The machine code contains addresses of this process.
            key, name = self._key(sig, data.codegen)
            payload: bytes = dumps(data._reduce())
            if (folder := cache_folder()) is None:
                raise FileNotFoundError("the user has no home directory")
            _write(folder / name, hashlib.sha256(key + payload).digest() + payload)
        except OSError as error:
            _warn_once(error)
        finally:
            self._lock.release()
            progress.clear()

    @property
    def _lock(self) -> FileLock:
        """Return the lock of this kernel.

        All versions of the kernel have the same lock, so that the number of lock files does not grow.
        """
        path = self.cache_path
        if self._locks is None or self._locks[0] != path:
            where = Path(os.devnull) / "none" if path is None else path.parent.parent / "locks" / self._name
            self._locks = path, FileLock(where)
        return self._locks[1]

    def _key(self, sig: Any, codegen: Any) -> tuple[bytes, str]:
        """Return a key of everything on which the machine code depends (also the processor), and the file's name."""
        flags = str(config.OPT), config.BOUNDSCHECK, self._is_free  # type: ignore[attr-defined]
        key = repr((_BUILD, self._source, self._name, str(sig), codegen.magic_tuple(), flags)).encode()
        return key, f"{self._name}-{hashlib.sha256(key).hexdigest()[:24]}"

    def enable(self) -> None:
        """Do nothing: the cache is always on."""

    def disable(self) -> None:
        """Do nothing: the cache is always on."""

    def flush(self) -> None:
        """Do nothing, because a file that is not valid is never read, so it need not be removed."""


def _read(key: bytes, name: str) -> bytes | None:
    """Return a kernel's machine code, or None if its file does not exist or is incomplete."""
    if (folder := cache_folder()) is None:
        return None
    try:
        content = (folder / name).read_bytes()
    except OSError:
        return None
    with suppress(OSError):  # The folder may be readable but belong to another user.
        os.utime(folder)  # The new time marks this build as used, because those used last are kept.
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if hashlib.sha256(key + payload).digest() == digest else None


def _make(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old_builds(folder)


def _write(path: Path, content: bytes) -> None:
    """Write a whole file at once, even if other processes write it at the same time."""
    _make(path.parent)
    _remove_abandoned(path)
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _remove_abandoned(path: Path) -> None:
    """Remove files that were left next to this kernel's file by processes that were killed while they wrote it."""
    for part in path.parent.glob(f"{escape(path.name)}.*.part"):
        with suppress(OSError):  # Another process may do the same.
            if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()


def _remove_old_builds(folder: Path) -> None:
    """Remove all versions except those used last. If a removed version is still in use, it is compiled again."""
    with suppress(OSError):  # Another process may do the same.
        others = [(other.stat().st_mtime, other) for other in folder.parent.iterdir() if other != folder]
        for _, other in sorted(others, reverse=True)[_MOST_BUILDS - 1 :]:
            shutil.rmtree(other, ignore_errors=True)


_has_told = False


def _warn_once(error: Exception) -> None:
    global _has_told
    if not _has_told:
        _has_told = True
        why = f"CPU kernels cannot be kept on disk, so each process compiles them again: {error}"
        _LOG.warning(f"{why}; name a folder in {_PLACE}")
