"""Reads the metadata of models with latent attention, as fields of transformers' configs."""

from __future__ import annotations

from hybridmem.models.loading.gguf.fields import (
    Fields,
    attention_layers,
    count_layers,
    has_part,
    largest,
    rms_eps,
    rope_fields,
)
from hybridmem.models.loading.gguf.file import GgufFile
from hybridmem.models.weights.checkpoint import UnsupportedModelError


def deepseek2(file: GgufFile) -> Fields:
    """Return the fields that DeepSeek-V2 and V3 have in common. The keys of all query heads are made of one latent."""
    if file.own("attention.key_length_mla", is_needed=False) is None:
        raise UnsupportedModelError(
            f"{file.path} has no attention.key_length_mla, as files of DeepSeek before May 2025; convert it again"
        )
    if file.own("attention.temperature_scale", 0.0):
        raise UnsupportedModelError(f"{file.path} scales scores by their positions, which is not implemented")
    n_rotary, n_heads = int(file.own("rope.dimension_count")), largest(file.own("attention.head_count"))
    rope = rope_fields(file, head_dim=n_rotary)
    if (weight := file.own("rope.scaling.yarn_log_multiplier", 0.0)) and rope["rope_parameters"]["rope_type"] == "yarn":
        # The converter multiplies this number by 0.1. In published models both mscales are equal, so angles are not
        # scaled.
        rope["rope_parameters"] |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * weight, 6))
    n_inner = largest(file.own("expert_feed_forward_length"))
    n_dense = file.own("leading_dense_block_count", 0)
    return {
        **rope, "num_attention_heads": n_heads, "num_key_value_heads": n_heads, "rms_norm_eps": rms_eps(file),
        "intermediate_size": largest(file.own("feed_forward_length")), "attention_bias": False,
        "kv_lora_rank": file.own("attention.kv_lora_rank"), "qk_rope_head_dim": n_rotary, "head_dim": n_rotary,
        "q_lora_rank": file.own("attention.q_lora_rank") if has_part(file, "attn_q_a.weight") else None,
        "qk_nope_head_dim": file.own("attention.key_length_mla") - n_rotary,
        "v_head_dim": file.own("attention.value_length_mla"),
        "first_k_dense_replace": n_dense if file.own("expert_count", 0) else count_layers(file),
        "n_routed_experts": file.own("expert_count", 0), "n_shared_experts": file.own("expert_shared_count", 0),
        "num_experts_per_tok": file.own("expert_used_count", 0), "moe_intermediate_size": n_inner,
        "n_group": file.own("expert_group_count", 1), "topk_group": file.own("expert_group_used_count", 1),
        "norm_topk_prob": bool(file.own("expert_weights_norm", default=False)),
        "routed_scaling_factor": float(file.own("expert_weights_scale", 1.0)),
    }  # fmt: skip


def deepseek_v2(file: GgufFile) -> Fields:
    fields = deepseek2(file)
    return fields | {"topk_method": "greedy" if fields["n_group"] == 1 else "group_limited_greedy"}


def is_deepseek_v3(file: GgufFile) -> bool:
    """True if experts are chosen by their sigmoids. The file's architecture is that of DeepSeek-V2 in both cases."""
    return file.architecture == "deepseek2" and file.own("expert_gating_func", _SOFTMAX) == _SIGMOID


_SOFTMAX, _SIGMOID = 1, 2
"""Numbers by which files say how experts are scored."""


def _delta_attention(file: GgufFile) -> Fields:
    """Return the fields that Kimi Linear and Ling 3 have in common: layers without key heads are delta attention."""
    _check_sigmoids(file)
    n_rotary, n_heads = int(file.own("rope.dimension_count")), largest(file.own("attention.head_count"))
    layers, numbers = attention_layers(file), range(count_layers(file))
    return {
        "num_attention_heads": n_heads, "num_key_value_heads": n_heads, "rms_norm_eps": rms_eps(file),
        "intermediate_size": largest(file.own("feed_forward_length")), "attention_bias": False,
        "layer_types": ["full_attention" if i in layers else "linear_attention" for i in numbers],
        "mlp_layer_types": ["sparse" if f"blk.{i}.ffn_gate_inp.weight" in file else "dense" for i in numbers],
        "kv_lora_rank": file.own("attention.kv_lora_rank"), "qk_rope_head_dim": n_rotary,
        "q_lora_rank": file.own("attention.q_lora_rank") if has_part(file, "attn_q_a.weight") else None,
        "qk_nope_head_dim": file.own("attention.key_length_mla") - n_rotary,
        "v_head_dim": file.own("attention.value_length_mla"), "num_local_experts": file.own("expert_count"),
        "num_experts_per_tok": file.own("expert_used_count"), "n_shared_experts": file.own("expert_shared_count"),
        "moe_intermediate_size": largest(file.own("expert_feed_forward_length")),
        "n_group": file.own("expert_group_count", 1), "topk_group": file.own("expert_group_used_count", 1),
        "routed_scaling_factor": float(file.own("expert_weights_scale", 1.0)),
    }  # fmt: skip


def kimi_linear(file: GgufFile) -> Fields:
    """Return the fields of Kimi Linear. llama.cpp renormalizes the weights of experts, and rotates nothing."""
    return _delta_attention(file) | {
        "linear_num_heads": largest(file.own("attention.head_count")), "linear_head_dim": file.own("kda.head_dim"),
        "linear_conv_kernel_dim": file.own("ssm.conv_kernel"), "norm_topk_prob": True,
        "max_position_embeddings": file.own("context_length"),
    }  # fmt: skip


def ling3(file: GgufFile) -> Fields:
    """Return the fields of Ling 3. The config's size of heads is that of delta attention."""
    fields = _delta_attention(file)
    if any(any(file.own(f"swiglu_clamp_{part}", [])) for part in ("exp", "shexp")):
        raise UnsupportedModelError(f"{file.path} clamps products of experts (swiglu_clamp), which is not implemented")
    _check_shared(file, fields)
    return fields | rope_fields(file, head_dim=fields["qk_rope_head_dim"]) | {
        "head_dim": file.own("kda.head_dim"), "short_conv_kernel_size": file.own("ssm.conv_kernel"),
        "kda_safe_gate": bool(file.own("kda.safe_gate", default=True)),
        "kda_lower_bound": float(file.own("kda.gate_lower_bound")), "num_mtp_layers": 0,
        "norm_topk_prob": bool(file.own("expert_weights_norm", default=False)),
    }  # fmt: skip


def _check_sigmoids(file: GgufFile) -> None:
    if file.own("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise UnsupportedModelError(f"{file.path} scores experts by something else than sigmoids")


def _check_shared(file: GgufFile, fields: Fields) -> None:
    n_shared = fields["moe_intermediate_size"] * fields["n_shared_experts"]
    if (found := file.own("expert_shared_feed_forward_length", n_shared)) != n_shared:
        raise UnsupportedModelError(
            f"{file.path} has shared experts of expert_shared_feed_forward_length={found}; implemented is {n_shared}"
        )


# The functions below read latent attention to rows that an index chooses.


def _index(file: GgufFile) -> Fields:
    return {
        "index_n_heads": file.own("attention.indexer.head_count"), "index_topk": file.own("attention.indexer.top_k"),
        "index_head_dim": file.own("attention.indexer.key_length"),
    }  # fmt: skip


def deepseek32(file: GgufFile) -> Fields:
    """Return the fields of DeepSeek-V3.2: those of DeepSeek-V3, and of an index in each layer."""
    _check_sigmoids(file)
    fields = deepseek2(file)
    n_rotary = file.own("attention.key_length") - fields["kv_lora_rank"]
    if n_rotary != fields["qk_rope_head_dim"]:
        raise UnsupportedModelError(
            f"{file.path} rotates rope.dimension_count={fields['qk_rope_head_dim']} of {n_rotary} elements; "
            "implemented is all of them"
        )
    has_experts = [f"blk.{i}.ffn_gate_inp.weight" in file for i in range(count_layers(file))]
    return fields | _index(file) | {"mlp_layer_types": ["sparse" if has else "dense" for has in has_experts]}


def glm_moe_dsa(file: GgufFile) -> Fields:
    """Return the fields of GLM-5, where a layer without an index of its own reads what the last index chose."""
    has_index = file.own("attention.indexer.types", is_needed=False)
    if has_index is None:
        has_index = [f"blk.{i}.indexer.attn_k.weight" in file for i in range(count_layers(file))]
    return deepseek32(file) | {"indexer_types": _indexer_types(file, has_index)}


def _indexer_types(file: GgufFile, has_index: list[bool]) -> list[str]:
    return ["full" if has else "shared" for has in has_index[: count_layers(file)]]


def glm5_next(file: GgufFile) -> Fields:
    """Return the fields of GLM-5.3, which rotates nothing. Each layer has an index unless the file says otherwise."""
    fields = _delta_attention(file)
    _check_shared(file, fields)
    eps = float(file.own("attention.layer_norm_epsilon", _INDEX_EPS))
    if abs(eps - _INDEX_EPS) > 1e-3 * _INDEX_EPS:
        raise UnsupportedModelError(
            f"{file.path} norms keys of its index with attention.layer_norm_epsilon={eps}; implemented is {_INDEX_EPS}"
        )
    kinds = [
        "linear_attention" if kind == "linear_attention" else "indexed_attention" for kind in fields["layer_types"]
    ]
    return fields | _index(file) | {
        "layer_types": kinds, "swiglu_limit": _clamp(file), "max_position_embeddings": file.own("context_length"),
        "indexer_types": _indexer_types(file, file.own("attention.indexer.types", [True] * len(kinds))),
        "index_kpool": file.own("attention.indexer.kpool"),
        "index_kpool_always_select_tail": file.own("attention.indexer.kpool_select_tail", default=True),
        "linear_num_heads": fields["num_attention_heads"], "linear_head_dim": file.own("kda.head_dim"),
        "linear_conv_kernel_dim": file.own("ssm.conv_kernel"),
        "linear_lower_bound": file.own("kda.gate_lower_bound", is_needed=False),
        "hc_mult": file.own("hyper_connection.count"),
        "hc_sinkhorn_iters": file.own("hyper_connection.sinkhorn_iterations"),
        "hc_eps": float(file.own("hyper_connection.epsilon")),
        "norm_topk_prob": bool(file.own("expert_weights_norm", default=False)),
    }  # fmt: skip


def _clamp(file: GgufFile) -> float:
    """Return the bound of products in feed-forward layers. For each layer, files name that of experts and another."""
    found = set[float]()
    for part in ("exp", "shexp"):
        values = file.own(f"swiglu_clamp_{part}")
        found.update(map(float, values if isinstance(values, list) else [values]))
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{file.path} clamps products of experts by several bounds (swiglu_clamp_exp, swiglu_clamp_shexp), "
            f"{sorted(found)}; implemented is one for all"
        )
    return found.pop()


_INDEX_EPS = 1e-6
"""The epsilon of the norm of an index's keys in the models' own code."""
