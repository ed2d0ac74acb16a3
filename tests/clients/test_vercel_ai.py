"""Vercel's AI SDK works with streams and tools."""

from __future__ import annotations

import json

from scripts import ScriptedServer, run_script, version_of  # type: ignore[import-not-found]

PACKAGE, VERSION = "Vercel AI SDK", version_of("ai")


def test_a_loop(scripted: ScriptedServer) -> None:
    """a loop with two tools, whole and as a stream; a prompt that is too long; a cancelled stream."""
    told = json.loads(run_script("vercel_ai.mjs", "ai", scripted))
    assert told["looked"] == told["streamed"] == ["here", "there"]
    assert told["text"] == told["stream"] == "All is done." and told["overflow"] == [400, True]
    scripted.wait_until_idle()
