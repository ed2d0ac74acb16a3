"""Draws a sample of mutants of the core, and reports how many the tests kill, and which survive."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.mutants.operators import Mutant, mutants_of
from benchmarks.mutants.running import ROOT, Run, import_ahead, run_tests

_PROMISES = ("tests/conformance/test_sequences.py", "tests/conformance/test_rollback.py")
_MEMORY = ("tests/unit/test_hybrid.py", "tests/unit/test_coordinator.py", *_PROMISES)
_PREFIX = "tests/unit/prefix"
FILES: dict[str, tuple[str, ...]] = {
    "memory/hybrid.py": (*_MEMORY, "tests/unit/test_wrong_calls.py", "tests/unit/storage", "tests/unit/sequences"),
    "memory/coordinator.py": (*_MEMORY, "tests/unit/sequences", "tests/unit/storage", "tests/conformance/test_away.py"),
    "memory/recurrent_state.py": (*_PROMISES, "tests/unit/test_hybrid.py", "tests/unit/storage"),
    "memory/state/tails.py": (*_PROMISES, "tests/unit/test_hybrid.py", "tests/unit/storage", "tests/unit/sequences"),
    "memory/attention_cache.py": (
        *_PROMISES,
        "tests/unit/test_hybrid.py",
        "tests/unit/storage",
        "tests/unit/sequences",
    ),
    "memory/blocks/arena.py": ("tests/unit/blocks", "tests/unit/test_hybrid.py"),
    "memory/sequences/ledger.py": (*_MEMORY, "tests/unit/sequences", "tests/unit/storage"),
    "memory/prefix/cache.py": (_PREFIX,),
    "memory/prefix/kept.py": (_PREFIX,),
    "memory/prefix/lookup.py": (_PREFIX,),
    "memory/prefix/outside.py": (_PREFIX,),
    "memory/prefix/radix_tree.py": (_PREFIX,),
    "memory/prefix/victims.py": (_PREFIX,),
}
"""Files that are mutated, and the tests that look at each: those first that see most."""


def kill(n_mutants: int, seed: int, files: list[str] | None, out: Path | None) -> bool:
    """Run the tests of each mutant of a sample; return True if 85 % were killed at least.

    Args:
        files: those alone; all of FILES unless given.
        out: a folder for mutants.json, which is written after each: a run that is ended there goes on from it.
    """
    known = {path: mutants_of(path, (ROOT / path).read_text()) for path in files or FILES}
    all_of_them = [mutant for own in known.values() for mutant in own]
    chosen = Random(seed).sample(all_of_them, min(n_mutants, len(all_of_them)))
    place = None if out is None else out / "mutants.json"
    ended: dict[str, Any] = json.loads(place.read_text()) if place is not None and place.exists() else {}
    import_ahead()
    usual: dict[str, Run] = {}
    for mutant in chosen:
        name = f"{mutant.path}:{mutant.line} #{mutant.number} {mutant.what}"
        if name not in ended:
            most = 3 * _usual(usual, mutant.path).seconds + 10
            run = run_tests(FILES[mutant.path], mutant, most)
            ended[name] = {"path": mutant.path, "status": run.status}
            print(f"{'survived' if run.status == 0 else 'killed'} {run.seconds:.0f} s: {name}", flush=True)
            if place is not None:
                place.write_text(json.dumps(ended, indent=1))
    return _report(ended, known)


def _usual(usual: dict[str, Run], path: str) -> Run:
    """Run the tests of a file as it is, once. Raises RuntimeError if they fail."""
    if path not in usual:
        run = usual[path] = run_tests(FILES[path], None, 3000)
        if run.status:
            raise RuntimeError(f"the tests of {path} fail without a mutant ({run.status=})")
    return usual[path]


def _report(ended: dict[str, Any], known: dict[str, list[Mutant]]) -> bool:
    total, killed = Counter[str](), Counter[str]()
    for result in ended.values():
        total[result["path"]] += 1
        killed[result["path"]] += result["status"] != 0
    print("| file | mutants | tried | killed |\n|---|---:|---:|---:|")
    for path, own in known.items():
        print(f"| `{path}` | {len(own):,} | {total[path]:,} | {killed[path]:,} |")
    n, n_killed = total.total(), killed.total()
    print(f"| all | {sum(map(len, known.values())):,} | {n:,} | {n_killed:,} ({100 * n_killed / max(1, n):.1f} %) |\n")
    print("\n".join(f"- {name}" for name, result in ended.items() if result["status"] == 0))
    return n_killed >= 0.85 * n
