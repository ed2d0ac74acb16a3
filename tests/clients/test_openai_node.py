"""Runs a script with OpenAI's client for Node."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripts import ScriptedServer, run_script, version_of  # type: ignore[import-not-found]

PACKAGE, VERSION = "openai (Node)", version_of("openai")


@pytest.fixture(scope="module")
def told(scripted: ScriptedServer) -> dict[str, Any]:
    return dict(json.loads(run_script("openai_node.mjs", "openai", scripted)))


def test_a_loop(told: dict[str, Any]) -> None:
    """a loop with two tools, over streamed chats and over responses, with a restart of the server in the middle."""
    assert told["looked"] == told["responses"] == ["here", "there"] and told["chat"] == told["said"] == "All is done."


def test_overflow(told: dict[str, Any]) -> None:
    """a prompt that is too long."""
    assert told["overflow"] == [400, "context_length_exceeded"]


def test_cancel(told: dict[str, Any]) -> None:
    """a cancelled stream."""
    assert told["isIdle"]
