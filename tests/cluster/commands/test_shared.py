"""A folder of stored sessions must be the same on all machines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridmem.cluster.commands.shared import Machine, check_shared
from hybridmem.memory import SpecError


def machine_with(root: Path) -> Machine:
    """Return a machine whose files are below another root."""

    def call(work: Callable[[str], bool], path: str) -> bool:
        return work(f"{root}{path}")

    return call


def test_a_folder_that_a_machine_does_not_see_is_refused(tmp_path: Path) -> None:
    first, other = machine_with(tmp_path / "a"), machine_with(tmp_path / "b")
    check_shared("/sessions", [first, first])
    with pytest.raises(SpecError, match=r"/sessions is not the same folder on all machines: 1 of 3"):
        check_shared("/sessions", [first, first, other])
    assert not list((tmp_path / "a" / "sessions").iterdir())
