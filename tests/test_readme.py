"""The README's promises: its example runs, and its commands are the ones that CI calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import architectures

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves
    example, prefixes, chats, policies, storages = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example.replace("print(memory)", "shown = repr(memory)"), "README.md", "exec"), names)
    assert "pages" in str(names["shown"])
    memory, alice, bob, carol = (names[n] for n in ("memory", "alice", "bob", "carol"))
    memory.check()  # type: ignore[attr-defined]
    assert [s.length for s in (alice, bob, carol)] == [1, 5, 4]  # type: ignore[attr-defined]
    exec(compile(prefixes, "README.md", "exec"), names)
    assert names["found"].reused == 0 and names["cache"].find([1, 3, 50, 51, 60]).reused == 4  # type: ignore[attr-defined]
    exec(compile(chats, "README.md", "exec"), names)
    assert names["filled"].text == "My cat is called Milo." and names["turn"].n_reused  # type: ignore[attr-defined]
    assert (tmp_path / "saved-chat").exists()
    exec(compile(policies, "README.md", "exec"), names)
    assert "H2O(1024)" in str(names["memory"])
    exec(compile(storages, "README.md", "exec"), names)
    assert "H2O(1024) of 4 bits" in str(names["memory"])


def test_ci_runs_the_readmes_commands() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    commands = [
        line.split("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()
    ]
    assert len(commands) == 4
    for command in commands:
        assert command.replace("pip install", "pip install -q") in ci or command in ci


def test_every_file_it_names_exists() -> None:
    for name in re.findall(r"`([\w/]+\.(?:py|json))`", README):
        assert list(ROOT.glob(name)) or list((ROOT / "memory").glob(name)), name


def test_the_table_of_architectures_is_that_of_the_registry() -> None:
    """`python -m benchmarks parity --out benchmarks/results` and `python -m benchmarks table` bring it up to date."""
    assert architectures.table_in_readme() == architectures.table()
