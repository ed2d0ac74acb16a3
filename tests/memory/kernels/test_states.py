"""Kernels of matrix-valued and channel-wise states are compared with their twins, and the twins with transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from hybridmem.memory import HybridMemory, MemorySpec, SpecError, StepError
from hybridmem.memory.kernels import Erase, Kernels, StateSlots, cpu, reference, rms_norm
from hybridmem.memory.recurrences import (
    FAMILIES,
    CausalConv,
    DeltaRuleShape,
    ShortConv,
    SSDShape,
    register_family,
    rwkv4_spec,
    short_conv_spec,
)
from tests.extent import few_cases, one_in
from tests.memory.kernels.test_kernels import CHANNELS, LENGTHS, Slots
from tests.tolerances import assert_kernel_close
from tests.toy import FamilyToy

N = sum(LENGTHS)


def make_matrix_scan(
    n_heads: int,
    n_groups: int,
    n_rows: int,
    n_columns: int,
    *,
    by_column: bool = False,
    erases: bool = False,
    after_decay: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Erase | None]:
    """Return q, k and v as parts of one wider row, as projections do. Keys have length 1, so that erasing is stable."""
    sizes = [n_groups * n_columns, n_groups * n_columns, n_heads * n_rows]
    q, k, v = torch.split(torch.randn(N, sum(sizes) + 3)[:, 3:], sizes, dim=1)
    q, v = q.unflatten(1, (n_groups, n_columns)), v.unflatten(1, (n_heads, n_rows))
    k = F.normalize(k.unflatten(1, (n_groups, n_columns)), dim=-1)
    decay = -torch.rand(N, n_heads, n_columns) if by_column else -torch.rand(N, n_heads)
    b = -torch.rand(N, n_heads, 1) * k.repeat_interleave(n_heads // n_groups, dim=1)
    return q, k, v, decay, Erase(k, b, after_decay) if erases else None


SHAPES = [(1, 1, 1, 1), (3, 1, 5, 48), (6, 3, 20, 7), (2, 2, 64, 64), (4, 2, 130, 16), (1, 1, 131, 80)]
MODES = [{}, {"by_column": True}, {"erases": True}, {"erases": True, "after_decay": True, "by_column": True}]


@few_cases
@pytest.mark.parametrize("mode", MODES, ids=lambda m: " ".join(m) or "plain")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matrix_scan_agrees_with_its_twin(shape: tuple[int, int, int, int], mode: dict[str, bool]) -> None:
    n_heads, _, n_rows, n_columns = shape
    slots, inputs = Slots((n_heads, n_rows, n_columns)), make_matrix_scan(*shape, **mode)
    expected = reference.matrix_scan(*inputs, slots.fresh())
    expected_ends = slots.ends()
    slots.assert_only_targets_changed()
    assert_kernel_close(cpu.matrix_scan(*inputs, slots.fresh()), expected)
    assert_kernel_close(slots.ends(), expected_ends)
    slots.assert_only_targets_changed()


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_matrix_scan_is_the_gated_delta_rule_of_transformers(kernels: Kernels) -> None:
    q, k, v, decay, _ = make_matrix_scan(6, 3, 20, 16)
    beta, slots = torch.rand(N, 6), Slots((6, 20, 16))
    erase = Erase(k, -beta[:, :, None] * k.repeat_interleave(2, dim=1), after_decay=True)
    actual = torch.split(
        kernels.matrix_scan(q * 16**-0.5, k, v * beta[:, :, None], decay, erase, slots.fresh()), LENGTHS
    )
    for i, parts in enumerate(zip(*(torch.split(t, LENGTHS) for t in (q, k, v, decay, beta)), strict=True)):
        start = slots.start(i).transpose(1, 2)[None].clone()
        y, end = torch_recurrent_gated_delta_rule(
            *(t[None] for t in parts), initial_state=start, output_final_state=True
        )
        assert_kernel_close(actual[i], y[0])
        assert_kernel_close(slots.ends()[i], end[0].transpose(1, 2))


def make_linear_scan(n_channels: int) -> tuple[Tensor, Tensor]:
    return torch.randn(N, n_channels), torch.rand(N, n_channels)


@pytest.mark.parametrize("n_channels", CHANNELS)
def test_linear_scan_agrees_with_its_twin(n_channels: int) -> None:
    slots, inputs = Slots((n_channels,)), make_linear_scan(n_channels)
    expected = reference.linear_scan(*inputs, slots.fresh())
    expected_ends = slots.ends()
    slots.assert_only_targets_changed()
    assert_kernel_close(cpu.linear_scan(*inputs, slots.fresh()), expected)
    assert_kernel_close(slots.ends(), expected_ends)
    slots.assert_only_targets_changed()


def test_linear_scan_by_hand() -> None:
    slots = Slots((1,), lengths=(3,), initial=2.0)
    slots.sources = [-1]
    y = reference.linear_scan(torch.tensor([[1.0], [0.0], [5.0]]), torch.tensor([[0.5], [0.5], [0.0]]), slots.fresh())
    assert y.flatten().tolist() == [2.0, 1.0, 5.0]
    assert slots.ends().item() == 5.0


class WkvSlots:
    """Holds the three states of the channels, at places of their own."""

    def __init__(self, n_channels: int) -> None:
        self.parts = [Slots((n_channels,), initial=initial) for initial in (0.0, 0.0, -1e38)]
        for source in set(self.parts[1].sources) - {-1}:
            self.parts[1].before[source : source + n_channels].abs_()

    def fresh(self, only: int | None = None) -> tuple[StateSlots, ...]:
        return tuple(part.fresh(only) for part in self.parts)


def make_wkv(n_channels: int) -> tuple[Tensor, ...]:
    """Return inputs with k of any size. Exponents must not overflow."""
    return (
        40 * torch.randn(N, n_channels),
        torch.randn(N, n_channels),
        -torch.rand(n_channels) * 3,
        torch.randn(n_channels),
    )


def make_gates(n_heads: int) -> tuple[Tensor, Tensor]:
    """Return exponents so far apart that exp would overflow, and logarithms of decays."""
    return 30 * torch.randn(N, n_heads), -40 * torch.rand(N, n_heads)


@pytest.mark.parametrize("n_channels", CHANNELS)
def test_wkv4_agrees_with_its_twin(n_channels: int) -> None:
    slots, inputs = WkvSlots(n_channels), make_wkv(n_channels)
    expected = reference.wkv4(*inputs, slots.fresh())
    expected_ends = [part.ends() for part in slots.parts]
    assert_kernel_close(cpu.wkv4(*inputs, slots.fresh()), expected)
    for part, end in zip(slots.parts, expected_ends, strict=True):
        assert_kernel_close(part.ends(), end)
        part.assert_only_targets_changed()


def test_wkv4_is_that_of_transformers() -> None:
    k, v, decay, first = make_wkv(24)
    slots = WkvSlots(24)
    actual = torch.split(reference.wkv4(k, v, decay, first, slots.fresh()), LENGTHS)
    for i, (own_k, own_v) in enumerate(zip(torch.split(k, LENGTHS), torch.split(v, LENGTHS), strict=True)):
        starts = [part.start(i)[None].clone() for part in slots.parts]
        y, ends = rwkv_linear_attention_cpu(
            torch.log(-decay), first, own_k[None], own_v[None], state=starts, return_state=True
        )
        assert_kernel_close(actual[i], y[0])
        for part, end in zip(slots.parts, ends, strict=True):
            assert_kernel_close(part.ends()[i], end[0])


@pytest.mark.parametrize("n_heads", [1, 130])
def test_stabilise_agrees_with_its_twin(n_heads: int) -> None:
    slots, inputs = Slots((n_heads,)), make_gates(n_heads)
    expected = reference.stabilise(*inputs, slots.fresh())
    ends = slots.ends()
    assert_kernel_close(cpu.stabilise(*inputs, slots.fresh()), expected)
    assert_kernel_close(slots.ends(), ends)
    slots.assert_only_targets_changed()


def test_stabilise_by_hand() -> None:
    """The greatest exponent fades with each token, until another one is greater."""
    slots = Slots((1,), lengths=(3,), initial=2.0)
    slots.sources = [-1]
    gate, log_decay = torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([[-1.0], [-1.0], [-0.5]])
    fade, strength, floor = reference.stabilise(gate, log_decay, slots.fresh())
    assert fade.flatten().tolist() == [0.0, -1.0, -3.5]
    assert_kernel_close(strength.flatten(), torch.tensor([-1.0, 0.0, 0.0]).exp())
    assert_kernel_close(floor.flatten(), torch.tensor([-1.0, -1.0, -4.0]).exp())
    assert slots.ends().item() == 4.0


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_softplus(kernels: Kernels) -> None:
    x, bias = 30 * torch.randn(9, 5), torch.randn(5)
    assert_kernel_close(kernels.softplus(x, bias), F.softplus(x.double() + bias.double()).float())


RUNS: dict[str, tuple[Callable[[], Slots | WkvSlots], Callable[[], tuple[object, ...]]]] = {
    "matrix_scan": (lambda: Slots((6, 20, 48)), lambda: make_matrix_scan(6, 3, 20, 48)),
    "linear_scan": (lambda: Slots((130,)), lambda: make_linear_scan(130)),
    "wkv4": (lambda: WkvSlots(130), lambda: make_wkv(130)),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda m: " ".join(m) or "plain")
def test_matrix_scan_is_the_same_bits_alone_and_among_others(mode: dict[str, bool]) -> None:
    slots, (q, k, v, decay, erase) = Slots((6, 20, 48)), make_matrix_scan(6, 3, 20, 48, **mode)
    together = cpu.matrix_scan(q, k, v, decay, erase, slots.fresh())
    at = 0
    for i, n in enumerate(LENGTHS):
        own = slice(at, at + n)
        own_erase = None if erase is None else Erase(erase.a[own], erase.b[own], erase.after_decay)
        alone = cpu.matrix_scan(q[own], k[own], v[own], decay[own], own_erase, slots.fresh(i))
        assert torch.equal(alone, together[own])
        at += n


@pytest.mark.parametrize("mode", MODES, ids=lambda m: " ".join(m) or "plain")
def test_rows_of_a_matrix_are_the_same_bits_in_fours_and_alone(mode: dict[str, bool]) -> None:
    """The kernel takes four of the seven rows at once, and the others alone.

    In reverse order, it takes other rows at once.
    """
    (q, k, v, decay, erase), forth, back = make_matrix_scan(2, 1, 7, 24, **mode), Slots((2, 7, 24)), Slots((2, 7, 24))
    back.before, back.sources, forth.sources = forth.before, [-1] * len(LENGTHS), [-1] * len(LENGTHS)
    y = cpu.matrix_scan(q, k, v, decay, erase, forth.fresh())
    assert torch.equal(cpu.matrix_scan(q, k, v.flip(-1).contiguous(), decay, erase, back.fresh()).flip(-1), y)
    assert torch.equal(back.ends().flip(-2), forth.ends())


@pytest.mark.parametrize("name", ["linear_scan", "wkv4"])
def test_channel_states_are_the_same_bits_alone_and_among_others(name: str) -> None:
    make_slots, make_inputs = RUNS[name]
    slots, inputs = make_slots(), make_inputs()
    together = getattr(cpu, name)(*inputs, slots.fresh())
    at = 0
    for i, n in enumerate(LENGTHS):
        own = [x[at : at + n] if len(x) == N else x for x in inputs]  # type: ignore[arg-type, index]
        assert torch.equal(getattr(cpu, name)(*own, slots.fresh(i)), together[at : at + n])
        at += n


def test_softplus_is_the_same_bits_wherever_a_row_stands() -> None:
    x, bias = torch.randn(40, 7), torch.randn(7)
    together = cpu.softplus(x, bias)
    for t in range(40):
        assert torch.equal(cpu.softplus(x[t : t + 1], bias)[0], together[t])
        assert torch.equal(cpu.softplus(x[t:], bias)[0], together[t])


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_convolution_reads_the_first_part_of_a_wider_row_and_may_stay_linear(kernels: Kernels) -> None:
    slots, rows, weight = Slots((2, 24)), torch.randn(N, 31), torch.randn(3, 24)
    expected = kernels.causal_conv(rows[:, :24].contiguous(), weight, None, slots.fresh(), activation=False)
    ends = slots.ends()
    assert torch.equal(kernels.causal_conv(rows, weight, None, slots.fresh(), activation=False), expected)
    assert torch.equal(slots.ends(), ends)
    assert_kernel_close(kernels.causal_conv(rows, weight, None, slots.fresh()), F.silu(expected))


@pytest.mark.parametrize("shape, n_groups", [((1, 1), 1), ((9, 48), 1), ((65, 130), 1), ((7, 60), 5), ((3, 24), 24)])
@pytest.mark.parametrize("has_gate, has_weight", [(False, False), (True, True), (False, True)])
def test_rms_norm_agrees_with_its_twin_and_with_torch(
    shape: tuple[int, int], n_groups: int, has_gate: bool, has_weight: bool
) -> None:
    wide = torch.randn(shape[0], shape[1] + 3)
    x, gate, weight = (
        wide[:, 3:],
        torch.randn(shape) if has_gate else None,
        torch.randn(shape[1]) if has_weight else None,
    )
    actual = cpu.rms_norm(x, weight, 1e-5, n_groups=n_groups, gate_TE=gate)
    assert_kernel_close(actual, reference.rms_norm(x, weight, 1e-5, n_groups=n_groups, gate_TE=gate))
    z = (x if gate is None else x * gate).reshape(shape[0], n_groups, -1)
    expected = F.rms_norm(z, (shape[1] // n_groups,), eps=1e-5).view(shape)
    assert_kernel_close(actual, expected if weight is None else expected * weight)
    for t in range(shape[0]):
        alone = cpu.rms_norm(
            x[t : t + 1], weight, 1e-5, n_groups=n_groups, gate_TE=None if gate is None else gate[t : t + 1]
        )
        assert torch.equal(alone[0], actual[t])


def test_rms_norm_of_no_rows_and_of_heads() -> None:
    assert cpu.rms_norm(torch.zeros(0, 4), None, 1.0).shape == (0, 4)
    x, weight = torch.randn(5, 3, 8), torch.randn(8)
    for x_ in (x, x.bfloat16()):
        normed = rms_norm(x_, weight.to(x_.dtype), 1e-6)
        assert normed.dtype == x_.dtype
        assert_kernel_close(normed, F.rms_norm(x_.float(), (8,), weight, 1e-6), x_.dtype)


def test_strength_and_skip_are_factors_and_the_delta_rule_needs_no_b() -> None:
    q, k, v, decay, _ = make_matrix_scan(6, 3, 20, 16)
    beta, skip, slots = torch.rand(N, 6), torch.randn(6), Slots((6, 20, 16))
    b = -beta[:, :, None] * k.repeat_interleave(2, dim=1)
    for kernels in (cpu, reference):
        expected = (
            kernels.matrix_scan(q, k, v * beta[:, :, None], decay, Erase(k, b, True), slots.fresh()) + skip[:, None] * v
        )
        ends = slots.ends()
        actual = kernels.matrix_scan(q, k, v, decay, Erase(k, None, True), slots.fresh(), strength_TH=beta, skip_H=skip)
        assert_kernel_close(actual, expected)
        assert_kernel_close(slots.ends(), ends)
    wide = torch.rand(N, 9)
    strided = cpu.matrix_scan(q, k, v, decay, None, slots.fresh(), strength_TH=wide[:, 2:8])
    assert torch.equal(
        strided, cpu.matrix_scan(q, k, v, decay, None, slots.fresh(), strength_TH=wide[:, 2:8].contiguous())
    )


def test_shapes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(SpecError, match="6 heads cannot share 4 groups"):
        SSDShape(n_heads=6, head_dim=8, n_groups=4, d_state=5, d_conv=4)
    with pytest.raises(SpecError, match="6 value heads cannot share 4 key heads"):
        DeltaRuleShape(n_heads=6, n_key_heads=4, value_dim=8, key_dim=8, d_conv=4)


def test_a_family_is_registered_once() -> None:
    with pytest.raises(SpecError, match="'ssd' is registered already"):
        register_family("ssd")(FAMILIES["ssd"].example)


def test_weights_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    """Compiled code does not check where it writes. A wider convolution would write into another sequence's state."""
    memory = HybridMemory(MemorySpec(((short_conv_spec(16, 2),),), 9), "1MiB", rollback_window=0)
    a, b = memory.open(), memory.open()
    for sequence, n_taps in ((a, 2), (b, 4), (b, 2)):
        with (
            pytest.raises(StepError, match="window has shape") if n_taps == 4 else nullcontext(),
            memory.step({sequence: [1]}) as step,
        ):
            step.recur(0, torch.randn(1, 16), ShortConv(CausalConv(torch.randn(n_taps, 16))))
    memory.check()
    slots, inputs = Slots((6, 20, 48)), make_matrix_scan(6, 3, 20, 48)
    q, k, v, decay, _ = inputs
    for wrong in ((q, k, v[:, :5], decay), (q[:, :, :7], k, v, decay), (q, k, v, decay[:, :2])):
        with pytest.raises(StepError):
            cpu.matrix_scan(*wrong, None, slots.fresh())
    for kernel, arguments in (
        (cpu.softplus, (torch.zeros(2, 3), torch.zeros(2))),
        (cpu.rms_norm, (torch.zeros(2, 3), torch.zeros(2), 1.0)),
        (cpu.linear_scan, (torch.zeros(N, 5), torch.zeros(N, 4), Slots((5,)).fresh())),
        (cpu.stabilise, (torch.zeros(N, 5), torch.zeros(N, 4), Slots((5,)).fresh())),
        (cpu.wkv4, (torch.zeros(N, 5), torch.zeros(N, 5), torch.zeros(2), torch.zeros(5), WkvSlots(5).fresh())),
    ):
        with pytest.raises(StepError):
            kernel(*arguments)


def test_sizes_of_nothing_are_refused() -> None:
    for sizes in ({"n_groups": 0}, {"d_conv": 0}, {"d_state": -1}):
        with pytest.raises(SpecError, match="at least 1"):
            SSDShape(**({"n_heads": 6, "head_dim": 8, "n_groups": 2, "d_state": 5, "d_conv": 4} | sizes))
    with pytest.raises(SpecError, match="n_key_heads"):
        DeltaRuleShape(n_heads=6, n_key_heads=0, value_dim=8, key_dim=8, d_conv=4)
    with pytest.raises(SpecError, match="tuple of specs"):
        MemorySpec((short_conv_spec(16, 2),), 9)  # type: ignore[arg-type]


def test_an_exponent_is_never_rounded() -> None:
    spec = MemorySpec(((rwkv4_spec(5),),), 9).with_state_dtype(torch.bfloat16)
    assert [s.dtype for s in spec.layers[0][0].states] == [torch.bfloat16, torch.bfloat16, torch.float32]  # type: ignore[union-attr]


@pytest.mark.parametrize("family", one_in(4, FAMILIES))
def test_states_of_16_bits_begin_and_go_on_as_in_plain_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some states of a family keep their dtype. So one kernel gets copies of some states, and others in place."""
    toy = FamilyToy(FAMILIES[family])

    def run(kernels: str) -> torch.Tensor:
        monkeypatch.setenv("HYBRID_MEMORY_KERNELS", kernels)
        memory = HybridMemory(toy.memory_spec, "1MiB", rollback_window=2, state_dtype="bfloat16", poison=True)
        a, b = memory.open(), memory.open()
        steps = {a: [1, 2, 3]}, {a: [4], b: [6, 1]}, {a: [1], b: [1]}
        return torch.cat([memory.run(toy, requests) for requests in steps])  # type: ignore[misc]

    found, expected = run("cpu"), run("reference")
    assert expected.std() > 0.3 and found.isfinite().all()
    assert_kernel_close(found, expected, torch.bfloat16)
