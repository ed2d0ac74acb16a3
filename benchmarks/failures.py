"""Fails every point of every public call in turn, and prints how many there are and what did not survive."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.failure.points import KINDS
from tests.failure.scenes import CALLS, SET_UPS
from tests.failure.survive import Survey, survey


def failures(set_ups: Iterable[str], every: int, out: Path | None) -> bool:
    """Print the table of points by call and kind; return True if everything has survived."""
    torch.set_num_threads(1)
    found = survey(set_ups, every=every, tell=print)
    print(table(found))
    if out is not None:
        points = [[*key, n] for key, n in found.points.items()]
        (out / "failures.json").write_text(json.dumps({"points": points, "faults": found.faults}, indent=1))
    return not found.faults


def table(found: Survey) -> str:
    """Return points by call (rows) and kind (columns), in Markdown, and each fault."""
    lines = [f"| call | {' | '.join(KINDS)} | all |", "|---|" + "---:|" * (len(KINDS) + 1)]
    for call in CALLS:
        counts = [found.points[call, kind] for kind in KINDS]
        lines.append(f"| {call} | {' | '.join(f'{n:,}' for n in counts)} | {sum(counts):,} |")
    by_kind = Counter[str]()
    for (_, kind), n in found.points.items():
        by_kind[kind] += n
    n_all = sum(by_kind.values())
    lines.append(f"| all | {' | '.join(f'{by_kind[kind]:,}' for kind in KINDS)} | {n_all:,} |")
    lines.append(f"\n{n_all:,} points failed, {found.survived:,} survived; {len(SET_UPS)} set-ups are known.")
    return "\n".join([*lines, *(f"- {fault}" for fault in found.faults)])
