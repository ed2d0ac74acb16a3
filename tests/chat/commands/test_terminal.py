"""In the terminal chat, the tests check commands and their output, and take everything back over a pipe as well."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from hybridmem.chat.cli import app
from hybridmem.chat.commands.terminal import Terminal
from hybridmem.chat.engine.engine import Engine, Sampling
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.session.session import ChatSession
from hybridmem.models import LanguageModel
from tests.chat.talking import assert_all_given_back, make_engine

TOLD, ASKED = "My cat is called Zoe.", "What is my cat called?"


def talk(*lines: str, options: tuple[str, ...] = ()) -> Result:
    return CliRunner().invoke(app, ["chat", *options], input="".join(f"{line}\n" for line in lines))


class ReadTerminal(Terminal):
    """Is a terminal whose consoles can be read."""

    def __init__(self, engine: Engine, session: ChatSession) -> None:
        self.out, self.notes = (Console(file=io.StringIO(), width=100) for _ in range(2))
        super().__init__(engine, session, console=self.out, notes=self.notes)


@pytest.fixture
def terminal(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[ReadTerminal]:
    engine = make_engine(embedded, tokenizer)
    terminal = ReadTerminal(engine, ChatSession(engine, max_tokens=20))
    yield terminal
    terminal.close()
    assert_all_given_back(engine)


def printed(console: Console) -> str:
    """Return what was printed since the last call."""
    file = console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    file.seek(0)
    file.truncate()
    return text


def take(terminal: ReadTerminal, line: str) -> tuple[str, str]:
    terminal.take(line)
    return printed(terminal.out), printed(terminal.notes)


# The tests below talk over a pipe.


def test_replies_go_to_standard_output_and_notes_to_standard_error() -> None:
    result = talk(TOLD, "", ASKED, "/edit 1 My cat is called Luna.", ASKED, "/quit", "never said")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "Okay, noted.",
        "Your cat is called Zoe.",
        "Okay, noted.",
        "Your cat is called Luna.",
    ]
    notes = result.stderr.splitlines()
    assert len(notes) == 4 and all(re.search(r"\d+ reused, \d+ computed", note) for note in notes)
    assert "edited text" in notes[2] and "\x1b" not in result.output


def test_the_end_of_the_input_is_the_end() -> None:
    result = talk(TOLD, "/undo", ASKED)
    assert (result.exit_code, result.stdout.splitlines()) == (0, ["Okay, noted.", "You have not told me that."])
    assert talk().exit_code == 0


def test_errors_are_one_line_and_not_the_end(tmp_path: Path) -> None:
    bad = "/undo|/regenerate|/edit|/edit 1 x|/edit x y|/nonsense|/switch|/switch nowhere|/save|/load".split("|")
    bad.append(f"/load {tmp_path}")
    result = talk(*bad, TOLD)
    assert (result.exit_code, result.stdout) == (0, "Okay, noted.\n")
    notes = result.stderr.splitlines()
    assert len(notes) == len(bad) + 1 and all(note.startswith("error: ") for note in notes[:-1])
    for command, note in zip(bad, notes, strict=False):
        assert (
            command.split()[0].strip("/") in note
            or "say something first" in note
            or "session.json" in note
            or "branch" in note
        )


def test_it_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    assert talk(TOLD, f"/save {tmp_path / 'chat'}").exit_code == 0
    result = talk(ASKED, options=("--resume", str(tmp_path / "chat")))
    assert result.stdout == "Your cat is called Zoe.\n"
    assert int(re.search(r"([\d,]+) reused", result.stderr)[1]) > 10  # type: ignore[index]
    result = talk("My cat is called Luna.", f"/load {tmp_path / 'chat'}", ASKED)
    assert result.stdout.splitlines() == ["Okay, noted.", "Your cat is called Zoe."]


def test_options_reach_the_session() -> None:
    assert talk(TOLD, options=("--max-tokens", "1")).stderr.rstrip().endswith("cut at the token limit")
    hot = [
        talk(TOLD, options=("--temperature", "5", "--seed", seed, "--max-tokens", "8")).stdout
        for seed in ("1", "1", "2")
    ]
    assert hot[0] == hot[1] != hot[2]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--model", "/nowhere/at/all"), "nowhere"), (("--budget", "1KiB"), "budget"),
        (("--resume", "/nowhere/at/all"), "session.json"),
    ],
)  # fmt: skip
def test_what_cannot_begin_is_one_line(options: tuple[str, ...], word: str) -> None:
    result = talk(TOLD, options=options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: ") and word in result.stderr


def test_a_system_message_is_remembered() -> None:
    result = talk("What is my cat called?", options=("--system", "My cat is called Zoe."))
    assert (result.exit_code, result.stdout) == (0, "Your cat is called Zoe.\n")


# The tests below are about commands.


def test_branches_go_their_own_ways(terminal: ReadTerminal) -> None:
    take(terminal, TOLD)
    assert "branch-1" in take(terminal, "/branch")[1] and terminal.current == "branch-1"
    take(terminal, "Actually my cat is called Luna.")
    assert "already" in take(terminal, "/branch branch-1")[1] and "branch-2" in take(terminal, "/branch")[1]
    take(terminal, "/branch other")
    assert list(terminal.sessions) == ["main", "branch-1", "branch-2", "other"]
    assert take(terminal, ASKED)[0] == "Your cat is called Luna.\n"
    take(terminal, "/switch main")
    assert take(terminal, ASKED)[0] == "Your cat is called Zoe.\n"


def test_memory_shows_live_bytes(terminal: ReadTerminal) -> None:
    empty = take(terminal, "/memory")[0]
    assert empty.lstrip().startswith("0 B of 16 MiB") and "main *" in empty
    take(terminal, TOLD)
    take(terminal, "/branch b")
    shown = take(terminal, "/memory")[0]
    assert all(
        words in shown for words in ("main", "b *", "pages", "states", "checkpoints")
    ) and not shown.lstrip().startswith("0 B")
    assert len(re.findall(r"(\d+) │ +[\d.]+ [KM]iB", shown)) >= 2  # These are the tokens and bytes of each branch.


def test_history_numbers_what_edit_takes(terminal: ReadTerminal) -> None:
    take(terminal, TOLD)
    take(terminal, "I read a book today. " * 4)
    lines = take(terminal, "/history")[0].splitlines()
    assert lines[0] == f"  1 user: {TOLD}" and lines[1] == "    assistant: Okay, noted."
    assert lines[2].startswith("  2 user: I read") and lines[2].endswith("…") and len(lines[2]) < 80
    take(terminal, "/edit 2 What is my cat called?")
    assert terminal.session.messages[-1].content == "Your cat is called Zoe."


def test_regenerate_draws_again_where_a_seed_is_given(terminal: ReadTerminal) -> None:
    terminal.session.sampling = Sampling(5.0, seed=1)
    said = [take(terminal, TOLD)[0], take(terminal, "/regenerate")[0], take(terminal, "/regenerate")[0]]
    assert len(set(said)) == 3 and len(terminal.session.messages) == 2


def test_help_lists_every_command(terminal: ReadTerminal) -> None:
    shown = take(terminal, "/help")[0]
    assert all(
        f"/{name}" in shown for name in "edit undo regenerate branch switch history memory save load help quit".split()
    )


def test_an_interrupted_reply_was_never_asked_for(terminal: ReadTerminal, monkeypatch: pytest.MonkeyPatch) -> None:
    take(terminal, TOLD)
    step, n_steps = terminal.engine.step, 0

    def interrupt() -> Any:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(terminal.engine, "step", interrupt)
    out, notes = take(terminal, ASKED)
    assert (
        out.startswith("Your") and out.endswith("\n") and "interrupted" in notes and len(terminal.session.messages) == 2
    )
    assert take(terminal, ASKED)[0] == "Your cat is called Zoe.\n"


def test_a_terminal_is_not_steered_by_the_model(
    embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(embedded, tokenizer)
    session = ChatSession(engine)
    out = Console(file=io.StringIO(), force_terminal=True)
    terminal = Terminal(engine, session, console=out, notes=Console(file=io.StringIO()))
    say = session.say
    monkeypatch.setattr(session, "say", lambda text, on_text: (on_text("a\x1b[2Jb\r\nc"), say(text))[1])
    terminal.take(TOLD)
    assert printed(out).startswith("a[2Jb\nc")
