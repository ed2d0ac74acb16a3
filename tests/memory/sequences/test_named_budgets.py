"""A budget that an error names is enough.

A memory made with it holds the same requests, after the same history.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from hybridmem.memory import (
    AttentionSpec,
    CapacityError,
    CrossAttentionSpec,
    DropError,
    HybridMemory,
    MemorySpec,
    SpecError,
)
from hybridmem.memory.eviction import H2O, PyramidKV, Quest, Recent, SnapKV
from hybridmem.memory.quantization import Float8, Quantized
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.rotary import Rotation
from hybridmem.memory.specs import LayerSpec, RecurrentSpec
from tests.extent import few_cases
from tests.subjects import IS_FULL

ROOM = 1 << 50
NAMED = re.compile(r"(larger budget, of|more host_pages,|larger host_budget, of) ([\d,]+) bytes")


@cache
def recurrence(family: str) -> RecurrentSpec:
    return FAMILIES[family].example(torch.Generator().manual_seed(0))[0]


def named_in(error: CapacityError) -> dict[str, int]:
    """Return what a message tells its reader to give: option -> bytes."""
    found = NAMED.search(str(error))
    assert found, str(error)
    option = next(name for name in ("host_pages", "host_budget", "budget") if name in found[1])
    return {option: int(found[2].replace(",", ""))}


class Case:
    """Holds a random spec with random options."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        rotation = Rotation(tuple(0.5**i for i in range(8))) if rng.random() < 0.7 else None
        attention = AttentionSpec(4, rng.choice([1, 2]), 16, rotation=rotation)
        windowed = AttentionSpec(4, 2, 16, name="narrow", window=rng.choice([1, 30, 100]), rotation=rotation)
        latent = AttentionSpec(4, 1, 32, name="latent", value_dim=16)
        kinds: list[LayerSpec] = [
            recurrence(name) if name in FAMILIES else {"full": attention, "window": windowed, "latent": latent}[name]
            for name in rng.choices(["full", "window", "latent", *rng.sample([*FAMILIES], 2)], k=rng.randint(1, 4))
        ]
        layers = [(kind,) for kind in kinds]
        self.has_encoder = rng.random() < 0.1
        if self.has_encoder:
            layers.append((CrossAttentionSpec(4, 2, 16),))
        device = torch.device(rng.choice(["cpu", "cuda"]))
        self.spec = MemorySpec(tuple(layers), 100, torch.float32, device)
        group, page_tokens = rng.choice([8, 16, 64]), rng.choice([1, 3, 4, 16])
        whole = [i for i, kind in enumerate(kinds) if isinstance(kind, AttentionSpec) and kind.window is None]
        if whole and rng.random() < 0.4:
            policies = [H2O(40), Recent(40, every=8), SnapKV(30), PyramidKV(30), Quest(64)]
            self.spec = self.spec.with_policy(
                rng.choice(policies), layers=rng.sample(whole, rng.randint(1, len(whole)))
            )
        if whole and rng.random() < 0.4:
            storages = [Quantized(4, group=group), Quantized(8, group=group), Quantized(2, group=group), Float8()]
            self.spec = self.spec.with_storage(
                rng.choice(storages), layers=rng.sample(whole, rng.randint(1, len(whole)))
            )
        self.has_host_pages = bool(whole) and rng.random() < 0.4
        self.options: dict[str, Any] = {
            "rollback_window": rng.choice([0, 1, 4, 32, 100]), "page_tokens": page_tokens,
            "fold": rng.choice([None, "keep", "replay", "defer"]), "device": "meta",
        }  # fmt: skip

    def memory(self, **sizes: int) -> HybridMemory:
        """Make a memory with budgets of these bytes. Budgets that are not given have room for anything."""
        rooms = {"budget": ROOM, "host_pages": ROOM} if self.has_host_pages else {"budget": ROOM}
        return HybridMemory(self.spec, **(self.options | rooms | sizes))

    def open(self, memory: HybridMemory, n_rows: int) -> Any:
        if not self.has_encoder:
            return memory.open()
        rows = torch.empty(n_rows, 2, 16, device="meta")
        return memory.open(encoder=[(rows, rows)])


def case(rng: random.Random) -> Case:
    """Return the next possible case, because some options suit no spec."""
    while True:
        try:
            found = Case(rng)
            found.memory()
        except SpecError:
            continue
        return found


Call = Callable[[HybridMemory, list[Any]], None]
"""Something that needs room: it is told the memory, and the sequences that were opened in it so far."""


def history(one: Case) -> list[tuple[str, Call]]:
    """Return random calls. A call does the same whenever the same calls came before it."""
    rng, calls = one.rng, list[tuple[str, Call]]()

    def pick(memory: HybridMemory, sequences: list[Any], at: float) -> Any:
        live = [s for s in sequences if not s.is_checkpoint and not s.is_swapped and not s.closed]
        return live[int(at * len(live))] if live else None

    def opened(n_rows: int) -> Call:
        return lambda memory, sequences: sequences.append(one.open(memory, n_rows))

    def fed(ats: list[float], n_tokens: int, max_tokens: int | None) -> Call:
        def feed(memory: HybridMemory, sequences: list[Any]) -> None:
            counts = {s: np.ones(n_tokens, np.int64) for at in ats if (s := pick(memory, sequences, at))}
            if not counts:
                return
            if max_tokens is not None:
                memory.run(None, counts, max_tokens=max_tokens)
            else:
                with memory.step(counts):
                    pass

        return feed

    def copied(at: float, *, is_checkpoint: bool) -> Call:
        def copy(memory: HybridMemory, sequences: list[Any]) -> None:
            if source := pick(memory, sequences, at):
                sequences.append((memory.checkpoint if is_checkpoint else memory.fork)(source))

        return copy

    def taken_back(at: float, share: float) -> Call:
        def go_back(memory: HybridMemory, sequences: list[Any]) -> None:
            if source := pick(memory, sequences, at):
                memory.rollback(source, to=memory.resume_point(source, int(source.length * share)))

        return go_back

    def closed(at: float) -> Call:
        def close(memory: HybridMemory, sequences: list[Any]) -> None:
            if sequences:
                memory.close(sequences.pop(int(at * len(sequences))))

        return close

    def dropped(at: float, start: float, end: float) -> Call:
        def drop(memory: HybridMemory, sequences: list[Any]) -> None:
            if source := pick(memory, sequences, at):
                bounds = sorted((int(source.length * start), int(source.length * end)))
                try:
                    memory.drop(source, *bounds, approximate=True)
                except DropError:
                    pass

        return drop

    def swapped(at: float) -> Call:
        def swap(memory: HybridMemory, sequences: list[Any]) -> None:
            if sequences:
                one = sequences[int(at * len(sequences))]
                (memory.swap_in if one.is_swapped else memory.swap_out)(one)

        return swap

    def moved(at: float) -> Call:
        def move(memory: HybridMemory, sequences: list[Any]) -> None:
            if one.has_host_pages and (source := pick(memory, sequences, at)):
                (memory.to_device if source.is_on_host else memory.to_host)(source)

        return move

    for _ in range(rng.randint(3, 16)):
        at, move = rng.random(), rng.random()
        if move < 0.2 or not calls:
            calls.append(("open", opened(rng.randint(1, 50))))
        elif move < 0.4:
            ats, n = [rng.random() for _ in range(rng.randint(1, 3))], rng.choice([1, 5, 40, 150, 700])
            calls.append(("step", fed(ats, n, None)))
        elif move < 0.55:
            ats, n = [rng.random() for _ in range(rng.randint(1, 3))], rng.choice([1, 5, 40, 150, 700])
            calls.append(("run", fed(ats, n, rng.choice([7, 64, 512]))))
        elif move < 0.7:
            calls.append(("copy", copied(at, is_checkpoint=rng.random() < 0.5)))
        elif move < 0.8:
            calls.append(("rollback", taken_back(at, rng.random())))
        elif move < 0.85:
            calls.append(("close", closed(at)))
        elif move < 0.88:
            calls.append(("drop", dropped(at, rng.random(), rng.random())))
        elif move < 0.94:
            calls.append(("move", moved(at)))
        else:
            calls.append(("swap", swapped(at)))
    return calls


def least_host_pages(one: Case) -> int:
    """Return the fewest bytes of `host_pages` with which a memory can be made."""
    with pytest.raises(SpecError) as caught:
        one.memory(host_pages=1)
    return max(int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", str(caught.value)))


def replay(calls: list[Call], memory: HybridMemory) -> None:
    sequences = list[Any]()
    for call in calls:
        call(memory, sequences)


def too_small(rng: random.Random) -> tuple[int, list[tuple[str, str]]]:
    """Count the refusals of one history. Return the call and the reason of those whose named budget is not enough."""
    one = case(rng)
    roomy, calls, sequences = one.memory(), history(one), list[Any]()
    most: dict[str, int] = {"budget": 0, "host_pages": 0, "host_budget": 0}
    for _, call in calls:
        call(roomy, sequences)
        usage = roomy.usage()
        used = {"budget": usage.used_bytes, "host_budget": roomy.counters.swapped_bytes[0]}
        used["host_pages"] = usage.on_host.used_bytes if usage.on_host else 0
        most = {option: max(n_bytes, used[option]) for option, n_bytes in most.items()}
    sizes = {option: max(1, int(n_bytes * rng.uniform(0.1, 1))) for option, n_bytes in most.items()}
    sizes["budget"] = max(sizes["budget"], roomy.counters.least_bytes)
    if one.has_host_pages:
        sizes["host_pages"] = max(sizes["host_pages"], least_host_pages(one))
    else:
        del sizes["host_pages"]
    memory, sequences, done = one.memory(**sizes), list[Any](), list[Call]()
    n_refused, found = 0, list[tuple[str, str]]()
    for name, call in calls:
        try:
            call(memory, sequences)
            done.append(call)
            continue
        except CapacityError as error:
            named, n_refused = named_in(error), n_refused + 1
            message = str(error)
            assert error.needed > error.free, message
        larger = one.memory(**(sizes | named))
        try:
            replay([*done, call], larger)
        except CapacityError as error:
            other = named_in(error)
            # The call needs more of both budgets, and its errors name one after the other.
            if other.keys() != named.keys():
                named |= other
                larger = one.memory(**(sizes | named))
                replay([*done, call], larger)
            else:
                found.append((name, f"{one.spec.layers} {one.options} {message} THEN {error}"))
        larger.check()
    memory.check()
    return n_refused, found


@few_cases
@pytest.mark.parametrize("part", range(8))
def test_a_named_budget_is_enough(part: int) -> None:
    """This holds in fresh and busy memories, for any kind of layer and any option."""
    rng, n_refused = random.Random(part), 0
    for _ in range(1250 if IS_FULL else 25):
        n, found = too_small(rng)
        assert not found, found[0]
        n_refused += n
    assert n_refused > 10
