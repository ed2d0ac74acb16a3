"""Turns the metadata of GGUF files into configs of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.architectures import ARCHITECTURES
from hybridmem.models.loading.compiler import light_configs
from hybridmem.models.loading.gguf.fields import (
    Fields,
    attention_fields,
    attention_layers,
    common_fields,
    count_layers,
    has_part,
    head_dim_of,
    largest,
    period_of,
    refuse_experts,
    rms_eps,
    rope_fields,
    ssd_fields,
)
from hybridmem.models.loading.gguf.file import GgufFile
from hybridmem.models.loading.gguf.latent import (
    deepseek2,
    deepseek32,
    deepseek_v2,
    glm5_next,
    glm_moe_dsa,
    is_deepseek_v3,
    kimi_linear,
    ling3,
)
from hybridmem.models.loading.model_list import import_models
from hybridmem.models.weights.checkpoint import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def read_gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Return the config of a model as transformers' object. Its `architectures` names the model class.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not implemented.
        FormatError: the metadata lacks something, or contradicts itself.
    """
    import_models()
    from transformers import AutoConfig

    if file.architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} holds a model of architecture {file.architecture!r}; these are read from GGUF files: "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    model_class, model_type, describe = _ARCHITECTURES[file.architecture]
    if _is_bamba(file):
        model_class, model_type, describe = _BAMBA
    elif is_deepseek_v3(file):
        model_class, model_type, describe = _DEEPSEEK_V3
    elif _is_falcon_mamba(file):
        model_class, model_type, describe = _FALCON_MAMBA
    ARCHITECTURES[model_class]  # The module of the class may register a config class that transformers lacks.
    try:
        with light_configs():
            config = AutoConfig.for_model(model_type, **common_fields(file), **describe(file))
    except (UnsupportedModelError, FormatError):
        raise
    except Exception as error:  # Validators of configs raise errors of several libraries.
        raise FormatError(f"{file.path} does not describe a {model_class}: {error}") from error
    config.architectures = [model_class]
    return config


def classes_in_files() -> frozenset[str]:
    """Return the model classes that GGUF files can hold."""
    return frozenset(model_class for model_class, _, _ in (*_ARCHITECTURES.values(), *_VARIANTS))


def _llama(file: GgufFile) -> Fields:
    refuse_experts(file)
    return {
        **attention_fields(file), **rope_fields(file), "head_dim": head_dim_of(file), "rms_norm_eps": rms_eps(file),
        "intermediate_size": file.own("feed_forward_length"), "attention_bias": has_part(file, "attn_q.bias"),
        "mlp_bias": has_part(file, "ffn_up.bias"),
    }  # fmt: skip


def _qwen2(file: GgufFile) -> Fields:
    """Return the fields of Qwen2, which always has the same biases."""
    return {name: value for name, value in _llama(file).items() if name not in ("mlp_bias", "attention_bias")}


def _qwen3(file: GgufFile) -> Fields:
    return {name: value for name, value in _llama(file).items() if name != "mlp_bias"}


def _gemma(file: GgufFile, *, period: int) -> Fields:
    """Return the fields that Gemma 2 and 3 have in common.

    Their largest models divide scores by the root of a width other than that of their heads, which no file says.
    """
    head_dim = head_dim_of(file)
    is_largest = count_layers(file) == _LARGEST_GEMMAS[file.architecture]
    caps = {name: file.own(name, is_needed=False) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    return {
        **attention_fields(file), **rope_fields(file), **caps, "head_dim": head_dim, "rms_norm_eps": rms_eps(file),
        "intermediate_size": file.own("feed_forward_length"), "attention_bias": has_part(file, "attn_q.bias"),
        "layer_types": _layer_types(file, period=period),
        "query_pre_attn_scalar": (
            file.own("embedding_length") // largest(file.own("attention.head_count")) if is_largest else head_dim
        ),
    }  # fmt: skip


def _layer_types(file: GgufFile, *, period: int) -> list[str]:
    """Return what each layer attends to. Of each period of layers, all but the last attend to a window."""
    has_window = file.own("attention.sliding_window_pattern", period)
    if not isinstance(has_window, list):
        has_window = [has_window == 0 or i % has_window < has_window - 1 for i in range(count_layers(file))]
    return ["sliding_attention" if windowed else "full_attention" for windowed in has_window]


_LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""The number of layers of the models with 27 billion parameters. llama.cpp recognizes them by it, too."""


def _gemma2(file: GgufFile) -> Fields:
    """Return the fields of Gemma 2. The first files lacked its bounds, and llama.cpp has the same for such files."""
    return _gemma(file, period=2) | {
        "sliding_window": file.own("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.own("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.own("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Fields:
    fields = _gemma(file, period=6)
    return fields | _windows(file, fields, theta=10000.0)


def _olmo2(file: GgufFile) -> Fields:
    """Return the fields of OLMo 3. OLMo 2 has the same architecture in files, and is OLMo 3 without windows."""
    fields = {
        **attention_fields(file), **rope_fields(file), "rms_norm_eps": rms_eps(file),
        "intermediate_size": file.own("feed_forward_length"), "attention_bias": has_part(file, "attn_q.bias"),
        "layer_types": _layer_types(file, period=4),
    }  # fmt: skip
    return fields | _windows(file, fields, theta=fields["rope_parameters"]["rope_theta"])


def _windows(file: GgufFile, fields: Fields, *, theta: float) -> Fields:
    """Return the window, and what it changes in fields that were read: no layer may have it.

    Rotary scaling is for layers that attend to all tokens. Others may have another base, which is `theta` by default.
    """
    window = file.own("attention.sliding_window", 0)
    in_windows = {"rope_type": "default", "rope_theta": float(file.own("rope.freq_base_swa", theta))}
    return {
        "layer_types": fields["layer_types"] if window else ["full_attention"] * count_layers(file),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": in_windows},
        "sliding_window": window or None,
    }


def _jamba(file: GgufFile) -> Fields:
    n_layers, n_model = count_layers(file), file.own("embedding_length")
    n_experts = file.own("expert_count", 0)
    with_experts = [i for i in range(n_layers) if f"blk.{i}.ffn_down_exps.weight" in file]
    attention_period, attention_offset = period_of(file, attention_layers(file), "attention")
    expert_period, expert_offset = period_of(file, with_experts, "experts")
    return {
        **attention_fields(file), "rms_norm_eps": rms_eps(file), "intermediate_size": file.own("feed_forward_length"),
        "attn_layer_period": attention_period, "attn_layer_offset": attention_offset,
        "expert_layer_period": expert_period, "expert_layer_offset": expert_offset,
        "num_experts": max(1, n_experts), "num_experts_per_tok": max(1, file.own("expert_used_count", 0)),
        "mamba_d_state": file.own("ssm.state_size"), "mamba_d_conv": file.own("ssm.conv_kernel"),
        "mamba_expand": file.own("ssm.inner_size") // n_model, "mamba_dt_rank": file.own("ssm.time_step_rank"),
        "mamba_conv_bias": has_part(file, "ssm_conv1d.bias"), "mamba_proj_bias": has_part(file, "ssm_in.bias"),
        "max_position_embeddings": file.own("context_length"),
    }  # fmt: skip


def _mamba(file: GgufFile) -> Fields:
    n_inner = file.own("ssm.inner_size")
    return {
        "layer_norm_epsilon": rms_eps(file), "state_size": file.own("ssm.state_size"),
        "conv_kernel": file.own("ssm.conv_kernel"), "intermediate_size": n_inner,
        "expand": n_inner // file.own("embedding_length"), "time_step_rank": file.own("ssm.time_step_rank"),
        "use_bias": has_part(file, "ssm_in.bias"), "use_conv_bias": has_part(file, "ssm_conv1d.bias"),
    }  # fmt: skip


def _is_falcon_mamba(file: GgufFile) -> bool:
    """True if dt, B and C are normalized. No file has the epsilon; published models have the one of the config."""
    return file.architecture == "mamba" and bool(file.own("ssm.dt_b_c_rms", default=False))


def _mamba2(file: GgufFile) -> Fields:
    n_inner, n_heads = file.own("ssm.inner_size"), file.own("ssm.time_step_rank")
    return {
        "layer_norm_epsilon": rms_eps(file), "state_size": file.own("ssm.state_size"),
        "conv_kernel": file.own("ssm.conv_kernel"), "num_heads": n_heads, "head_dim": n_inner // n_heads,
        "n_groups": file.own("ssm.group_count"), "expand": n_inner // file.own("embedding_length"),
        "use_bias": has_part(file, "ssm_in.bias"), "use_conv_bias": has_part(file, "ssm_conv1d.bias"),
    }  # fmt: skip


def _granite_hybrid(file: GgufFile) -> Fields:
    layers, n_experts = attention_layers(file), file.own("expert_count", 0)
    rope = rope_fields(file)
    if not _has_positions(file):
        rope.pop("rope_parameters")
    n_inner = largest(file.own("feed_forward_length"))
    return {
        **attention_fields(file), **ssd_fields(file), **rope, "rms_norm_eps": rms_eps(file),
        "mamba_expand": file.own("ssm.inner_size") // file.own("embedding_length"),
        "layer_types": ["attention" if i in layers else "mamba" for i in range(count_layers(file))],
        "position_embedding_type": "rope" if _has_positions(file) else None,
        "intermediate_size": n_inner, "num_local_experts": n_experts,
        "num_experts_per_tok": file.own("expert_used_count", 0),
        "shared_intermediate_size": file.own("expert_shared_feed_forward_length", n_inner),
        "attention_bias": has_part(file, "attn_q.bias"),
        "attention_multiplier": float(file.own("attention.scale", head_dim_of(file) ** -0.5)),
        "embedding_multiplier": float(file.own("embedding_scale", 1.0)),
        "residual_multiplier": float(file.own("residual_scale", 1.0)),
        "logits_scaling": float(file.own("logit_scale", 1.0)),
    }  # fmt: skip


def _has_positions(file: GgufFile) -> bool:
    return bool(file.own("rope.scaling.finetuned", default=False))


def _is_bamba(file: GgufFile) -> bool:
    """True if the file was made from Bamba. The converter writes it as a Granite with positions and no factors."""
    is_granite = file.architecture == "granitehybrid" and not file.own("expert_count", 0)
    return is_granite and _has_positions(file) and file.own("attention.scale", is_needed=False) is None


def _bamba(file: GgufFile) -> Fields:
    rope = rope_fields(file)
    rope["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # The config class's own default is a half.
    return {
        **attention_fields(file), **ssd_fields(file), **rope, "rms_norm_eps": rms_eps(file),
        "mamba_expand": file.own("ssm.inner_size") // file.own("embedding_length"),
        "attn_layer_indices": attention_layers(file), "intermediate_size": largest(file.own("feed_forward_length")),
        "attention_bias": has_part(file, "attn_q.bias"), "mlp_bias": has_part(file, "ffn_up.bias"),
    }  # fmt: skip


def _falcon_h1(file: GgufFile) -> Fields:
    """Return the fields of Falcon-H1.

    The config's factors are one, because the converter multiplies weights by them.
    """
    return {
        **attention_fields(file), **ssd_fields(file), **rope_fields(file),
        "rms_norm_eps": rms_eps(file), "head_dim": head_dim_of(file),
        "mamba_d_ssm": file.own("ssm.inner_size"), "intermediate_size": file.own("feed_forward_length"),
        "mamba_rms_norm": has_part(file, "ssm_norm.weight"), "mamba_norm_before_gate": False,
        "attention_bias": has_part(file, "attn_q.bias"), "mlp_bias": has_part(file, "ffn_up.bias"),
        "projectors_bias": has_part(file, "ssm_out.bias"),
        "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0], "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0, "ssm_multipliers": [1.0] * 5,
    }  # fmt: skip


def _lfm2(file: GgufFile) -> Fields:
    layers, n_layers = attention_layers(file), count_layers(file)
    return {
        **attention_fields(file), **rope_fields(file), "norm_eps": rms_eps(file),
        "intermediate_size": file.own("feed_forward_length"), "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.own("shortconv.l_cache"), "conv_bias": has_part(file, "shortconv.conv.bias"),
        "layer_types": ["full_attention" if i in layers else "conv" for i in range(n_layers)],
    }  # fmt: skip


def _lfm2_moe(file: GgufFile) -> Fields:
    """Return the fields of LFM2 with experts, whose weights are renormalized. Only newer files have a factor."""
    fields = {name: value for name, value in _lfm2(file).items() if name != "block_auto_adjust_ff_dim"}
    return fields | {
        "num_experts": file.own("expert_count"), "num_experts_per_tok": file.own("expert_used_count"),
        "moe_intermediate_size": largest(file.own("expert_feed_forward_length")),
        "num_dense_layers": file.own("leading_dense_block_count", 0),
        "use_expert_bias": has_part(file, "exp_probs_b.bias"),
        "norm_topk_prob": True, "routed_scaling_factor": float(file.own("expert_weights_scale", 1.0)),
    }  # fmt: skip


def _nemotron_h(file: GgufFile) -> Fields:
    """Return the fields of Nemotron-H, in which each layer is one of four kinds."""
    attention, widths = attention_layers(file), file.own("feed_forward_length")
    n_inner, n_heads = file.own("ssm.inner_size"), file.own("ssm.time_step_rank")

    def kind(i: int) -> str:
        if i in attention:
            return "attention"
        if f"blk.{i}.ffn_gate_inp.weight" in file:
            return "moe"
        return "mlp" if widths[i] > 0 else "mamba"

    return {
        **attention_fields(file), "head_dim": head_dim_of(file),
        "layers_block_type": [kind(i) for i in range(count_layers(file))],
        "layer_norm_epsilon": rms_eps(file), "intermediate_size": max(widths),
        "mamba_num_heads": n_heads, "mamba_head_dim": n_inner // n_heads, "n_groups": file.own("ssm.group_count"),
        "ssm_state_size": file.own("ssm.state_size"), "conv_kernel": file.own("ssm.conv_kernel"),
        "use_conv_bias": has_part(file, "ssm_conv1d.bias"), "mamba_proj_bias": has_part(file, "ssm_in.bias"),
        "use_bias": has_part(file, "ssm_in.bias"),
        "mlp_bias": has_part(file, "ffn_up.bias") or has_part(file, "ffn_up_shexp.bias"),
        "max_position_embeddings": file.own("context_length"),
    }  # fmt: skip


def _nemotron_h_moe(file: GgufFile) -> Fields:
    """Return the fields of Nemotron-H with experts, which have one width in all layers."""
    n_inner, n_chosen = file.own("expert_feed_forward_length"), file.own("expert_used_count")
    if isinstance(n_inner, list) or isinstance(n_chosen, list):
        raise UnsupportedModelError(f"{file.path} has other experts in each layer, which is not implemented")
    return _nemotron_h(file) | {
        "n_routed_experts": file.own("expert_count"), "num_experts_per_tok": n_chosen, "moe_intermediate_size": n_inner,
        "moe_shared_expert_intermediate_size": file.own("expert_shared_feed_forward_length"),
        "n_shared_experts": file.own("expert_shared_count", 1), "norm_topk_prob": file.own("expert_weights_norm", True),
        "routed_scaling_factor": float(file.own("expert_weights_scale", 1.0)),
        "n_group": file.own("expert_group_count", 1), "topk_group": file.own("expert_group_used_count", 1),
        "moe_latent_size": file.own("moe_latent_size", is_needed=False),
    }  # fmt: skip


def _rwkv7(file: GgufFile) -> Fields:
    """Return the fields of RWKV-7. Heads are normalized without what flash-linear-attention's fused kernel adds."""

    def rank(name: str) -> int:
        return int(file.own(f"attention.{name}_lora_rank"))

    return {
        "head_dim": file.own("wkv.head_size"), "intermediate_size": largest(file.own("feed_forward_length")),
        "norm_eps": float(file.own("attention.layer_norm_epsilon")), "fuse_norm": False,
        "norm_first": "token_embd_norm.weight" in file, "norm_bias": "output_norm.bias" in file,
        "decay_low_rank_dim": rank("decay"), "a_low_rank_dim": rank("iclr"), "gate_low_rank_dim": rank("gate"),
        "v_low_rank_dim": rank("value_residual_mix"),
    }  # fmt: skip


def _qwen_next(file: GgufFile) -> Fields:
    """Return the fields that Qwen3-Next and Qwen3.5 have in common."""
    n_heads = file.own("ssm.time_step_rank")
    kinds = [
        "full_attention" if f"blk.{i}.attn_q.weight" in file else "linear_attention" for i in range(count_layers(file))
    ]  # fmt: skip
    return {
        **attention_fields(file), **rope_fields(file), "head_dim": head_dim_of(file), "rms_norm_eps": rms_eps(file),
        "layer_types": kinds, "attention_bias": has_part(file, "attn_q.bias"),
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
    """Return the fields of Qwen3-Next, with experts in every layer, whose weights llama.cpp renormalizes."""
    return _qwen35_moe(file) | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


_BAMBA = ("BambaForCausalLM", "bamba", _bamba)
_DEEPSEEK_V3 = ("DeepseekV3ForCausalLM", "deepseek_v3", deepseek2)
_FALCON_MAMBA = ("FalconMambaForCausalLM", "falcon_mamba", _mamba)
_VARIANTS = _BAMBA, _DEEPSEEK_V3, _FALCON_MAMBA
"""Models that files hold under the architecture of another class."""

_ARCHITECTURES: dict[str, tuple[str, str, Callable[[GgufFile], Fields]]] = {
    "bailingmoe3": ("BailingHybridForCausalLM", "bailing_hybrid", ling3),
    "deepseek2": ("DeepseekV2ForCausalLM", "deepseek_v2", deepseek_v2),
    "deepseek32": ("DeepseekV32ForCausalLM", "deepseek_v32", deepseek32),
    "falcon-h1": ("FalconH1ForCausalLM", "falcon_h1", _falcon_h1),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "glm-dsa": ("GlmMoeDsaForCausalLM", "glm_moe_dsa", glm_moe_dsa),
    "glm5-next": ("Glm5NextForConditionalGeneration", "glm5_next", glm5_next),
    # Files from before llama.cpp read them have this name.
    "glm5next": ("Glm5NextForConditionalGeneration", "glm5_next", glm5_next),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", _granite_hybrid),
    "jamba": ("JambaForCausalLM", "jamba", _jamba),
    "kimi-linear": ("KimiLinearForCausalLM", "kimi_linear", kimi_linear),
    "lfm2": ("Lfm2ForCausalLM", "lfm2", _lfm2),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe", _lfm2_moe),
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "mamba": ("MambaForCausalLM", "mamba", _mamba),
    "mamba2": ("Mamba2ForCausalLM", "mamba2", _mamba2),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h", _nemotron_h),
    "nemotron_h_moe": ("NemotronHForCausalLM", "nemotron_h", _nemotron_h_moe),
    "olmo2": ("Olmo3ForCausalLM", "olmo3", _olmo2),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _qwen3),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen35_moe),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next", _qwen3_next),
    "rwkv7": ("RWKV7ForCausalLM", "rwkv7", _rwkv7),
}
"""Maps a file's architecture to the model class, the name of transformers' config, and a reader of its fields."""
