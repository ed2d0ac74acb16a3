"""GLM-5.3: an index that leaves most spans of a prompt out, residual streams that are routed, clamped experts."""

from __future__ import annotations

from typing import Any

from transformers import Glm5NextConfig

from tests.models.families.kimi_linear import KIMI_SIZES

# With few heads, all products of a key with queries are often negative; then spans have equal scores, of which
# transformers chooses any.
_INDEX = {"index_topk": 10, "index_kpool": 5, "index_head_dim": 8, "index_n_heads": 24}
_OWN = {
    "q_lora_rank": 12,
    "qk_rope_head_dim": 0,
    "hc_mult": 3,
    "linear_lower_bound": -1.0,
    "hc_sinkhorn_iters": 4,
    "swiglu_limit": 0.7,
}
_TOWER = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 28, "patch_size": 14, "out_hidden_size": 24,
    "intermediate_size": 16, "projection_intermediate_size": 16,
}  # fmt: skip


def glm5_next_config(layers: str = "DAD", *, tied: bool = False, **options: Any) -> Glm5NextConfig:
    """D stands for a layer of delta attention, A for one of latent attention."""
    sizes = {name: size for name, size in KIMI_SIZES.items() if name != "num_local_experts"} | {"n_routed_experts": 3}
    text = sizes | _INDEX | _OWN | {
        "num_hidden_layers": len(layers), "linear_num_heads": 3, "linear_head_dim": 8,
        "layer_types": ["linear_attention" if kind == "D" else "indexed_attention" for kind in layers],
        "indexer_types": ["full"] * len(layers), "mlp_layer_types": ["dense"] + ["sparse"] * (len(layers) - 1),
    }  # fmt: skip
    return Glm5NextConfig(text_config=text | options, vision_config=_TOWER, tie_word_embeddings=tied)


CONFIGS = {
    "glm5-next": glm5_next_config,
    # An index in the first layer would choose among equal tokens, which have equal keys there.
    "glm5-next-two-of-eight-experts-in-groups": lambda: glm5_next_config(
        "DAA", indexer_types=["full", "full", "shared"], mlp_layer_types=["sparse", "dense", "sparse"], index_topk=10,
        index_kpool=5, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=2,
        norm_topk_prob=False, routed_scaling_factor=1.3, attention_bias=True, linear_lower_bound=None,
        linear_conv_kernel_dim=2, hc_mult=4, hc_sinkhorn_iters=1, swiglu_limit=2.0, tied=True,
    ),
    "glm5-next-single-rows": lambda: glm5_next_config("DA", index_kpool=1, index_topk=5),
}  # fmt: skip
