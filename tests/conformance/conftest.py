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
from tests.extent import IS_LONG, pick
from tests.subjects import IS_FULL, SUBJECTS, Subject, make_subject

_MOST = pick(1, 2)
"""Combinations of a test's own parameters that a subject meets; promises of the kit meet one subject of a kind all."""

_OF_ALL = {
    "test_a_promise_of_the_kit_is_kept",
    "test_64_sequences_shuffled_equal_each_alone",
    "test_every_distance_at_once",
    *(["test_every_split_of_a_prompt_equals_one_shot"] if IS_LONG else []),
}
"""What a model, a recurrence or a policy can break whose kinds of memory other subjects have. By default, prompts of
models are split by `tests/models/test_parity.py` alone.
"""
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
"""Subjects that add no kind of memory to the others': they run the tests above."""
_EACH_KIND = {"toy", "toy-attention", "toy-recurrent", "toy-sparse", "toy-quest", "toy-4-bit", "jamba", "mamba replay"}
_OF_PLUGINS = {
    f"family:{name}" for name, own in FAMILIES.items() if not own.example.__module__.startswith("hybridmem.")
}
"""These and one subject for each kind of memory run every test. The rest, mostly pairs that differ in one choice, share
the other tests between them, every second subject each; which half it is differs from test to test."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Let each test meet the subjects about which it can say more than about others."""
    if "subject" in metafunc.fixturenames:
        test = metafunc.function.__name__
        is_whole = is_everything(metafunc.config) or test in _OF_ALL
        rest = [name for name in SUBJECTS if name not in _ALIKE and name not in _EACH_KIND]
        chosen = _EACH_KIND | _OF_PLUGINS | set(rest[crc32(test.encode()) % 2 :: 2])
        subjects = [name for name in SUBJECTS if is_whole or name in chosen]
        metafunc.parametrize("subject", subjects, indirect=True, scope="session")


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Return each model on which the conformance suite runs."""
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def is_everything(config: pytest.Config) -> bool:
    return IS_FULL or any("[" in argument for argument in config.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `is_chosen` does not choose."""
    if is_everything(config):
        return
    dropped = {item for item in items if is_ours(item) and not is_chosen(item)}
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def is_ours(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent and "subject" in getattr(item, "fixturenames", ())


def is_chosen(item: pytest.Item) -> bool:
    """Return whether a combination of a test's own parameters is in the part that the subject meets.

    That part is evenly spread, and begins elsewhere for each subject and for tests of other names. So each combination
    meets some subjects in each test. For example, in `test_any_window_reaches_that_far` each subject meets one of the
    six window sizes, and two in the long form.
    """
    subject, test = item.callspec.params["subject"], item.originalname  # type: ignore[attr-defined]
    if "promise" in item.callspec.params and subject in _EACH_KIND | _OF_PLUGINS:  # type: ignore[attr-defined]
        return True
    nth, n = 0, 1
    for name, values in (mark.args for mark in item.iter_markers("parametrize")):
        nth += n * list(values).index(item.callspec.params[name])  # type: ignore[attr-defined]
        n *= len(values)
    start = crc32(test.encode()) + SUBJECTS.index(subject)
    return (nth + start) % ceil(n / _MOST) == 0
