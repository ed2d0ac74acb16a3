"""A part of every product of a test's parameters with the subjects, unless CONFORMANCE=full, or a test is asked for by
its whole name. One promise is tested once: models run what a model can break, and toys what only a memory can.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from zlib import crc32

import pytest

from tests.subjects import IS_FULL, SUBJECTS, Subject, make_subject

_MOST = 2
"""Combinations of a test's own parameters that a subject meets; one if they are distances to go back, `k`."""

_OF_MODELS = {
    "test_abort_inside_a_layer",
    "test_64_sequences_shuffled_equal_each_alone",
    "test_every_distance_at_once",
    "test_every_split_of_a_prompt_equals_one_shot",
}
"""What a model can break whose kinds of memory the toys and the families have."""
_WHOLE_MODELS = {"model:bamba defer", "model:deepseek-v3", "model:gemma2", "model:rwkv7"}
"""Models that run every test: for deferred states, latent attention, soft caps, and values of a first layer."""


@pytest.fixture(scope="session", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Each model that the conformance suite runs on."""
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `is_chosen` does not choose."""
    if IS_FULL or any("[" in argument for argument in config.args):
        return
    dropped = {item for item in items if is_ours(item) and not is_chosen(item)}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def is_ours(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent and "subject" in getattr(item, "fixturenames", ())


def is_chosen(item: pytest.Item) -> bool:
    """Whether the test can say more of the subject than of the toys; then a part of the combinations.

    That part is evenly spread, from another one on for each subject and for tests of other names.

    So each combination meets some subjects in each test. All distances to go back meet each subject in
    `test_every_distance_at_once`; two of the six sizes of the window do in `test_any_window_reaches_that_far`.
    """
    subject, test = item.callspec.params["subject"], item.originalname  # type: ignore[attr-defined]
    if subject.startswith("model:") and subject not in _WHOLE_MODELS and test not in _OF_MODELS:
        return False
    if "k" in item.callspec.params and not subject.startswith("toy"):  # type: ignore[attr-defined]
        return False
    nth, n = 0, 1
    for name, values in (mark.args for mark in item.iter_markers("parametrize")):
        nth += n * list(values).index(item.callspec.params[name])  # type: ignore[attr-defined]
        n *= len(values)
    start = crc32(test.encode()) + SUBJECTS.index(subject)
    return (nth + start) % ceil(n / (1 if "k" in item.callspec.params else _MOST)) == 0
