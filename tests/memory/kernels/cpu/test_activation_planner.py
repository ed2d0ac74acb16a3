"""A recorded step knows its own memory, and moves only what was declared to be an address in it."""

from __future__ import annotations

import pytest
import torch

from hybridmem.memory.kernels.cpu.activation_planner import ActivationPlanner
from hybridmem.memory.kernels.cpu.launches import Address


def test_an_address_is_declared_and_never_guessed() -> None:
    """A number that happens to lie in the step's memory refuses the recording.

    A number that is declared as an address is moved.
    """
    planner, result = ActivationPlanner(), torch.arange(8.0)
    planner.add([result], [])
    inside = result.data_ptr() + 8
    assert planner.key_of(Address(inside)) == ("address", (0, 8))
    with pytest.raises(ValueError, match="not declared"):
        planner.key_of(inside)
    (call, *_), output, n_bytes = planner.pack([(print, (Address(inside), 7))], result)
    assert call[1] == (output.data_ptr() + 8, 7) and n_bytes >= 32
