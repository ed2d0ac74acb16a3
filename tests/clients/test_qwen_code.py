"""Qwen Code, as npm installs it."""

from __future__ import annotations

from pathlib import Path

from scripts import OTHER_WORDS, ScriptedServer, program, run, steps, version_of  # type: ignore[import-not-found]

PACKAGE, VERSION = "Qwen Code", version_of("@qwen-code/qwen-code")


def test_a_loop(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    command = [str(program("qwen")), "--yolo", "--auth-type", "openai", "-p"]
    env = {"HOME": str(tmp_path), "OPENAI_API_KEY": "none is needed", "OPENAI_MODEL": "embedded"}
    env["OPENAI_BASE_URL"] = f"{scripted.url}/v1"
    n_before = len(scripted.requests())
    text = steps("run_shell_command", "command", is_background=False)
    assert "All is done." in run([*command, text], tmp_path, env)
    loop = scripted.requests()[n_before:]
    assert len(loop) >= 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing of its main prompt again.
    n_before = len(scripted.requests())
    run(
        [*command, OTHER_WORDS],
        tmp_path,
        env | {"OPENAI_BASE_URL": f"{scripted.url}/v1"},
    )
    main = max(scripted.requests()[n_before:], key=lambda each: each["prompt_tokens"])
    assert main["prompt_tokens"] - main["cached_tokens"] <= 0.02 * main["prompt_tokens"]
