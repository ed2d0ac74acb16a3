"""Turns names of tensors in Hugging Face checkpoints into names that the `gguf` package's tables contain."""

from __future__ import annotations

import re

_RWKV7 = (
    (r"\.attn\.(\w)_lora\.lora\.0\.weight$", r".attention.\g<1>1.weight"),
    (r"\.attn\.(\w)_lora\.lora\.2\.weight$", r".attention.\g<1>2.weight"),
    (r"\.attn\.(\w)_lora\.lora\.2\.bias$", r".attention.\g<1>0.weight"),
    (r"\.attn\.(k_k|k_a|r_k)$", r".attention.\1.weight"),
    (r"\.attn\.g_norm\.", ".attention.ln_x."),
    (r"\.attn\.", ".attention."),
    (r"\.ffn\.x_k$", ".feed_forward.x_k.weight"),
    (r"\.ffn\.", ".feed_forward."),
    (r"\.attn_norm\.", ".ln1."),
    (r"\.ffn_norm\.", ".ln2."),
)
"""Pairs of patterns for flash-linear-attention's names of RWKV-7. The first that fits is replaced."""

_LING3 = (
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.f_proj\.", ".self_attn.f_a_proj."),
    (r"\.attention\.g_proj\.", ".self_attn.g_a_proj."),
    (r"\.attention\.dt_bias$", ".self_attn.dt_proj.bias"),
    (r"\.attention\.", ".self_attn."),
    (r"\.word_embeddings\.", ".embed_tokens."),
    (r"\.mlp\.gate\.expert_bias$", ".block_sparse_moe.gate.e_score_correction.bias"),
    (r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
)
"""Pairs of patterns for names of Ling 3, which become those of Kimi Linear. The first that fits is replaced."""

_OTHERS = (
    (r"\.dt_bias$", ".dt_proj.bias"),
    (r"\.e_score_correction_bias$", ".e_score_correction.bias"),
    (r"\.expert_bias$", ".expert_bias.bias"),
)

_PATTERNS = {"bailingmoe3": _LING3, "rwkv7": _RWKV7}

_PARTS_OF_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


_GLM5_NEXT = ("glm5-next", "glm5next")

_TABLES = {"bailingmoe3": "kimi-linear", "deepseek32": "glm-dsa", **dict.fromkeys(_GLM5_NEXT, "kimi-linear")}
"""Maps architectures that the package has no table for to those whose table has their names, or most of them."""

_OF_GLM5_NEXT = {
    **{f"hc_{part}": f"hc_{part}.weight" for part in (
        "attn_fn", "attn_base", "attn_scale", "ffn_fn", "ffn_base", "ffn_scale",
    )},
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
}  # fmt: skip
"""Maps names within a layer of GLM-5.3 that the table of Kimi Linear lacks to those in files."""

_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def table_of(architecture: str) -> str:
    """Return the architecture whose table in the package has an architecture's names."""
    return _TABLES.get(architecture, architecture)


def name_in_no_table(architecture: str, name: str) -> str | None:
    """Return a file's name of a tensor that no table has, given what `known_name` returns; None if there is none."""
    match = _IN_LAYER.fullmatch(name) if architecture in _GLM5_NEXT else None
    if match is None or match[2] not in _OF_GLM5_NEXT:
        return None
    return f"blk.{match[1]}.{_OF_GLM5_NEXT[match[2]]}"


def known_name(architecture: str, name: str) -> str:
    """Return the name in the tables of a tensor that the file holds as a single tensor."""
    for pattern, replacement in _PATTERNS.get(architecture, _OTHERS):
        name, n_replaced = re.subn(pattern, replacement, name)
        if n_replaced:
            break
    return name.replace("model.language_model.", "model.")


_OF_A_HEAD = {
    "mtp.fc": "eh_proj", "mtp.norm": "shared_head.norm", "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
}  # fmt: skip
"""Qwen's names of what a draft head has beside its layer, and DeepSeek's, which files follow."""

_NEXTN = re.compile(r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight")


def in_layer_behind(name: str, n_layers: int) -> str:
    """Return DeepSeek's name of a tensor of Qwen's draft head: it is in a layer after the last one. Others stay."""
    stem = name.removesuffix(".weight")
    if stem in _OF_A_HEAD:
        return f"model.layers.{n_layers}.{_OF_A_HEAD[stem]}.weight"
    return re.sub(r"^mtp\.layers\.(\d+)\.", lambda match: f"model.layers.{n_layers + int(match[1])}.", name)


def nextn_of(name: str) -> str | None:
    """Return the name in files of what a draft head has beside its layer; None for other tensors."""
    if (match := _NEXTN.fullmatch(name)) is None:
        return None
    return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.weight"


def expert_of(name: str) -> tuple[str, int] | None:
    """Return the name of the stack of experts with this weight, and the expert's number; None for other weights."""
    if (match := _EXPERT.fullmatch(name)) is None:
        return None
    part = _PARTS_OF_EXPERTS.get(match[3], match[3])
    return f"model.layers.{layer_of(name)}.mlp.experts.{part}.weight", int(match[2])


def layer_of(name: str) -> str:
    """Return the first number in a name, which is that of the layer."""
    return next(part for part in name.split(".") if part.isdecimal())
