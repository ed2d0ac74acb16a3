"""What TESTS=rest tries beside the default run is together the long form: nothing is lost between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import extent
from tests.conformance.conftest import subjects_of
from tests.subjects import SUBJECTS

BY_DEFAULT, IN_LONG_FORM = ["jamba", "mamba"], ["jamba", "jamba-tied", "mamba", "mamba-wide"]


def names(monkeypatch: pytest.MonkeyPatch, *, is_long: bool, is_rest: bool) -> list[str]:
    monkeypatch.setattr(extent, "IS_LONG", is_long)
    monkeypatch.setattr(extent, "IS_REST", is_rest)
    return extent.named(BY_DEFAULT, IN_LONG_FORM)


def test_the_rest_and_the_default_names_are_those_of_the_long_form(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(monkeypatch, is_long=False, is_rest=False) == BY_DEFAULT
    assert names(monkeypatch, is_long=True, is_rest=False) == IN_LONG_FORM
    assert names(monkeypatch, is_long=True, is_rest=True) == ["jamba-tied", "mamba-wide"]


@pytest.mark.parametrize("test", ["test_abort", "test_out_of_reach", "test_every_distance_at_once"])
def test_subjects_of_the_default_run_are_some_of_the_long_form(test: str) -> None:
    by_default, in_long_form = (subjects_of(test, in_long_form=is_long) for is_long in (False, True))
    assert by_default <= in_long_form and "toy" in by_default


def test_each_subject_meets_what_it_can_break_in_the_long_form() -> None:
    for test in ("test_64_sequences_shuffled_equal_each_alone", "test_a_promise_of_the_kit_is_kept"):
        assert subjects_of(test, in_long_form=True) == set(SUBJECTS)
    assert subjects_of("test_abort", in_long_form=True) != subjects_of("test_speculative_rounds", in_long_form=True)


@dataclass(frozen=True)
class Case:
    """Stands for a test that pytest has collected."""

    path: Path
    originalname: str
    name: str
    has_few_cases: bool = True

    def get_closest_marker(self, name: str) -> bool | None:
        assert name == "few_cases"
        return self.has_few_cases or None


@pytest.mark.parametrize("imports", ["", "from tests.extent import pick"])
def test_the_default_run_and_the_rest_are_all_cases(
    imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with a long form is run whole once more, because its tests try more than they did."""
    file = tmp_path / "test_file.py"
    file.write_text(imports)
    many = {Case(file, "test_many", f"test_many[{i}]") for i in range(9)}
    others = {Case(file, "test_other", f"test_other[{i}]") for i in range(9)}
    whole = {Case(file, "test_whole", f"test_whole[{i}]", has_few_cases=False) for i in range(9)}
    tests = sorted(many | others | whole, key=str)

    def run(*, is_long: bool, is_rest: bool) -> set[Case]:
        monkeypatch.setattr(extent, "IS_LONG", is_long)
        monkeypatch.setattr(extent, "IS_REST", is_rest)
        return set(tests) - extent.left_out(tests)  # type: ignore[arg-type, operator]

    by_default = run(is_long=False, is_rest=False)
    assert len(by_default & many) == len(by_default & others) == extent.N_FEW and by_default >= whole
    assert {case.name[-3:] for case in by_default & many} != {case.name[-3:] for case in by_default & others}
    assert run(is_long=True, is_rest=False) == set(tests)
    assert run(is_long=True, is_rest=True) == (set(tests) if imports else set(tests) - by_default)
