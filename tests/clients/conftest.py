"""Starts a server that the clients of other projects talk to, and writes the table of what worked.

They run in an environment of their own, since their dependencies exclude ours:

    python -m venv .venv-clients
    .venv-clients/bin/pip install -c constraints.txt ".[clients]"
    .venv-clients/bin/python -m pytest -c tests/clients/pytest.ini --rootdir . tests/clients

The server runs in the library's environment, `.venv` unless `HYBRID_MEMORY_PYTHON` names another Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import scripts  # type: ignore[import-not-found]

ROOT = Path(__file__).parent.parent.parent
TABLE = ROOT / "docs" / "results" / "clients.md"
KEY = "no key is needed"
_HEAD = """# Clients of other projects

This table says which features of these clients work with a server that was started as `hybrid-memory serve --model
embedded`. Each client has its defaults. `pytest tests/clients` writes the page, and continuous integration runs it.

No model that is small enough for continuous integration follows the prompts of agents. So programs such as Claude Code
and libraries such as LangGraph ask a server whose replies are prescribed by the user's words
(`tests/clients/scripted.py`). The programs, their prompts and their tool calls are real.

| client | version | tried on | what works |
|---|---|---|---|
"""
_TAIL = """
The table says how many tokens of an agent's first prompt a server computes, when it has seen sessions of the same agent
before. In each session, the user writes other words. They are at the end of the prompt, so a session in the same folder
computes little else. Claude Code, Codex, opencode and Qwen Code write the folder's path and contents near the start of
their prompts. All tokens after the first one that differs are new to a model that reads from left to right. So no
server computes fewer tokens than the numbers in brackets.

| agent | first prompt | again, in the same folder | in a second folder | in a third folder |
|---|---|---|---|---|
| Claude Code | 50,672 | 20 (20), 0.04 % | 6,636 (6,170), 13 % | 6,177 (6,177), 12 % |
| Codex | 24,377 | 20 (20), 0.08 % | 309 (265), 1.3 % | 272 (272), 1.1 % |
| opencode | 19,655 | 21 (21), 0.1 % | 709 (562), 3.6 % | 566 (566), 2.9 % |
| pi | 3,629 | 20 (20), 0.6 % | 11 (11), 0.3 % | 15 (15), 0.4 % |
| Qwen Code | 48,801 | 20 (20), 0.04 % | 8,339 (8,108), 17 % | 8,130 (8,130), 17 % |

Where two prompts diverge for the first time, the second prompt continues from the last checkpoint before that position,
which is less than 512 tokens away. It leaves a checkpoint where the two diverge, so a third prompt computes only new
tokens. opencode and Qwen Code also send a second, smaller prompt. That of Qwen Code has 25,090 tokens, of which 1,071
come after the words of the user. A second session continues from the beginning of the user's turn, and computes 1,073
tokens.

These features cannot work with the embedded model, which knows a small world and follows no instructions:

- langchain-openai: `with_structured_output(method="json_mode")` for a class sends `{"type": "json_object"}`, so that
  any object is a valid reply, and describes the fields only in words. With its default, `json_schema`, the reply has
  the fields of the class.
- instructor: `PARALLEL_TOOLS` leaves it to the model whether it calls a tool (`tool_choice: "auto"`). `FUNCTIONS` sends
  `functions` and `function_call`, which OpenAI replaced by `tools`; the server refuses them by name.
"""
_TOLD: dict[str, dict[str, str]] = {}
_VERSIONS: dict[str, str] = {}
"""The versions of clients that are no packages of Python."""


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = os.environ.get("HYBRID_MEMORY_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
    folder = tmp_path_factory.mktemp("server")
    log = (folder / "log.txt").open("w+")
    command = [
        python,
        "-c",
        "from hybridmem.chat.cli import main; main()",
        "serve",
        "--model",
        "embedded",
        "--port",
        "0",
    ]
    command += ["--sessions", str(folder / "sessions")]
    server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=scripts.environment())
    try:
        yield f"{_wait_for(server, Path(log.name))}/v1"
    finally:
        server.terminate()
        server.wait(120)
        log.close()


def _wait_for(server: subprocess.Popen[bytes], log: Path) -> str:

    for _ in range(3000):
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found is not None:
            return found[0]
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no server after 300 s: {log.read_text()}")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[scripts.ScriptedServer]:
    """Return a server whose replies the users prescribe."""
    server = scripts.ScriptedServer(tmp_path_factory.mktemp("scripted"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def environment(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Return the environment of a client without settings. Clients write nothing outside of the test's folder."""
    for name, value in {
        "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "LLM_USER_PATH": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note what passed: the module says which client it is, and the test's docstring what works."""
    report = (yield).get_result()
    package = getattr(item.module, "PACKAGE", None)  # type: ignore[attr-defined]
    if report.when == "call" and package is not None:
        words = (item.function.__doc__ or "").strip().split("\n")[0].rstrip(".")  # type: ignore[attr-defined]
        rows = _TOLD.setdefault(package, {})
        _VERSIONS[package] = getattr(item.module, "VERSION", "")  # type: ignore[attr-defined]
        if words:
            rows[words] = "" if report.passed and rows.get(words, "") == "" else "**fails**"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the rows of the clients that were asked, if all of their tests ran. The other rows stay."""
    is_part = session.config.getoption("keyword") or any("::" in name for name in session.config.args)
    if is_part or not _TOLD:
        return
    table = TABLE.read_text().partition("| client |")[2].partition("\n\n")[0]  # There is another table behind it.
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    for package, told in _TOLD.items():
        works = "; ".join(f"{words} {mark}".strip() for words, mark in told.items())
        about = f"{_VERSIONS.get(package) or version(package)} | {datetime.now(UTC).date()}"
        rows[package] = f"| {package} | {about} | {works} |"
    lines = [line for package, line in sorted(rows.items(), key=lambda row: row[0].lower()) if package != "client"]
    TABLE.write_text(_HEAD + "\n".join(lines) + "\n" + _TAIL)
