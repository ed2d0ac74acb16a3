"""Asks aider, which has no tools: it edits files by what a reply says.

Its dependencies exclude those of other clients, so it runs where the variable `AIDER` names its program.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from scripts import GO_ON, LONG, ScriptedServer, cancel, run, small_server  # type: ignore[import-not-found]

AIDER = os.environ.get("AIDER", "")


def _version() -> str:
    if not AIDER:
        return ""
    return subprocess.run([AIDER, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


PACKAGE, VERSION = "aider", _version()
pytestmark = pytest.mark.skipif(not AIDER, reason="AIDER names no program")
_EDIT = "hello.txt\n```\n<<<<<<< SEARCH\na cat\n=======\na dog\n>>>>>>> REPLACE\n```\n"
_QUIET = (
    "--yes-always",
    "--no-git",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-analytics",
    "--map-tokens=0",
)


def aider(server: ScriptedServer, folder: Path, *words: str) -> tuple[list[str], Path, dict[str, str]]:
    """Return the command that asks aider about the file hello.txt of a folder, the folder, and the environment."""
    bases = dict.fromkeys(("OPENAI_API_BASE", "OPENAI_BASE_URL"), f"{server.url}/v1")
    env = {"HOME": str(folder), "OPENAI_API_KEY": "none is needed", **bases}
    return [AIDER, "--model", "openai/embedded", "--edit-format", "diff", *_QUIET, "hello.txt", *words], folder, env


def test_an_edit_and_restart(scripted: ScriptedServer, tmp_path: Path) -> None:
    """an edit of a file, as a stream; another one after a restart, of whose prompt only new tokens are computed."""
    (tmp_path / "hello.txt").write_text("a cat\n")
    n_before = len(scripted.requests())
    run(*aider(scripted, tmp_path, "--message", f"Do it. [[SAY {_EDIT}]]"))
    assert (tmp_path / "hello.txt").read_text() == "a dog\n"
    assert scripted.requests()[n_before]["prompt_tokens"] > 1000
    scripted.restart()
    second = _EDIT.replace("a cat", "a horse").replace("a dog", "a cat").replace("a horse", "a dog")
    run(*aider(scripted, tmp_path, "--restore-chat-history", "--message", f"And back. [[SAY {second}]]"))
    assert (tmp_path / "hello.txt").read_text() == "a cat\n"
    last = scripted.requests()[-1]
    assert last["cached_tokens"] > 0.5 * last["prompt_tokens"]


def test_cancel(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a reply that is cancelled."""
    (tmp_path / "hello.txt").write_text("a cat\n")
    cancel(*aider(scripted, tmp_path, "--message", GO_ON), scripted)


def test_overflow(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """a prompt that is too long, which it knows as such."""
    (tmp_path / "hello.txt").write_text(LONG)
    with small_server(tmp_path_factory.mktemp("small")) as server:
        assert "possibly exhausted context window" in run(*aider(server, tmp_path, "--message", "Hello."))
