"""Where the CUDA kernels' tests run: on a GPU if one is here, else in Triton's interpreter, on the CPU.

The interpreter is chosen by the environment before triton is imported, so it needs a process of its own: `tests/unit/test_interpreted.py`
starts one for each file here. Elsewhere these files are not collected.
"""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_DEVICE = torch.cuda.is_available() and not IS_INTERPRETED

collect_ignore_glob = [] if IS_INTERPRETED or HAS_DEVICE else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_DEVICE:
        for item in items:
            if "kernels_cuda" in item.path.parts:
                item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_DEVICE else "cpu")
