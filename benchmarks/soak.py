"""Keeps memories of every kind busy at full budget for minutes, and looks for wrong outputs, leaks and slowdown.

A round takes one kind of memory, fills a small budget with sequences that share, fork, go back, swap, save and fail,
and then closes all of them. The next round takes the next kind. A sample of the sequences is computed again in an empty
memory and compared. A seed determines the run, except for the time at which the run ends.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Report
from hybridmem.memory import CapacityError, HybridMemory, Sequence
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.testing import HybridAdapter, InjectedError, subjects
from hybridmem.memory.testing.histories import Fed, Parts, head, joined, length_of

KINDS: dict[str, Callable[..., HybridAdapter]] = {
    "hybrid": subjects.hybrid,
    "hybrid, replay": partial(subjects.hybrid, fold="replay"),
    "window": partial(subjects.hybrid, window=7),
    "attention": subjects.attention,
    "recurrent": subjects.recurrent,
    "mamba-1": partial(subjects.family, "mamba1"),
    "mamba-2": partial(subjects.family, "ssd"),
    "delta rule, deferred": partial(subjects.family, "gated_delta", fold="defer"),
    "h2o": partial(subjects.hybrid, "h2o"),
    "quest": partial(subjects.hybrid, "quest"),
    "4 bits": partial(subjects.hybrid, None, "4-bit"),
    "snapkv, 8 bits": partial(subjects.hybrid, "snapkv", "8-bit"),
}
_OPERATIONS_A_ROUND = 400
_MOST_SEQUENCES = 24
_CHECK_EVERY, _REPLAY_EVERY = 25, 20


@dataclass
class Tally:
    """Counts what happened, over all rounds.

    Attributes:
        seconds: processor time of each call that does bookkeeping only, in the order of the calls. Processor time
            leaves other programs out.
        mismatches: a description of each output that differed from that of a sequence that was computed alone.
    """

    operations: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    n_replayed: int = 0
    n_tokens: int = 0
    leaked_bytes: int = 0
    mismatches: list[str] = field(default_factory=list)


class Round:
    """Keeps one memory busy; `live` holds the tokens that each sequence was fed, step by step."""

    def __init__(self, kind: str, seed: int, tally: Tally, folder: Path) -> None:
        self._kind, self._random, self._tally, self._folder = kind, Random(seed), tally, folder
        options: dict[str, Any] = {"budget": "160KiB", "host_budget": 1 << 17, "swap_dir": folder / "swap"}
        self._adapter = KINDS[kind](**options)
        self.memory: HybridMemory = self._adapter.memory
        self._cache = None if self._adapter.agreement.cuts_matter else PrefixCache(self.memory)
        self.live: dict[Sequence, Parts] = {}
        self._marks: dict[Sequence, Parts] = {}
        verbs = {
            "open": 2, "feed": 12, "rollback": 5, "fork": 3, "checkpoint": 2, "return": 2, "reorder": 2, "swap_out": 2,
            "swap_in": 2, "save": 1, "insert": 2, "reuse": 2, "close": 2, "fail": 1,
        }  # fmt: skip
        self._verbs = [verb for verb, weight in verbs.items() for _ in range(weight)]

    def run(self) -> None:
        for number in range(_OPERATIONS_A_ROUND):
            verb = self._random.choice(self._verbs)
            try:
                getattr(self, f"_{verb}")()
                self._tally.operations[verb] += 1
            except CapacityError:
                self._tally.refused[verb] += 1
                self._give_way()
            if number % _CHECK_EVERY == 0:
                self.memory.check()
            if number % _REPLAY_EVERY == 0:
                self._replay_one()
        self._end()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self._tally.seconds.append(time.thread_time() - started)

    def _here(self) -> list[Sequence]:
        return [sequence for sequence in self.live if not sequence.is_swapped]

    def _give_way(self) -> None:
        """Close the oldest sequence or checkpoint, because the budget is full."""
        for held in (self._marks, self.live):
            if held:
                sequence = next(iter(held))
                del held[sequence]
                self.memory.close(sequence)

    # The methods below are the actions of users.

    def _open(self) -> None:
        if len(self.live) < _MOST_SEQUENCES:
            self.live[self.memory.open()] = ()

    def _tokens(self, n: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._adapter.vocab_size) for _ in range(n))

    def _feed(self, *, fails: bool = False) -> None:
        if not (here := self._here()):
            return
        chosen = self._random.sample(here, min(len(here), self._random.randrange(1, 6)))
        requests = {sequence: self._tokens(self._random.choice((1, 1, 2, 5, 17))) for sequence in chosen}
        step = self.memory.step({sequence: list(tokens) for sequence, tokens in requests.items()})
        started = time.thread_time()
        with step:
            began = time.thread_time()
            self._adapter.model(step)
            if fails:
                raise InjectedError
            ended = time.thread_time()
        self._tally.seconds.append(time.thread_time() - ended + began - started)
        for sequence, tokens in requests.items():
            self.live[sequence] = (*self.live[sequence], Fed(tokens))
            self._tally.n_tokens += len(tokens)

    def _fail(self) -> None:
        try:
            self._feed(fails=True)
        except InjectedError:
            pass

    def _rollback(self) -> None:
        if here := self._here():
            sequence = self._random.choice(here)
            to = self._random.randint(self.memory.resume_point(sequence, sequence.horizon), sequence.length)
            if self.memory.can_rollback(sequence, to):
                with self._timed():
                    self.memory.rollback(sequence, to=to)
                self.live[sequence] = head(self.live[sequence], to)

    def _fork(self) -> None:
        if (here := self._here()) and len(self.live) < _MOST_SEQUENCES:
            source = self._random.choice(here)
            with self._timed():
                fork = self.memory.fork(source)
            self.live[fork] = self.live[source]

    def _checkpoint(self) -> None:
        if (here := self._here()) and len(self._marks) < _MOST_SEQUENCES:
            source = self._random.choice(here)
            with self._timed():
                mark = self.memory.checkpoint(source)
            self._marks[mark] = self.live[source]

    def _return(self) -> None:
        pairs = [(s, mark) for s in self._here() for mark in self._marks if self.memory.can_rollback(s, mark)]
        if pairs:
            sequence, mark = self._random.choice(pairs)
            with self._timed():
                self.memory.rollback(sequence, to=mark)
            self.live[sequence] = self._marks[mark]

    def _reorder(self) -> None:
        if len(here := self._here()) > 1:
            chosen = self._random.sample(here, min(4, len(here)))
            moves = {target: self._random.choice(chosen) for target in chosen}
            with self._timed():
                self.memory.reorder(moves)
            self.live |= {target: self.live[source] for target, source in moves.items()}

    def _swap_out(self) -> None:
        if here := self._here():
            try:
                self.memory.swap_out(self._random.choice(here))
            except OSError:
                self._tally.refused["swap_out"] += 1

    def _swap_in(self) -> None:
        if away := [sequence for sequence in self.live if sequence.is_swapped]:
            self.memory.swap_in(self._random.choice(away))

    def _save(self) -> None:
        if here := self._here():
            sequence = self._random.choice(here)
            self.memory.save(sequence, self._folder / "saved.safetensors")
            self.live[self.memory.load(self._folder / "saved.safetensors")] = self.live[sequence]

    def _insert(self) -> None:
        if self._cache is not None and (here := self._here()):
            self._cache.insert(self._random.choice(here))

    def _reuse(self) -> None:
        if self._cache is not None and self.live and len(self.live) < _MOST_SEQUENCES:
            parts = self._random.choice(list(self.live.values()))
            if tokens := joined(parts):
                sequence, _ = self._cache.open([*tokens, 0])
                self.live[sequence] = head(parts, sequence.length)

    def _close(self) -> None:
        held = self._random.choice((self.live, self._marks))
        if held:
            sequence = self._random.choice(list(held))
            del held[sequence]
            with self._timed():
                self.memory.close(sequence)

    # The methods below check the conditions that must always hold.

    def _replay_one(self) -> None:
        """Feed a token, and compare its logits with those of an empty memory that was fed the same."""
        if not (here := self._here()):
            return
        sequence, token = self._random.choice(here), self._tokens(1)
        try:
            with self.memory.step({sequence: list(token)}) as step:
                found = self._adapter.model(step)
        except CapacityError:
            self._give_way()
            return
        self.live[sequence] = (*self.live[sequence], Fed(token))
        alone = KINDS[self._kind](budget="4MiB")
        other, agreement = alone.open(), alone.agreement
        for part in self.live[sequence]:
            # If the split into steps affects outputs, every step must have the same length as in the first run.
            behind = part.taken_back if agreement.cuts_matter else ()
            with alone.memory.step({other: [*part.tokens, *behind]}) as step:
                expected = alone.model(step)
                step.accept({other: len(part.tokens)})
        self._tally.n_replayed += 1
        # Steps of equal lengths give equal bits. Prefixes are not reused, because other sequences may have fed them in
        # other steps.
        has_same_bits = agreement.same_bits and agreement.cuts_matter
        most = 0.0 if has_same_bits else agreement.rounding * max(1.0, float(expected.std()))
        if sequence.tokens.tolist() != other.tokens.tolist() or not torch.allclose(found, expected, rtol=0, atol=most):
            worst = float((found - expected).abs().max())
            self._tally.mismatches.append(f"{self._kind}: {length_of(self.live[sequence])} tokens, off by {worst:.2g}")

    def _end(self) -> None:
        for sequence in (*self.live, *self._marks):
            self.memory.close(sequence)
        if self._cache is not None:
            self._cache.close()
        self.memory.check()
        usage = self.memory.usage()
        self._tally.leaked_bytes += usage.used_bytes + usage.host_bytes + usage.disk_bytes
        self.memory.close_all()


def measure(*, quick: bool, minutes: float = 30.0, seed: int = 0) -> Report:
    """Run rounds until `minutes` of processor time are over, and at least one round of each kind of memory.

    Processor time counts, so that a run on a busy machine does no less work. SIGTERM or Ctrl-C ends the run early, and
    the rounds until then are reported.
    """
    tally, started = Tally(), time.process_time()
    seconds = 60.0 * minutes * (not quick)
    memory_at = [0.0, 0.0]
    n_rounds = 0
    with _ended_by_signals():
        while (elapsed := time.process_time() - started) < seconds or n_rounds < len(KINDS):
            kind = list(KINDS)[n_rounds % len(KINDS)]
            with tempfile.TemporaryDirectory() as folder:
                Round(kind, seed * 1_000_003 + n_rounds, tally, Path(folder)).run()
            memory_at[elapsed > seconds / 10] = _resident_mib()
            n_rounds += 1
    return _report(tally, n_rounds, time.process_time() - started, memory_at)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Leave the `with` block at SIGTERM and SIGINT, even if a shell has set SIGINT to be ignored."""
    former = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def _report(tally: Tally, n_rounds: int, seconds: float, memory_at: list[float]) -> Report:
    tenth = max(1, len(tally.seconds) // 10)
    first, last = (np.percentile(part, 99) * 1e6 for part in (tally.seconds[:tenth], tally.seconds[-tenth:]))
    figures: dict[str, float] = {
        "minutes of the processor": round(seconds / 60, 1),
        "rounds": n_rounds,
        "operations": sum(tally.operations.values()),
        "tokens fed": tally.n_tokens,
        "steps that failed on purpose": tally.operations["fail"],
        "rollbacks and returns": tally.operations["rollback"] + tally.operations["return"],
        "refused for want of room": sum(tally.refused.values()),
        "sequences computed again": tally.n_replayed,
        "of these, that differed": len(tally.mismatches),
        "bytes in use after all was closed": tally.leaked_bytes,
        "p99 of a bookkeeping call in the first tenth, us": float(first),
        "in the last tenth, us": float(last),
        "resident memory after the first tenth, MiB": memory_at[0],
        "at the end, MiB": memory_at[1] or memory_at[0],
    }
    report = Report("soak", notes=tally.mismatches[:20] or ["No sequence differed from one that was computed alone."])
    for name, figure in figures.items():
        report.add("every kind of memory at full budget", {"what": name, "figure": figure})
    return report
