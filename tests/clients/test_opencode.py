"""opencode, as npm installs it."""

from __future__ import annotations

import json
from pathlib import Path

from scripts import OTHER_WORDS, ScriptedServer, program, run, steps, version_of  # type: ignore[import-not-found]

PACKAGE, VERSION = "opencode", version_of("opencode-ai")


def test_a_loop(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    path = str(program("opencode"))
    limit = {"context": 131_072, "output": 8192}
    options = {"baseURL": f"{scripted.url}/v1", "apiKey": "none is needed"}
    model = {"name": "embedded", "limit": limit}
    ours = {"npm": "@ai-sdk/openai-compatible", "name": "ours", "options": options, "models": {"embedded": model}}
    models = dict.fromkeys(("model", "small_model"), "ours/embedded")
    (tmp_path / "opencode.json").write_text(json.dumps({**models, "provider": {"ours": ours}}))
    env = {"HOME": str(tmp_path), "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    n_before = len(scripted.requests())
    assert "All is done." in run([path, "run", steps("bash", "command")], tmp_path, env)
    loop = scripted.requests()[n_before:]
    assert len(loop) >= 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing of its main prompt again.
    n_before = len(scripted.requests())
    run([path, "run", OTHER_WORDS], tmp_path, env)
    main = max(scripted.requests()[n_before:], key=lambda each: each["prompt_tokens"])
    assert main["prompt_tokens"] - main["cached_tokens"] <= 0.02 * main["prompt_tokens"]
