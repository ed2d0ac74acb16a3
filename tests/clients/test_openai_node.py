"""OpenAI's client for Node works with chats, streams and tools."""

from __future__ import annotations

import json

from scripts import ScriptedServer, run_script, version_of  # type: ignore[import-not-found]

PACKAGE, VERSION = "openai (Node)", version_of("openai")


def test_a_loop(scripted: ScriptedServer) -> None:
    """a loop with two tools, over streamed chats and over responses; a prompt that is too long; a cancelled stream."""
    told = json.loads(run_script("openai_node.mjs", "openai", scripted))
    assert told["looked"] == told["responses"] == ["here", "there"] and told["chat"] == told["said"] == "All is done."
    assert told["overflow"] == [400, "context_length_exceeded"]
    scripted.wait_until_idle()
