"""Weights in bfloat16 have products that are compiled for processors that multiply pairs or whole tiles of bfloat16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hybridmem.models import load_model, weight_bytes
from hybridmem.models.layers import linear as module
from hybridmem.models.layers.linear import Linear
from hybridmem.models.products import amx, blocked, few_rows, integer_vectors, kernels
from hybridmem.models.products.kernels import KERNELS, choose
from hybridmem.models.products.packed import PackedWeight
from hybridmem.models.products.quantised import LAYOUTS
from tests.tolerances import assert_kernel_close

pytestmark = pytest.mark.skipif(
    not integer_vectors.multiplies_pairs(), reason="this processor multiplies no pairs of bfloat16"
)
SHAPES = (1, 1), (16, 32), (17, 33), (100, 70), (64, 96), (80, 768), (250, 512)


@pytest.fixture(params=[True, False], ids=["tiles", "pairs"], autouse=True)
def has_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the processor multiplies tiles. One test treats it as a processor that multiplies only pairs."""
    has: bool = request.param
    if has and not KERNELS["tiles"].applies():
        pytest.skip("this processor multiplies no tiles, or Linux does not let us")
    if not has:
        monkeypatch.setattr(kernels, "KERNELS", {name: own for name, own in KERNELS.items() if name != "tiles"})
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return has


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[blocked.BlockedWeight]:
    """Return the weights of all products that the compiled kernels compute."""
    multiply, found = blocked.BlockedWeight.multiply, list[blocked.BlockedWeight]()

    def noted(weight: blocked.BlockedWeight, *arguments: Any, **options: Any) -> torch.Tensor:
        found.append(weight)
        return multiply(weight, *arguments, **options)

    monkeypatch.setattr(blocked.BlockedWeight, "multiply", noted)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", [None, "silu", "relu", "sigmoid", "gelu"])
def test_a_product_is_that_of_plain_torch_and_a_row_has_the_same_bits_in_any_company(
    shape: tuple[int, int], activation: str | None, products: list[blocked.BlockedWeight]
) -> None:
    """Cases have a bias or none, rows of float32, and numbers of rows near those of the kernel's tiles."""
    weight, bias, x = drawn(*shape), drawn(shape[0]), drawn(71, shape[1])
    for b in (None, bias):
        linear = Linear(weight / shape[1] ** 0.5, bias=b, activation=activation)
        products.clear()
        whole = linear(x)
        assert len(products) == 1
        plain = F.linear(x.float(), weight.float() / shape[1] ** 0.5, None if b is None else b.float())
        expected = plain if activation is None else module.activation_by(activation)(plain)
        assert_kernel_close(whole, expected, torch.bfloat16)
        for n_rows in (0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 33):
            assert torch.equal(linear(x[:n_rows]), whole[:n_rows])
            assert torch.equal(linear(x[71 - n_rows :]), whole[71 - n_rows :])
        assert linear(x.float()).dtype == torch.float32 and torch.equal(linear(x.float()).bfloat16(), whole)


def test_rows_may_begin_anywhere_and_have_any_stride() -> None:
    linear, wide = Linear(drawn(24, 32)), drawn(9, 100)
    for x in (wide[:, 3:35], wide[:, ::3][:, :32], wide[1, 5:37][None], wide.flatten()[1:65].view(2, 32)):
        assert torch.equal(linear(x), linear(x.clone()))


def test_weights_are_held_once() -> None:
    assert weight_bytes(Linear(drawn(640, 512))) == 640 * 512 * 2  # type: ignore[arg-type]
    assert weight_bytes(Linear(drawn(1, 1))) == 64 * 32 * 2  # type: ignore[arg-type]


def test_tiles_are_multiplied_where_the_processor_does_that(has_tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    for name, kernel in list(kernels.KERNELS.items()):
        noted = replace(kernel, product=lambda *_, uses_tiles=kernel.has_tiles: found.append(uses_tiles))
        monkeypatch.setitem(kernels.KERNELS, name, noted)
    Linear(drawn(64, 32))(drawn(3, 32))
    assert found == [has_tiles]


def test_onednn_is_kept_where_it_alone_may_use_tiles(
    has_tiles: bool, products: list[blocked.BlockedWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(amx, "multiplies_tiles", lambda: has_tiles)
    linear, x = Linear(weight := drawn(640, 512) / 22, activation="silu"), drawn(5, 512)
    assert linear.is_packed
    assert_kernel_close(linear(x), F.silu(F.linear(x.float(), weight.float())), torch.bfloat16)
    assert len(products) == has_tiles


def test_products_of_onednn_and_of_threads_beside_do_not_disturb_each_other() -> None:
    """What a thread leaves in its registers must not change another thread's or another library's product."""
    weight = drawn(640, 512) / 22
    ours, theirs = Linear(weight), PackedWeight(weight, torch.bfloat16)
    rows = [drawn(n, 512) for n in (1, 5, 16, 33, 70)]
    expected = [(ours(x), theirs.multiply(x, None, None)) for x in rows]

    def differ(i: int) -> int:
        return sum(
            (not torch.equal(ours(x), own)) + (not torch.equal(theirs.multiply(x, None, None), other))
            for _ in range(10) for x, (own, other) in zip(rows[i:] + rows[:i], expected[i:] + expected[:i], strict=True)
        )  # fmt: skip

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(differ, range(4))) == [0] * 4


def test_a_model_in_bfloat16_uses_them_and_no_step_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile_product = few_rows.CompiledProduct.compile

    def noted(product: few_rows.CompiledProduct) -> None:
        compiled.append((product.dtype, product.kind.kernel))
        compile_product(product)

    monkeypatch.setattr(few_rows.CompiledProduct, "compile", noted)
    load_model("embedded", dtype="bfloat16")
    load_model("embedded", dtype="bfloat16", weights="int4")
    # Weights in fewer bits have a product of their own for the vocabulary, which keeps more.
    assert [*dict.fromkeys(compiled)] == [
        (torch.bfloat16, choose(layout, torch.bfloat16)) for layout in (None, LAYOUTS["int4"])
    ]
