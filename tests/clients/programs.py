"""Describes agents that npm installs: how each is configured for a server, and asked by one command.

Agents describe the folder in which they work to the model, some of them early in their prompts. `SHARING` has the same
agents with settings by which they do so late or briefly, so that sessions in different folders share more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from scripts import ScriptedServer, program, run, serving, version_of  # type: ignore[import-not-found]

Configure = Callable[[ScriptedServer, Path], dict[str, str]]
"""Writes the settings of an agent for a server into a home folder, and returns the agent's environment."""

_CODEX = """
model = "embedded"
model_provider = "ours"
approval_policy = "never"
[model_providers.ours]
name = "ours"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""
_QUIET_CLAUDE = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")


@dataclass(frozen=True)
class Agent:
    """Holds what a test must know to start an agent.

    Attributes:
        name: its name in the table of clients. package: its name in npm's registry.
        words: the program and the options with which it answers one message, which follows them.
        configure: writes its settings.
    """

    name: str
    package: str
    words: tuple[str, ...]
    configure: Configure

    @property
    def version(self) -> str:
        return version_of(self.package)

    def command(self, *more: str) -> list[str]:
        """Return the command that asks the agent. The test is skipped if it is not installed."""
        return [str(program(self.words[0])), *self.words[1:], *more]


def _claude_code(server: ScriptedServer, home: Path) -> dict[str, str]:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "embedded")
    keys = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_API_KEY": "none is needed", "HOME": str(home)}
    return models | keys | dict.fromkeys(_QUIET_CLAUDE, "1")


def _claude_code_without_memory(server: ScriptedServer, home: Path) -> dict[str, str]:
    return _claude_code(server, home) | {"CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1"}


def _codex(server: ScriptedServer, home: Path) -> dict[str, str]:
    folder = home / "codex"
    folder.mkdir()
    (folder / "config.toml").write_text(_CODEX.format(url=server.url))
    return {"CODEX_HOME": str(folder)}


def _opencode(server: ScriptedServer, home: Path, **settings: object) -> dict[str, str]:
    options = {"baseURL": f"{server.url}/v1", "apiKey": "none is needed"}
    model = {"name": "embedded", "limit": {"context": 131_072, "output": 8192}}
    ours = {"npm": "@ai-sdk/openai-compatible", "name": "ours", "options": options, "models": {"embedded": model}}
    models = dict.fromkeys(("model", "small_model"), "ours/embedded")
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps({**models, "provider": {"ours": ours}, **settings}))
    return {"HOME": str(home), "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def _opencode_without_skills(server: ScriptedServer, home: Path) -> dict[str, str]:
    return _opencode(server, home, permission={"skill": "deny"})


def _pi(server: ScriptedServer, home: Path) -> dict[str, str]:
    model = {"id": "embedded", "contextWindow": 131_072, "maxTokens": 8192}
    ours = {"baseUrl": f"{server.url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    (home / ".pi" / "agent").mkdir(parents=True)
    (home / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"ours": ours}}))
    return {"HOME": str(home), "PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"}


def _qwen_code(server: ScriptedServer, home: Path) -> dict[str, str]:
    env = {"HOME": str(home), "OPENAI_API_KEY": "none is needed", "OPENAI_MODEL": "embedded"}
    return env | {"OPENAI_BASE_URL": f"{server.url}/v1"}


def _qwen_code_without_memory(server: ScriptedServer, home: Path) -> dict[str, str]:
    off = dict.fromkeys(("enableManagedAutoMemory", "enableManagedAutoDream"), False)
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps({"memory": off}))
    return _qwen_code(server, home)


CLAUDE_CODE = Agent("Claude Code", "@anthropic-ai/claude-code", ("claude", "-p"), _claude_code)
CODEX = Agent(
    "Codex", "@openai/codex",
    ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"), _codex,
)  # fmt: skip
OPENCODE = Agent("opencode", "opencode-ai", ("opencode", "run"), _opencode)
PI = Agent(
    "pi", "@mariozechner/pi-coding-agent", ("pi", "--provider", "ours", "--model", "embedded", "-p"), _pi
)  # fmt: skip
QWEN_CODE = Agent("Qwen Code", "@qwen-code/qwen-code", ("qwen", "--yolo", "--auth-type", "openai", "-p"), _qwen_code)
AGENTS = (CLAUDE_CODE, CODEX, OPENCODE, PI, QWEN_CODE)
SHARING = (
    replace(
        CLAUDE_CODE, name="Claude Code, set to share", configure=_claude_code_without_memory,
        words=("claude", "--exclude-dynamic-system-prompt-sections", "-p"),
    ),
    replace(OPENCODE, name="opencode, set to share", configure=_opencode_without_skills),
    replace(QWEN_CODE, name="Qwen Code, set to share", configure=_qwen_code_without_memory),
)  # fmt: skip


@dataclass(frozen=True)
class Tight:
    """Asks an agent in a home folder of its own, whose server has hardly more context than the agent's first prompt."""

    agent: Agent
    home: Path
    env: dict[str, str]
    server: ScriptedServer

    def ask(self, *words: str) -> str:
        """Return what the agent prints. It must not fail."""
        return str(run(self.agent.command(*words), self.home, self.env)).strip()


@contextmanager
def tight(agent: Agent, n_more: int, wide: ScriptedServer, folders: pytest.TempPathFactory) -> Iterator[Tight]:
    """Serve a context of `n_more` tokens more than an agent's first prompt has. A wider server counts these."""
    home, n_before = folders.mktemp("home"), len(wide.requests())
    run(agent.command("Hello."), home, agent.configure(wide, home))
    n_first = max(request["prompt_tokens"] for request in wide.requests()[n_before:])
    with serving(folders.mktemp("tight"), "--max-tokens", str(n_first + n_more)) as server:
        home = folders.mktemp("home")
        yield Tight(agent, home, agent.configure(server, home), server)
