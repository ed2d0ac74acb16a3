"""Each reader gets a sample of hostile inputs, and those that were once read wrongly.

`FUZZING=N` feeds N inputs to each reader. `python -m fuzzing` does so in processes that may die.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuzzing.running import draw, judge
from fuzzing.targets import TARGETS, make_target
from hybridmem.memory.errors import FormatError, SpecError
from hybridmem.models.loading.gguf.header import Header
from tests.extent import few_cases, pick

N_INPUTS = int(os.environ.get("FUZZING", pick(4, 12)))
SLOW = {"chat", "tokenizer"}
"""Readers that take seconds for the first input: their messages and errors are tested elsewhere."""

FORMER = sorted((Path(__file__).parent.parent / "data" / "fuzzing").glob("*/*"))


@few_cases
@pytest.mark.parametrize("name", [name for name in TARGETS if name not in SLOW or N_INPUTS > 12])
def test_hostile_inputs_are_read_or_refused(name: str, tmp_path: Path) -> None:
    target = make_target(name, tmp_path)
    problems = [judge(target, draw(target, name, 4, number)) for number in range(N_INPUTS)]
    assert [problem for problem in problems if problem is not None] == []


@few_cases
@pytest.mark.parametrize("path", FORMER, ids=lambda path: f"{path.parent.name}-{path.name[:6]}")
def test_former_findings_stay_mended(path: Path, tmp_path: Path) -> None:
    assert judge(make_target(path.parent.name, tmp_path), path.read_bytes()) is None


def test_an_array_that_leads_out_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    """A reader that believes such an array would count to its end."""
    path = tmp_path / "model.gguf"
    key = b"general.architecture"
    value = len(key).to_bytes(8, "little") + key + (9).to_bytes(4, "little") + (4).to_bytes(4, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + value
    path.write_bytes(head + (1 << 60).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="bytes should follow byte"):
        Header(path)
    path.write_bytes(head + (2).to_bytes(8, "little") + bytes(8))
    Header(path)


class _Reader:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def read(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "is_finding"),
    [(None, False), (FormatError("no"), False), (SpecError("no"), False), (KeyError("x"), True), (MemoryError(), True)],
)
def test_what_counts_as_a_finding(error: BaseException | None, is_finding: bool) -> None:
    assert (judge(_Reader(error), b"") is not None) == is_finding  # type: ignore[arg-type]
