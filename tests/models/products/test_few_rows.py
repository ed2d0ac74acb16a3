"""Norms, gates and sums are computed in one call with the products of few rows."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch

from hybridmem.memory.kernels import Weights
from hybridmem.models.layers.linear import Linear, add_gated_mlp, add_product, normed_products
from hybridmem.models.layers.norms import GatedNorm, LayerNorm, RMSNorm
from hybridmem.models.products import few_rows_kernels, packed
from hybridmem.models.products.few_rows import MOST_ROWS
from hybridmem.models.weights.formats import IntegerFormat, weights_in
from tests.extent import IS_LONG, one_in

pytestmark = pytest.mark.skipif(
    Linear(torch.zeros(1, 1)).compiled is None, reason="products of this processor are oneDNN's"
)


def drawn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (torch.float32, None),
        (torch.bfloat16, "int4"),
        *([(torch.bfloat16, None), (torch.float16, None), (torch.float32, "int8")] if IS_LONG else []),
    ],
)
@pytest.mark.parametrize(("n_in", "n_out"), [(33, 17), (64, 200)])
def test_one_call_has_the_bits_of_many(dtype: torch.dtype, format: IntegerFormat | None, n_in: int, n_out: int) -> None:
    """Residual streams have the weights' dtype or float32. There are a few rows, or slightly too many."""
    with nullcontext() if format is None else weights_in(format, torch.device("cpu")):
        first = Linear(drawn(n_out, n_in, dtype=dtype), activation="silu")
        second = Linear(drawn(70, n_in, dtype=dtype), bias=drawn(70, dtype=dtype))
    if first.compiled is None:
        pytest.skip("this processor reads such rows in another dtype")
    norm = RMSNorm(drawn(n_in, dtype=dtype), 1e-5)
    gated_norm = GatedNorm(Weights(drawn(n_in, dtype=dtype)), 1e-5, 3 if n_in == 33 else 4)
    for residual_dtype in {dtype, torch.float32}:
        for n_rows in (0, 1, 2, MOST_ROWS, MOST_ROWS + 1):
            x, residual = drawn(n_rows, n_in, dtype=residual_dtype) * 3, drawn(n_rows, 70, dtype=residual_dtype)
            y, gate = drawn(n_rows, n_in, dtype=dtype), drawn(n_rows, n_in, dtype=dtype)
            expected = [linear(norm(x)) for linear in (first, second)]
            assert all(map(torch.equal, normed_products(x, norm, first, second), expected))
            assert torch.equal(normed_products(x, norm, first)[0], expected[0])
            for own_gate, own_norm in ((None, None), (gate, None), (gate, gated_norm)):
                rows = y if own_gate is None else y * own_gate if own_norm is None else own_norm(y, own_gate)
                found = add_product(residual, second, y, own_gate, own_norm)
                assert found.dtype == residual_dtype and torch.equal(found, residual + second(rows))


@pytest.mark.parametrize("n_rows", [1, 3, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("dtype", one_in(2, [torch.float32, torch.bfloat16, None]))
def test_a_gated_mlp_in_one_call_has_the_bits_of_many(
    dtype: torch.dtype | None, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dtype=None` stands for bfloat16 on a processor that only multiplies float32."""
    if dtype is None:
        dtype = torch.bfloat16
        monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: False)
    gate, up = (Linear(drawn(50, 33, dtype=dtype), activation=name) for name in ("silu", None))
    down, norm = Linear(drawn(33, 50, dtype=dtype), bias=drawn(33, dtype=dtype)), RMSNorm(drawn(33, dtype=dtype), 1e-5)
    for residual_dtype in {dtype, torch.float32}:
        x = drawn(n_rows, 33, dtype=residual_dtype)
        expected = x + down(gate(norm(x)) * up(norm(x)))
        found = add_gated_mlp(x, norm, gate, up, down, scale=1.0)
        assert found.dtype == residual_dtype and torch.equal(found, expected)


def test_a_copy_reads_its_own_weights() -> None:
    linear, norm, x = Linear(torch.randn(12, 16)), RMSNorm(torch.ones(16), 1e-5), torch.randn(2, 16)
    (expected,) = normed_products(x, norm, linear)
    copy = deepcopy(linear)
    assert copy.compiled is not None
    copy.compiled.weight[0][:] = 0
    assert torch.equal(normed_products(x, norm, linear)[0], expected) and expected.any()
    assert not normed_products(x, norm, copy)[0].any()


def test_what_is_not_for_one_call_takes_many() -> None:
    """Such cases are other kinds of norms, rows that are not contiguous, scales, and kernels that a user has named."""
    linear, x = Linear(torch.randn(12, 16)), torch.randn(2, 40)[:, 3:19]
    layer_norm, norm = LayerNorm(torch.ones(16), None, 1e-5), RMSNorm(torch.ones(16), 1e-5)
    assert torch.equal(normed_products(x, layer_norm, linear)[0], linear(layer_norm(x)))
    assert torch.equal(normed_products(x, norm, linear)[0], linear(norm(x)))
    residual = torch.randn(2, 12)
    assert torch.equal(add_product(residual, linear, x, scale=0.5), torch.add(residual, linear(x), alpha=0.5))


def test_a_choice_of_kernels_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, norm, x = Linear(torch.randn(12, 16)), RMSNorm(torch.ones(16), 1e-5), torch.randn(2, 16)
    assert linear.compiled is not None and linear.compiled.normed(x, norm) is not None
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")
    assert linear.compiled.normed(x, norm) is None
    assert linear.compiled.gated(x, None, None, torch.zeros(2, 12)) is None


def test_a_call_has_the_same_arguments_after_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt computes the parts of a gated MLP one by one. Steps of few rows before and after it are replayed."""
    calls, gated_mlp = list[object](), few_rows_kernels.gated_mlp
    monkeypatch.setattr(few_rows_kernels, "gated_mlp", lambda *args: (calls.append(args[0]), gated_mlp(*args)))
    gate, up, down = (Linear(torch.randn(16, 16)) for _ in range(3))
    norm, x = RMSNorm(torch.ones(16), 1e-5), torch.randn(2, 16)
    for rows in (x, x.repeat(MOST_ROWS, 1), x):
        add_gated_mlp(rows, norm, gate, up, down, scale=1.0)
        normed_products(x, norm, gate, up)
    assert len(calls) == 2 and calls[0] is calls[1]


def test_calls_are_made_anew_for_another_norm() -> None:
    linear, x = Linear(torch.randn(12, 16)), torch.randn(2, 16)
    for weight in (torch.ones(16), torch.randn(16)):
        norm = RMSNorm(weight, 1e-5)
        assert torch.equal(normed_products(x, norm, linear)[0], linear(norm(x)))
