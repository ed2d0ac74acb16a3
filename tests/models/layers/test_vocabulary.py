"""Logits are float32, so that tokens whose logits are equal in 16 bits have the order of the head's sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridmem.memory import HybridMemory
from hybridmem.memory.recorded import RecordedModel
from hybridmem.models import load_model
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.layers.vocabulary import HEAD, Vocabulary
from hybridmem.models.loading.reproducible import reproducible_rows
from hybridmem.models.products import packed, plain
from hybridmem.models.products.kernels import choose
from hybridmem.models.products.plain import plain_sums
from hybridmem.models.weights.checkpoint import LoadedCheckpoint
from hybridmem.models.weights.formats import WeightFormat, plain_weights, weights_in
from tests.extent import only_in_long
from tests.models.checkpoints import write_checkpoint
from tests.models.families.llama import llama_config
from tests.models.gguf_files import write_gguf
from tests.tolerances import assert_kernel_close

CPU = torch.device("cpu")
BEST, SECOND = 7, 5


def close_weights(vocab_size: int, n_model: int) -> Tensor:
    """Return a head whose two largest logits for `close_row` differ by 1/1024, where bfloat16 has steps of 1/128.

    The second of them has the lower id, so an argmax of equal numbers takes the wrong one.
    """
    weight = torch.zeros(vocab_size, n_model)
    weight[:, 0] = -1
    weight[SECOND, 0] = weight[BEST, 0] = weight[BEST, 1] = 1
    return weight


def close_row(n_model: int, dtype: torch.dtype) -> Tensor:
    """Return a row (1, M). Its second number is so small that 16 bits cannot hold its sum with the first."""
    x = torch.zeros(1, n_model, dtype=dtype)
    x[0, 0], x[0, 1] = 1, 2**-10 if dtype is torch.bfloat16 else 2**-12
    return x


@contextmanager
def held_as(form: str) -> Iterator[None]:
    format = cast(WeightFormat, form if form in ("int8", "int4") else "auto")
    with weights_in(format, CPU), reproducible_rows(form == "reproducible", CPU):
        with plain_weights() if form == "plain" else nullcontext():
            yield


def assert_ordered(held: Vocabulary, n_model: int, dtype: torch.dtype) -> None:
    x = close_row(n_model, dtype)
    logits = held.logits(x)
    assert logits.dtype == torch.float32 and int(logits.argmax()) == BEST
    assert int(logits.to(dtype).argmax()) == SECOND, "these logits are equal in 16 bits"
    assert_kernel_close(held.logits(x.expand(9, -1)), logits.expand(9, -1))
    assert held.logits(x[:0]).shape == (0, logits.shape[1]) and held.logits(x[:0]).dtype == torch.float32


onednn_rounds = pytest.mark.skipif(
    packed.multiplies_bfloat16() and choose(None, torch.bfloat16) is None,
    reason="on this processor bfloat16 is multiplied by oneDNN's operator, which rounds its sums",
)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("int8", marks=only_in_long),  # The test of a GGUF file has heads of 8 bits.
        "int4",
        "reproducible",
        "plain",
        pytest.param("auto", marks=onednn_rounds),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_that_are_equal_in_sixteen_bits_have_an_order(dtype: torch.dtype, form: str) -> None:
    config = llama_config(tie_word_embeddings=False)
    head = close_weights(config.vocab_size, config.hidden_size).to(dtype)
    checkpoint = LoadedCheckpoint("model", {"embed": head.clone(), HEAD: head}, CPU, dtype)
    with held_as(form):
        assert_ordered(Vocabulary.load(checkpoint, config, "embed"), config.hidden_size, dtype)


@pytest.mark.parametrize("is_tied", [True, False])
def test_so_they_have_in_the_bits_of_a_gguf_file(is_tied: bool, tmp_path: Path) -> None:
    """The model's own logits are float32, those of replayed steps too, and a plan knows the same bytes of weights."""
    config = llama_config(hidden_size=96, intermediate_size=64, tie_word_embeddings=is_tied)
    folder = write_checkpoint(tmp_path, config)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight" if is_tied else HEAD] = close_weights(config.vocab_size, 96)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_model(write_gguf(folder, tmp_path / "model.gguf", "Q8_0"), dtype="bfloat16")
    assert isinstance(model, Decoder)
    assert_ordered(model.vocabulary, 96, torch.bfloat16)
    memory, recorded = HybridMemory(model.memory_spec, "4MiB"), RecordedModel(model)
    sequence = memory.open()
    for token in range(1, 9):
        with memory.step({sequence: [token]}) as step:
            assert recorded(step).dtype == torch.float32


def test_training_gets_logits_in_float32_with_gradients() -> None:
    """Sums are rounded as they are in other products, so that no copy of the head is kept."""
    weight = torch.randn(40, 16).bfloat16().requires_grad_()
    x = torch.randn(3, 16).bfloat16()
    with torch.enable_grad():
        y = plain_sums(x, weight, None)
        y.sum().backward()
    assert torch.equal(y, F.linear(x, weight).float()) and y.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_plain_head_is_multiplied_in_parts_of_its_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "_AT_ONCE", 5 * 16)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((3, 16), (12, 16), (12,)))
    y = plain_sums(x, weight, bias)
    assert y.dtype == torch.promote_types(dtype, torch.float32)
    assert_kernel_close(y, F.linear(x.double(), weight.double(), bias.double()).to(y.dtype))
