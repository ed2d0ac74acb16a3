"""Compares our logits with llama.cpp's for each model family whose GGUF files can be loaded.

The files are small, with random weights, and are written with the changes that llama.cpp's converter makes. Speed is
not measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BailingHybridConfig,
    BambaConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    FalconH1Config,
    FalconMambaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm5NextConfig,
    GlmMoeDsaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from benchmarks.harness import Report
from benchmarks.llamacpp import agree, differ_in_batch, write_model
from benchmarks.llamacpp_peer import start_llamacpp
from hybridmem.models import load_model
from hybridmem.models.families.rwkv7 import RWKV7Config

_TOLERANCE = 0.001
"""Largest difference of a logit in F32, as a share of the logits' standard deviation."""

_VOCAB = 160
_COMMON = {"vocab_size": _VOCAB, "hidden_size": 64}
_ATTENTION = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_SSD = {
    "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_DELTA = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64
}  # fmt: skip
_MULTIPLIERS = {
    "attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 0.5
}  # fmt: skip
_LAYERS = ["linear_attention", "full_attention"] * 2
_NEMOTRON = _COMMON | _ATTENTION | {
    "head_dim": 32, "ssm_state_size": 32, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "chunk_size": 16,
    # llama.cpp does not bound time steps from below.
    "time_step_min": 1e-9,
}  # fmt: skip
_NEMOTRON.pop("num_hidden_layers")
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
_LATENT = _COMMON | {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_SOME_DENSE = {"n_routed_experts": 8, "first_k_dense_replace": 1}
_GROUPS = {"n_group": 4, "topk_group": 2}
_DELTA_AND_LATENT = _LATENT | {
    "num_local_experts": 8, "layer_types": ["linear_attention", "linear_attention", "full_attention"]
}  # fmt: skip
# The index leaves most rows of a prompt out. llama.cpp rotates its heads by blocks of 64 elements.
_INDEX = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 64}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def _falcon_h1() -> PreTrainedConfig:
    """Return a Falcon-H1 whose norm stands after the gate: llama.cpp knows no other."""
    return FalconH1Config(
        **_COMMON, **_ATTENTION, **{name: n for name, n in _SSD.items() if name != "mamba_expand"},
        mamba_d_ssm=128, mamba_rms_norm=True, mamba_norm_before_gate=False, head_dim=32, key_multiplier=0.7,
        lm_head_multiplier=1.3, ssm_multipliers=[0.8, 1.1, 0.9, 1.2, 1.05], mlp_multipliers=[1.4, 0.6],
    )  # fmt: skip


def _nemotron_h_moe(**options: Any) -> PreTrainedConfig:
    defaults = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2}
    return NemotronHConfig(
        **_NEMOTRON, hybrid_override_pattern="MEM*E", moe_intermediate_size=32, moe_shared_expert_intermediate_size=64,
        routed_scaling_factor=2.5, **(defaults | options),
    )  # fmt: skip


def _glm5_next() -> PreTrainedConfig:
    text = _LATENT | _INDEX | _GROUPS | {
        "num_hidden_layers": 4, "qk_rope_head_dim": 0, "index_kpool": 4, "linear_num_heads": 4, "linear_head_dim": 32,
        "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "n_routed_experts": 8, "mlp_layer_types": ["dense"] + ["sparse"] * 3, "linear_lower_bound": -1.0,
        "swiglu_limit": 0.7, "hc_mult": 4, "hc_sinkhorn_iters": 4,
    }  # fmt: skip
    tower = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 16}
    return Glm5NextConfig(text_config=text, vision_config=tower, tie_word_embeddings=False)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "jamba": lambda: JambaConfig(
        **_COMMON, **_ATTENTION, attn_layer_period=4, attn_layer_offset=2, num_experts=1, num_experts_per_tok=1,
        mamba_dt_rank=32,
    ),
    "jamba, experts": lambda: JambaConfig(
        **_COMMON, **_ATTENTION, attn_layer_period=4, attn_layer_offset=2, expert_layer_period=2,
        expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_dt_rank=32,
    ),
    "mamba": lambda: MambaConfig(**_COMMON, num_hidden_layers=3, state_size=16),
    "mamba2": lambda: Mamba2Config(
        **_COMMON, num_hidden_layers=3, state_size=32, num_heads=4, head_dim=32, n_groups=2, chunk_size=16
    ),
    "granitehybrid": lambda: GraniteMoeHybridConfig(
        **_COMMON, **_ATTENTION, **_SSD, **_MULTIPLIERS, layer_types=_LAYERS, num_local_experts=0,
        num_experts_per_tok=0, shared_intermediate_size=96,
    ),
    "granitehybrid, experts": lambda: GraniteMoeHybridConfig(
        **_COMMON, **_ATTENTION, **_SSD, **_MULTIPLIERS, layer_types=_LAYERS, num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=64,
    ),
    "falcon-h1": _falcon_h1,
    "lfm2": lambda: Lfm2Config(
        **_COMMON, **_ATTENTION, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
    ),
    "lfm2moe": lambda: Lfm2MoeConfig(
        **_COMMON, **_ATTENTION, layer_types=["conv", "full_attention"] * 2, num_dense_layers=1, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "nemotron_h": lambda: NemotronHConfig(**_NEMOTRON, hybrid_override_pattern="M-M*-"),
    "nemotron_h_moe": _nemotron_h_moe,
    # All experts are chosen: a close choice between two of them would show as a difference.
    "nemotron_h_moe, latent": lambda: _nemotron_h_moe(
        moe_latent_size=32, n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1
    ),
    "qwen3next": lambda: Qwen3NextConfig(**_COMMON, **_ATTENTION, **_DELTA, **_EXPERTS),
    "qwen35": lambda: Qwen3_5TextConfig(**_COMMON, **_ATTENTION, **_DELTA),
    "qwen35moe": lambda: Qwen3_5MoeTextConfig(
        **_COMMON, **{name: n for name, n in _ATTENTION.items() if name != "intermediate_size"}, **_DELTA, **_EXPERTS
    ),
    "rwkv7": lambda: RWKV7Config(
        **{**_COMMON, "hidden_size": 128}, num_hidden_layers=3, head_dim=64, intermediate_size=256,
        decay_low_rank_dim=32, a_low_rank_dim=32, v_low_rank_dim=32, gate_low_rank_dim=64, fuse_norm=False,
    ),
    "llama": lambda: LlamaConfig(**_COMMON, **_ATTENTION),
    "qwen2": lambda: Qwen2Config(**_COMMON, **_ATTENTION),
    "qwen3": lambda: Qwen3Config(**_COMMON, **_ATTENTION, head_dim=32),
    "gemma2": lambda: Gemma2Config(**_COMMON, **_ATTENTION, **_WINDOWS, head_dim=32, query_pre_attn_scalar=32),
    "gemma3": lambda: Gemma3TextConfig(**_COMMON, **_ATTENTION, **_WINDOWS, head_dim=32, query_pre_attn_scalar=32),
    "olmo2 of OLMo 3": lambda: Olmo3Config(
        **_COMMON, **_ATTENTION, **_WINDOWS, pad_token_id=None, eos_token_id=None,
        rope_parameters={
            "full_attention": {name: n for name, n in _YARN.items() if "mscale" not in name},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "mamba of Falcon-Mamba": lambda: FalconMambaConfig(**_COMMON, num_hidden_layers=3, state_size=16),
    "deepseek2 of DeepSeek-V2": lambda: DeepseekV2Config(
        **_LATENT, **_SOME_DENSE, topk_method="greedy", rope_parameters=_YARN
    ),
    "deepseek2 of DeepSeek-V3": lambda: DeepseekV3Config(**_LATENT, **_SOME_DENSE, **_GROUPS, rope_parameters=_YARN),
    "deepseek32": lambda: DeepseekV32Config(**_LATENT, **_SOME_DENSE, **_GROUPS, **_INDEX, rope_parameters=_YARN),
    "glm-dsa": lambda: GlmMoeDsaConfig(
        **_LATENT, **_SOME_DENSE, **_INDEX, n_group=1, topk_group=1, indexer_types=["full", "shared", "full"]
    ),
    "glm5-next": _glm5_next,
    # llama.cpp reads neither groups of experts nor compressed queries of Kimi Linear.
    "kimi-linear": lambda: KimiLinearConfig(
        **(_DELTA_AND_LATENT | {"q_lora_rank": None}), n_group=1, topk_group=1, linear_num_heads=4, linear_head_dim=32
    ),
    "bailingmoe3": lambda: BailingHybridConfig(**_DELTA_AND_LATENT, **_GROUPS, head_dim=32, first_k_dense_replace=1),
}  # fmt: skip
"""Small models by llama.cpp's name of their architecture, with rows that are whole blocks of 32."""

# llama.cpp has no architecture for Bamba: its converter writes Bamba as granitehybrid with positions. Published Bambas
# rotate only a part of each head, but the converter pairs the elements of the whole head, so llama.cpp rotates other
# pairs than the model. So this config rotates whole heads.
FAMILIES["granitehybrid of Bamba"] = lambda: BambaConfig(
    **_COMMON, **_ATTENTION, **_SSD, attn_layer_indices=[1, 3],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
)  # fmt: skip


def agreement(*, families: Sequence[str], quick: bool = False) -> Report:
    """Compare the logits of 3 prompts of 24 tokens and of 8 decode steps (2 if quick) in F32.

    Logits of llama.cpp for a batch are also compared with its own logits for single prompts.
    """
    from tests.models.checkpoints import write_checkpoint

    report = Report("gguf")
    tokens = torch.randint(0, _VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    for name in families:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), FAMILIES[name]())
            path = write_model(Path(folder), "F32")
            options = {"keys": "F32", "n_threads": torch.get_num_threads(), "flash_attention": False}
            with start_llamacpp(path, 3, 64, **options) as theirs:
                in_batch = differ_in_batch(theirs, tokens)
                found = agree(load_model(path, progress=False), theirs, tokens, 2 if quick else 8)
                if not report.notes:
                    report.notes.append(theirs.describe())
        report.add("logits of one file, ours and llama.cpp's", {
            "family": name, "largest difference": found.largest, "typical": found.typical,
            "same tokens, %": 100 * found.same, "llama.cpp in a batch and alone": in_batch,
            "same model": found.largest <= _TOLERANCE,
        })  # fmt: skip
    report.notes.append(
        f"Differences are shares of the logits' standard deviation; the same model is one within {_TOLERANCE}. "
        "llama.cpp keeps keys and values in F32, without flash attention."
    )
    return report
