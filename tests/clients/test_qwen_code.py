"""Asks Qwen Code, as npm installs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import QWEN_CODE, tight  # type: ignore[import-not-found]
from scripts import LONG, OTHER_WORDS, ScriptedServer, cancel, restart, run, steps  # type: ignore[import-not-found]

PACKAGE, VERSION = QWEN_CODE.name, QWEN_CODE.version


def test_a_loop(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    command = QWEN_CODE.command(steps("run_shell_command", "command", is_background=False))
    env = QWEN_CODE.configure(scripted, tmp_path)
    n_before = len(scripted.requests())
    assert "All is done." in run(command, tmp_path, env)
    loop = scripted.requests()[n_before:]
    assert len(loop) >= 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing of its main prompt again.
    n_before = len(scripted.requests())
    run(QWEN_CODE.command(OTHER_WORDS), tmp_path, env)
    main = max(scripted.requests()[n_before:], key=lambda each: each["prompt_tokens"])
    assert main["prompt_tokens"] - main["cached_tokens"] <= 0.02 * main["prompt_tokens"]


def test_cancel(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a reply that is cancelled."""
    cancel(QWEN_CODE.command("[[ON one and two and ]]"), tmp_path, QWEN_CODE.configure(scripted, tmp_path), scripted)


def test_restart(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a restart of the server in the middle of a session."""
    more = QWEN_CODE.command("And now? [[SAY Two.]]", "--continue")
    env = QWEN_CODE.configure(scripted, tmp_path)
    restart((QWEN_CODE.command("Hello. [[SAY One.]]"), more), tmp_path, env, scripted)


def test_overflow(scripted: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """a session that becomes too long, which it summarises and continues."""
    with tight(QWEN_CODE, 4000, scripted, tmp_path_factory) as tried:
        assert tried.ask(LONG) == "Okay, noted." and not tried.server.n_refused()
        assert tried.ask(LONG, "--continue") == "Okay, noted." and tried.server.n_refused() == 1
        assert tried.ask("And now? [[SAY Two.]]", "--continue") == "Two."
