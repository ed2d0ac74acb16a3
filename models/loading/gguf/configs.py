"""Turns the metadata of GGUF files into configs of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memory.errors import FormatError
from models.loading.checkpoint import UnsupportedModelError
from models.loading.gguf.file import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Fields = dict[str, Any]


def read_gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Return the config of a model, as transformers' object; its `architectures` names the model class.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not implemented.
        FormatError: the metadata lacks something, or contradicts itself.
    """
    from transformers import AutoConfig

    if file.architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {file.architecture!r}; these are read from GGUF files: "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    model_class, model_type, describe = _ARCHITECTURES[file.architecture]
    try:
        config = AutoConfig.for_model(model_type, **_common(file), **describe(file))
    except (UnsupportedModelError, FormatError):
        raise
    except Exception as error:  # validators of configs raise types of their own, of several libraries
        raise FormatError(f"{file.path} does not describe a {model_class}: {error}") from error
    config.architectures = [model_class]
    return config


def _common(file: GgufFile) -> Fields:
    embedding = "token_embd.weight"
    if embedding not in file:
        raise FormatError(f"{file.path} has no tensor {embedding}; it holds no whole language model")
    ids = {
        f"{name}_token_id": file.value(f"tokenizer.ggml.{key}_token_id", is_needed=False)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "vocab_size": file.shape(embedding)[0],
        "hidden_size": file.own("embedding_length"),
        "num_hidden_layers": _n_layers(file),
        "tie_word_embeddings": "output.weight" not in file,
        "dtype": _dtype(file),
        **ids,
    }


def _n_layers(file: GgufFile) -> int:
    """Return the number of layers, without those that only draft tokens (multi-token prediction)."""
    return int(file.own("block_count") - file.own("nextn_predict_layers", 0))


def _dtype(file: GgufFile) -> str:
    """Return the dtype of most numbers; bfloat16 for those in fewer bits.

    Numbers are counted, not tensors: of Mamba-2's, most with two axes are small, and F32 in every file.
    """
    if file.is_quantised():
        return "bfloat16"
    n_numbers = dict.fromkeys(("F32", "F16", "BF16"), 0)
    for name in file:
        n_numbers[file.stored_dtype(name)] += math.prod(file.shape(name))
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[max(n_numbers, key=lambda kind: n_numbers[kind])]


def _attention(file: GgufFile) -> Fields:
    """Return the fields of attention, in the layers that have it."""
    n_heads, n_kv_heads = _largest(file.own("attention.head_count")), file.own("attention.head_count_kv", 0)
    return {"num_attention_heads": n_heads, "num_key_value_heads": _largest(n_kv_heads) or n_heads}


def _largest(value: Any) -> int:
    return int(max(value)) if isinstance(value, list) else int(value)


def _attention_layers(file: GgufFile) -> list[int]:
    """Return the layers with attention: those that have key heads."""
    counts = file.own("attention.head_count_kv")
    n_layers = _n_layers(file)
    return [i for i, n in enumerate(counts if isinstance(counts, list) else [counts] * n_layers) if n > 0]


def _head_dim(file: GgufFile) -> int:
    n_heads = _largest(file.own("attention.head_count"))
    return int(file.own("attention.key_length", file.own("embedding_length") // n_heads))


def _rope(file: GgufFile) -> Fields:
    """Return the rotary embedding's parameters, whose kind llama.cpp keeps in several ways."""
    theta = float(file.own("rope.freq_base", 10000.0))
    kind = file.own("rope.scaling.type", "none")
    head_dim = _head_dim(file)
    share = file.own("rope.dimension_count", head_dim) / head_dim
    found: Fields = {"rope_theta": theta, "rope_type": "default"}
    if share != 1.0:
        found["partial_rotary_factor"] = share
    if "rope_freqs.weight" in file:
        found |= _llama3(file, theta, head_dim)
    elif kind == "linear":
        found |= {"rope_type": "linear", "factor": float(file.own("rope.scaling.factor"))}
    elif kind == "yarn":
        found |= {
            "rope_type": "yarn", "factor": float(file.own("rope.scaling.factor")),
            "original_max_position_embeddings": int(file.own("rope.scaling.original_context_length")),
        }  # fmt: skip
    elif kind != "none":
        raise UnsupportedModelError(
            f"{file.path} scales rotary embeddings by {kind!r}; read are linear, yarn and llama3"
        )
    return {"rope_parameters": found, "max_position_embeddings": int(file.own("context_length"))}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> Fields:
    """Return Llama 3's rotary parameters: the file holds only the factors that follow from them.

    Models of this family differ in the largest factor and in the length that they were trained with first.
    """
    import torch

    stored = file.read("rope_freqs.weight", torch.float32).float().flatten()
    factor, low, high = float(stored.max()), 1.0, 4.0
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    for n_original in (1 << i for i in range(4, 20)):
        smooth = ((n_original / wavelengths - low) / (high - low)).clamp(0, 1)
        if stored.shape == smooth.shape and torch.allclose(1 / ((1 - smooth) / factor + smooth), stored, rtol=1e-3):
            return {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": n_original,
            }  # fmt: skip
    raise UnsupportedModelError(
        f"rope_freqs.weight in {file.path} holds factors that are not Llama 3's; give the checkpoint in safetensors"
    )


def _has(file: GgufFile, part: str) -> bool:
    """True if any layer has this tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in file)


def _refuse_experts(file: GgufFile) -> None:
    if file.own("expert_count", 0) > 0:
        raise UnsupportedModelError(f"{file.path} is a {file.architecture} with experts, which is not implemented")


def _llama(file: GgufFile) -> Fields:
    _refuse_experts(file)
    return {
        **_attention(file), **_rope(file), "head_dim": _head_dim(file), "rms_norm_eps": _rms_eps(file),
        "intermediate_size": file.own("feed_forward_length"), "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }  # fmt: skip


def _qwen3(file: GgufFile) -> Fields:
    return {name: value for name, value in _llama(file).items() if name != "mlp_bias"}


def _rms_eps(file: GgufFile) -> float:
    return float(file.own("attention.layer_norm_rms_epsilon"))


def _jamba(file: GgufFile) -> Fields:
    n_layers, n_model = _n_layers(file), file.own("embedding_length")
    n_experts = file.own("expert_count", 0)
    with_experts = [i for i in range(n_layers) if f"blk.{i}.ffn_down_exps.weight" in file]
    attention_period, attention_offset = _period(file, _attention_layers(file), "attention")
    expert_period, expert_offset = _period(file, with_experts, "experts")
    return {
        **_attention(file), "rms_norm_eps": _rms_eps(file), "intermediate_size": file.own("feed_forward_length"),
        "attn_layer_period": attention_period, "attn_layer_offset": attention_offset,
        "expert_layer_period": expert_period, "expert_layer_offset": expert_offset,
        "num_experts": max(1, n_experts), "num_experts_per_tok": max(1, file.own("expert_used_count", 0)),
        "mamba_d_state": file.own("ssm.state_size"), "mamba_d_conv": file.own("ssm.conv_kernel"),
        "mamba_expand": file.own("ssm.inner_size") // n_model, "mamba_dt_rank": file.own("ssm.time_step_rank"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"), "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "max_position_embeddings": file.own("context_length"),
    }  # fmt: skip


def _period(file: GgufFile, layers: list[int], what: str) -> tuple[int, int]:
    """Return the period and offset of layers, as Jamba's config names them."""
    n_layers = _n_layers(file)
    if not layers:
        return n_layers + 1, n_layers
    period = layers[1] - layers[0] if len(layers) > 1 else n_layers
    if layers != list(range(layers[0], n_layers, period)) or layers[0] >= period:
        raise UnsupportedModelError(f"{file.path} has {what} in layers {layers}, which have no period")
    return period, layers[0]


def _mamba(file: GgufFile) -> Fields:
    if file.own("ssm.dt_b_c_rms", default=False):
        raise UnsupportedModelError(f"{file.path} is a FalconMamba, which is not implemented")
    n_inner = file.own("ssm.inner_size")
    return {
        "layer_norm_epsilon": _rms_eps(file), "state_size": file.own("ssm.state_size"),
        "conv_kernel": file.own("ssm.conv_kernel"), "intermediate_size": n_inner,
        "expand": n_inner // file.own("embedding_length"), "time_step_rank": file.own("ssm.time_step_rank"),
        "use_bias": _has(file, "ssm_in.bias"), "use_conv_bias": _has(file, "ssm_conv1d.bias"),
    }  # fmt: skip


def _mamba2(file: GgufFile) -> Fields:
    n_inner, n_heads = file.own("ssm.inner_size"), file.own("ssm.time_step_rank")
    return {
        "layer_norm_epsilon": _rms_eps(file), "state_size": file.own("ssm.state_size"),
        "conv_kernel": file.own("ssm.conv_kernel"), "num_heads": n_heads, "head_dim": n_inner // n_heads,
        "n_groups": file.own("ssm.group_count"), "expand": n_inner // file.own("embedding_length"),
        "use_bias": _has(file, "ssm_in.bias"), "use_conv_bias": _has(file, "ssm_conv1d.bias"),
    }  # fmt: skip


def _ssd(file: GgufFile) -> Fields:
    """Return the fields of Mamba-2 layers, as configs of hybrids name them."""
    n_inner, n_heads = file.own("ssm.inner_size"), file.own("ssm.time_step_rank")
    return {
        "mamba_n_heads": n_heads, "mamba_d_head": n_inner // n_heads, "mamba_n_groups": file.own("ssm.group_count"),
        "mamba_d_state": file.own("ssm.state_size"), "mamba_d_conv": file.own("ssm.conv_kernel"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"), "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }  # fmt: skip


def _granite_hybrid(file: GgufFile) -> Fields:
    n_layers, layers, n_experts = _n_layers(file), _attention_layers(file), file.own("expert_count", 0)
    has_positions = bool(file.own("rope.scaling.finetuned", default=False))
    rope = _rope(file)
    if not has_positions:
        rope.pop("rope_parameters")
    n_inner = file.own("feed_forward_length")
    return {
        **_attention(file), **_ssd(file), **rope, "rms_norm_eps": _rms_eps(file),
        "mamba_expand": file.own("ssm.inner_size") // file.own("embedding_length"),
        "layer_types": ["attention" if i in layers else "mamba" for i in range(n_layers)],
        "position_embedding_type": "rope" if has_positions else None,
        "intermediate_size": _largest(n_inner), "num_local_experts": n_experts,
        "num_experts_per_tok": file.own("expert_used_count", 0),
        "shared_intermediate_size": file.own("expert_shared_feed_forward_length", _largest(n_inner)),
        "attention_bias": _has(file, "attn_q.bias"),
        "attention_multiplier": float(file.own("attention.scale", _head_dim(file) ** -0.5)),
        "embedding_multiplier": float(file.own("embedding_scale", 1.0)),
        "residual_multiplier": float(file.own("residual_scale", 1.0)),
        "logits_scaling": float(file.own("logit_scale", 1.0)),
    }  # fmt: skip


def _falcon_h1(file: GgufFile) -> Fields:
    """The converter multiplies weights by the config's factors, so these are one."""
    return {
        **_attention(file), **_ssd(file), **_rope(file), "rms_norm_eps": _rms_eps(file), "head_dim": _head_dim(file),
        "mamba_d_ssm": file.own("ssm.inner_size"), "intermediate_size": file.own("feed_forward_length"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"), "mamba_norm_before_gate": False,
        "attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias"),
        "projectors_bias": _has(file, "ssm_out.bias"),
        "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0], "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0, "ssm_multipliers": [1.0] * 5,
    }  # fmt: skip


def _lfm2(file: GgufFile) -> Fields:
    layers, n_layers = _attention_layers(file), _n_layers(file)
    return {
        **_attention(file), **_rope(file), "norm_eps": _rms_eps(file),
        "intermediate_size": file.own("feed_forward_length"), "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.own("shortconv.l_cache"), "conv_bias": _has(file, "shortconv.conv.bias"),
        "layer_types": ["full_attention" if i in layers else "conv" for i in range(n_layers)],
    }  # fmt: skip


def _nemotron_h(file: GgufFile) -> Fields:
    attention, widths = _attention_layers(file), file.own("feed_forward_length")
    n_inner, n_heads = file.own("ssm.inner_size"), file.own("ssm.time_step_rank")
    kinds = [
        "attention" if i in attention else "mlp" if width > 0 else "mamba" for i, width in enumerate(widths)
    ]  # fmt: skip
    return {
        **_attention(file), "head_dim": _head_dim(file), "layers_block_type": kinds,
        "layer_norm_epsilon": _rms_eps(file), "intermediate_size": max(widths),
        "mamba_num_heads": n_heads, "mamba_head_dim": n_inner // n_heads, "n_groups": file.own("ssm.group_count"),
        "ssm_state_size": file.own("ssm.state_size"), "conv_kernel": file.own("ssm.conv_kernel"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"), "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"), "max_position_embeddings": file.own("context_length"),
    }  # fmt: skip


def _qwen_next(file: GgufFile) -> Fields:
    """Return what Qwen3-Next and Qwen3.5 have in common."""
    n_heads = file.own("ssm.time_step_rank")
    kinds = [
        "full_attention" if f"blk.{i}.attn_q.weight" in file else "linear_attention" for i in range(_n_layers(file))
    ]  # fmt: skip
    return {
        **_attention(file), **_rope(file), "head_dim": _head_dim(file), "rms_norm_eps": _rms_eps(file),
        "layer_types": kinds, "attention_bias": _has(file, "attn_q.bias"),
        "linear_conv_kernel_dim": file.own("ssm.conv_kernel"), "linear_key_head_dim": file.own("ssm.state_size"),
        "linear_num_key_heads": file.own("ssm.group_count"), "linear_num_value_heads": n_heads,
        "linear_value_head_dim": file.own("ssm.inner_size") // n_heads,
    }  # fmt: skip


def _qwen35(file: GgufFile) -> Fields:
    return _qwen_next(file) | {"intermediate_size": file.own("feed_forward_length")}


def _qwen35_moe(file: GgufFile) -> Fields:
    return _qwen_next(file) | {
        "num_experts": file.own("expert_count"), "num_experts_per_tok": file.own("expert_used_count"),
        "moe_intermediate_size": file.own("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.own("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _qwen3_next(file: GgufFile) -> Fields:
    """llama.cpp renormalises the weights of experts, which are in every layer."""
    return _qwen35_moe(file) | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


_ARCHITECTURES: dict[str, tuple[str, str, Callable[[GgufFile], Fields]]] = {
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1", _falcon_h1),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", _granite_hybrid),
    "jamba": ("JambaForCausalLM", "jamba", _jamba),
    "lfm2": ("Lfm2ForCausalLM", "lfm2", _lfm2),
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "mamba": ("MambaForCausalLM", "mamba", _mamba),
    "mamba2": ("Mamba2ForCausalLM", "mamba2", _mamba2),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h", _nemotron_h),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _qwen3),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen35_moe),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next", _qwen3_next),
}
"""Architecture in the file -> the model class, transformers' name of its config, and what reads the config's fields."""
