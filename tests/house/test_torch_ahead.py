"""Torch's library is linked while Python imports other modules, and torch is afterwards what it always is."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from hybridmem import torch_ahead
from tests.extent import only_in_long

PROGRAM = """
import sys, threading
from hybridmem import torch_ahead
torch_ahead.begin("transformers", "a_module_that_is_not_installed")
assert "transformers" in sys.modules and "torch" not in sys.modules
(thread,) = [thread for thread in threading.enumerate() if thread.name == "torch-ahead"] or [None]
if thread:
    thread.join()
assert "libtorch_cpu" in open("/proc/self/maps").read()
import torch
assert torch.ones(2, 2).matmul(torch.ones(2, 2)).sum() == 8
"""


@only_in_long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux links libraries ahead")
def test_the_library_is_linked_before_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_done_when_torch_is_imported_already() -> None:
    before = threading.active_count()
    torch_ahead.begin("a_module_that_is_not_installed")
    assert threading.active_count() == before
