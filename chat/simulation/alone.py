"""Serves the same users one at a time, to find answers that sharing the memory has changed."""

from __future__ import annotations

from dataclasses import replace

from hybridmem.chat.simulation.report import Report
from hybridmem.chat.simulation.simulation import Setup, Simulation
from hybridmem.chat.simulation.workload import Family, Workload


def serve_alone(setup: Setup, family: Family, user: str) -> dict[int, str]:
    """Return the replies to a user who is served alone, with the same messages, a fresh memory, no cache and no swap.

    A branch is served from the beginning of the conversation from which it grew.

    Returns:
        The replies to questions, by the index in `family` of the event that was answered.
    """
    kept = [i for i in _path_to(family, user) if family[i].action not in ("branch", "pause")]
    events = [replace(family[i], user=user, at=float(n)) for n, i in enumerate(kept)]
    alone = replace(setup, grid_tokens=None, swap_dir=None, host_budget=None, speed=None, is_checked=True)
    report = Simulation(alone, [events]).run()
    return {kept[answer.index]: answer.answer for answer in report.tally.answers}


def compare_alone(setup: Setup, workload: Workload, report: Report, *, which: str = "wrong") -> None:
    """Add to a report's answers what the model replies to the same question when it serves that user alone.

    Args:
        which: "wrong" compares the conversations with a wrong answer. "all" compares all of them, and "none" none.
    """
    answers = report.tally.answers
    wanted = {(a.family, a.user) for a in answers if which == "all" or (which == "wrong" and not a.is_right)}
    alone: dict[tuple[int, int], str] = {}
    for number, family in enumerate(workload) if wanted else ():
        for user in sorted(name for n, name in wanted if n == number):
            alone |= {(number, i): text for i, text in serve_alone(setup, family, user).items()}
    report.tally.answers = [
        replace(a, alone=alone.get((a.family, a.index)) if (a.family, a.user) in wanted else None) for a in answers
    ]
    report.n_checked_alone = sum(a.alone is not None for a in report.tally.answers)


def _path_to(family: Family, user: str) -> list[int]:
    """Return the indices of all events in a user's conversation, including those before it branched."""
    own = [i for i, event in enumerate(family) if event.user == user]
    born = next((i for i, event in enumerate(family) if event.into == user), None)
    return own if born is None else [i for i in _path_to(family, family[born].user) if i < born] + own
