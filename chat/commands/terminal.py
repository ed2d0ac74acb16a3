"""Runs a chat in a terminal or over a pipe.

It shows replies as they come; commands such as /undo change the conversation.

Replies, and the output of commands, go to standard output. Standard error gets one line for the cost of each turn and
for each error.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridmem.chat.commands.drafter import Budgets, make_drafter
from hybridmem.chat.commands.head_drafter import NONE, check_draft_options, make_head_drafter
from hybridmem.chat.commands.start import Unread, check_budget, choose_threads
from hybridmem.chat.console import make_console
from hybridmem.chat.engine.draft_models import JobDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer, encode_chat
from hybridmem.chat.session.saved import read_folder
from hybridmem.chat.session.session import ChatSession, Turn
from hybridmem.memory import BatchError, FormatError, HybridMemory, HybridMemoryError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.views import format_bytes
from hybridmem.models import LanguageModel

_MAIN = "main"
_SHOWN_CHARACTERS = 60
"""/history shows this many characters of each message."""


@dataclass(frozen=True)
class Settings:
    """Holds the options of a new terminal.

    None means the default of `ChatSession`. If `resume` is given, it means the saved session's value.
    """

    budget: str = "1GiB"
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    resume: str | None = None
    threads: int | None = None
    draft_model: str | None = None
    draft_head: str = NONE
    weights: str = "auto"

    def check(self, unread: Unread) -> None:
        """Raise an error if a model cannot be used for chats, before its weights are read."""
        check_draft_options(self.draft_model, self.draft_head, None)
        check_budget(unread.spec, self.budget)
        if not unread.tokenizer.chat_template:
            raise FormatError(
                "this model has no chat template, so it only continues texts; give them to hybrid-memory generate"
            )
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        encode_chat(unread.tokenizer, [*system, {"role": "user", "content": "?"}])
        if self.resume is not None:
            read_folder(self.resume, FormatError)


def run_terminal(model: LanguageModel, tokenizer: Tokenizer, settings: Settings) -> None:
    """Chat with a model on standard input and output until the input ends.

    Raises as `ChatSession` does when it is made or resumed.
    """
    budgets = Budgets({"budget": settings.budget})
    drafter: JobDrafter | None = None
    if settings.draft_model is not None:
        drafter, budgets = make_drafter(
            settings.draft_model, model, tokenizer, budgets, weights=settings.weights, has_cache=True
        )
    elif settings.draft_head != NONE:
        drafter, budgets = make_head_drafter(
            settings.draft_head, model, budgets, weights=settings.weights, has_cache=True
        )
    memory = HybridMemory(model.memory_spec, **budgets.memory)
    choose_threads(model, memory, settings.threads)
    speculation = Speculation(drafter=drafter)
    engine = Engine(model, memory, tokenizer, prefixes=PrefixCache(memory), speculation=speculation)
    session = (
        ChatSession(engine, system=settings.system)
        if settings.resume is None
        else ChatSession.resume(engine, settings.resume)
    )
    if settings.max_tokens is not None:
        session.max_tokens = settings.max_tokens
    if settings.temperature is not None:
        session.sampling = replace(session.sampling, temperature=settings.temperature)
    if settings.seed is not None:
        session.sampling = replace(session.sampling, seed=settings.seed)
    terminal = Terminal(engine, session, console=make_console(), notes=Console(stderr=True))
    try:
        terminal.run()
    finally:
        terminal.close()


class Terminal:
    """Holds sessions by name, and lets the user talk in one of them.

    Args:
        console: gets replies and tables.
        notes: gets the costs of turns, and errors.
        session: the first session. The terminal closes it, and all others that it makes.
    """

    def __init__(self, engine: Engine, session: ChatSession, *, console: Console, notes: Console) -> None:
        self.engine = engine
        self.sessions = {_MAIN: session}
        self.current = _MAIN
        self._console = console
        self._notes = notes
        self._n_regenerated = 0
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "/edit": (self._edit, "N text", "say your message number N otherwise, and go on from there"),
            "/undo": (self._undo, "", "take back your last message and its reply"),
            "/regenerate": (self._regenerate, "", "another reply to your last message"),
            "/branch": (
                self._branch,
                "[name]",
                "a copy of this conversation, to be tried out; this one stays as it is",
            ),
            "/switch": (self._switch, "name", "go on with another branch"),
            "/history": (self._history, "", "what was said, with the numbers that /edit takes"),
            "/memory": (self._memory, "", "the bytes that are in use now"),
            "/save": (self._save, "folder", "write this conversation, and all that is remembered of it"),
            "/load": (self._load, "folder", "go on with a saved one in place of this"),
            "/help": (self._help, "", "this list"),
            "/quit": (self._quit, "", "leave; so does the end of the input"),
        }

    @property
    def session(self) -> ChatSession:
        return self.sessions[self.current]

    def run(self, lines: Iterator[str] | None = None) -> None:
        """Read and reply until the input ends or the user quits.

        `lines` replaces standard input.
        """
        with suppress(_Quit):
            for line in self._read() if lines is None else lines:
                self.take(line)

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()

    def take(self, line: str) -> None:
        """Execute one line of input: a command, or a message.

        If the library or the file system refuses, `notes` gets one line about it, and nothing has changed.
        """
        line = line.strip()
        if not line:
            return
        try:
            if not line.startswith("/"):
                self._show(lambda hear: self.session.say(line, on_text=hear))
                return
            name, _, rest = line.partition(" ")
            if name not in self._commands:
                raise BatchError(f"there is no command {name}; /help lists them")
            self._commands[name][0](rest.strip())
        except (HybridMemoryError, OSError) as error:
            self._notes.print(Text(f"error: {' '.join(str(error).split())}", style="red"), soft_wrap=True)

    def _read(self) -> Iterator[str]:
        is_shown = self._console.is_terminal and sys.stdin.isatty()
        if is_shown:
            with suppress(ImportError):
                import readline  # noqa: F401 - makes `input` a line editor

        while True:
            try:
                yield input(f"{self.current}> " if is_shown else "")
            except EOFError:
                return
            except KeyboardInterrupt:  # A Ctrl-C at the prompt ends the chat, as the end of the input does.
                self._console.print()
                return

    # The methods below are the commands that talk to the model.

    def _show(self, call: Callable[[Callable[[str], None]], Turn]) -> None:
        """Print a reply while it grows. Ctrl-C ends it, and the session returns to where it was before the message."""
        out, is_terminal, has_begun = self._console.file, self._console.is_terminal, False

        def hear(piece: str) -> None:
            nonlocal has_begun
            has_begun = True
            # Control characters in a reply must not reach the terminal.
            out.write("".join(c for c in piece if c.isprintable() or c in "\n\t") if is_terminal else piece)
            out.flush()

        try:
            turn = call(hear)
        except BaseException as error:
            out.write("\n" if has_begun else "")
            if not isinstance(error, KeyboardInterrupt):
                raise
            self._notes.print(Text("interrupted: nothing was said", style="dim"))
            return
        out.write("\n")
        out.flush()
        why = "".join(f"; {n:,} {reason}" for reason, n in turn.computed.items())
        cut = "; cut at the token limit" if turn.finish_reason == "length" else ""
        line = f"{len(turn.token_ids):,} tokens said, {turn.n_reused:,} reused, {turn.n_computed:,} computed{why}{cut}"
        self._notes.print(Text(line, style="dim"), soft_wrap=True)

    def _edit(self, rest: str) -> None:
        number, _, text = rest.partition(" ")
        users = [i for i, message in enumerate(self.session.messages) if message.role == "user"]
        if not number.isdecimal() or not 1 <= int(number) <= len(users) or not text.strip():
            said = f"1 ... {len(users)}" if users else "none yet"
            raise BatchError(f"/edit {rest}: give the number of a message of yours ({said}) and its new text")
        self._show(lambda hear: self.session.edit(users[int(number) - 1], text.strip(), on_text=hear))

    def _undo(self, rest: str) -> None:
        undone = self.session.undo()
        self._notes.print(Text(f"taken back: {_shorten(undone[0].content)}", style="dim"), soft_wrap=True)

    def _regenerate(self, rest: str) -> None:
        sampling = self.session.sampling
        if sampling.seed is not None:  # The same seed would give the same reply again.
            self._n_regenerated += 1
            sampling = replace(sampling, seed=sampling.seed + self._n_regenerated)
        self._show(lambda hear: self.session.regenerate(sampling=sampling, on_text=hear))

    # The methods below are the commands for branches.

    def _branch(self, name: str) -> None:
        name = name or self._free_name()
        if name in self.sessions:
            raise BatchError(f"there is a branch {name} already; /switch {name} goes on with it")
        self.sessions[name] = self.session.branch()
        self._notes.print(
            Text(f"{name} goes on from here; /switch {self.current} goes back", style="dim"), soft_wrap=True
        )
        self.current = name

    def _free_name(self) -> str:
        return next(free for n in itertools.count(1) if (free := f"branch-{n}") not in self.sessions)

    def _add_branches(self) -> None:
        """Name the branches that were saved with the current conversation."""
        for branch in self.session.branches:
            self.sessions[self._free_name()] = branch

    def _switch(self, name: str) -> None:
        if name not in self.sessions:
            raise BatchError(f"there is no branch {name or '(give its name)'}; there are {', '.join(self.sessions)}")
        self.current = name
        self._notes.print(Text(f"this is {name}", style="dim"))

    # The methods below are the commands that show or save the conversation.

    def _history(self, rest: str) -> None:
        n_user = 0
        for message in self.session.messages:
            is_user = message.role == "user"
            n_user += is_user
            self._console.print(
                Text(f"{n_user if is_user else '':>3} {message.role}: {_shorten(message.content)}"), soft_wrap=True
            )

    def _memory(self, rest: str) -> None:
        memory, prefixes = self.engine.memory, self.engine.prefixes
        usage = memory.usage()
        table = Table(title=f"{format_bytes(usage.used_bytes)} of {format_bytes(usage.budget_bytes)} in use")
        for heading, justify in (("", "left"), ("tokens", "right"), ("bytes", "right"), ("of these its own", "right")):
            table.add_column(heading, justify=justify)  # type: ignore[arg-type]
        for name, session in self.sessions.items():
            live = session.sequence
            held = None if live is None else usage.by_sequence[live.id]
            n_tokens, *sizes = (0, 0, 0) if held is None else (held.n_tokens, held.total_bytes, held.private_bytes)
            table.add_row(
                Text(f"{name}{' *' if name == self.current else ''}"), f"{n_tokens:,}", *map(format_bytes, sizes)
            )
        if prefixes is not None:
            stats = prefixes.stats()
            table.add_row(f"{stats.n_checkpoints} checkpoints", "", "", format_bytes(stats.private_bytes))
        table.add_section()
        for kind, n_bytes in usage.by_kind.items():
            table.add_row(Text(kind), "", format_bytes(n_bytes), "")
        self._console.print(table)

    def _save(self, path: str) -> None:
        self.session.save(_given(path, "/save"))
        self._notes.print(Text(f"saved in {path}", style="dim"), soft_wrap=True)

    def _load(self, path: str) -> None:
        loaded = ChatSession.resume(self.engine, _given(path, "/load"))
        self.session.close()
        self.sessions[self.current] = loaded
        self._add_branches()
        others = f"; with {', '.join(self.sessions)}" if loaded.branches else ""
        self._notes.print(Text(f"{len(loaded.messages)} messages from {path}{others}", style="dim"), soft_wrap=True)

    def _help(self, rest: str) -> None:
        table = Table.grid(padding=(0, 2))
        for name, (_, arguments, what) in self._commands.items():
            table.add_row(Text(f"{name} {arguments}"), what)
        self._console.print(table)

    def _quit(self, rest: str) -> None:
        raise _Quit


class _Quit(Exception):  # noqa: N818 - it ends nothing but the loop
    pass


def _given(path: str, command: str) -> str:
    if not path:
        raise BatchError(f"{command} needs a folder; give its path")
    return path


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 1]}…"
