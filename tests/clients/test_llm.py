"""Runs the command llm, which is told of the server as its documentation says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "llm"


@pytest.fixture(autouse=True)
def told(url: str, environment: None, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: embedded\n  api_base: {url}\n  supports_schema: true\n"
    )


def run(*words: str) -> str:
    command = [sys.executable, "-m", "llm", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def test_prompt() -> None:
    """a prompt with a system message, as a stream and whole."""
    assert run("-m", "here", "-s", "Be brief.", "My cat is called Zoe.").strip()
    assert run("-m", "here", "--no-stream", "My cat is called Zoe.").strip()


def test_schema() -> None:
    """a schema."""
    assert '"name"' in run("-m", "here", "--schema", "name, age int", "Who is it?")
