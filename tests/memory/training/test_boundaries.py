"""What is kept between chunks fits a budget, and gradients stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridmem.memory import CapacityError
from hybridmem.memory.eviction import H2O, EvictionPolicy
from hybridmem.memory.training import Tape
from hybridmem.models import Trainable
from tests.memory.training import peers
from tests.models.checkpoints import draw_tokens

TOKENS = draw_tokens(60)


def gradients(
    name: str, policy: EvictionPolicy | None = None, **options: Any
) -> tuple[dict[str, torch.Tensor], Tape, dict[str, int]]:
    """Return gradients of a text of fifteen chunks, the tape, and its usage after the forward."""
    model = peers.random_model(name)
    own = Trainable.of(model).model()
    own.memory_spec = own.memory_spec.with_policy(policy)
    tape = Tape(own, chunk_tokens=4, **options)
    text = tape.open()
    loss = -tape.run({text: TOKENS})[text].mean()
    usage = tape.usage()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, tape, usage


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, rtol=1e-4, atol=1e-6 * float(grad.abs().max())), name


def test_files_hold_what_the_budget_does_not(tmp_path: Path) -> None:
    expected, _, whole = gradients("jamba")
    found, tape, usage = gradients("jamba", budget=whole["device"] // 3, folder=tmp_path)
    assert usage["device"] <= whole["device"] // 3
    assert usage["device"] + usage["files"] == whole["device"]
    assert_same(found, expected)
    assert tape.usage() == {"device": 0, "host": 0, "files": 0, "computed again": 0}
    assert not [*tmp_path.iterdir()]


POLICY = H2O(6, recent=2, every=4)


def test_files_hold_rows_that_a_policy_keeps(tmp_path: Path) -> None:
    expected, _, whole = gradients("jamba", POLICY, rollback_window=3)
    found, tape, usage = gradients("jamba", POLICY, rollback_window=3, budget=whole["device"] // 3, folder=tmp_path)
    assert usage["device"] <= whole["device"] // 3
    assert usage["device"] + usage["files"] == whole["device"]
    assert_same(found, expected)
    assert tape.usage() == {"device": 0, "host": 0, "files": 0, "computed again": 0}


def test_states_are_computed_again_from_rows_that_a_policy_keeps() -> None:
    expected, _, whole = gradients("jamba", POLICY, rollback_window=3)
    found, tape, usage = gradients("jamba", POLICY, rollback_window=3, budget=whole["device"] * 3 // 4)
    assert usage["device"] <= whole["device"] * 3 // 4
    assert tape.usage()["computed again"] > 0
    assert_same(found, expected)


def test_states_are_computed_again_where_nothing_else_has_room() -> None:
    expected, _, whole = gradients("mamba")
    found, tape, usage = gradients("mamba", budget=whole["device"] // 3)
    assert usage["device"] <= whole["device"] // 3
    assert tape.usage()["computed again"] > 0
    assert_same(found, expected)


def test_nothing_is_computed_twice_for_states_of_one_stretch() -> None:
    """Each chunk's states are computed again at most once."""
    _, _, whole = gradients("mamba")
    _, tape, _ = gradients("mamba", budget=whole["device"] // 3)
    assert tape.usage()["computed again"] < 15


def test_rows_that_fit_nowhere_are_refused_and_nothing_changes() -> None:
    model = peers.random_model("jamba")
    _, _, whole = gradients("jamba")
    tape = Tape(Trainable.of(model).model(), chunk_tokens=4, budget=whole["device"] // 3)
    text = tape.open()
    tape.run({text: TOKENS[:4]})
    before = tape.usage()
    with pytest.raises(CapacityError, match="give the tape a larger budget, a host_budget, or a folder"):
        tape.run({text: TOKENS[4:]})
    assert (text.length, tape.usage()) == (4, before)
