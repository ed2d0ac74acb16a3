"""`from_transformers` gives our model the weights of a loaded transformers model, without a file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, GPT2Config

from hybridmem.memory import HybridMemory, SpecError
from hybridmem.models import HybridCache, LanguageModel, UnsupportedModelError, attach, from_transformers, load_model
from hybridmem.models.products import choice
from tests.extent import few_cases, one_in
from tests.models.checkpoints import CONFIGS, draw_tokens, randomise_
from tests.models.hf_models import given, hf_model, logits

TOKENS = draw_tokens(20)
ONE_OF_EACH = (
    "bailing-hybrid", "bamba", "deepseek-v2", "deepseek-v3", "falcon-h1", "falcon-mamba", "gemma2", "gemma3",
    "gpt-oss", "granite-moe-hybrid", "inkling-log-scale", "inkling2", "inkling2-loop", "jamba", "kimi-linear",
    "lara-mini", "lfm2-moe", "lfm3", "minimax", "olmo-hybrid", "olmo3", "llama",
    "mamba", "mamba2", "nemotron-h", "qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen4-exp", "recurrent-gemma", "rwkv",
    "xlstm", "zamba", "zamba2", "zaya",
)  # fmt: skip
ONE_OF_EACH = tuple(name for name in ONE_OF_EACH if name in CONFIGS)  # Transformers 5.23 lacks one of them.


def run(model: LanguageModel) -> Tensor:
    memory = HybridMemory(model.memory_spec, "2MiB", poison=True)
    with memory.step({memory.open(): TOKENS}, outputs="all") as step:
        return model(step)


@few_cases
@pytest.mark.parametrize("name", one_in(3, ONE_OF_EACH))
def test_it_is_the_model_that_loading_its_checkpoint_gives(name: str, tmp_path: Path) -> None:
    """The logits are equal bit for bit, although transformers stores some weights in another form than files do."""
    hf_model(name).save_pretrained(tmp_path)
    from_file, loaded = load_model(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = run(from_file)
    for source in (hf_model(name), loaded):  # The model remembers how its files were converted.
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


def test_weights_are_shared_where_they_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a matrix is not packed, a change of the source model shows in ours."""
    torch.manual_seed(0)
    for dtype, is_shared in ((torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)):
        if is_shared:
            monkeypatch.setattr(choice, "packed_dtype", lambda weight: None)
        source = AutoModelForCausalLM.from_config(CONFIGS["jamba"](), dtype=dtype)
        randomise_(source)
        model = from_transformers(source)
        before = run(model)
        with torch.no_grad():
            source.lm_head.weight.zero_()
        assert (run(model) == 0).all() if is_shared else torch.equal(run(model), before)


def test_encoder_decoder_models_come_too() -> None:
    config = BartConfig(
        vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
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


class Adapter(nn.Module):
    """Is a low-rank adapter around a linear layer, as in PEFT."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Adapted(nn.Module):
    """Is what PEFT returns: a model of another class, with a model of transformers inside."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.peft_config = inside, {"default": object()}


def test_adapters_are_named_and_their_remedy() -> None:
    model = copy.deepcopy(hf_model("llama"))
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    with pytest.raises(
        UnsupportedModelError, match=r"adapter, at model\.layers\.1\.self_attn\.q_proj; .*merge_and_unload"
    ):
        from_transformers(model)
    with pytest.raises(UnsupportedModelError, match=r"adapter, at the whole model; .*merge_and_unload"):
        from_transformers(Adapted(model))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"Adapted cannot be attached; .*adapter.*get_base_model"):
        attach(Adapted(model))  # type: ignore[arg-type]
    attention.q_proj = attention.q_proj.base_layer
    model.peft_config = {"default": object()}  # PEFT leaves this attribute after a merge.
    assert torch.equal(run(from_transformers(model)), run(from_transformers(hf_model("llama"))))


def test_a_folder_with_an_adapter_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"holds an adapter, not a model; .*merge_and_unload"):
        load_model(tmp_path)


def test_adapters_run_where_modules_are_called_and_are_refused_where_weights_are_read() -> None:
    model = copy.deepcopy(hf_model("jamba"))
    mixer = next(module for module in model.modules() if type(module).__name__ == "JambaMambaMixer")
    plain = mixer.in_proj
    mixer.in_proj = Adapter(plain)
    expected = logits(model, torch.tensor([TOKENS]))
    assert not torch.allclose(expected, logits(hf_model("jamba"), torch.tensor([TOKENS])), atol=0.1)
    with attach(model) as bridge:
        memory = HybridMemory(bridge.memory_spec, "2MiB")
        cache = HybridCache(memory, [memory.open()])
        assert torch.allclose(logits(model, torch.tensor([TOKENS]), **given(cache)), expected, atol=5e-4)
    mixer.in_proj, mixer.dt_proj = plain, Adapter(mixer.dt_proj)
    with pytest.raises(UnsupportedModelError, match="adapter around a Linear whose weights a layer reads"):
        attach(model)
    model = copy.deepcopy(hf_model("deepseek-v3"))
    attention = model.model.layers[1].self_attn
    # This linear layer makes keys and values of the rows that are remembered.
    attention.kv_b_proj = Adapter(attention.kv_b_proj)
    with pytest.raises(UnsupportedModelError, match="adapter around a Linear whose weights a layer reads"):
        attach(model)


def test_a_model_that_has_run_is_the_same_model() -> None:
    """When transformers runs RWKV-4, it scales its weights in place."""
    torch.manual_seed(5)
    source = AutoModelForCausalLM.from_config(CONFIGS["rwkv-rescaled-tied"]()).eval()
    randomise_(source)
    expected = run(from_transformers(source))
    assert torch.allclose(logits(source, torch.tensor([TOKENS]))[0], expected, atol=5e-4)
    assert torch.equal(run(from_transformers(source)), expected)


def test_what_load_model_refuses_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported; these are: BailingHybrid"):
        from_transformers(AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20)))
    model = AutoModelForCausalLM.from_config(CONFIGS["jamba"]())
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="quant_method"):
        from_transformers(model)
    with torch.device("meta"):
        without_weights = AutoModelForCausalLM.from_config(CONFIGS["jamba"]())
    with pytest.raises(UnsupportedModelError, match="weights on meta"):
        from_transformers(without_weights)
