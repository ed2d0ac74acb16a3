"""Makes processes that are killed at each file call of compiling a kernel and keeping it on disk.

`python -m tests.failure.killed_cache FOLDER STEP` kills them at each STEP-th, each with a cache of its own, and lets a
second process of each cache compile the same. They are forks of one that has compiled nothing with this cache.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numba

from hybridmem.memory.kernels.cpu.compiled import NotCompiledError, cache_folder, compiled, on_a_miss
from tests.failure.points import KINDS, call_with


@compiled()
def add_one(x: int) -> int:
    """Add one. This is the kernel."""
    return x + 1


def run_in_child(call: object) -> int:
    """Run a function in a forked child, and return its exit status."""
    child = os.fork()
    if not child:
        os._exit(int(call()))  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def compile_it() -> int:
    """Return 0 if the kernel is right."""
    return int(add_one(3) != 4)


def read_it() -> int:
    """Return 0 if the kernel is on disk, whole, and right."""
    try:
        with on_a_miss("skip"):
            return compile_it()
    except NotCompiledError:
        return 2


def age() -> None:
    """Make everything in the cache an hour old."""
    folder = cache_folder()
    for path in () if folder is None or not folder.exists() else folder.iterdir():
        os.utime(path, (0, 0))


def main(root: Path, step: int) -> None:
    """Kill at every `step`-th file call. Write to the file `ends` what each of the caches then has."""
    lines = []
    numba.njit(lambda x: x)(1)  # This sets up numba once, and the children inherit it.
    for n in range(0, 10**6, step):
        os.environ["HYBRID_MEMORY_CACHE"] = str(root / str(n))
        killed = run_in_child(lambda n=n: call_with(lambda: add_one(3), KINDS["disk full"], n, kills=True).result != 4)
        was_kept = run_in_child(read_it) == 0
        age()
        again, read = run_in_child(compile_it), run_in_child(read_it)
        folder = cache_folder()
        assert folder is not None
        n_files = len(list(folder.iterdir()))
        lines.append(f"{killed} {int(was_kept)} {again} {read} {n_files}")
        if killed == 0:
            break
    (root / "ends").write_text("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
