"""Packed weights give the same product and are held once. Where packing is impossible, plain products are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN

from hybridmem.memory import HybridMemory
from hybridmem.models import load_model, weight_bytes
from hybridmem.models.layers import linear as module
from hybridmem.models.layers.linear import Linear, add_scaled
from hybridmem.models.products import choice
from hybridmem.models.products import packed as packing
from hybridmem.models.products.packed import PackedWeight, multiplies_bfloat16, packed_dtype
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.tolerances import assert_kernel_close


@pytest.mark.parametrize("n_rows", [0, 1, 2, 3, 15, 16, 17, 64, 65])
@pytest.mark.parametrize("n_in, n_outs", [(1, (1,)), (7, (3, 5)), (48, (130,)), (768, (768, 256, 256))])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_product_is_a_product(n_rows: int, n_in: int, n_outs: tuple[int, ...], has_bias: bool) -> None:
    weights = [torch.randn(n_out, n_in) / n_in**0.5 for n_out in n_outs]
    bias = torch.randn(sum(n_outs)) if has_bias else None
    linear, x = Linear(*weights, bias=bias), torch.randn(n_rows, n_in)
    assert linear.is_packed and (linear.n_out, linear.n_in) == (sum(n_outs), n_in)
    if n_rows:
        assert_kernel_close(linear(x), F.linear(x, torch.cat(weights), bias))
    else:
        assert linear(x).shape == (0, sum(n_outs))


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_one_or_two_rows_are_rows_of_a_product_of_four(activation: str | None) -> None:
    linear, x = Linear(torch.randn(640, 512), activation=activation), torch.randn(4, 512)
    four = linear(x)
    for n_rows in (1, 2):
        few = linear(x[:n_rows])
        assert few.shape == (n_rows, 640) and few.is_contiguous() and torch.equal(few, four[:n_rows])


def test_onednn_meets_few_numbers_of_rows() -> None:
    """oneDNN keeps half a MiB of code for each number of rows.

    Steps of a server have any number, so rows are padded by up to a quarter.
    """
    given: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if "_linear_pointwise" in str(func):
                given.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    weight, x = torch.randn(24, 16), torch.randn(512, 16)
    packed, whole = PackedWeight(weight, torch.float32), F.linear(x, weight)
    with torch.inference_mode(), Watch():
        for n_rows in range(1, 513):
            assert_kernel_close(packed.multiply(x[:n_rows], None, None), whole[:n_rows])
            assert n_rows <= given[-1] <= 1.25 * n_rows
    assert set(given) >= {*range(1, 9), 16, 32, 64, 80, 256, 512} and len(set(given)) == 8 + 4 * 3 + (512 - 64) // 16


@pytest.mark.parametrize("activation", sorted({*PackedWeight.FUSED, *module._ACTIVATIONS, "gelu_new"}))
def test_an_activation_is_transformers(activation: str) -> None:
    weight, x = 3 * torch.randn(8, 6), torch.randn(5, 6)
    for w, in_dtype in ((weight, x), (weight.bfloat16(), x.bfloat16())):
        linear = Linear(w, activation=activation)
        assert_kernel_close(linear(in_dtype), ACT2FN[activation](F.linear(in_dtype, w)), w.dtype)


def test_inputs_need_not_be_contiguous() -> None:
    linear, weight = Linear(weight := torch.randn(8, 6)), weight
    for x in (torch.randn(5, 12)[:, ::2], torch.randn(5, 9)[:, 3:], torch.randn(10, 6)[1::2]):
        assert_kernel_close(linear(x), F.linear(x, weight))


def test_weights_and_bias_need_not_be_contiguous() -> None:
    weight, bias, x = torch.randn(16, 12)[::2, ::2], torch.randn(16)[::2], torch.randn(5, 6)
    assert_kernel_close(Linear(weight, bias=bias)(x), F.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 40])
@pytest.mark.parametrize("is_fast", [True, False])
def test_products_of_16_bits_are_packed_as_what_the_processor_multiplies(
    is_fast: bool, n_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds with a bias and a fused activation.

    If the processor only multiplies float32, the weights are float32.
    """
    is_fast = is_fast and multiplies_bfloat16()
    monkeypatch.setattr(packing, "multiplies_bfloat16", lambda: is_fast)
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((640, 512), (640,), (n_rows, 512)))
    linear = Linear(weight, bias=bias, activation="silu")
    y = linear(x)
    packed = torch.bfloat16 if is_fast and dtype == torch.bfloat16 else torch.float32
    assert packed_dtype(weight) == packed and weight_bytes(linear) >= 640 * 512 * packed.itemsize  # type: ignore[arg-type]
    expected = F.silu(F.linear(x.float(), weight.float(), bias.float()))
    assert y.dtype == dtype and expected.std() > 1
    assert_kernel_close(y, expected, torch.bfloat16)


@pytest.mark.parametrize("weight", [torch.randn(3, 4).double(), torch.randn(3, 4, device="meta")])
def test_other_weights_stay_as_they_are(weight: torch.Tensor) -> None:
    linear = Linear(weight)
    assert not linear.is_packed and weight_bytes(linear) == weight.nbytes  # type: ignore[arg-type]
    assert linear(torch.ones(2, 4, dtype=weight.dtype, device=weight.device)).shape == (2, 3)


@pytest.mark.parametrize("name", ["jamba", "mamba"])
def test_models_run_the_same_where_nothing_can_be_packed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    logits = []
    for is_possible in (True, False):
        monkeypatch.setattr(choice, "packed_dtype", packed_dtype if is_possible else lambda weight: None)
        model = load_model(folder)
        memory = HybridMemory(model.memory_spec, "8MiB")
        with memory.step({memory.open(): list(range(20))}, outputs="all") as step:
            logits.append(model(step))
    assert_kernel_close(*logits)


@pytest.mark.parametrize("name", ["jamba-two-of-four-experts", "mamba"])
def test_weights_are_held_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain weights take as many bytes as the file's tensors.

    Packed weights add the padding and a packed copy of the tied head.
    """
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    packed = weight_bytes(load_model(folder))
    monkeypatch.setattr(choice, "packed_dtype", lambda weight: None)
    plain_model = load_model(folder)
    n_file = (folder / "model.safetensors").stat().st_size
    assert 0.9 * n_file < weight_bytes(plain_model) <= n_file
    embedding = plain_model.memory_spec.vocab_size * plain_model.config.hidden_size * 4
    assert weight_bytes(plain_model) + 0.9 * embedding < packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [7, 40, 48, 64, 1000])
def test_a_scaled_sum_has_the_same_bits_in_any_company(n: int, dtype: torch.dtype) -> None:
    """Parts of some models are scaled before they are added. transformers rounds them in the same way."""
    x, y = torch.randn(2, 67, n).to(dtype)
    together = add_scaled(x, y, 0.22)
    assert torch.equal(together, torch.cat([add_scaled(x[i : i + 1], y[i : i + 1], 0.22) for i in range(67)]))
    assert torch.equal(together, x + y * 0.22)
