"""What TESTS=rest tries beside the default run is together the long form: nothing is lost between them."""

from __future__ import annotations

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


def test_each_subject_meets_sequences_in_other_orders_or_every_distance() -> None:
    tests = ("test_64_sequences_shuffled_equal_each_alone", "test_every_distance_at_once")
    shuffled, distances = (subjects_of(test, in_long_form=False) for test in tests)
    assert shuffled | distances == set(SUBJECTS) == subjects_of(tests[0], in_long_form=True)
    assert shuffled != distances
