"""The deferred write computes what the eager one does: else its time says nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.deferred import Work
from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels import Erase, StateSlots, reference
from tests.tolerances import assert_kernel_close


@pytest.mark.parametrize("erases", [False, True])
def test_deferred_is_eager(erases: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.deferred.N_BYTES", 1)
    n, n_rows = 3, 7
    work = Work(n, n_rows, 6, 3, 5, 8, erases)
    late = work.deferred()
    # The same history, written at each token: u_j is what was written, so nothing is erased on the way.
    heads = 2
    host = torch.device("cpu")
    cu_rows = place(np.arange(n + 1) * n_rows, host)
    slots = StateSlots(cu_rows, work.flat, work.offsets[0], work.offsets[0], work.shape, 0.0)
    k, u, log_decay = (t.flatten(0, 1) for t in (work.old_k, work.old_u, work.old_log_decay))
    reference.matrix_scan(torch.zeros_like(k), k, u, log_decay, None, slots)
    erase = (
        Erase(work.k, work.k.repeat_interleave(heads, 1) * -work.beta[:, :, None], after_decay=True) if erases else None
    )
    slots = slots._replace(cu_rows=place(np.arange(n + 1), host))
    expected = reference.matrix_scan(work.q, work.k, work.v * work.beta[:, :, None], work.log_decay, erase, slots)
    assert_kernel_close(late, expected)
    assert len(work.offsets) == 1
