"""Asks aider, which has no tools: it edits files by what a reply says.

Its dependencies exclude those of other clients, so it runs where the variable `AIDER` names its program.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from scripts import ScriptedServer, run  # type: ignore[import-not-found]

AIDER = os.environ.get("AIDER", "")


def _version() -> str:
    if not AIDER:
        return ""
    return subprocess.run([AIDER, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]


PACKAGE, VERSION = "aider", _version()
_EDIT = "hello.txt\n```\n<<<<<<< SEARCH\na cat\n=======\na dog\n>>>>>>> REPLACE\n```\n"
_QUIET = (
    "--yes-always",
    "--no-git",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-analytics",
    "--map-tokens=0",
)


@pytest.mark.skipif(not AIDER, reason="AIDER names no program")
def test_an_edit(scripted: ScriptedServer, tmp_path: Path) -> None:
    """an edit of a file, as a stream; a second edit of the session, of whose prompt only new tokens are computed."""
    (tmp_path / "hello.txt").write_text("a cat\n")
    bases = dict.fromkeys(("OPENAI_API_BASE", "OPENAI_BASE_URL"), f"{scripted.url}/v1")
    env = {"HOME": str(tmp_path), "OPENAI_API_KEY": "none is needed", **bases}
    command = [AIDER, "--model", "openai/embedded", "--edit-format", "diff", *_QUIET, "hello.txt"]
    n_before = len(scripted.requests())
    run([*command, "--message", f"Do it. [[SAY {_EDIT}]]"], tmp_path, env)
    assert (tmp_path / "hello.txt").read_text() == "a dog\n"
    second = _EDIT.replace("a cat", "a horse").replace("a dog", "a cat").replace("a horse", "a dog")
    run([*command, "--restore-chat-history", "--message", f"And back. [[SAY {second}]]"], tmp_path, env)
    assert (tmp_path / "hello.txt").read_text() == "a cat\n"
    first, *_, last = scripted.requests()[n_before:]
    assert first["prompt_tokens"] > 1000 and last["cached_tokens"] > 0.5 * last["prompt_tokens"]
