"""Runs a script with Vercel's AI SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripts import ScriptedServer, run_script, version_of  # type: ignore[import-not-found]

PACKAGE, VERSION = "Vercel AI SDK", version_of("ai")


@pytest.fixture(scope="module")
def told(scripted: ScriptedServer) -> dict[str, Any]:
    return dict(json.loads(run_script("vercel_ai.mjs", "ai", scripted)))


def test_a_loop(told: dict[str, Any]) -> None:
    """a loop with two tools, whole and as a stream, with a restart of the server in the middle."""
    assert told["looked"] == told["streamed"] == ["here", "there"]
    assert told["text"] == told["stream"] == "All is done."


def test_overflow(told: dict[str, Any]) -> None:
    """a prompt that is too long."""
    assert told["overflow"] == [400, True]


def test_cancel(told: dict[str, Any]) -> None:
    """a cancelled stream."""
    assert told["isIdle"]
