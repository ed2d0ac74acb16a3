"""Chooses a part of the products of tests' parameters with subjects.

All of them run with CONFORMANCE=full, or if a test is named in full. Each promise is tested once: models run what a
model can break, and toys run what only a memory can break.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path
from zlib import crc32

import pytest

from hybridmem.memory.recurrences import FAMILIES
from tests.extent import IS_LONG, IS_REST
from tests.subjects import IS_FULL, SUBJECTS, Subject, make_subject

_OF_ALL_IN_LONG = {
    "test_64_sequences_shuffled_equal_each_alone",
    "test_every_distance_at_once",
    "test_a_promise_of_the_kit_is_kept",
    "test_every_split_of_a_prompt_equals_one_shot",
}
"""What a model, a recurrence or a policy can break whose kinds of memory other subjects have."""
_WHOLE_MODELS = {"model:bamba defer", "model:deepseek-v3", "model:gemma2", "model:rwkv7"}
"""Models that run every test: for deferred states, latent attention, soft caps, and values of a first layer."""
_ALIKE = {
    *(name for name in SUBJECTS if name.startswith("model:") and name not in _WHOLE_MODELS),
    *(f"family:{name}" for name in ("kimi_delta", "linear_attention", "mamba1", "mlstm", "rwkv4", "rwkv7")),
    "family:gated_pool",
    "family:short_conv",
    "family:ssd",
    "family:mamba1 defer",
    "toy-attention-pyramid",
    "toy-attention-recent-2-bit",
    "toy-knorm-float8",
    "toy-scissorhands",
    "toy-snapkv-8-bit",
}
"""Subjects that add no kind of memory to the others': they meet the tests above alone."""
_EACH_KIND = {"toy", "toy-attention", "toy-recurrent", "toy-sparse", "toy-quest", "toy-4-bit", "jamba", "mamba replay"}
_OF_PLUGINS = {
    f"family:{name}" for name, own in FAMILIES.items() if not own.example.__module__.startswith("hybridmem.")
}
"""These and one subject for each kind of memory run every test, and by default no others do. In the long form, every
second of the rest meets a test, other ones in each test: most of them are pairs that differ in one choice.
"""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let each test meet the subjects about which it can say more than about others."""
    if "subject" in metafunc.fixturenames:
        chosen = subjects_of(metafunc.function.__name__, in_long_form=IS_LONG)
        subjects = SUBJECTS if is_everything(metafunc.config) else [name for name in SUBJECTS if name in chosen]
        metafunc.parametrize("subject", subjects, indirect=True, scope="session")


def subjects_of(test: str, *, in_long_form: bool) -> set[str]:
    if not in_long_form:
        return _EACH_KIND | _OF_PLUGINS
    if test in _OF_ALL_IN_LONG:
        return set(SUBJECTS)
    rest = [name for name in SUBJECTS if name not in _ALIKE and name not in _EACH_KIND]
    return _EACH_KIND | _OF_PLUGINS | set(rest[crc32(test.encode()) % 2 :: 2])


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Return each model on which the conformance suite runs."""
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def is_everything(config: pytest.Config) -> bool:
    return IS_FULL or any("[" in argument for argument in config.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_everything(config):
        return
    dropped = {item for item in items if item.path.parent == Path(__file__).parent and is_left_out(item)}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def is_left_out(item: pytest.Item) -> bool:
    """Return whether this run drops the test: it is not chosen, or with TESTS=rest the default run has tried it."""
    if "subject" not in getattr(item, "fixturenames", ()):
        return IS_REST and item.get_closest_marker("few_cases") is None
    return not is_chosen(item, in_long_form=IS_LONG) or (IS_REST and is_chosen(item, in_long_form=False))


def is_chosen(item: pytest.Item, *, in_long_form: bool) -> bool:
    """Return whether the subject is one of the test's, and meets this combination of the test's own parameters.

    A subject meets one of a test's combinations, and in the long form two. They are evenly spread, and begin elsewhere
    for each subject and for tests of other names. So each combination meets some subjects in each test. For example, in
    `test_any_window_reaches_that_far` each subject meets one of the six window sizes, and two in the long form. One
    subject of each kind meets all promises of the kit.
    """
    subject, test = item.callspec.params["subject"], item.originalname  # type: ignore[attr-defined]
    if subject not in subjects_of(test, in_long_form=in_long_form):
        return False
    if "promise" in item.callspec.params and subject in _EACH_KIND | _OF_PLUGINS:  # type: ignore[attr-defined]
        return True
    nth, n = 0, 1
    for name, values in (mark.args for mark in item.iter_markers("parametrize")):
        nth += n * list(values).index(item.callspec.params[name])  # type: ignore[attr-defined]
        n *= len(values)
    start = crc32(test.encode()) + SUBJECTS.index(subject)
    return (nth + start) % ceil(n / (2 if in_long_form else 1)) == 0
