"""Makes processes that are killed at each file call of swapping and saving.

`python -m tests.failure.killed FOLDER STEP` kills them at each STEP-th. They are forks of one that has run no kernel:
threads of kernels do not survive a fork.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from hybridmem.memory import HybridMemory
from hybridmem.memory.testing.toys import Toy
from tests.failure.points import KINDS, call_with

OLD, NEW = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]


def make_memory(folder: Path) -> HybridMemory:
    spec = Toy(recurrent=False).memory_spec
    return HybridMemory(spec, "256KiB", rollback_window=4, page_tokens=4, host_budget=1, swap_dir=folder / "swap")


def writing(folder: Path, tokens: list[int]) -> Callable[[], None]:
    """Return what is killed: a sequence is swapped to a file and back, and saved over an earlier file."""
    model, memory = Toy(recurrent=False), make_memory(folder)
    sequence = memory.open()
    memory.run(model, {sequence: tokens})

    def write() -> None:
        memory.swap_out(sequence)
        memory.swap_in(sequence)
        memory.save(sequence, folder / "saved")

    return write


def main(root: Path, step: int) -> None:
    """Kill at every `step`-th file call, each time in a folder of its own, until one process reaches its end."""
    for n in range(0, 10**6, step):
        folder = root / str(n)
        folder.mkdir()
        child = os.fork()
        if not child:
            writing(folder, OLD)()
            call_with(writing(folder, NEW), KINDS["disk full"], n, kills=True)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
