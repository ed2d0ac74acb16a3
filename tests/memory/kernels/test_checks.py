"""A recurrence that passes wrong inputs to kernels gets an error that names them, before any kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import HybridMemory, MemorySpec, RecurrentSpec, States, StateTensor, StepError
from hybridmem.memory.kernels import Erase, Kernels, Scoring, StateSlots, cpu, reference
from hybridmem.memory.recurrences import Fold
from tests.memory.kernels.test_kernels import Pages, Slots

LENGTHS = (2, 3)
T = sum(LENGTHS)
Call = Callable[[Any], object]


def slots(*shape: int) -> StateSlots:
    return Slots(shape, LENGTHS).fresh()


def rows(*sizes: int) -> Tensor:
    return torch.zeros(*sizes)


def conv(n_rows: int = T, width: int = 4, **changes: Any) -> Call:
    return lambda k: k.causal_conv(rows(n_rows, width), rows(3, 4), None, slots(2, 4)._replace(**changes))


def scan(x: int = T, dt: int = T, b: int = T, c: int = T) -> Call:
    sizes, n = (rows(4), rows(b, 2), rows(c, 2), rows(2, 4), rows(4)), (2, 4)
    return lambda k: k.selective_scan(rows(x, 4), rows(dt, 4), *sizes, slots(*n))


def matrix(
    q: tuple[int, ...] = (T, 2, 5), k: tuple[int, ...] = (T, 2, 5), v: tuple[int, ...] = (T, 4, 3),
    decay: tuple[int, ...] = (T, 4), a: tuple[int, ...] | None = None, b: tuple[int, ...] | None = None,
    strength: tuple[int, ...] | None = None,
) -> Call:  # fmt: skip
    erase = None if a is None else Erase(rows(*a), None if b is None else rows(*b), True)
    beta = None if strength is None else rows(*strength)
    return lambda kernels: kernels.matrix_scan(
        rows(*q), rows(*k), rows(*v), rows(*decay), erase, slots(4, 3, 5), strength_TH=beta
    )


def wkv(k: int = T, v: int = T, exponent: int = 4, n_states: int = 3) -> Call:
    states = (slots(4), slots(4), slots(exponent))[:n_states]
    return lambda kernels: kernels.wkv4(rows(k, 4), rows(v, 4), rows(4), rows(4), states)


def attend(
    n_queries: int = 5, n_kv_heads: int = 2, sinks: Tensor | None = None, bias: Tensor | None = None, n_lengths: int = 2
) -> Call:
    pages = Pages(4, 2, 8, 4, lengths=LENGTHS, histories=(3, 9))
    batch = replace(pages.batch, kv_lengths=pages.batch.kv_lengths[:n_lengths])
    flats = pages.arena, pages.arena[pages.values_at :]
    return lambda k: k.paged_attention(
        rows(n_queries, 4, 8), *flats, batch, n_kv_heads, Scoring(1.0, None, None, sinks, bias)
    )


GIVEN: dict[str, tuple[Call, str]] = {
    "conv, a row too few": (conv(T - 1), r"rows has shape \(4, 4\), not \(5, 4\)"),
    "conv, a row too many": (conv(T + 1), r"rows has shape \(6, 4\)"),
    "conv, narrow rows": (conv(width=3), r"rows \(5, 3\) and taps \(3, 4\)"),
    "conv, no axis of tokens": (lambda k: k.causal_conv(rows(4), rows(3, 4), None, slots(2, 4)), r"rows \(4,\)"),
    "conv, fewer states than runs": (conv(sources=torch.zeros(1, dtype=torch.int64)), "2 runs have 1 states to begin"),
    "conv, more states than runs": (conv(targets=torch.zeros(3, dtype=torch.int64)), "3 to end with"),
    "conv, integers": (lambda k: k.causal_conv(rows(T, 4).long(), rows(3, 4), None, slots(2, 4)), "int64"),
    "scan, x": (scan(x=T - 1), r"x has shape \(4, 4\)"),
    "scan, dt": (scan(dt=T - 2), r"dt has shape \(3, 4\)"),
    "scan, b": (scan(b=1), r"b has shape \(1, 2\)"),
    "scan, c": (scan(c=T - 1), r"c has shape \(4, 2\)"),
    "scan, all": (scan(4, 4, 4, 4), r"x has shape \(4, 4\)"),
    "matrix, queries": (matrix(q=(T - 1, 2, 5)), r"queries has shape \(4, 2, 5\)"),
    "matrix, keys": (matrix(k=(1, 2, 5)), r"keys has shape \(1, 2, 5\)"),
    "matrix, values": (matrix(v=(T - 1, 4, 3)), r"values has shape \(4, 4, 3\)"),
    "matrix, narrow keys": (matrix(k=(T, 2, 4)), "keys has shape"),
    "matrix, decays": (matrix(decay=(T - 1, 4)), "log_decay has shape"),
    "matrix, decays by column": (matrix(decay=(T, 4, 3)), "log_decay has shape"),
    "matrix, strengths": (matrix(strength=(T - 1, 4)), "strength has shape"),
    "matrix, what is read": (matrix(a=(T - 1, 2, 5)), r"a has shape \(4, 2, 5\), not \(5, 2, 5\)"),
    "matrix, what is erased": (matrix(a=(T, 2, 5), b=(T, 2, 5)), r"b has shape \(5, 2, 5\), not \(5, 4, 5\)"),
    "matrix, heads of queries": (matrix(q=(T, 3, 5)), "4 heads cannot share 3"),
    "matrix, heads of keys": (matrix(k=(T, 3, 5)), "4 heads cannot share 3"),
    "matrix, heads of what is read": (matrix(a=(T, 3, 5)), "4 heads cannot share 3"),
    "matrix, two axes": (matrix(v=(T, 12)), r"give \(tokens, heads, channels\)"),
    "linear": (lambda k: k.linear_scan(rows(4, 6), rows(4, 6), slots(6)), r"x has shape \(4, 6\)"),
    "linear, decays": (lambda k: k.linear_scan(rows(T, 6), rows(4, 6), slots(6)), r"decay has shape \(4, 6\)"),
    "stabiliser": (lambda k: k.stabilise(rows(4, 6), rows(4, 6), slots(6)), r"gate has shape \(4, 6\)"),
    "stabiliser, decays": (lambda k: k.stabilise(rows(T, 6), rows(4, 6), slots(6)), r"log_decay has shape \(4, 6\)"),
    "wkv, both": (wkv(4, 4), r"keys has shape \(4, 4\)"),
    "wkv, a state": (wkv(exponent=3), "exponent has shape"),
    "wkv, two states": (wkv(n_states=2), "2 states"),
    "norm, parts": (lambda k: k.rms_norm(rows(T, 7), None, 1e-5, n_groups=2), "equal parts"),
    "norm, gate": (lambda k: k.rms_norm(rows(T, 8), None, 1e-5, gate_TE=rows(T - 1, 8)), "gate has shape"),
    "softplus": (lambda k: k.softplus(rows(T, 7), rows(6)), "bias has shape"),
    "attention, queries": (attend(n_queries=6), r"queries have shape \(6, 4, 8\), not \(5, heads"),
    "attention, heads": (attend(n_kv_heads=3), "4 heads cannot share 3"),
    "attention, sinks": (attend(sinks=rows(2)), "sinks has shape"),
    "attention, biases": (attend(bias=rows(2, 9)), "bias has shape"),
    "attention, no distance": (attend(bias=rows(4, 0)), "bias has shape"),
    "attention, lengths": (attend(n_lengths=1), "2 requests have lengths of 1"),
    "at hand, fewer than queries": (
        lambda k: k.attend_rows(rows(3, 2, 8), *[rows(2, 2, 8)] * 2, Scoring(1.0)),
        "as many queries or fewer",
    ),
    "at hand, values": (
        lambda k: k.attend_rows(rows(1, 2, 8), rows(4, 2, 8), rows(3, 2, 8), Scoring(1.0)),
        "as many values as keys",
    ),
}


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("what", GIVEN)
def test_what_does_not_fit_is_refused(what: str, kernels: Kernels) -> None:
    call, says = GIVEN[what]
    with pytest.raises(StepError, match=says):
        call(kernels)


def test_the_right_inputs_pass() -> None:
    """Each of the cases above changes one of these inputs."""
    good = [
        conv(),
        scan(),
        matrix(),
        matrix(a=(T, 1, 5), b=(T, 4, 5), strength=(T, 4), decay=(T, 4, 5)),
        wkv(),
        attend(),
    ]
    for kernels in (cpu, reference):
        for call in good:
            call(kernels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_kernels_of_the_cpu_take_floats_up_to_32_bits(dtype: torch.dtype) -> None:
    with pytest.raises(StepError, match=f"an input is {dtype}; these kernels take torch.bfloat16, torch.float16, "):
        cpu.linear_scan(rows(T, 6).to(dtype), rows(T, 6), slots(6))


def test_weights_that_numpy_does_not_have() -> None:
    with pytest.raises(StepError, match=r"torch.float8_e4m3fn on cpu is not for these kernels"):
        cpu.softplus(rows(T, 6), rows(6).to(torch.float8_e4m3fn))


def test_rows_that_are_fewer_than_their_places() -> None:
    with pytest.raises(StepError, match="2 rows go to 3 places"):
        cpu.write_rows_(rows(40), torch.arange(3) * 4, rows(2, 4))


def too_short(states: States, x: Tensor) -> tuple[Tensor, States]:
    return states.kernels.linear_scan(x[:-1], x[:-1], states.slots(0)), states.written()


def too_few_outputs(states: States, x: Tensor) -> tuple[Tensor, States]:
    return states.kernels.linear_scan(x, x, states.slots(0))[:-1], states.written()


def no_state(states: States, x: Tensor) -> tuple[Tensor, States]:
    return x, states.end()


RECURRENCES: list[tuple[Any, str]] = [
    (too_short, r"x has shape \(2, 4\), not \(3, 4\)"),
    (too_few_outputs, r"outputs of shape \(2, 4\) for 3 rows"),
    (no_state, "ends in 0 states; give all of h"),
    (Fold(lambda states, row: (states, row[:0])), "outputs whose first axis is 1"),
    (Fold(lambda states, row: ((), row)), "gives 0 states"),
]


@pytest.mark.parametrize(
    "recurrence, says", RECURRENCES, ids=["input", "output", "end", "formula's output", "formula's states"]
)
def test_a_recurrence_that_is_refused_leaves_its_sequence_as_it_was(recurrence: Any, says: str) -> None:
    memory = HybridMemory(MemorySpec(((RecurrentSpec("own", (4,), (StateTensor("h", (4,)),)),),), vocab_size=9), "1MiB")

    def right(states: States, x: Tensor) -> tuple[Tensor, States]:
        return states.kernels.linear_scan(x, x, states.slots(0)), states.written()

    def feed(sequence: Any, tokens: list[int], run: Any) -> Tensor:
        with memory.step({sequence: tokens}) as step:
            return step.recur(0, step.token_ids[:, None].expand(-1, 4).float() / 9, run)

    sequence, other = memory.open(), memory.open()
    feed(sequence, [1, 2], right)
    with pytest.raises(StepError, match=says):
        feed(sequence, [3, 4, 5], recurrence)
    assert sequence.length == 2
    memory.check()
    feed(other, [1, 2], right)
    assert torch.equal(feed(sequence, [6, 7], right), feed(other, [6, 7], right))
