"""Libraries compute prompts where they can: they are called with what they expect, and their results are right.

If a user forbids it, they are not called. Stand-ins compute what the libraries document, and refuse what they refuse.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.kernels import chosen_kernels, cuda, reference
from hybridmem.memory.kernels.cuda import libraries, prompts
from tests.kernels_cuda.test_states import moved
from tests.memory.kernels.test_kernels import Slots
from tests.tolerances import assert_kernel_close

LENGTHS = (6, 5, 9)
calls: list[str] = []


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """Stand for causal-conv1d 1.6.1, with states and channels last."""
    calls.append("causal_conv1d")
    (_, n_channels, _), width = x.shape, weight.shape[1]
    assert seq_idx is None and final_states_out is None and return_final_states and activation in (None, "silu")
    assert x.stride(1) == 1 and n_channels % 8 == 0 and x.stride(2) % 8 == 0 and x.stride(0) % 8 == 0
    assert 2 <= width <= 4 and weight.shape == (n_channels, width) and (bias is None or bias.stride(-1) == 1)
    assert (
        initial_states.shape == (1, n_channels, width - 1)
        and initial_states.stride(1) == 1
        and initial_states.dtype == x.dtype
    )
    seen = torch.cat([initial_states, x], dim=2)
    out = F.conv1d(seen, weight[:, None], bias, groups=n_channels)
    return F.silu(out) if activation else out, seen[:, :, -(width - 1) :]


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):
    """Stand for mamba-ssm 2.3, whose states start from zeros."""
    calls.append("mamba_ssm")
    assert z is None and delta_bias is None and not delta_softplus and return_last_state
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in (u, delta, A, B, C, D))
    assert A.shape == (u.shape[1], B.shape[1]) and B.shape == C.shape == (1, A.shape[1], u.shape[2])
    h, outputs = torch.zeros(1, *A.shape, device=A.device), list[Tensor]()
    for t in range(u.shape[2]):
        step = delta[:, :, t, None]
        h = torch.exp(step * A) * h + step * B[:, None, :, t] * u[:, :, t, None]
        outputs.append((h * C[:, None, :, t]).sum(-1) + D * u[:, :, t])
    return torch.stack(outputs, dim=2), h


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, function in (
        ("causal_conv1d", causal_conv1d_fn), ("causal_conv1d_cuda", None), ("selective_scan_cuda", None),
        ("mamba_ssm", None), ("mamba_ssm.ops", None), ("mamba_ssm.ops.selective_scan_interface", selective_scan_fn),
    ):  # fmt: skip
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        if function is not None:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(prompts, "LEAST_TOKENS", 5)
    monkeypatch.delenv("HYBRID_MEMORY_KERNELS", raising=False)
    libraries._installed.cache_clear()
    calls.clear()
    yield
    libraries._installed.cache_clear()


@pytest.mark.parametrize("activation", [True, False])
def test_convolution(device: torch.device, activation: bool) -> None:
    slots, n = Slots((3, 16), LENGTHS, initial=0.5), sum(LENGTHS)
    rows, weight, bias = torch.randn(n, 24), torch.randn(4, 16), torch.randn(16)
    expected, ends = reference.causal_conv(rows, weight, bias, own := slots.fresh(), activation=activation), own.flat
    ours = moved(slots.fresh(), device)
    actual = cuda.causal_conv(*moved((rows, weight, bias), device), ours, activation=activation)
    assert calls == ["causal_conv1d"] * 3
    assert_kernel_close(actual.cpu(), expected)
    assert torch.equal(ours.flat.cpu().nan_to_num(), ends.nan_to_num())


def scan_inputs(n_channels: int = 12, n_states: int = 4) -> tuple[Tensor, ...]:
    n = sum(LENGTHS)
    x, dt, b, c = (
        torch.randn(n, n_channels),
        torch.randn(n, n_channels),
        torch.randn(n, n_states),
        torch.randn(n, n_states),
    )
    return x, dt, torch.randn(n_channels), b, c, -torch.rand(n_states, n_channels), torch.randn(n_channels)


def test_selective_scan_starts_from_any_state(device: torch.device) -> None:
    slots, inputs = Slots((4, 12), LENGTHS), scan_inputs()
    expected, ends = reference.selective_scan(*inputs, own := slots.fresh()), own.flat
    ours = moved(slots.fresh(), device)
    actual = cuda.selective_scan(*moved(inputs, device), ours)
    assert calls == ["mamba_ssm"] * 3
    assert_kernel_close(actual.cpu(), expected)
    assert_kernel_close(ours.flat.cpu().nan_to_num(), ends.nan_to_num())


def test_what_a_library_does_not_take_is_ours(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = torch.randn(sum(LENGTHS), 9, device=device)
    cuda.causal_conv(odd, torch.randn(3, 9, device=device), None, moved(Slots((2, 9), LENGTHS).fresh(), device))
    short = torch.randn(4, 8, device=device)
    cuda.causal_conv(short, torch.randn(3, 8, device=device), None, moved(Slots((2, 8), (4,)).fresh(), device))
    assert not calls
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "triton")
    cuda.selective_scan(*moved(scan_inputs(), device), moved(Slots((4, 12), LENGTHS).fresh(), device))
    assert not calls, "the choice was overridden"


def test_the_choice_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "cuda")
    found = chosen_kernels("cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    assert (found["causal_conv"], found["selective_scan"]) == (
        "cuda, prompts by causal_conv1d",
        "cuda, prompts by mamba_ssm",
    )
    assert found["matrix_scan"] == "cuda"
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "triton")
    assert chosen_kernels("cuda" if torch.cuda.is_available() else "cpu", torch.float32)["causal_conv"] == "cuda"
