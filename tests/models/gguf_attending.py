"""Writes models without recurrent layers as llama.cpp's converter does, and holds what all such writers share."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from torch import Tensor

Tensors = dict[str, Tensor]
Written = tuple[MODEL_ARCH, dict[str, Any], Tensors]
_MOST_LAYERS = 32


def renamed(arch: MODEL_ARCH, tensors: Tensors) -> Tensors:
    names = get_tensor_name_map(arch, _MOST_LAYERS)
    found = {}
    for name, tensor in tensors.items():
        new = names.get_name(name, (".weight", ".bias"))
        assert new is not None, name
        found[new] = tensor
    return found


def _paired(tensor: Tensor, n_heads: int) -> Tensor:
    """Make the two elements of each rotary pair neighbours."""
    halves = tensor.view(n_heads, 2, -1, *tensor.shape[1:])
    return torch.stack((halves[:, 0], halves[:, 1]), 2).flatten(0, 2)


def pair_all(config: dict[str, Any], tensors: Tensors) -> Tensors:
    n = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return {
        name: _paired(t, n[name.split("_proj")[0][-1]]) if "q_proj" in name or "k_proj" in name else t
        for name, t in tensors.items()
    }


def stack_experts(tensors: Tensors, prefix: str) -> Tensors:
    """Stack experts that are stored one by one. llama.cpp has names of its own for the stacks."""
    found: Tensors = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if f".{prefix}.experts." in name:
            layer, number, part = name.split(".")[2], name.split(".experts.")[1].split(".")[0], name.split(".")[-2]
            stacks.setdefault(f"model.layers.{layer}.mlp.experts.{part}.weight", {})[int(number)] = tensor
        else:
            found[name] = tensor
    return found | {name: torch.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


def split_experts(tensors: Tensors, prefix: str = "mlp") -> Tensors:
    """Stack experts, and split stacks in which gate and up are one tensor."""
    found: Tensors = {}
    for name, tensor in stack_experts(tensors, prefix).items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, 1)
            base = name.removesuffix("gate_up_proj")
            found |= {f"{base}gate_proj.weight": gate, f"{base}up_proj.weight": up}
        else:
            found[name + ".weight" if name.endswith("experts.down_proj") else name] = tensor
    return found


def attention_fields(config: dict[str, Any], layers: list[int] | None = None) -> dict[str, Any]:
    n_layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    n_kv = config["num_key_value_heads"]
    per_layer = n_kv if layers is None else [n_kv if i in layers else 0 for i in range(n_layers)]
    rope = config.get("rope_parameters") or {}
    return {
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": per_layer,
        "context_length": config["max_position_embeddings"], "rope.freq_base": float(rope.get("rope_theta", 1e4)),
    }  # fmt: skip


def _llama(config: dict[str, Any], tensors: Tensors) -> Written:
    fields = attention_fields(config) | {
        "feed_forward_length": config["intermediate_size"], "rope.dimension_count": config["head_dim"],
        "attention.key_length": config["head_dim"],
    }  # fmt: skip
    found = renamed(MODEL_ARCH.LLAMA, pair_all(config, tensors))
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
        n_original, low, high = (
            rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
        )
        smooth = np.clip((n_original / wavelengths - low) / (high - low), 0, 1)
        found["rope_freqs.weight"] = torch.tensor(1 / ((1 - smooth) / rope["factor"] + smooth)).float()
    return MODEL_ARCH.LLAMA, fields, found


def _qwen2(config: dict[str, Any], tensors: Tensors) -> Written:
    fields = attention_fields(config) | {"feed_forward_length": config["intermediate_size"]}
    return MODEL_ARCH.QWEN2, fields, renamed(MODEL_ARCH.QWEN2, tensors)


def _qwen3(config: dict[str, Any], tensors: Tensors) -> Written:
    fields = attention_fields(config) | {
        "feed_forward_length": config["intermediate_size"], "attention.key_length": config["head_dim"],
    }  # fmt: skip
    return MODEL_ARCH.QWEN3, fields, renamed(MODEL_ARCH.QWEN3, tensors)


def _gemma(config: dict[str, Any], tensors: Tensors) -> Written:
    """Write Gemma 2 or 3. The converter adds one to the weights of their norms."""
    is_third = config["model_type"] == "gemma3_text"
    arch = MODEL_ARCH.GEMMA3 if is_third else MODEL_ARCH.GEMMA2
    fields = attention_fields(config) | {
        "feed_forward_length": config["intermediate_size"], "attention.key_length": config["head_dim"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
    }  # fmt: skip
    fields |= {
        name: config[name]
        for name in ("attn_logit_softcapping", "final_logit_softcapping") if config.get(name) is not None
    }  # fmt: skip
    if is_third:
        whole = config["rope_parameters"]["full_attention"]
        fields["rope.freq_base"] = float(whole["rope_theta"])
        if whole["rope_type"] == "linear":
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(whole["factor"])}
    moved = {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
    return arch, fields, renamed(arch, moved)


def _olmo3(config: dict[str, Any], tensors: Tensors) -> Written:
    fields = attention_fields(config) | {
        "feed_forward_length": config["intermediate_size"], "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
    }  # fmt: skip
    whole, in_windows = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    fields |= {"rope.freq_base": whole["rope_theta"], "rope.freq_base_swa": in_windows["rope_theta"]}
    if whole["rope_type"] == "yarn":
        fields |= _yarn(whole)
    return MODEL_ARCH.OLMO2, fields, renamed(MODEL_ARCH.OLMO2, tensors)


def _yarn(rope: dict[str, Any]) -> dict[str, Any]:
    betas = {f"rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow") if name in rope}
    return betas | {
        "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }  # fmt: skip


def _deepseek(config: dict[str, Any], tensors: Tensors) -> Written:
    """Write DeepSeek-V2 or V3. Keys and values that are made from a latent are separate, and keys are transposed."""
    is_third, rope = config["model_type"] == "deepseek_v3", config["rope_parameters"]
    n_heads, n_plain, n_latent = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "kv_lora_rank"))
    fields = attention_fields(config | {"num_key_value_heads": 1}) | {
        "feed_forward_length": config["intermediate_size"], "attention.kv_lora_rank": n_latent,
        "attention.key_length": n_latent + config["qk_rope_head_dim"],
        "attention.key_length_mla": n_plain + config["qk_rope_head_dim"],
        "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": config["qk_rope_head_dim"],
        "leading_dense_block_count": config["first_k_dense_replace"], "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"], "expert_shared_count": config["n_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_scale": float(config["routed_scaling_factor"]), "expert_weights_norm": config["norm_topk_prob"],
        "expert_gating_func": 2 if is_third else 1,
    }  # fmt: skip
    if config["q_lora_rank"]:
        fields["attention.q_lora_rank"] = config["q_lora_rank"]
    if config["n_group"]:
        fields |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    if rope["rope_type"] == "yarn":
        fields |= _yarn(rope) | {"rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"]}
    found: Tensors = {}
    for name, tensor in split_experts(tensors).items():
        if name.endswith("kv_b_proj.weight"):
            keys, values = tensor.view(n_heads, -1, n_latent).split([n_plain, config["v_head_dim"]], 1)
            found[name.replace("kv_b", "k_b")] = keys.transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = values
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return MODEL_ARCH.DEEPSEEK2, fields, renamed(MODEL_ARCH.DEEPSEEK2, found)


def _indexed(config: dict[str, Any], tensors: Tensors) -> Written:
    """Write DeepSeek-V3.2 or GLM-5: DeepSeek-V3 with an index, whose tensors are as in the checkpoint."""
    found = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    index = {name: tensor for name, tensor in tensors.items() if ".indexer." in name}
    _, fields, written = _deepseek(config | {"model_type": "deepseek_v3"}, found)
    n_dense = (
        config["mlp_layer_types"].index("sparse")
        if "sparse" in config["mlp_layer_types"]
        else config["num_hidden_layers"]
    )
    fields |= _index_fields(config) | {"leading_dense_block_count": n_dense}
    if "shared" in config.get("indexer_types", ()):
        fields["attention.indexer.types"] = [kind == "full" for kind in config["indexer_types"]]
    return MODEL_ARCH.GLM_DSA, fields, written | renamed(MODEL_ARCH.GLM_DSA, index)


def _index_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.indexer.head_count": config["index_n_heads"], "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.key_length": config["index_head_dim"],
    }  # fmt: skip


def _glm5_next(config: dict[str, Any], tensors: Tensors) -> Written:
    """Write GLM-5.3 with an index and routed streams. It is Kimi Linear if the package has no names for it."""
    n_layers, index = config["num_hidden_layers"], {}
    rest = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    for name in [name for name in rest if ".hc_" in name or ".indexer." in name]:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(?:self_attn\.)?(.+)", name)
        assert match is not None, name
        layer, part = match.groups()
        index[f"blk.{layer}.{_OF_INDEX.get(part, f'{part}.weight')}"] = rest.pop(name)
    as_kimi = {
        "model_max_length": config["max_position_embeddings"], "num_experts": config["n_routed_experts"],
        "num_experts_per_token": config["num_experts_per_tok"], "num_shared_experts": config["n_shared_experts"],
        "layer_types": [kind.replace("indexed", "full") for kind in config["layer_types"]],
    }  # fmt: skip
    arch, fields, written = _delta_attention(config | as_kimi, rest, experts="mlp")
    fields |= _index_fields(config) | {
        "attention.indexer.kpool": config["index_kpool"], "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.kpool_select_tail": config["index_kpool_always_select_tail"],
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
        "kda.gate_lower_bound": config["linear_lower_bound"], "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"], "expert_weights_norm": config["norm_topk_prob"],
        "expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"],
        "expert_shared_feed_forward_length": config["moe_intermediate_size"] * config["n_shared_experts"],
        **{f"swiglu_clamp_{part}": [float(config["swiglu_limit"])] * n_layers for part in ("exp", "shexp")},
    }  # fmt: skip
    return arch, fields, written | index


_OF_INDEX = {
    "indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight", "indexer.k_norm.bias": "indexer.k_norm.bias",
    "indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "indexer.k_norm.weight": "indexer.k_norm.weight", "indexer.weights_proj.weight": "indexer.proj.weight",
    "indexer.wk.weight": "indexer.attn_k.weight", "indexer.wq_b.weight": "indexer.attn_q_b.weight",
}  # fmt: skip


def _latent(config: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    """Return the fields of Kimi Linear and Ling 3."""
    n_latent, n_rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    as_one_head = config | {"num_key_value_heads": 1, "max_position_embeddings": config["model_max_length"]}
    fields = attention_fields(as_one_head, layers) | {
        "feed_forward_length": config["intermediate_size"], "attention.kv_lora_rank": n_latent,
        "attention.key_length": n_latent + n_rotary, "rope.dimension_count": n_rotary,
        "attention.key_length_mla": config["qk_nope_head_dim"] + n_rotary,
        "attention.value_length_mla": config["v_head_dim"], "kda.head_dim": config["linear_head_dim"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"], "expert_shared_count": config["num_shared_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"], "expert_gating_func": 2,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "leading_dense_block_count": config["mlp_layer_types"].index("sparse"),
    }  # fmt: skip
    if config["q_lora_rank"]:
        fields["attention.q_lora_rank"] = config["q_lora_rank"]
    return fields


def _delta_attention(config: dict[str, Any], tensors: Tensors, experts: str = "block_sparse_moe") -> Written:
    """Write Kimi Linear, or Ling 3, which is Kimi Linear if the package has no names for it."""
    is_ling = config["model_type"] == "bailing_hybrid"
    layers = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    fields = _latent(config, layers)
    if is_ling:
        n_shared = config["moe_intermediate_size"] * config["num_shared_experts"]
        fields |= {
            "kda.safe_gate": config["kda_safe_gate"], "kda.gate_lower_bound": float(config["kda_lower_bound"]),
            "expert_weights_norm": config["moe_renormalize"], "expert_shared_feed_forward_length": n_shared,
            "expert_group_count": config["num_expert_group"], "expert_group_used_count": config["topk_group"],
        }  # fmt: skip
        fields |= _yarn(config["rope_parameters"]) if config["rope_parameters"]["rope_type"] == "yarn" else {}
    found: Tensors = {}
    for name, tensor in stack_experts(tensors, "mlp" if is_ling else experts).items():
        layer = name.split(".")[2] if ".layers." in name else ""
        part = name.split(f".layers.{layer}.")[-1]
        if part.endswith("_conv1d.weight"):
            tensor = tensor.reshape(1, tensor.shape[0], 1, tensor.shape[-1])
        if part.endswith("A_log"):
            tensor = tensor.exp().view(-1, 1) if is_ling else -tensor.exp()
        if part.endswith("kv_b_proj.weight"):
            parts = config["qk_nope_head_dim"], config["v_head_dim"]
            keys, values = tensor.view(config["num_attention_heads"], sum(parts), -1).split(parts, 1)
            found |= {f"blk.{layer}.attn_k_b.weight": keys.transpose(1, 2), f"blk.{layer}.attn_v_b.weight": values}
        elif part == "attention.g_proj.weight" and int(layer) in layers:
            found[f"blk.{layer}.attn_gate.weight"] = tensor
        elif part in _OF_LING:
            found[f"blk.{layer}.{_OF_LING[part]}"] = tensor
        else:
            for old, new in _RENAMED:
                name = name.replace(old, new)
            found |= renamed(MODEL_ARCH.KIMI_LINEAR, {name: tensor})
    return MODEL_ARCH.KIMI_LINEAR, fields, found


_OF_LING = {
    "attention.f_proj.weight": "ssm_f_a.weight", "attention.g_proj.weight": "ssm_g_a.weight",
    "attention.dense.weight": "attn_output.weight", "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.expert_bias": "exp_probs_b.bias",
}  # fmt: skip
_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_RENAMED = (
    (".attention.", ".self_attn."), ("word_embeddings", "embed_tokens"), (".dt_bias", ".dt_proj.bias"),
    ("e_score_correction_bias", "e_score_correction.bias"),
    *((f".experts.{old}.", f".experts.{new}.") for old, new in _PARTS.items()),
    # Transformers writes them so; published files call MLPs by the names on the right.
    *((f".block_sparse_moe.{name}.", f".mlp.{name}.") for name in _PARTS.values()),
)  # fmt: skip


ATTENDING = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "gemma2": _gemma, "gemma3_text": _gemma, "olmo3": _olmo3,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "deepseek_v32": _indexed, "glm_moe_dsa": _indexed,
    "kimi_linear": _delta_attention, "bailing_hybrid": _delta_attention, "glm5_next": _glm5_next,
}  # fmt: skip
"""What writes each type of model."""
