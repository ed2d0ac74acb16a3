"""Measures which lines and branches of `memory/` the default tests run on the CPU, folder by folder.

Bodies of kernels are compiled, by numba or by Triton, so no Python runs in them: they are left out. Tests of kernels
    compare each kernel with plain torch. pyproject.toml, `[tool.coverage.report]`, lists what is left out, with
    reasons.
`memory/kernels/cuda` is counted separately: without a GPU, only Triton's interpreter runs its kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import Report

ROOT = Path(__file__).parent.parent
_APART = "kernels/cuda"


def covered(tests: Iterable[str], out: Path | None) -> Report:
    """Run tests in one process, and report what they cover. The folder `out` adds up the coverage of several calls."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = (Path(folder) if out is None else out.absolute()) / "coverage"
        environment = os.environ | {"COVERAGE_FILE": str(data)}

        def run(*arguments: str, check: bool = True) -> int:
            command = [sys.executable, "-m", "coverage", *arguments]
            return subprocess.run(command, cwd=ROOT, env=environment, check=check).returncode

        status = run("run", "-m", "pytest", "-n", "0", "-q", *tests, check=False)
        run("combine", "--append")
        run("json", "-q", "-o", f"{data}.json")
        found = report(json.loads(Path(f"{data}.json").read_text()))
        if status:
            found.notes.append(f"Some of these tests failed (pytest ended with {status}).")
        return found


def report(measured: dict[str, Any]) -> Report:
    """Return a report: a table of folders, the total without CUDA kernels, and the files with most uncovered lines."""
    rooms: dict[str, Counter[str]] = {}
    missing = dict[str, int]()
    for name, file in measured["files"].items():
        path = Path(name).relative_to("hybridmem/memory")
        counts = Counter({key: n for key, n in file["summary"].items() if key in _COUNTS})
        room = _APART if path.is_relative_to(_APART) else path.parts[0] if len(path.parts) > 1 else "flat files"
        rooms.setdefault(room, Counter()).update(counts)
        if room != _APART:
            rooms.setdefault("all but kernels/cuda", Counter()).update(counts)
            missing[name] = counts["missing_lines"] + counts["missing_branches"]
    found = Report("coverage")
    for room, n in sorted(rooms.items(), key=lambda item: (item[0] == "all but kernels/cuda", item[0])):
        covered = n["covered_lines"] + n["covered_branches"]
        all_of_them = n["num_statements"] + n["num_branches"]
        row = {"room": room, "lines": n["num_statements"], "branches": n["num_branches"]}
        not_run = {"lines not run": n["missing_lines"], "branches not taken": n["missing_branches"]}
        shares = {"% of branches": 100 * n["covered_branches"] / max(1, n["num_branches"])}
        found.add("coverage of memory/", row | not_run | shares | {"% of both": 100 * covered / max(1, all_of_them)})
    worst = sorted(missing.items(), key=lambda item: -item[1])[:12]
    found.notes = ["Most is missing in " + ", ".join(f"{name} ({n})" for name, n in worst if n) + "."]
    return found


_COUNTS = {
    "num_statements", "num_branches", "covered_lines", "covered_branches", "missing_lines", "missing_branches",
}  # fmt: skip
