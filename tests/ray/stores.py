"""Holds the places in which the fleet of the tests may keep sequences: a folder, or a bucket of an S3 server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from moto.server import ThreadedMotoServer

from hybridmem.cluster.store.place import Place

BUCKET = "sessions"


class TestedStore(Protocol):
    """Declares what tests do with a place besides using it."""

    __test__ = False
    url: str

    def down(self) -> object:
        """Return a context in which the place refuses everything."""
        ...


def n_sequences(store: TestedStore) -> int:
    return len([entry for entry in Place(store.url).entries("") if entry.name.endswith(".safetensors")])


class Folder:
    """Is a folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self._path = path
        path.mkdir()

    @contextmanager
    def down(self) -> Iterator[None]:
        """Put a file where the folder is."""
        away = self._path.with_name("away")
        self._path.rename(away)
        self._path.write_text("no folder")
        try:
            yield
        finally:
            self._path.unlink()
            away.rename(self._path)


class Bucket:
    """Is a bucket of moto's S3 server. s3fs and botocore talk to it over HTTP, as they do to Amazon's."""

    url = f"s3://{BUCKET}/store"

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self._server.start()
        os.environ |= {
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}", "FSSPEC_S3_KEY": "key", "FSSPEC_S3_SECRET": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        from fsspec.config import conf, set_conf_env

        set_conf_env(conf)
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)

    @contextmanager
    def down(self) -> Iterator[None]:
        """Stop the server; what it holds stays in the process."""
        self._server.stop()
        try:
            yield
        finally:
            self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
            self._server.start()
            time.sleep(0.2)

    def close(self) -> None:
        self._server.stop()
