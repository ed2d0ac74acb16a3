"""Measures what agents compute of their first prompts in folders of which the server knows none, one or two.

TESTS=long asks all agents, which takes ten minutes. Otherwise those with short prompts are asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import AGENTS, CODEX, PI, SHARING, Agent  # type: ignore[import-not-found]
from scripts import OTHER_WORDS, ScriptedServer, run, serving  # type: ignore[import-not-found]

_GRID_TOKENS, _WINDOW_TOKENS = 512, 32
"""The distance of checkpoints in a prompt, and the rollback window, in the server's defaults."""
_ASKED = [*AGENTS, *SHARING] if os.environ.get("TESTS") == "long" else [CODEX, PI]
_MOST = 0.02
"""A second session may compute this share of its first prompt again."""


@dataclass(frozen=True)
class Session:
    """Says how a server computed the largest prompt of a session.

    Attributes:
        n_tokens: the prompt's tokens. n_computed: those that were computed.
        n_new: the tokens after the longest beginning that the prompt shares with any prompt before.
    """

    n_tokens: int
    n_computed: int
    n_new: int

    @property
    def share(self) -> float:
        return self.n_computed / self.n_tokens

    def __str__(self) -> str:
        percent = f"{100 * self.share:.0f}" if self.share >= 0.1 else f"{100 * self.share:.2g}"
        return f"{self.n_computed:,} ({self.n_new:,}), {percent} %"


def sessions(agent: Agent, server: ScriptedServer, home: Path) -> list[Session]:
    """Run four sessions: two in one folder, and one in each of two others. The user's words differ from the first."""
    env = agent.configure(server, home)
    found = list[Session]()
    for number, name in enumerate(("first", "first", "second", "third")):
        folder = home / name
        folder.mkdir(exist_ok=True)
        (folder / "README.md").write_text(f"The {name} of three.\n")
        before, n_requests = server.prompts(), len(server.requests())
        run(agent.command(OTHER_WORDS if number else "My cat is called Zoe."), folder, env)
        prompt = max(server.prompts()[len(before) :], key=len)
        main = max(server.requests()[n_requests:], key=lambda each: each["prompt_tokens"])
        assert main["prompt_tokens"] == len(prompt)
        n_common = max((_n_common(prompt, other) for other in before), default=0)
        found.append(Session(len(prompt), len(prompt) - main["cached_tokens"], len(prompt) - n_common))
    return found


def _n_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("agent", _ASKED, ids=lambda agent: agent.name)
def test_sessions(agent: Agent, tmp_path_factory: pytest.TempPathFactory, figures: dict[str, str]) -> None:
    """Sessions compute little more than the tokens after the first one that differs from all prompts before.

    With settings by which agents describe their folder late or briefly, that is at most 2 % in any folder.
    """
    agent.command()  # If the agent is not installed, no server is started.
    with serving(tmp_path_factory.mktemp("server")) as server:
        first, again, second, third = sessions(agent, server, tmp_path_factory.mktemp("home"))
    assert again.share <= _MOST
    assert second.n_computed <= second.n_new + _GRID_TOKENS
    assert third.n_computed <= third.n_new + _WINDOW_TOKENS
    assert third.share <= _MOST or agent not in SHARING
    figures[agent.name] = f"{first.n_tokens:,} | {again} | {second} | {third}"
