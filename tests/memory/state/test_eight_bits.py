"""The tests say how many bytes states of 8 bits take, how near to float32 they stay, and which memories refuse them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory, MemorySpec, SpecError
from hybridmem.memory.kernels.eight_bits import EIGHT_BITS, encode, read_states
from hybridmem.memory.recurrences.registry import FAMILIES
from tests.extent import few_cases, one_in

N_TOKENS = 90
WINDOW = 16


class Layer:
    """Is a model of one recurrence, whose rows are the same for each position."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        spec, self.recurrence = FAMILIES[family].example(generator)
        self.memory_spec = MemorySpec(((spec,),), 9, dtype)
        self.rows = (torch.rand(N_TOKENS, *spec.row_shape, generator=generator) * 2 - 1).to(dtype)

    def feed(self, memory: HybridMemory, sequence: Any, *lengths: int) -> Tensor:
        """Feed as many tokens in each step, and return the outputs of all."""
        outputs = []
        for n in lengths:
            rows = self.rows[sequence.length : sequence.length + n]
            with memory.step({sequence: [1] * n}) as step:
                outputs.append(step.recur(0, rows, self.recurrence).clone())
        return torch.cat(outputs)


def memory_of(layer: Layer, state_dtype: str | None, **options: Any) -> HybridMemory:
    options = {"rollback_window": WINDOW, "poison": True} | options
    return HybridMemory(layer.memory_spec, "1MiB", state_dtype=state_dtype, **options)


TAKE_8_BITS = ("gated_delta", "kimi_delta", "linear_attention", "mamba1", "rwkv7", "ssd")


@few_cases
@pytest.mark.parametrize("kernels", ["", "reference"])
@pytest.mark.parametrize("state_dtype", one_in(2, EIGHT_BITS))
@pytest.mark.parametrize("family", one_in(2, TAKE_8_BITS))
def test_outputs_stay_near_and_files_forks_and_reruns_have_the_same_bits(
    family: str, state_dtype: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", kernels)
    layer = Layer(family)
    exact, memory = memory_of(layer, None, fold="defer"), memory_of(layer, state_dtype)
    assert memory.fold == "defer"
    steps = (37, *[1] * 20, 3, *[1] * 10)
    expected = layer.feed(exact, exact.open(), *steps)
    sequence = memory.open()
    found = layer.feed(memory, sequence, *steps)
    assert torch.allclose(found[:37], expected[:37], atol=1e-5), "nothing is rounded before the first fold"
    apart = float((found - expected).square().mean().sqrt() / expected.std())
    assert 1e-6 < apart < (0.02 if state_dtype == "int8" else 0.06)
    again = memory.open()
    assert torch.equal(layer.feed(memory, again, *steps), found), "the same tokens round in the same way"
    fork = memory.fork(sequence)
    memory.save(sequence, tmp_path / "own.safetensors")
    other = memory_of(layer, state_dtype)
    loaded = other.load(tmp_path / "own.safetensors")
    memory.swap_out(again)
    memory.swap_in(again)
    later = layer.feed(memory, sequence, *[1] * 20)
    for who, owner in ((fork, memory), (again, memory), (loaded, other)):
        assert torch.equal(layer.feed(owner, who, *[1] * 20), later)
    memory.rollback(fork, to=80)
    back = layer.feed(memory, fork, *[1] * 10)
    assert float((back - later[-10:]).abs().max() / later.std()) < (0.05 if state_dtype == "int8" else 0.15)
    memory.check()
    with pytest.raises(Exception, match=r"states\[-?\d+\].dtype|other layers"):
        exact.load(tmp_path / "own.safetensors")


@pytest.mark.parametrize("state_dtype", EIGHT_BITS)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {*TAKE_8_BITS}))
def test_families_with_one_number_a_channel_or_with_a_stabiliser_are_refused(family: str, state_dtype: str) -> None:
    spec = Layer(family).memory_spec.layers[0][0]
    if family in ("short_conv", "token_shift"):
        assert Layer(family).memory_spec.with_state_dtype(state_dtype).layers[0][0] == spec, "rows keep their dtype"
        return
    with pytest.raises(SpecError, match=f"{state_dtype}.* is not for {family}: .*'bfloat16'"):
        memory_of(Layer(family), state_dtype)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"fold": "keep"}, "fold='keep'.*fold points"),
        ({"fold": "replay"}, "fold='replay'.*fold points"),
        ({"rollback_window": 0}, "rollback_window=0.*16 or more"),
        ({"rollback_window": 8}, "rollback_window=8 .*every 4 tokens.*'bfloat16'"),
    ],
)
def test_memories_that_would_round_too_often_are_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(SpecError, match=names):
        memory_of(Layer("ssd"), "int8", **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_states_fold_at_fold_points_on_every_device(device: str) -> None:
    spec = replace(Layer("ssd").memory_spec, device=torch.device(device))
    assert HybridMemory(spec, "1MiB", device="meta", state_dtype="int8", rollback_window=WINDOW).fold == "defer"


@pytest.mark.parametrize("dtype", EIGHT_BITS.values(), ids=str)
def test_rounding_has_no_direction_and_is_a_function_of_the_position(dtype: torch.dtype) -> None:
    """A number between two codes comes back as itself on average.

    NaN, zeros and tiny numbers come back too.
    """
    state = torch.linspace(-3, 3, 128).repeat(4, 1)
    state[:, 0] = 3.17
    no_place, once = torch.zeros(1, dtype=torch.int64), encode(state, dtype, 5)
    assert torch.equal(once, encode(state, dtype, 5)) and not torch.equal(once, encode(state, dtype, 6))

    def read(position: int, x: Tensor = state) -> Tensor:
        return read_states(encode(x, dtype, position).flatten().view(dtype), no_place, (1, *x.shape), 0.0)[0, 0]

    step = 3.17 / 127 if dtype == torch.int8 else 3.17 / 14
    errors = torch.stack([read(16 * i) - state for i in range(1000)])
    assert float(errors.abs().max()) <= step * 1.0001
    assert float(errors.mean(0).abs().max()) < 6 * 0.5 * step / 1000**0.5, "six standard deviations of a mean"
    odd = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [float("nan"), 1.0], [3e38, 1.0]])
    back = read(3, odd)
    assert torch.equal(back[0], odd[0]) and torch.allclose(back[1], odd[1]) and back[2].isnan().all()
    assert torch.isclose(back[3, 0], odd[3, 0])
