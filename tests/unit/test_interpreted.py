"""The CUDA kernels' tests in Triton's interpreter: in three processes of their own, for the environment chooses it.

Half of their parameters, unless CONFORMANCE=full; `TRITON_INTERPRET=1 pytest tests/kernels_cuda` runs all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.subjects import IS_FULL

ROOT = Path(__file__).parent.parent.parent
FILES = sorted(map(str, (ROOT / "tests" / "kernels_cuda").glob("test_*.py")))


@pytest.mark.parametrize("files", [FILES[i::3] for i in range(3)], ids=["first third", "second third", "last third"])
def test_kernels_in_the_interpreter(files: list[str]) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {"KERNELS_CUDA": "" if IS_FULL else "half", **os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
