"""Lets every public call fail, in memories of a dozen set-ups, with sequences that must not notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from hybridmem.memory import CapacityError, HybridMemory, Sequence
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.recorded import run_recorded
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.testing.subjects import POLICIES, STORAGES
from hybridmem.memory.testing.toys import FamilyToy, Toy

Logits = dict[int, torch.Tensor]


@dataclass(frozen=True)
class SetUp:
    """Makes a memory and names what is special about it."""

    name: str
    model: Callable[[], Any]
    policy: str | None = None
    storage: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    is_exact: bool = True
    swaps_to_files: bool = False
    budget: str = "512KiB"
    n_ballast: int = 0
    """Sequences that fill the budget, and that a reclaimer closes one by one."""

    @property
    def calls(self) -> Mapping[str, Callable[[Any], Any]]:
        if dict(self.options).get("host_pages"):
            return CALLS
        return {name: call for name, call in CALLS.items() if name not in ("to_host", "to_device")}

    def make(self, folder: Path, call: str) -> Scene:
        """Return a scene in which the call can be made."""
        scene = Scene(self, folder, has_files=call.startswith(("save", "load")))
        if call in ("prefix save", "prefix load"):
            scene.fill_prefixes()
        for _ in range(_STEPS_BEFORE.get(call, 0)):
            scene.feed_recorded()
            for sequence in (scene.a, scene.b):
                scene.memory.rollback(sequence, n_tokens=1)
        return scene

    def memory(self, folder: Path) -> HybridMemory:
        spec = self.model().memory_spec
        if self.policy or self.storage:
            spec = spec.with_policy(POLICIES[self.policy] if self.policy else None)
            spec = spec.with_storage(STORAGES[self.storage] if self.storage else None)
        options: dict[str, Any] = {"rollback_window": 4, "page_tokens": 4, "poison": True, **dict(self.options)}
        if self.swaps_to_files:
            options |= {"host_budget": 1, "swap_dir": folder / "swap"}
        return HybridMemory(spec, self.budget, **options)


@cache
def _toy(**options: Any) -> Toy:
    return Toy(**options)


@cache
def _family(name: str) -> FamilyToy:
    return FamilyToy(FAMILIES[name])


_STEPS_BEFORE = {"step, recorded": 5, "step, recorded again": 6, "step, replayed": 7}
"""How many steps come before a step that is recorded, recorded again to compare, and replayed. After the first one,
which no rollback precedes, all have one layout.
"""

_HOST = (("host_pages", "256KiB"),)
SET_UPS = {
    s.name: s
    for s in (
        SetUp("hybrid", _toy, options=_HOST),
        SetUp("hybrid, replay", _toy, options=(*_HOST, ("fold", "replay")), is_exact=False),
        SetUp("hybrid, window", partial(_toy, window=5), options=_HOST),
        SetUp("attention", partial(_toy, recurrent=False), options=_HOST),
        SetUp("recurrent", partial(_toy, attention=False)),
        SetUp("deferred delta rule", partial(_family, "gated_delta"), options=(("fold", "defer"),), is_exact=False),
        SetUp("deferred Mamba-1", partial(_family, "mamba1"), options=(("fold", "defer"),), is_exact=False),
        SetUp("H2O", _toy, policy="h2o", options=_HOST),
        SetUp("SnapKV in 8 bits", _toy, policy="snapkv", storage="8-bit", options=_HOST),
        SetUp("Quest", _toy, policy="quest", options=_HOST),
        SetUp("4 bits", _toy, storage="4-bit", options=_HOST),
        SetUp("swapped to files", _toy, options=_HOST, swaps_to_files=True),
        SetUp("full budget", _toy, budget="40KiB", n_ballast=6),
    )
}


class Scene:
    """A memory with two sequences, one that is swapped out, one that is on the host, a checkpoint and a bystander."""

    def __init__(self, set_up: SetUp, folder: Path, *, has_files: bool) -> None:
        self.set_up, self.folder, self.model = set_up, folder, set_up.model()
        self.memory = set_up.memory(folder)
        self.a, self.b, self.away, self.bystander = (self.memory.open() for _ in range(4))
        for n_tokens in (7, 3):
            self.feed({s: _tokens(n_tokens, i) for i, s in enumerate((self.a, self.b, self.away, self.bystander))})
        self.mark = self.memory.checkpoint(self.a)
        self.feed({self.a: _tokens(2, 7)})
        self.memory.swap_out(self.away)
        self.path, self.family_path, self.saved = folder / "saved", folder / "family", b""
        if has_files:
            self.memory.save(self.b, self.path)
            self.saved = self.path.read_bytes()
            self.memory.save(self.a, self.family_path, checkpoints=True)
        self.prefixes = self.other = PrefixCache(self.memory, grid_tokens=4)
        self.fork, self.new = self.memory.fork(self.b), self.memory.open()
        if dict(set_up.options).get("host_pages"):
            self.memory.to_host(self.fork)
        self.ballast = [self.memory.open() for _ in range(set_up.n_ballast)]
        if self.ballast:
            self._fill()
            self.memory.add_reclaimer(self.callback_give_way)

    def fill_prefixes(self) -> None:
        """Insert a sequence and save it, and make a cache that knows nothing of it."""
        self.prefixes.insert(self.b)
        self.prefixes.save(self.folder / "prefixes")
        self.prefixes.insert(self.a)
        self.other = PrefixCache(self.memory, grid_tokens=4)

    def _fill(self) -> None:
        """Feed the ballast until the budget is full."""
        with suppress(CapacityError):
            while True:
                for sequence in self.ballast:
                    self.feed({sequence: [1] * 24})

    def callback_give_way(self, missing_bytes: int) -> bool:
        """Close one of the sequences that only fill the budget. This is a reclaimer."""
        # An exception may have come before the sequence was taken from the list.
        while self.ballast and self.ballast[-1].closed:
            self.ballast.pop()
        if not self.ballast:
            return False
        self.memory.close(self.ballast[-1])
        return True

    def feed(self, requests: dict[Sequence, list[int]]) -> tuple[torch.Tensor, ...]:
        with self.memory.step(requests, outputs="all") as step:
            return step.split(self.model(step))

    def feed_recorded(self) -> torch.Tensor:
        """Feed a token to each of two sequences, in a step that is run, recorded or replayed."""
        with self.memory.step({self.a: [1], self.b: [2]}) as step:
            return run_recorded(self.model, step)

    def _handles(self) -> list[Sequence]:
        return sorted((h for h in self.memory.sequences if h not in self.ballast), key=lambda handle: handle.id)

    def books(self) -> list[tuple[Any, ...]]:
        """Return what can be seen of all sequences but the ballast."""
        return [(h.is_checkpoint, h.tokens.tolist(), h.horizon, h.is_swapped, h.is_on_host) for h in self._handles()]

    def go_on(self) -> Logits:
        """Roll back each live sequence and feed it, with all swapped in. Return outputs by the places in the books."""
        found: Logits = {}
        while self.callback_give_way(0):  # Otherwise checkpoints of a prefix cache would give way instead.
            pass
        handles = self._handles()
        for handle in handles:
            if handle.is_swapped:
                self.memory.swap_in(handle)
        live = {place: self.memory.fork(h) if h.is_checkpoint else h for place, h in enumerate(handles)}
        for sequence in live.values():
            if sequence.length > 2 and self.memory.can_rollback(sequence, sequence.length - 1):
                self.memory.rollback(sequence, to=sequence.length - 1)
        for tokens in (_tokens(2, 11), [1]):
            for place, rows in zip(live, self.feed(dict.fromkeys(live.values(), tokens)), strict=True):
                found[place] = torch.cat([found[place], rows]) if place in found else rows
        return found

    def end(self) -> None:
        """Close everything. Raise AssertionError if a byte is lost."""
        self.memory.check()
        for prefixes in {self.prefixes, self.other}:
            prefixes.close()
        for handle in self.memory.sequences:
            self.memory.close(handle)
        self.memory.check()
        used, away = self.memory.usage().used_bytes, self.memory.counters.swapped_bytes
        assert used == 0 and away == (0, 0), f"{used} bytes are lost, {away} outside"
        swap = self.folder / "swap"
        left = [p.name for p in swap.iterdir()] if swap.exists() else []
        assert left == [], f"{left} are left"
        self.memory.close_all()

    def file(self) -> bytes:
        """Return the content of the saved file."""
        return self.path.read_bytes() if self.path.exists() else b""


def _tokens(n_tokens: int, seed: int) -> list[int]:
    return torch.randint(0, 19, (n_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def _accept(s: Scene) -> None:
    with s.memory.step({s.a: _tokens(3, 1), s.b: [2]}) as step:
        s.model(step)
        step.accept({s.a: 1})


def _reclaim(s: Scene) -> None:
    def callback_reclaim(missing_bytes: int) -> bool:
        return False

    s.memory.add_reclaimer(callback_reclaim)
    try:
        s.feed({s.a: _tokens(60, 1), s.b: _tokens(5, 2)})
    finally:
        s.memory.remove_reclaimer(callback_reclaim)


CALLS: dict[str, Callable[[Scene], Any]] = {
    "open": lambda s: s.memory.open(),
    "step, decode": lambda s: s.feed({s.a: [1], s.b: [2], s.fork: [3]}),
    "step, prompt": lambda s: s.feed({s.a: _tokens(17, 3), s.b: [2]}),
    "step, a new sequence": lambda s: s.feed({s.new: _tokens(9, 4)}),
    "step, accept": _accept,
    "step, reclaim": _reclaim,
    "step, recorded": lambda s: s.feed_recorded(),
    "step, recorded again": lambda s: s.feed_recorded(),
    "step, replayed": lambda s: s.feed_recorded(),
    "run": lambda s: s.memory.run(s.model, {s.a: _tokens(19, 5), s.b: [2]}, max_tokens=8),
    "fork": lambda s: s.memory.fork(s.a),
    "checkpoint": lambda s: s.memory.checkpoint(s.a),
    "reorder": lambda s: s.memory.reorder({s.a: s.b, s.b: s.a}),
    "rollback": lambda s: s.memory.rollback(s.a, n_tokens=2),
    "rollback to a checkpoint": lambda s: s.memory.rollback(s.a, to=s.mark),
    "rollback to 0": lambda s: s.memory.rollback(s.a, to=0),
    "close": lambda s: s.memory.close(s.a),
    "close what is swapped": lambda s: s.memory.close(s.away),
    "swap_out": lambda s: s.memory.swap_out(s.a),
    "swap_in": lambda s: s.memory.swap_in(s.away),
    "to_host": lambda s: s.memory.to_host(s.a),
    "to_device": lambda s: s.memory.to_device(s.fork),
    "save": lambda s: s.memory.save(s.a, s.path),
    "save a family": lambda s: s.memory.save(s.a, s.path, checkpoints=True),
    "load": lambda s: s.memory.load(s.path),
    "load a family": lambda s: s.memory.load(s.family_path, family=True),
    "prefix insert": lambda s: s.prefixes.insert(s.a),
    "prefix open": lambda s: s.prefixes.open([*_tokens(9, 0), 3, 4]),
    "prefix save": lambda s: s.prefixes.save(s.folder / "prefixes"),
    "prefix load": lambda s: s.other.load(s.folder / "prefixes"),
    "usage": lambda s: s.memory.usage(),
    "check": lambda s: s.memory.check(),
}
"""Every public call that changes a memory, or reads all of it."""
