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
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import results_page  # type: ignore[import-not-found]
import scripts  # type: ignore[import-not-found]

ROOT = Path(__file__).parent.parent.parent
KEY = "no key is needed"
_TOLD: dict[str, dict[str, str]] = {}
_VERSIONS: dict[str, str] = {}
"""The versions of clients that are no packages of Python."""
_FIGURES: dict[str, str] = {}
"""The rows of the table of agents' prompts."""


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


@pytest.fixture
def looked() -> list[str]:
    """Return the places where the tool `look` has looked."""
    return []


@pytest.fixture
def look(scripted: scripts.ScriptedServer, looked: list[str]) -> Callable[[str], str]:
    """Return a tool for the messages `LOOKS`. When it is called for the first time, it restarts the server."""

    def look(where: str) -> str:
        """Look somewhere.

        Args:
            where: a place.
        """
        looked.append(where)
        if len(looked) == 1:
            scripted.restart()
        return "a dog"

    return look


@pytest.fixture(scope="session")
def figures() -> dict[str, str]:
    """Return a dictionary for rows of the table of agents' prompts."""
    return _FIGURES


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
    words = (item.function.__doc__ or "").strip().split("\n")[0].rstrip(".")  # type: ignore[attr-defined]
    if package is None or not words or report.skipped or not (report.failed or report.when == "call"):
        return
    rows = _TOLD.setdefault(package, {})
    _VERSIONS[package] = getattr(item.module, "VERSION", "") or version(package)  # type: ignore[attr-defined]
    rows[words] = "" if report.passed and rows.get(words, "") == "" else "**fails**"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the rows of the clients that were asked, if all of their tests ran. The other rows stay."""
    is_part = session.config.getoption("keyword") or any("::" in name for name in session.config.args)
    if is_part:
        return
    today = datetime.now(UTC).date()
    works = {
        package: "; ".join(f"{words} {mark}".strip() for words, mark in told.items()) for package, told in _TOLD.items()
    }
    rows = {package: f"{_VERSIONS[package]} | {today} | {told}" for package, told in works.items()}
    results_page.write_rows(results_page.CLIENTS, rows)
    results_page.write_rows(results_page.AGENTS, _FIGURES)
