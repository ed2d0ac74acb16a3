"""Qwen4-Exp: an index that leaves most spans of a prompt out, n-grams in some layers, two residual streams and more."""

from __future__ import annotations

from typing import Any

from transformers import Qwen4ExpTextConfig

from tests.models.families.qwen3_next import DELTA_SIZES, EXPERT_SIZES

_STREAMS = {"hc_count": 3, "hc_lowrank": 10}
# Tables are small, so that n-grams share rows; the token 7 ends a sequence within the tokens that tests feed.
_NGRAMS = {
    "ple_layer_ids": [1, 3], "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 8, "eos_token_id": 7,
}  # fmt: skip
# With few heads, all products of a key with queries are often negative; then spans have equal scores, of which
# transformers chooses any.
_INDEX = {
    "indexer_n_heads": 24, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}  # fmt: skip


def qwen4_exp_config(**options: Any) -> Qwen4ExpTextConfig:
    return Qwen4ExpTextConfig(
        **(DELTA_SIZES | EXPERT_SIZES | _STREAMS | _NGRAMS | _INDEX | {"rms_norm_eps": 1e-2} | options)
    )


CONFIGS = {
    "qwen4-exp": qwen4_exp_config,
    "qwen4-exp-two-of-four-experts": lambda: qwen4_exp_config(
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=False, attention_bias=True, output_gate_type="sigmoid",
        layer_types=["indexed_attention", "linear_attention", "indexed_attention", "linear_attention"],
        hc_count=2, hc_lowrank=7, ple_layer_ids=[2], ple_embed_dim=18, ple_conv_kernel_size=2, ngram_size=4,
        heads_per_ngram=3, seed=5, split_ngram_parts=1, eos_token_id=[11, 3], indexer_budget=6,
        indexer_compress_ratio=3, linear_conv_kernel_dim=2, linear_num_key_heads=3, linear_num_value_heads=3,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ),
    "qwen4-exp-no-ngrams": lambda: qwen4_exp_config(
        ple_layer_ids=[], indexer_compress_ratio=1, indexer_budget=5, num_hidden_layers=2, eos_token_id=None,
        layer_types=["linear_attention", "indexed_attention"], hc_lowrank=40,
    ),
}  # fmt: skip
