"""Reads and writes files in one place, which is a folder or any URL that fsspec can open."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from hybridmem.memory.storage import as_os_errors, check_url, local_place, make_folder, written_whole

log = logging.getLogger("hybrid_memory.cluster")


@dataclass(frozen=True)
class Entry:
    """Describes a file. `changed_at` is a time in unix seconds."""

    name: str
    n_bytes: int
    changed_at: float


class Place:
    """Holds files by names such as "sessions/3f/1.json". All calls block, and raise OSError if the place fails.

    Args:
        url: the URL of a folder. The folder is made if it is missing, unless the store does not answer now.
    Raises:
        SpecError: fsspec cannot open the URL, or it is a file. OSError: the place does not exist, or access is denied.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = check_url("--store", url).rstrip("/")
        self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
        self._is_local = local_place(self.url) is not None
        try:
            make_folder(self.url)
        except OSError as error:
            if self._is_local or isinstance(error, PermissionError | FileNotFoundError):
                raise
            log.warning("the store does not answer: %s", error)  # The replica starts even if the store is down.

    def path(self, name: str) -> str:
        """Return the path or URL of a file, for functions that open it themselves."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if there is no such file."""
        with as_os_errors(self.path(name)):
            try:
                return bytes(self._fs.cat_file(self._at(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        if self._is_local:
            self._make_parent(name)
            with written_whole(Path(self._at(name)), is_lasting=False) as file:
                file.write(content)
            return
        with as_os_errors(self.path(name)):
            self._fs.pipe_file(self._at(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists. Return False if it exists. If several try at once, one succeeds.

        An object store must support `If-None-Match: *` for that, as S3 does.
        """
        if self._is_local:
            return self._create_locally(name, content)
        with as_os_errors(self.path(name)):
            try:
                self._fs.pipe_file(self._at(name), content, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if "PreconditionFailed" in repr(error) or "412" in str(error):
                    return False
                raise
        return True

    def write_with(self, name: str, write: Callable[[str], None]) -> None:
        """Let a function write a file. The function gets the file's path or URL."""
        if self._is_local:
            self._make_parent(name)
        with as_os_errors(self.path(name)):
            write(self.path(name))

    def has(self, name: str) -> bool:
        with as_os_errors(self.path(name)):
            return bool(self._fs.exists(self._at(name)))

    def remove(self, name: str) -> None:
        """Remove a file. Nothing happens if there is no such file."""
        with as_os_errors(self.path(name)), suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder. The list is empty if there is no such folder."""
        with as_os_errors(self.path(folder)):
            try:
                found = self._fs.ls(self._at(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def entries(self, folder: str) -> list[Entry]:
        """Return all files below a folder."""
        with as_os_errors(self.path(folder)):
            try:
                found: dict[str, dict[str, Any]] = self._fs.find(self._at(folder), detail=True)
            except FileNotFoundError:
                return []
        start = len(self._root) + 1
        return [Entry(path[start:], int(about["size"] or 0), _changed_at(about)) for path, about in found.items()]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        Path(self._at(name)).parent.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _create_locally(self, name: str, content: bytes) -> bool:
        """Write a file beside the place, then link it.

        So a reader never sees a half-written file, and an existing file is not replaced.
        """
        self._make_parent(name)
        path = Path(self._at(name))
        beside = path.with_name(f"{path.name}.{uuid4().hex}.part")
        try:
            with open(beside, "xb", opener=lambda at, flags: os.open(at, flags, 0o600)) as file:
                file.write(content)
            os.link(beside, path)
        except FileExistsError:
            return False
        finally:
            beside.unlink(missing_ok=True)
        return True


def _changed_at(about: dict[str, Any]) -> float:
    when = about.get("mtime", about.get("LastModified", about.get("created", 0.0)))
    return float(when.timestamp() if hasattr(when, "timestamp") else when)
