"""Chooses where the tests of CUDA kernels run: on a GPU if there is one, else in Triton's interpreter on the CPU.

The environment chooses the interpreter before triton is imported, so it needs a process of its own.
`tests/memory/kernels/cuda/test_interpreted.py` starts one. Without it, these files are not collected.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from types import FunctionType

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_DEVICE = torch.cuda.is_available() and not IS_INTERPRETED

_LONG = {
    "test_a_batch_without_whole_spans_chooses_nothing",
    "test_a_captured_step_counts_what_it_used",
    "test_a_model_is_run_once_a_step",
    "test_a_real_model_is_recorded",
    "test_a_row_whose_key_is_nan_is_chosen",
    "test_a_row_with_a_number_that_is_none_becomes_nan",
    "test_a_run_that_is_longer_than_its_ring",
    "test_deferred_states",
    "test_drafts_a_step_that_fails_and_two_steps_at_once",
    "test_channels_of_8_bits",
    "test_groups_are_chosen_without_a_recording",
    "test_memories_are_as_in_plain_torch",
    "test_replays_are_the_steps_they_stand_for",
    "test_replays_read_pages_where_they_are",
    "test_scores_in_parts_are_as_at_once",
    "test_states_of_8_bits",
    "test_the_best_spans_are_chosen",
    "test_what_cannot_be_recorded_runs_as_ever",
    "test_what_a_recording_that_failed_left_behind_is_not_used",
}
"""Left out as well, because each takes seconds in the interpreter. Other tests compare their kernels with plain torch;
recordings of whole steps are compared with these steps in `.ci/run`, which runs every test in the interpreter."""

_NTH = 40
"""One of so many parameters is kept."""

collect_ignore_glob = [] if IS_INTERPRETED or HAS_DEVICE else ["test_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need a GPU. KERNELS_CUDA=part keeps a part of each test's parameters and nothing `_LONG`."""
    own = [item for item in items if "kernels_cuda" in item.path.parts]
    if HAS_DEVICE:
        for item in own:
            item.add_marker("gpu")
    if os.environ.get("KERNELS_CUDA") == "part":
        nth = Counter[str]()
        dropped = list[pytest.Item]()
        for item in own:
            name = item.nodeid.partition("[")[0]
            if nth[name] % _NTH or name.rpartition("::")[2] in _LONG:
                dropped.append(item)
            nth[name] += 1
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_DEVICE else "cpu")


@pytest.fixture(scope="session", autouse=True)
def patched_once() -> Iterator[None]:
    """Patch Triton's language once for each kernel.

    The interpreter would search the whole language again for each call of a device function.
    """
    if not IS_INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_once(function: FunctionType) -> object:
        modules = {
            module.__name__ for module in (tl, tl.core) if any(x is module for x in function.__globals__.values())
        }
        if patched and modules <= patched:
            return interpreter._LangPatchScope()  # There is nothing to restore.
        scope, is_kernel = patch(function), not patched
        patched.update(modules)
        if is_kernel:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", patch_once)
        yield
