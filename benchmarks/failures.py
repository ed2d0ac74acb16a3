"""Lets every failure point of every public call fail in turn, and counts the points and the faults that this shows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.failure.points import KINDS
from tests.failure.survive import EVERYTHING, survey

FILE = "failures.json"


def failures(set_ups: Iterable[str], every: int, out: Path | None) -> bool:
    """Print the table of failure points by call and kind; return True if the memory survived every failure.

    Args:
        out: a folder whose FILE keeps the latest results of each set-up. The table then shows all set-ups in that file.
    """
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        if (out / FILE).exists():
            results = json.loads((out / FILE).read_text())
    for set_up in set_ups:
        found = survey([set_up], every=every, tell=print)
        points = [[*key, n] for key, n in found.points.items()]
        results[set_up] = {"every": every, "points": points, "survived": found.survived, "faults": found.faults}
        if out is not None:
            (out / FILE).write_text(json.dumps(results, indent=1))
    print(table(results))
    return not any(result["faults"] for result in results.values())


def table(results: dict[str, Any]) -> str:
    """Return Markdown: failure points by call (rows) and kind (columns), points by set-up, and all faults."""
    lines = [f"| call | {' | '.join(KINDS)} | all |", "|---|" + "---:|" * (len(KINDS) + 1)]
    points, by_kind = Counter[tuple[str, str]](), Counter[str]()
    for result in results.values():
        for call, kind, n in result["points"]:
            points[call, kind] += n
            by_kind[kind] += n
    calls = dict.fromkeys(call for set_up in EVERYTHING.values() for call in set_up.calls)
    for call in calls:
        counts = [points[call, kind] for kind in KINDS]
        if sum(counts):
            lines.append(f"| {call} | {' | '.join(f'{n:,}' for n in counts)} | {sum(counts):,} |")
    lines.append(f"| all | {' | '.join(f'{by_kind[kind]:,}' for kind in KINDS)} | {sum(by_kind.values()):,} |")
    lines.append("\nWithout a point: " + ", ".join(c for c in calls if not any(points[c, k] for k in KINDS)) + ".\n")
    lines += ["| set-up | points | survived |", "|---|---:|---:|"]
    for name, result in results.items():
        note = "" if result["every"] == 1 else f" (each {result['every']}th)"
        lines.append(f"| {name}{note} | {sum(p[2] for p in result['points']):,} | {result['survived']:,} |")
    survived = sum(result["survived"] for result in results.values())
    lines.append(
        f"\n{sum(by_kind.values()):,} points failed, {survived:,} survived; {len(EVERYTHING)} set-ups are known."
    )
    return "\n".join([*lines, *(f"- {fault}" for result in results.values() for fault in result["faults"])])
