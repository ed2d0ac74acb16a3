"""If their parent has computed nothing, children of `os.fork` compute like any process.

Otherwise they refuse by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.extent import only_in_long

ROOT = Path(__file__).parents[3]

FORKING = """
    import os, signal, sys
    import torch
    from hybridmem.memory import HybridMemory, SpecError
    from hybridmem.memory.blocks import forked_process
    from hybridmem.memory.kernels import rms_norm
    from hybridmem.models import load_model
    from tests.toy import Toy

    toy, limit_seconds = Toy(), 100
    forked_process._TRIAL_SECONDS = 2.0

    def compute():
        memory = HybridMemory(toy.memory_spec, "1MiB")
        return memory.run(toy, {memory.open(): [1] * 40})

    def is_refused(why, use):
        try:
            use()
        except SpecError as error:
            assert why in str(error) and "os.fork" in str(error) and "'spawn'" in str(error), error
            return True

    def fork(check):
        child = os.fork()
        if not child:
            signal.alarm(limit_seconds)  # the system ends a child that waits for threads
            os._exit(0 if check() else 1)
        assert os.waitpid(child, 0)[1] == 0, check

    def refuses_all():
        dry = HybridMemory(toy.memory_spec, "1MiB", device="meta")
        dry.open(), dry.usage()
        return all(is_refused("run kernels", use) for use in (
            compute, lambda: load_model("embedded"), lambda: rms_norm(torch.ones(1, 2), None, 1.0),
        ))

    def compute_and_fork():
        compute(), fork(refuses_all)
        return compute() is not None

    fork(compute_and_fork)
    torch.ones(1 << 20).exp_()
    fork(lambda: is_refused("torch's threads", compute))
    compute()
    fork(refuses_all)
    compute()
    print("done")
"""


@only_in_long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads survive a fork, or there is none")
def test_a_forked_child_computes_or_refuses() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(FORKING)]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"}
    environment.pop("HYBRID_MEMORY_KERNELS", None)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
