"""The tests of CUDA kernels run in Triton's interpreter, in a process of their own, because the environment chooses it.

By default they take a fortieth of the parameters, and with CONFORMANCE=full all of them. So does `TRITON_INTERPRET=1
pytest tests/kernels_cuda`, which `.ci/run` runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.subjects import IS_FULL

ROOT = Path(__file__).parent.parent.parent.parent.parent


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {"KERNELS_CUDA": "" if IS_FULL else "part", **os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/kernels_cuda"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
