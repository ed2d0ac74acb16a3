"""What the README and the docs show is true.

Python code runs and prints what the page says, commands and files exist, and JSON parses.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from benchmarks.__main__ import app as benchmarks_app
from hybridmem import models
from hybridmem.chat.cli import app as chat_app
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.testing.__main__ import make_parser
from tests.chat.servers import running
from tests.docs.pages import NOT_RUN, OUTPUT, PAGES, ROOT, Block, name_of, read_blocks, read_prose
from tests.extent import few_cases, one_in

LANGUAGES = {"python", "bash", "console", "json", "jsonl", "text", "toml", "yaml", "ini", "dockerfile"}
"""TOML is read by tests/chat/commands/test_serve_options.py, units and files of containers by test_services.py."""
MOST_NOT_RUN = 3
SERVER = "http://127.0.0.1:8000"
APPS: dict[str, Any] = {
    "hybrid-memory": typer.main.get_command(chat_app),
    "python -m benchmarks": typer.main.get_command(benchmarks_app),
}
UsageError = typer.BadParameter.__bases__[0]
"""What a command line that cannot be parsed raises; typer has a click of its own, or the one that is installed, and
shows no other name.
"""
OTHERS = (
    "python -m benchmarks.mutants",
    "python -m hybridmem.memory.testing",
    "python -m training.evaluate",
    "pytest --pyargs hybridmem.memory.testing",
    "python -m pytest",
    "python3 -m venv",
    "pip install",
    "mkdocs",
)
"""Commands that are not ours; those of the README are run by CI."""

load_once = cache(models.load_model)
WITH_PYTHON = [page for page in PAGES[1:] if any(block.language == "python" for block in read_blocks(page))]
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Return a folder to write to, and load one embedded model for all pages.

    A family that a page has registered is removed.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_model", load_once)
    families = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(families)


@few_cases
@pytest.mark.parametrize("page", one_in(4, WITH_PYTHON), ids=name_of)
@pytest.mark.usefixtures("workplace")
def test_python_runs(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of a page are one program.

    Code that talks to a server at its usual port gets one on a free port. `test_readme.py` runs what the README shows.
    """
    blocks = read_blocks(page)
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = None
    with ExitStack() as stack:
        url = SERVER
        if any(SERVER in block.code for block in blocks if block.language == "python"):
            server = running(load_once("embedded"), load_tokenizer(models.EMBEDDED))
            url = stack.enter_context(server).url
        for block in blocks:
            if block.title == OUTPUT:
                assert printed is not None, f"{name_of(page)}:{block.line}: nothing stands before this output"
                assert printed == block.code, f"{name_of(page)}:{block.line}: this is not what the block before prints"
            elif block.language == "python":
                run_block(page, block, url, module)
                printed = capsys.readouterr().out


def run_block(page: Path, block: Block, url: str, module: ModuleType) -> None:
    code = compile("\n" * (block.line - 1) + block.code.replace(SERVER, url), str(page), "exec")
    if not block.title.startswith(NOT_RUN):
        exec(code, module.__dict__)


@every_page
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    for block in read_blocks(page):
        assert block.language in LANGUAGES, f"{name_of(page)}:{block.line}"
        if block.language in ("json", "jsonl"):
            for document in [block.code] if block.language == "json" else block.code.splitlines():
                json.loads(document)


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    titles = [block.title for page in PAGES for block in read_blocks(page) if block.title.startswith("not run")]
    assert len(titles) <= MOST_NOT_RUN and all(
        title.removeprefix(NOT_RUN).strip() not in ("", title) for title in titles
    ), titles


@every_page
def test_every_command_and_option_exists(page: Path) -> None:
    """Each command in a block is parsed as if it were run.

    In the text, each command that begins as ours do is checked, and each option alone.
    """
    for block in read_blocks(page):
        if block.language in ("bash", "console"):
            code = (
                block.code if block.language == "bash" else "".join(re.findall(r"^\$ (.*\n)", block.code, re.MULTILINE))
            )
            for line in code.replace("\\\n", " ").splitlines():
                if command := line.partition(" #")[0].strip():
                    check_command(command, f"{name_of(page)}:{block.line}")
    spans = re.findall(r"`([^`\n]+)`", read_prose(page))
    for span in spans:
        if span.startswith(tuple(APPS)) and " " in span.removeprefix("python -m "):
            check_command(span.replace("COMMAND", "generate"), name_of(page))
        elif re.match(r"--[a-z]", span):
            option = span.split()[0]
            known = {"--help", *(o for action in make_parser()._actions for o in action.option_strings)}
            assert option in known or any(option in known_options(app) for app in APPS.values()), (
                f"{name_of(page)}: {option}"
            )


def check_command(command: str, where: str) -> None:
    command = re.sub(r"^(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?", "", command)
    start = next((name for name in (*APPS, *OTHERS) if command == name or command.startswith(name + " ")), None)
    assert start is not None, f"{where}: {command!r} is no command of this project"
    if start not in APPS:
        return
    group, words = APPS[start], shlex.split(command.removeprefix(start))
    if not words:
        return
    if words[0] in (option for parameter in group.params for option in parameter.opts):
        return
    assert words[0] in group.commands, f"{where}: there is no {start} {words[0]}"
    chosen = group.commands[words[0]]
    if "--help" in words:
        return
    if len(words) > 1 or not any(parameter.required for parameter in chosen.params):
        try:
            chosen.make_context(words[0], words[1:])
        except UsageError as error:
            raise AssertionError(f"{where}: {command!r}: {error}") from error


def known_options(app: Any) -> set[str]:
    commands = [app, *app.commands.values()]
    return {name for command in commands for p in command.params for name in (*p.opts, *p.secondary_opts)}


@every_page
def test_every_file_it_names_exists(page: Path) -> None:
    for name in re.findall(r"`((?:memory|models|chat|training|tests|benchmarks|docs)/[\w/.-]*)`", read_prose(page)):
        assert (ROOT / name).exists(), f"{name_of(page)}: {name}"
    for target in re.findall(r"\]\(([^)#\s]+)", read_prose(page)):
        if not target.startswith("https://"):
            # One page is a text that stands elsewhere; the site's build checks that link, and all anchors.
            assert (page.parent / target).exists() or target == "../changelog.md", f"{name_of(page)}: {target}"


def test_blocks_are_found(tmp_path: Path) -> None:
    """All other tests of this file rely on the function that finds blocks."""
    page = tmp_path / "page.md"
    page.write_text('text\n\n```python title="not run: no"\nx = 1\n```\n\n```text\ny\n```\n')
    assert read_blocks(page) == [Block("python", "not run: no", "x = 1\n", 4), Block("text", "", "y\n", 8)]
    page.write_text("```python linenums\nx\n```\n")
    with pytest.raises(ValueError, match="fence"):
        read_blocks(page)


@pytest.mark.parametrize(
    "command",
    [
        "hybrid-memory fly",
        "hybrid-memory serve --wings 2",
        "python -m benchmarks decode --threads many",
        "curl localhost",
    ],
)
def test_commands_that_do_not_exist_are_found(command: str) -> None:
    with pytest.raises(AssertionError, match="page"):
        check_command(command, "page")
