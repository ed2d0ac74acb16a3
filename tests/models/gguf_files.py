"""Writes checkpoints as GGUF files, with what llama.cpp's converter changes in them, by the `gguf` package's writer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
)
from gguf.quants import quantize
from safetensors.torch import load_file
from torch import Tensor

from tests.models.gguf_attending import (
    ATTENDING,
    Tensors,
    attention_fields,
    pair_all,
    renamed,
    split_experts,
    stack_experts,
)

_ONLY_F32 = r"(norm|conv1d(_[qkv])?|conv|ffn_gate_inp|time_mix_(w1|w2|lerp_fused))\.weight$"
_NEWER = {"bailing_hybrid": "bailingmoe3", "deepseek_v32": "deepseek32", "glm5_next": "glm5-next"}
"""Types of models whose architecture the `gguf` package does not name, and what llama.cpp calls it."""


def write_gguf(
    folder: Path,
    path: Path,
    kind: str = "F32",
    *,
    leave_out: str = "",
    fuses_experts: bool = False,
    others: Mapping[str, str] | None = None,
    world_tokens: Sequence[bytes] = (),
    **changed: Any,
) -> Path:
    """Write the checkpoint of a folder to a GGUF file.

    Args:
        kind: the type of matrices, such as "Q8_0". Those whose rows are not whole blocks are F16, and what llama.cpp
            reads in F32 only is F32: norms, convolutions and decays.
        leave_out: a tensor that is not written.
        fuses_experts: whether gates and first products of experts become one tensor.
        others: part of a tensor's name -> the type of matrices with such names.
        world_tokens: the tokenizer's tokens, as RWKV has them, behind the one that ends texts.
        changed: metadata that are written instead; None leaves one out.
    """
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        config = config["text_config"] | {name: config[name] for name in ("model_type", "tie_word_embeddings")}
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    arch, fields, tensors = described(config, tensors)
    if fuses_experts:
        tensors = _fused(tensors)
    writer = GGUFWriter(path, _NEWER.get(config["model_type"], MODEL_ARCH_NAMES[arch]))
    for key, value in (fields | changed).items():
        if value is not None:
            add_field(writer, f"{writer.arch}.{key}", value)
    for name, tensor in tensors.items():
        if name == leave_out or (name == "output.weight" and config.get("tie_word_embeddings")):
            continue
        data = tensor.contiguous().numpy()
        own = next((own for part, own in (others or {}).items() if part in name), kind)
        dtype = _dtype_of(name, data, GGMLQuantizationType[own])
        writer.add_tensor(name, quantize(data, dtype), raw_dtype=dtype)
    if world_tokens:
        _add_world(writer, world_tokens)
    elif (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, folder)
    else:
        writer.add_tokenizer_model("no_vocab")
        writer.add_vocab_size(config["vocab_size"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def described(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    """Return llama.cpp's architecture of a checkpoint, its fields without the architecture's name, and its tensors."""
    n_layers, nextn = config.get("num_hidden_layers") or len(config["layers_block_type"]), dict[str, Tensor]()
    tensors = {_behind(name, n_layers): tensor for name, tensor in tensors.items()}
    for name in [name for name in tensors if re.search(r"\.(enorm|hnorm|eh_proj|shared_head\.norm)\.weight$", name)]:
        stored = name.replace("model.layers", "blk").replace(f".{n_layers}.", f".{n_layers}.nextn.")
        is_offset = name.endswith("norm.weight") and config["model_type"].startswith("qwen")
        nextn[stored.replace("shared_head.norm", "shared_head_norm")] = tensors.pop(name) + is_offset
    arch, fields, tensors = _WRITERS[config["model_type"]](config, tensors)
    tensors |= nextn
    if "attention.key_length" in fields:
        fields["attention.value_length"] = fields["attention.key_length"]
    fields |= {
        "block_count": n_layers + bool(nextn), "embedding_length": config["hidden_size"],
        **({"nextn_predict_layers": 1} if nextn else {}),
    }  # fmt: skip
    eps = next(config[k] for k in config if k.endswith(("norm_eps", "norm_epsilon")))
    # The name is that of the configs; llama.cpp takes either for Nemotron-H.
    is_plain = arch in (MODEL_ARCH.RWKV7, MODEL_ARCH.NEMOTRON_H, MODEL_ARCH.NEMOTRON_H_MOE)
    fields[f"attention.layer_norm_{'' if is_plain else 'rms_'}epsilon"] = eps
    return arch, fields, tensors


def _behind(name: str, n_layers: int) -> str:
    """Return where llama.cpp's converter has a tensor of Qwen's draft head: in a layer after the last one."""
    for part, own in (
        ("mtp.layers.0", ""), ("mtp.fc", ".eh_proj"), ("mtp.pre_fc_norm_embedding", ".enorm"),
        ("mtp.pre_fc_norm_hidden", ".hnorm"), ("mtp.norm", ".shared_head.norm"),
    ):  # fmt: skip
        name = re.sub(rf"^{re.escape(part)}\.", f"model.layers.{n_layers}{own}.", name)
    return name


def _fused(tensors: Tensors) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("ffn_gate_exps.weight"):
            up = tensors[name.replace("_gate_", "_up_")]
            found[name.replace("_gate_", "_gate_up_")] = torch.cat((tensor, up), 1)
        elif not name.endswith("ffn_up_exps.weight"):
            found[name] = tensor
    return found


def _dtype_of(name: str, data: np.ndarray, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """Choose the type of a tensor as llama.cpp's converter does."""
    is_matrix = name.endswith(".weight") and not re.search(_ONLY_F32, name)
    if data.ndim < 2 or not is_matrix or kind == GGMLQuantizationType.F32:
        return GGMLQuantizationType.F32
    return kind if data.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.F16


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    """Add a tokenizer of pairs of bytes, as GPT-2 has it."""
    raw, config = (json.loads((folder / f"tokenizer{end}.json").read_text()) for end in ("", "_config"))
    tokens = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
    special = {token["content"] for token in raw["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in raw["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(config["bos_token"]))
    writer.add_eos_token_id(tokens.index(config["eos_token"]))
    writer.add_pad_token_id(tokens.index(config["pad_token"]))
    default = (folder / "chat_template.jinja").read_text()
    named = [
        {"name": path.stem, "template": path.read_text()}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    ]
    writer.add_eot_token_id(tokens.index(config["eos_token"]))
    writer.add_chat_template([{"name": "default", "template": default}, *named] if named else default)


def _add_world(writer: GGUFWriter, tokens: Sequence[bytes]) -> None:
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([b"<s>", *(repr(token)[2:-1].encode() for token in tokens)])
    writer.add_token_types([3] + [1] * len(tokens))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("rwkv-world")


def add_field(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a field in the type that its Python object has."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)


def _of_states(tensors: Tensors) -> Tensors:
    """Change the decays and convolutions of Mamba layers as llama.cpp's kernels need them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            tensor = tensor.squeeze(1)
        if name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt_proj.bias")
        found[name] = tensor
    return found


def _of_heads(config: dict[str, Any], tensors: Tensors) -> Tensors:
    """Change those of Mamba-2: one column for A and D, and a row for each group of a norm."""
    n_groups = config.get("mamba_n_groups") or config["n_groups"]
    found = {}
    for name, tensor in _of_states(tensors).items():
        if name.endswith(("A_log", ".D")):
            tensor = tensor[:, None]
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            tensor = tensor.view(n_groups, -1)
        found[name] = tensor
    return found


def _jamba(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    n_layers, offset, period = (config[k] for k in ("num_hidden_layers", "attn_layer_offset", "attn_layer_period"))
    fields = attention_fields(config, list(range(offset, n_layers, period))) | {
        "feed_forward_length": config["intermediate_size"], "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"], "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"], "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
    }  # fmt: skip
    found = stack_experts(_of_states(tensors), "feed_forward")
    return MODEL_ARCH.JAMBA, fields, renamed(MODEL_ARCH.JAMBA, found)


def _mamba(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    fields = {
        "ssm.conv_kernel": config["conv_kernel"], "ssm.inner_size": config["intermediate_size"],
        "ssm.state_size": config["state_size"], "ssm.time_step_rank": config["time_step_rank"],
        "attention.head_count": 0, "feed_forward_length": 0, "context_length": 2**20,
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }  # fmt: skip
    return MODEL_ARCH.MAMBA, fields, renamed(MODEL_ARCH.MAMBA, _of_states(tensors))


def _mamba2(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    fields = {
        "ssm.conv_kernel": config["conv_kernel"], "ssm.inner_size": config["num_heads"] * config["head_dim"],
        "ssm.state_size": config["state_size"], "ssm.time_step_rank": config["num_heads"],
        "ssm.group_count": config["n_groups"], "attention.head_count": 0, "feed_forward_length": 0,
        "context_length": 2**20,
    }  # fmt: skip
    return MODEL_ARCH.MAMBA2, fields, renamed(MODEL_ARCH.MAMBA2, _of_heads(config, tensors))


def _ssm(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"], "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "ssm.state_size": config["mamba_d_state"], "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.group_count": config["mamba_n_groups"],
    }  # fmt: skip


def _granite(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    kinds = config.get("layer_types") or config["layers_block_type"]
    n_experts = config.get("num_local_experts") or 0
    layers = [i for i, kind in enumerate(kinds) if kind in ("attention", "full_attention")]
    fields = attention_fields(config, layers) | _ssm(config) | {
        "feed_forward_length": config["intermediate_size"], "expert_count": n_experts,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "expert_used_count": config["num_experts_per_tok"], "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"], "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"], "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
    }  # fmt: skip
    fields = {key: float(value) if "scale" in key else value for key, value in fields.items()}
    found: Tensors = {}
    for name, tensor in _of_heads(config, pair_all(config, tensors)).items():
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        shared = "_shexp" if n_experts else ""
        if name.endswith("input_linear.weight"):
            gate, up = tensor.chunk(2, -2)
            suffix = shared if "shared" in name else "_exps"
            found |= {f"{layer}.ffn_gate{suffix}.weight": gate, f"{layer}.ffn_up{suffix}.weight": up}
        elif name.endswith("shared_mlp.output_linear.weight"):
            found[f"{layer}.ffn_down{shared}.weight"] = tensor
        else:
            found |= renamed(MODEL_ARCH.GRANITE_HYBRID, {name: tensor})
    return MODEL_ARCH.GRANITE_HYBRID, fields, found


def _bamba(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    """Write Bamba, which llama.cpp's converter makes a Granite with positions."""
    n_layers, n_heads = config["num_hidden_layers"], config["num_attention_heads"]
    layers = [i for i in range(n_layers) if f"model.layers.{i}.self_attn.q_proj.weight" in tensors]
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    fields = attention_fields(config, layers) | _ssm(config) | {
        "feed_forward_length": config["intermediate_size"], "rope.scaling.finetuned": True,
        "rope.dimension_count": int(share * config["hidden_size"] // n_heads),
    }  # fmt: skip
    found = _of_heads(config, pair_all(config, tensors))
    return MODEL_ARCH.GRANITE_HYBRID, fields, renamed(MODEL_ARCH.GRANITE_HYBRID, found)


def _falcon_h1(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    fields = attention_fields(config) | _ssm(config) | {
        "ssm.inner_size": config["mamba_d_ssm"], "feed_forward_length": config["intermediate_size"],
        "attention.key_length": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    }  # fmt: skip
    n_inner, n_state = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = [n_inner, n_inner, n_state, n_state, config["mamba_n_heads"]]
    in_factors = torch.cat([torch.full((n,), m) for n, m in zip(parts, config["ssm_multipliers"], strict=True)])
    factors = {
        "down_proj": config["mlp_multipliers"][1], "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * config["attention_in_multiplier"],
        "q_proj": config["attention_in_multiplier"], "v_proj": config["attention_in_multiplier"],
        "o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"], "embed_tokens": config["embedding_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * in_factors[:, None],
    }  # fmt: skip
    found = {
        name: tensor * factors[name.split(".")[-2]] if name.split(".")[-2] in factors else tensor
        for name, tensor in _of_heads(config, tensors).items()
    }
    return MODEL_ARCH.FALCON_H1, fields, renamed(MODEL_ARCH.FALCON_H1, found)


def _lfm2(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    layers = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    width = next(t.shape[0] for name, t in tensors.items() if name.endswith("feed_forward.w1.weight"))
    fields = attention_fields(config, layers) | {
        "feed_forward_length": width,
        "shortconv.l_cache": config["conv_L_cache"],
    }
    return MODEL_ARCH.LFM2, fields, renamed(MODEL_ARCH.LFM2, _of_states(tensors))


def _lfm2_moe(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    layers = [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    fields = attention_fields(config, layers) | {
        "feed_forward_length": config["intermediate_size"], "expert_count": config["num_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_used_count": config["num_experts_per_tok"],
        "leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2,
        "shortconv.l_cache": config["conv_L_cache"],
    }  # fmt: skip
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    found: Tensors = {}
    for name, tensor in stack_experts(_of_states(tensors), "feed_forward").items():
        *rest, part, _ = name.split(".")
        if ".experts." in name and part in parts:  # These tensors are stacked.
            name = ".".join((*rest, parts[part], "weight"))
        found[name + ".bias" if name.endswith("expert_bias") else name] = tensor
    return MODEL_ARCH.LFM2MOE, fields, renamed(MODEL_ARCH.LFM2MOE, found)


def _nemotron_h(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    kinds = config["layers_block_type"]
    layers = [i for i, kind in enumerate(kinds) if kind in ("attention", "full_attention")]
    has_experts = "moe" in kinds
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    fields = attention_fields(config, layers) | {
        "feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.key_length": config["head_dim"], "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.state_size": config["ssm_state_size"], "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.group_count": config["n_groups"],
    }  # fmt: skip
    if has_experts:
        fields |= {
            "expert_count": config["n_routed_experts"], "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": width, "expert_shared_count": config["n_shared_experts"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"], "expert_group_count": config["n_group"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_group_used_count": config["topk_group"],
        }  # fmt: skip
        if config.get("moe_latent_size"):
            fields["moe_latent_size"] = config["moe_latent_size"]
    arch = MODEL_ARCH.NEMOTRON_H_MOE if has_experts else MODEL_ARCH.NEMOTRON_H
    found: Tensors = {}
    for name, tensor in _of_heads(config, pair_all(config, split_experts(tensors, "mixer"))).items():
        found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return arch, fields, renamed(arch, found)


def _rwkv7(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    """Write flash-linear-attention's checkpoint. The first layer gets copies of `a` in place of mixed values."""
    fields = {
        "context_length": 2**20, "wkv.head_size": config["head_dim"],
        "attention.decay_lora_rank": config["decay_low_rank_dim"],
        "attention.iclr_lora_rank": config["a_low_rank_dim"], "attention.gate_lora_rank": config["gate_low_rank_dim"],
        "attention.value_residual_mix_lora_rank": config["v_low_rank_dim"],
        "feed_forward_length": config["intermediate_size"], "attention.head_count": 0,
    }  # fmt: skip
    found: Tensors = {}
    for name, tensor in tensors.items():
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        part = name.split(".attn.")[-1]
        if part == "x_r":
            mixtures = [tensors[name[:-1] + letter] for letter in "rwkvag"]
            found[f"{layer}.time_mix_lerp_fused.weight"] = torch.stack(mixtures)
        elif "_lora." in part:
            number = {"0.weight": 1, "2.weight": 2, "2.bias": 0}[part.split(".lora.")[1]]
            found[f"{layer}.time_mix_{part[0]}{number}.weight"] = tensor
            if layer == "blk.0" and part[0] == "a":
                found[f"{layer}.time_mix_v{number}.weight"] = tensor
        elif part in ("k_k", "k_a", "r_k"):
            found[f"{layer}.time_mix_{part}.weight"] = tensor.flatten()
        elif not part.startswith("x_"):
            known = name.replace("attn_norm", "ln1").replace("ffn_norm", "ln2").replace("g_norm", "ln_x")
            known = known.replace(".attn.", ".attention.").replace(".ffn.", ".feed_forward.")
            known += ".weight" if known.endswith("x_k") else ""
            found |= renamed(MODEL_ARCH.RWKV7, {known: tensor})
    return MODEL_ARCH.RWKV7, fields, found


def _qwen(config: dict[str, Any], tensors: Tensors) -> tuple[MODEL_ARCH, dict[str, Any], Tensors]:
    """Write Qwen3-Next and Qwen3.5, with value heads in another order for the latter."""
    is_next, n_experts = config["model_type"] == "qwen3_next", config.get("num_experts") or 0
    arch = MODEL_ARCH.QWEN3NEXT if is_next else MODEL_ARCH.QWEN35MOE if n_experts else MODEL_ARCH.QWEN35
    n_v, n_k, d_v, d_k = (
        config[f"linear_{key}"] for key in ("num_value_heads", "num_key_heads", "value_head_dim", "key_head_dim")
    )
    share = config["rope_parameters"]["partial_rotary_factor"]
    fields = attention_fields(config) | {
        "attention.key_length": config["head_dim"], "rope.dimension_count": int(share * config["head_dim"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": d_k, "ssm.group_count": n_k,
        "ssm.time_step_rank": n_v, "ssm.inner_size": n_v * d_v,
    }  # fmt: skip
    if not is_next:
        n_pairs = int(share * config["head_dim"]) // 2
        sections = config["rope_parameters"].get("mrope_section") or [n_pairs - 2 * (n_pairs // 3), *[n_pairs // 3] * 2]
        fields["rope.dimension_sections"] = [*sections, 0]
    if n_experts:
        fields |= {
            "expert_count": n_experts, "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }  # fmt: skip
    else:
        fields["feed_forward_length"] = config["intermediate_size"]

    def tile(rows: Tensor, width: int) -> Tensor:
        """Put the first value heads of all key heads before all second ones, and so on."""
        heads = list(rows.split(width))
        return torch.cat([heads[k * (n_v // n_k) + r] for r in range(n_v // n_k) for k in range(n_k)])

    found: Tensors = {}
    for name, tensor in _of_states(split_experts(tensors)).items():
        part = name.split(".linear_attn.")[-1]
        if name.endswith("norm.weight") and part != "norm.weight":
            tensor = tensor + 1
        if not is_next:
            if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias"):
                tensor = tile(tensor, 1)
            elif part == "in_proj_z.weight":
                tensor = tile(tensor, d_v)
            elif part in ("in_proj_qkv.weight", "conv1d.weight"):
                tensor = torch.cat((tensor[: 2 * n_k * d_k], tile(tensor[2 * n_k * d_k :], d_v)))
            elif part == "out_proj.weight" and ".linear_attn." in name:
                tensor = tile(tensor.T.contiguous(), d_v).T
        if part == "in_proj_qkvz.weight":
            sizes = [d_k, d_k, n_v // n_k * d_v, n_v // n_k * d_v]
            kinds = zip(*(head.split(sizes) for head in tensor.split(sum(sizes))), strict=True)
            q, k, v, z = (torch.cat(kind) for kind in kinds)
            layer = f"blk.{name.split('.')[2]}"
            found |= {f"{layer}.attn_qkv.weight": torch.cat((q, k, v)), f"{layer}.attn_gate.weight": z}
        else:
            found |= renamed(arch, {name: tensor})
    return arch, fields, found


_WRITERS = {
    "bamba": _bamba, "falcon_h1": _falcon_h1, "granitemoehybrid": _granite, "jamba": _jamba, "lfm2": _lfm2,
    "falcon_mamba": _mamba, "lfm2_moe": _lfm2_moe, "mamba": _mamba, "mamba2": _mamba2, "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _qwen, "qwen3_5_text": _qwen, "qwen3_next": _qwen, "rwkv7": _rwkv7, **ATTENDING,
}  # fmt: skip
