"""`from_transformers`: a loaded transformers model's weights in our model, without a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, GPT2Config

from memory import HybridMemory, SpecError
from models import LanguageModel, UnsupportedModelError, from_transformers, load_model
from tests.models.checkpoints import CONFIGS, draw_tokens, randomise_
from tests.models.hf_models import hf_model, logits

TOKENS = draw_tokens(20)
ONE_OF_EACH = (
    "bamba", "deepseek-v2", "deepseek-v3", "falcon-h1", "gemma2", "gemma3", "granite-moe-hybrid", "jamba", "lfm2-moe", "llama", "mamba",
    "mamba2", "nemotron-h", "qwen3-next", "qwen3.5", "qwen3.5-moe", "recurrent-gemma", "rwkv", "zamba2",
)  # fmt: skip


def run(model: LanguageModel) -> Tensor:
    memory = HybridMemory(model.memory_spec, "2MiB", poison=True)
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_it_is_the_model_that_loading_its_checkpoint_gives(name: str, tmp_path: Path) -> None:
    """Bit for bit, though transformers keeps some weights in another form than files do."""
    hf_model(name).save_pretrained(tmp_path)
    from_file, loaded = load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = run(from_file)
    for source in (hf_model(name), loaded):  # it remembers how its files were converted
        model = from_transformers(source)
        assert torch.equal(run(model), expected)
        assert model.memory_spec.layers == from_file.memory_spec.layers


def test_the_dtype_is_the_models_own_unless_given() -> None:
    torch.manual_seed(0)
    half = AutoModelForCausalLM.from_config(CONFIGS["jamba"](), dtype=torch.bfloat16)
    assert from_transformers(half).memory_spec.dtype == torch.bfloat16
    assert from_transformers(half, dtype="float32").memory_spec.dtype == torch.float32
    with pytest.raises(SpecError, match="dtype='int8'"):
        from_transformers(half, dtype="int8")


def test_weights_are_shared_where_they_are_used_as_they_are() -> None:
    """In 16 bits a change of the source shows in ours; where it is packed, it does not."""
    torch.manual_seed(0)
    for dtype, is_shared in ((torch.bfloat16, True), (torch.float32, False)):
        source = AutoModelForCausalLM.from_config(CONFIGS["jamba"](), dtype=dtype)
        randomise_(source)
        model = from_transformers(source)
        before = run(model)
        with torch.no_grad():
            source.lm_head.weight.zero_()
        assert (run(model) == 0).all() if is_shared else torch.equal(run(model), before)


def test_encoder_decoder_models_come_too() -> None:
    config = BartConfig(
        vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    source = AutoModelForSeq2SeqLM.from_config(config).eval()
    randomise_(source)
    model = from_transformers(source)
    memory = HybridMemory(model.memory_spec, "2MiB")
    (encoded,) = model.encode([[5, 6, 7]])  # type: ignore[attr-defined]
    with memory.step({memory.open(encoder=encoded): [1, 8, 9]}, outputs="all") as step:
        actual = model(step)
    expected = logits(source, torch.tensor([[5, 6, 7]]), decoder_input_ids=torch.tensor([[1, 8, 9]]))[0]
    assert torch.allclose(actual, expected, atol=5e-4)


def test_what_load_model_refuses_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported; these are: Bamba"):
        from_transformers(AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)))
    model = AutoModelForCausalLM.from_config(CONFIGS["jamba"]())
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="quant_method"):
        from_transformers(model)
    with torch.device("meta"):
        without_weights = AutoModelForCausalLM.from_config(CONFIGS["jamba"]())
    with pytest.raises(UnsupportedModelError, match="weights on meta"):
        from_transformers(without_weights)
