"""Runs the tests of the core against mutants of the core, and reports how many mutants they kill, and which survive.

It draws a sample of each file's mutants and forks a process for each mutant. CONTRIBUTING.md says why mutmut and
cosmic-ray are not used.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.mutants.operators import Mutant, mutants_of
from benchmarks.mutants.patching import import_instead, replace
from benchmarks.mutants.reaching import Reach, read_reach, watch
from benchmarks.mutants.running import OPTIONS, ROOT, Collected, Task, import_ahead, in_forks, run_items

_WIDE = (
    "tests/conformance/test_sequences.py", "tests/conformance/test_rollback.py", "tests/conformance/test_away.py",
    "tests/conformance/test_lossy_bodies.py", "tests/memory/eviction", "tests/memory/storage",
    "tests/memory/test_step.py",
    "tests/memory/sequences/test_interrupts.py", "tests/memory/views/test_usage.py",
)  # fmt: skip
"""Tests of all kinds of memories, which take minutes: `--wide` asks them too."""
_MEMORY = (
    "tests/memory/test_hybrid.py", "tests/memory/test_coordinator.py", "tests/memory/test_integrity.py",
    "tests/memory/test_wrong_calls.py", "tests/memory/test_capacity.py", "tests/memory/state/test_tails.py",
    "tests/memory/test_attention_cache.py", "tests/memory/sequences/test_drop.py",
    "tests/memory/sequences/test_lifetime.py", "tests/memory/sequences/test_room.py",
    "tests/memory/sequences/test_token_buffer.py", "tests/memory/sequences/test_batch.py",
    "tests/memory/sequences/test_ledger.py", "tests/memory/prefix/test_kept.py",
    "tests/memory/storage/test_files.py", "tests/memory/attention/test_host_pages.py",
    "tests/memory/attention/test_selection.py",
)  # fmt: skip
_PREFIX = ("tests/memory/prefix", "tests/chat/engine/test_step_plan.py")
FILES: dict[str, tuple[str, ...]] = {
    "memory/hybrid.py": _MEMORY,
    "memory/coordinator.py": _MEMORY,
    "memory/recurrent_state.py": _MEMORY,
    "memory/state/tails.py": _MEMORY,
    "memory/attention_cache.py": _MEMORY,
    "memory/blocks/arena.py": ("tests/memory/blocks", "tests/memory/test_hybrid.py", "tests/memory/test_integrity.py"),
    "memory/sequences/ledger.py": _MEMORY,
    "memory/prefix/cache.py": _PREFIX,
    "memory/prefix/digests.py": _PREFIX,
    "memory/prefix/kept.py": _PREFIX,
    "memory/prefix/lookup.py": _PREFIX,
    "memory/prefix/outside.py": _PREFIX,
    "memory/prefix/radix_tree.py": _PREFIX,
    "memory/prefix/saved.py": _PREFIX,
    "memory/prefix/eviction_rank.py": _PREFIX,
}
"""Files that are mutated, and the tests that look at each."""
_MUST_BE_IMPORTED = 71


@dataclass(frozen=True)
class Choice:
    """Says which mutants are tried, and how.

    Attributes:
        files: the files whose mutants are tried.
        sample, seed: how many mutants of each file are tried, drawn by the seed; None tries all.
        seconds: the processor time that all tests of one mutant may take together; slower tests are left out.
        n_jobs: how many mutants are tried at a time.
        wide: whether the tests of all kinds of memories run too, which take minutes.
        again: whether mutants that survived in an earlier run are tried again.
    """

    files: tuple[str, ...]
    sample: int | None
    seed: int
    seconds: float
    n_jobs: int
    wide: bool
    again: bool


def kill(choice: Choice, out: Path | None) -> bool:
    """Try mutants; return True if at least 85 % of them were killed.

    Args:
        out: a folder for the report and two more files. From mutants_tried.json an interrupted run continues. With
            tests_that_run.json, only tests that have changed are traced again.
    """
    known = {path: mutants_of(path, (ROOT / path).read_text()) for path in FILES}
    place = None if out is None else out / "mutants_tried.json"
    tried: dict[str, str] = json.loads(place.read_text()) if place is not None and place.exists() else {}
    names = {_name(mutant) for own in known.values() for mutant in own}
    tried = {name: how for name, how in tried.items() if name in names}  # Other names are mutants of an older source.
    # Mutants come in random order, from all files in turn, so that an interrupted run has tried a fair sample of each
    # file.
    drawn = [Random(choice.seed).sample(known[path], len(known[path]))[: choice.sample] for path in choice.files]
    wanted = [mutant for turn in zip_longest(*drawn) for mutant in turn if mutant is not None]
    left = [m for m in wanted if (how := tried.get(_name(m))) is None or (choice.again and how != "killed")]
    for name, how in _ended(left, choice, None if out is None else out / "tests_that_run.json"):
        tried[name] = how
        print(f"{how}: {name}", flush=True)
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(json.dumps(tried, indent=1) + "\n")
    return _report(known, tried, out)


def _name(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.line} #{mutant.number} {mutant.what}"


def _ended(mutants: list[Mutant], choice: Choice, reach_file: Path | None) -> Iterator[tuple[str, str]]:
    """Generate the names of mutants that were tried, each with "killed", "survived" or "not reached" (by any test)."""
    if not mutants:
        return
    import_ahead()
    tests = [test for path in choice.files for test in FILES[path]] + [*(_WIDE if choice.wide else ())]
    with tempfile.TemporaryDirectory() as folder:
        reach_file, ended_file = reach_file or Path(folder) / "reach.json", Path(folder) / "ended.jsonl"
        ended_file.touch()
        child = os.fork()
        if not child:
            _session(list(dict.fromkeys(tests)), mutants, choice, reach_file, ended_file)
        yield from _followed(child, ended_file)
        reach = read_reach(reach_file)
        ended = {name for name, _ in map(json.loads, ended_file.read_text().splitlines())}
        last = (_import_task(mutant, reach, choice) for mutant in mutants if _name(mutant) not in ended)
        for name, run in in_forks(last, choice.n_jobs):
            yield name, "killed" if run.status else "survived"


def _followed(child: int, place: Path) -> Iterator[tuple[str, str]]:
    """Generate the lines that a child process writes, until it ends. Raises RuntimeError if the process failed."""
    with place.open() as lines:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            for line in lines:
                name, how = json.loads(line)
                yield name, how
            if ended:
                break
            time.sleep(0.5)
    if status:
        raise RuntimeError(f"the session of tests ended with {os.waitstatus_to_exitcode(status)}")


def _session(tests: list[str], mutants: list[Mutant], choice: Choice, reach_file: Path, ended_file: Path) -> None:
    """Collect tests, trace what they run, try each mutant whose code can be replaced, and then end the process."""
    import pytest
    from numba.np.ufunc import parallel

    def then(session: Any) -> None:
        if parallel._is_initialized:
            raise RuntimeError("a file of tests starts numba's threads when it is imported; they do not survive a fork")
        for _, run in in_forks(iter([Task("", lambda: watch(session, choice.files, reach_file), 3600)]), 1):
            if run.status:
                raise RuntimeError(f"the tests without a mutant ended with {run.status}")
        reach = read_reach(reach_file)
        items = {item.nodeid: item for item in session.items}
        if failed := sorted(items.keys() - reach.seconds.keys()):
            print(f"left out, because they fail here without a mutant: {', '.join(failed)}", flush=True)
        sources = {path: (ROOT / path).read_text() for path in choice.files}

        def tasks() -> Iterator[Task]:
            for mutant in mutants:
                chosen = reach.tests_of(mutant, sources[mutant.path], choice.seconds)
                if not chosen:
                    write(_name(mutant), "not reached")
                    continue
                own = [items[test] for test in chosen]
                seconds = sum(reach.seconds[test] for test in chosen)
                yield Task(_name(mutant), lambda own=own, mutant=mutant: attempt(own, mutant), 3 * seconds + 10)

        def attempt(own: list[Any], mutant: Mutant) -> int:
            return run_items(session, own) if replace(mutant) else _MUST_BE_IMPORTED

        def write(name: str, how: str) -> None:
            with ended_file.open("a") as file:
                file.write(json.dumps([name, how]) + "\n")

        for path in choice.files:
            some = next(m for m in mutants_of(path, sources[path]))
            own = [items[test] for test in reach.tests_of(some, sources[path], choice.seconds)]
            for _, run in in_forks(iter([Task("", lambda own=own: run_items(session, own), 3600)]), 1):
                if run.status:
                    raise RuntimeError(f"the tests of {path} fail in this order without a mutant")
        for name, run in in_forks(tasks(), choice.n_jobs):
            if run.status != _MUST_BE_IMPORTED:
                write(name, "killed" if run.status else "survived")

    status = 1
    try:
        status = int(pytest.main([*OPTIONS, *tests], plugins=[Collected(then)]))
    finally:
        os._exit(0 if status in (0, 5) else 1)


def _import_task(mutant: Mutant, reach: Reach, choice: Choice) -> Task:
    chosen = reach.tests_of(mutant, (ROOT / mutant.path).read_text(), choice.seconds)

    def attempt() -> int:
        import_instead(mutant)
        import pytest

        return int(pytest.main([*OPTIONS, "-x", *chosen]))

    return Task(_name(mutant), attempt, 3 * sum(reach.seconds[test] for test in chosen) + 20)


def _report(known: dict[str, list[Mutant]], tried: dict[str, str], out: Path | None) -> bool:
    """Print the table of files and the surviving mutants, and write both to a folder."""
    # This import comes late, because it loads torch and modules that the forks must not have loaded.
    from benchmarks.harness import Report

    found = Report("mutants")
    total, killed = Counter[str](), Counter[str]()
    for path, own in known.items():
        ways = Counter(tried[_name(mutant)] for mutant in own if _name(mutant) in tried)
        for name in (path, "all"):
            total[name] += ways.total()
            killed[name] += ways["killed"]
        if ways:
            _add(found, path, len(own), ways.total(), ways["killed"], ways["not reached"])
    n_known = sum(len(own) for path, own in known.items() if total[path])
    _add(found, "all", n_known, total["all"], killed["all"], sum(how == "not reached" for how in tried.values()))
    for name, how in sorted(tried.items()):
        if how != "killed":
            found.notes.append(f"- {how}: `{name}`")
    found.show()
    if out is not None:
        found.write(out)
    return killed["all"] >= 0.85 * total["all"]


def _add(found: Any, name: str, n_known: int, n_tried: int, n_killed: int, n_unreached: int) -> None:
    row = {"file": name, "mutants": n_known, "tried": n_tried, "killed": n_killed, "no test reaches": n_unreached}
    low, high = _wilson(n_killed, n_tried)
    sure = "all tried" if n_tried == n_known else f"{100 * low:.1f} to {100 * high:.1f}"
    found.add("mutants", row | {"%": 100 * n_killed / max(1, n_tried), "95 % interval": sure})


def _wilson(n_killed: int, n_tried: int) -> tuple[float, float]:
    """Return the bounds of a share with 95 % confidence (Wilson, 1927)."""
    if not n_tried:
        return 0.0, 1.0
    z2, share = 1.96**2, n_killed / n_tried
    middle = (share + z2 / (2 * n_tried)) / (1 + z2 / n_tried)
    half = (z2 * (share * (1 - share) / n_tried + z2 / (4 * n_tried**2))) ** 0.5 / (1 + z2 / n_tried)
    return middle - half, middle + half
