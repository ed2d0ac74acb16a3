"""What fails one level higher: the calls of an engine, whose requests must not notice, and those of a chat.

A failure ends one request at most. Every other request says what it would have said. The messages of a chat are those
before the call or those after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine, Generation
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.session import ChatSession
from hybridmem.memory import CapacityError, HybridMemory
from hybridmem.memory.prefix import PrefixCache
from tests.failure.points import InjectedError
from tests.failure.scenes import Logits
from tests.speaker import speaker, tokenizer_of_speaker
from tests.toy import Toy

_ENDED_BY = (InjectedError, MemoryError, CapacityError, OSError)


@cache
def _toy() -> Toy:
    toy: Any = Toy()
    toy.config = None
    return toy


@dataclass(frozen=True)
class TalkSetUp:
    """Names what is made, and the calls that are made to it; `scene` makes it in a folder, for a call."""

    name: str
    scene: Callable[[Path, str], Any]
    calls: Mapping[str, Callable[[Any], Any]]
    is_exact: bool = True

    def make(self, folder: Path, call: str) -> Any:
        """Return a scene in which the call can be made."""
        return self.scene(folder, call)


class Talk:
    """An engine over a memory with a prefix cache, on which requests or chats are in progress."""

    saved = b""

    def __init__(self, model: Any, folder: Path, budget: str, **options: Any) -> None:
        self.folder = folder
        self.memory = HybridMemory(
            model.memory_spec, budget, rollback_window=8, page_tokens=4, poison=True, host_budget=1 << 13,
            swap_dir=folder / "swap",
        )  # fmt: skip
        self.prefixes = PrefixCache(self.memory, grid_tokens=4)
        options = {"step_tokens": 24, "max_running": 3, "clock": lambda: 0.0, "prefixes": self.prefixes} | options
        self.engine = Engine(model, self.memory, **options)

    def file(self) -> bytes:
        """Return what is saved."""
        return b""

    def end(self) -> None:
        """Give everything back; raise AssertionError if a byte is lost."""
        assert self.engine.is_idle and not self.engine.step(), "what has ended is released again"
        self.prefixes.clear()
        self.memory.check()
        usage = self.memory.usage()
        assert (usage.used_bytes, usage.host_bytes, usage.disk_bytes) == (0, 0, 0), f"bytes are lost: {usage}"
        assert not usage.by_sequence, f"{usage.by_sequence} are left"
        swap = self.folder / "swap"
        assert not swap.exists() or not list(swap.iterdir()), "swap files are left"
        self.memory.close_all()


@dataclass
class Heard:
    """Holds what the callback of a request has heard."""

    pieces: list[str] = field(default_factory=list)

    def callback_hear(self, generation: Generation, piece: str) -> None:
        """Note a piece."""
        self.pieces.append(piece)


class Requests(Talk):
    """Four requests, drawn and greedy, of which two have a common beginning."""

    def __init__(self, folder: Path, call: str, budget: str) -> None:
        speculation = Speculation(looks_up=True, adapts=False)
        super().__init__(_toy(), folder, budget, tokenizer=None, stop_ids=(0,), speculation=speculation)
        self.generations = [self.submit(i) for i in range(4)]
        self.cancelled: Generation | None = None
        for _ in range(_STEPS_BEFORE.get(call, 0)):
            self.engine.step()

    def submit(self, i: int) -> Generation:
        """Submit the request number i."""
        prompt = [3, 4, 5, 6, 7, 8, 9, 3, 4, 5][: 10 - i] + [1 + i, 2, 2 + i] * (1 + i)
        sampling = Sampling(0.8, seed=i) if i % 2 else Sampling()
        return self.engine.submit(
            prompt, max_tokens=5 + i, sampling=sampling, on_token=Heard().callback_hear, priority=i % 2
        )

    def cancel(self) -> None:
        """Cancel the second request."""
        self.cancelled = self.generations[1]
        self.engine.cancel(self.cancelled)

    def books(self) -> list[tuple[Any, ...]]:
        """Return nothing, because no book says how far requests have come."""
        return []

    def go_on(self) -> Logits:
        """Step to the end. Return what requests say, except those that were cancelled or ended with an error."""
        self.engine.run()
        self.memory.check()
        failed = [g for g in self.generations if g.finish_reason == "error"]
        assert len(failed) <= 1, f"one failure ended {len(failed)} requests"
        assert all(isinstance(g.error, _ENDED_BY) for g in failed), failed
        ended = [g for g in self.generations if g not in failed and g is not self.cancelled]
        assert all(g.finish_reason in ("stop", "length") for g in ended), [g.finish_reason for g in ended]
        return {i: torch.tensor(g.token_ids) for i, g in enumerate(self.generations) if g in ended}


_STEPS_BEFORE = {"engine step, replies": 2, "engine step, ends": 7, "engine cancel": 2}

_ENGINE_CALLS: dict[str, Callable[[Requests], Any]] = {
    "engine submit": lambda s: s.generations.append(s.submit(4)),
    "engine step, prompts": lambda s: s.engine.step(),
    "engine step, replies": lambda s: s.engine.step(),
    "engine step, ends": lambda s: s.engine.step(),
    "engine run": lambda s: s.engine.run(),
    "engine cancel": lambda s: s.cancel(),
}


class Chat(Talk):
    """Is a chat of two messages and a reply, from which one branch grows."""

    def __init__(self, folder: Path, call: str) -> None:
        super().__init__(speaker(), folder, "1MiB", tokenizer=tokenizer_of_speaker())
        self.place = folder / "chat"
        self.session = ChatSession(self.engine, max_tokens=2)
        self.session.say("Hello")
        self.open = [self.session, self.session.branch()]
        if call in ("chat save", "chat resume"):
            self.session.save(self.place)
            self.saved = self.file()
        self.open[1].say("Who?")
        if call == "chat wake":
            self.session.sleep()

    def callback_hear(self, piece: str) -> None:
        """Hear a piece of a reply."""

    def resume(self) -> None:
        """Resume the saved chat, beside the chat itself."""
        resumed = ChatSession.resume(self.engine, self.place)
        self.open += [resumed, *resumed.branches]

    def books(self) -> list[tuple[Any, ...]]:
        """Return the messages of all chats, and which are closed or asleep."""
        return [(s.messages, repr(s).endswith(": closed>"), s.sequence is None) for s in self.open]

    def file(self) -> bytes:
        """Return the messages of what is saved, resumed in an empty memory."""
        if not self.place.exists():
            return b""
        names = [path.name for path in self.place.iterdir()]
        assert all(name.startswith(("session.json", "memory-")) for name in names), names
        memory = HybridMemory(speaker().memory_spec, "1MiB", rollback_window=8, page_tokens=4)
        model: Any = speaker()
        first = ChatSession.resume(Engine(model, memory, tokenizer_of_speaker()), self.place)
        return repr([session.messages for session in (first, *first.branches)]).encode()

    def go_on(self) -> Logits:
        """Say something more in each chat that is open. Return the tokens of each reply."""
        live = [s for s in self.open if not repr(s).endswith(": closed>")]
        said = {i: torch.tensor(session.say("Once more").token_ids) for i, session in enumerate(live)}
        for session in live:
            session.close()
        return said


_CHAT_CALLS: dict[str, Callable[[Chat], Any]] = {
    "chat say": lambda s: s.session.say("And you?", on_text=s.callback_hear),
    "chat edit": lambda s: s.session.edit(0, "Good bye", on_text=s.callback_hear),
    "chat regenerate": lambda s: s.session.regenerate(on_text=s.callback_hear),
    "chat undo": lambda s: s.open[1].undo(),
    "chat branch": lambda s: s.open.append(s.session.branch()),
    "chat sleep": lambda s: s.session.sleep(),
    "chat wake": lambda s: s.session.wake(),
    "chat save": lambda s: s.session.save(s.place),
    "chat resume": lambda s: s.resume(),
    "chat close": lambda s: s.session.close(),
}

TALKING = {
    s.name: s
    for s in (
        TalkSetUp("engine", lambda folder, call: Requests(folder, call, "1MiB"), _ENGINE_CALLS),
        TalkSetUp("engine, full budget", lambda folder, call: Requests(folder, call, "8KiB"), _ENGINE_CALLS),
        TalkSetUp("chat", Chat, _CHAT_CALLS),
    )
}
