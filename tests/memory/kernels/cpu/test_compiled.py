"""Compiled kernels on disk are found again, never stale, and never run if incomplete.

The library works without them.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from numba.core.codegen import JITCPUCodegen

from hybridmem.memory.kernels.cpu import compiled as module
from hybridmem.memory.kernels.cpu import progress
from hybridmem.memory.kernels.cpu.compiled import cache_folder, compiled, sources_digest
from tests.extent import one_in, only_in_long

ROOT = Path(__file__).parent.parent.parent.parent.parent


def double(x: Any) -> Any:
    return x + x


def triple(x: Any) -> Any:
    return x + x + x


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRID_MEMORY_CACHE", str(tmp_path))
    return kept_in()


def kept_in() -> Path:
    folder = cache_folder()
    assert folder is not None
    return folder


def run(function: Callable[..., Any] = double, x: float = 4) -> bool:
    """Return whether a kernel was on disk that this process has not compiled yet."""
    kernel = compiled()(function)
    assert kernel(x) == function(x)
    return bool(kernel.stats.cache_hits)


def test_a_kernel_is_compiled_once_for_each_kind_of_argument(folder: Path) -> None:
    assert [run(), run(), run(x=0.5), run(x=0.5), run()] == [False, True, False, True, True]
    assert len(list(folder.iterdir())) == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def swap(path: Path) -> None:
    """Put the complete file of another kernel there."""
    run(triple)
    (other,) = (other for other in path.parent.iterdir() if other != path)
    shutil.copy(other, path)


def remove(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("damage", one_in(2, [cut, empty, flip, remove, swap]))
def test_a_file_that_is_not_whole_or_not_the_right_one_is_compiled_again(
    damage: Callable[[Path], None], folder: Path
) -> None:
    run()
    (path,) = folder.iterdir()
    damage(path)
    assert not run()
    assert run(), "it was not mended"


def test_another_version_has_kernels_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    (path,) = folder.iterdir()
    own = path.read_bytes()
    monkeypatch.setattr(module, "_BUILD", module._BUILD + "newer")
    run()
    (newer,) = kept_in().iterdir()
    newer.write_bytes(own)
    assert not run()


def test_old_versions_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(12):
        old = folder.parent / f"old {i}"
        old.mkdir(parents=True)
        os.utime(old, (i, i))
    run()
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, *(f"old {i}" for i in range(5, 12))}


def test_a_version_that_is_used_is_not_old(folder: Path) -> None:
    run()
    os.utime(folder, (1, 1))
    assert run() and folder.stat().st_mtime > 1


def test_what_killed_processes_left_beside_a_kernel_goes(folder: Path) -> None:
    """Another process may still be writing a young file, so young files stay."""
    run()
    (path,) = folder.iterdir()
    old, young = (path.with_name(f"{path.name}.{name}.part") for name in ("old", "young"))
    for part in (old, young):
        part.write_bytes(b"half")
    os.utime(old, (1, 1))
    path.unlink()
    assert not run()
    assert set(folder.iterdir()) == {path, young}


def test_without_a_home_kernels_work_and_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HYBRID_MEMORY_CACHE", raising=False)
    monkeypatch.setattr(module, "user_cache_path", lambda *_, **__: Path("~/.cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_has_told", True)
    assert cache_folder() is None and not module.is_kept()
    assert not run() and not list(tmp_path.iterdir())


def test_every_source_counts(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    seen = set[str]()
    for path, text in (("a.py", "1"), ("inner/b.py", "1"), ("a.py", "2"), ("inner/b.py", "2"), ("inner/a.py", "")):
        (tmp_path / path).write_text(text)
        seen.add(sources_digest(tmp_path))
    assert len(seen) == 5


@pytest.mark.parametrize("place", one_in(2, ["a file", "no home"]))
def test_where_nothing_can_be_kept_kernels_work_and_it_is_said_once(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_has_told", False)
    if place == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("HYBRID_MEMORY_CACHE", str(tmp_path / "file" / "inside"))
    else:
        for name in ("HYBRID_MEMORY_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)

        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(progress, "tell", lambda kernel: None)
    with caplog.at_level(logging.WARNING, "memory"):
        assert [run(), run(), run(triple)] == [False] * 3
    assert len(caplog.records) == 1 and "HYBRID_MEMORY_CACHE" in caplog.text


def test_a_folder_that_is_filled_and_not_writable_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of a warmed-up container has such a folder."""

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    run()
    monkeypatch.setattr(module, "_write", refuse)
    assert run()


def test_users_caches_are_where_they_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HYBRID_MEMORY_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert kept_in().parent == tmp_path / "hybrid-memory" / "kernels"


def test_a_full_disk_leaves_nothing_behind_and_kernels_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_has_told", False)
    monkeypatch.setattr(progress, "tell", lambda kernel: None)

    def write_half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full, caplog.at_level(logging.WARNING, "memory"):
        full.setattr(Path, "write_bytes", write_half)
        assert [run(), run()] == [False, False]
    assert len(caplog.records) == 1 and "No space left" in caplog.text and not list(folder.iterdir())
    assert [run(), run()] == [False, True]


def test_kernels_of_another_processor_are_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    magic = JITCPUCodegen.magic_tuple
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(JITCPUCodegen, "magic_tuple", lambda self: (*magic(self)[:1], "other", "+none"))
        assert not run()
    assert run() and len(list(folder.iterdir())) == 2


SLOW = """
import sys, time
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu import compiled as module

def double(x):
    return x + x

kernel = compiled()(double)
print("ready", flush=True)
if sys.argv[1:] == ["hangs"]:
    kernel._compiler.compile = lambda *_: (print("compiling", flush=True), time.sleep(600))
print(kernel(4), bool(kernel.stats.cache_hits), flush=True)
"""


@only_in_long
def test_a_process_waits_for_one_that_compiles_but_not_for_a_killed_one(folder: Path, tmp_path: Path) -> None:
    (script := tmp_path / "slow.py").write_text(SLOW)

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, str(script), *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip

    first = start("hangs")
    assert first.stdout is not None and [first.stdout.readline() for _ in range(2)] == ["ready\n", "compiling\n"]
    second = start()
    assert second.stdout is not None and second.stdout.readline() == "ready\n"
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.7)
    first.kill()
    first.communicate()
    assert second.communicate(timeout=600)[0] == "8 False\n"
    assert start().communicate()[0] == "ready\n8 True\n"


SOFTPLUS = """
import torch
from hybridmem.memory.kernels.cpu.channel_states import softplus
print(round(softplus(torch.zeros(1, 1), torch.zeros(1)).item(), 4))
"""


@only_in_long
def test_kernels_follow_functions_that_they_inline_from_other_files(tmp_path: Path) -> None:
    """Two processes run at once, and a third after a file has changed.

    Nothing can be written beside the sources or in the home directory.
    """
    copy, ignored = tmp_path / "hybridmem" / "memory", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "memory", copy, ignore=ignored)
    shutil.copy(ROOT / "hybridmem" / "__init__.py", copy.parent)
    (copy / "kernels" / "cpu" / "__pycache__").touch()
    environment = os.environ | {
        "HOME": "/dev/null",
        "HYBRID_MEMORY_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(tmp_path),
    }

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SOFTPLUS], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )

    two = [start(), start()]
    assert [process.communicate()[0] for process in two] == ["0.6931\n"] * 2
    inlined = copy / "kernels" / "cpu" / "vector_math.py"
    inlined.write_text(
        inlined.read_text().replace("return max(x, _ZERO) + _TWO * s * p", "return max(x, _ZERO) + _ONE")
    )
    assert start().communicate()[0] == "1.0\n"
