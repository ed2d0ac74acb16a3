"""The library treats every field of every config as transformers does, or refuses it at load by name.

By default the tests draw a few mutations with a fixed seed, and add those that were wrong once. They try every fourth
class and former fault, and TESTS=long tries all. MUTATIONS=full tries each value of each field of each class, fields of
other classes, and some combinations, which takes an hour of one core.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from transformers import PreTrainedModel

from hybridmem.models import LanguageModel, from_transformers
from tests.extent import few_cases, one_in
from tests.models import mutations
from tests.models.mutations import SUBJECTS, Changes, class_of, foreign_changes, judge, random_changes, single_changes

IS_FULL = os.environ.get("MUTATIONS") == "full"
N_DRAWN, N_TOGETHER = 1, 40
"""Mutations of a class that are always tried, and those of several fields at once of each config in the full form."""

RICHEST = {class_of(subject): subject for subject in SUBJECTS} | {
    "BailingHybridConfig": "bailing-hybrid-two-of-eight-experts-in-groups", "BambaConfig": "bamba",
    "LaraMiniConfig": "lara-mini-two-of-four-experts", "FalconH1Config": "falcon-h1-biases",
    "FalconMambaConfig": "falcon-mamba-wide", "Gemma2Config": "gemma2", "Gemma3TextConfig": "gemma3",
    "GptOssConfig": "gpt-oss",
    "GraniteMoeHybridConfig": "granite-moe-hybrid-rope-two-of-four-experts", "JambaConfig": "jamba",
    "Lfm2Config": "lfm2", "Lfm2MoeConfig": "lfm2-moe-three-of-four-experts",
    "NemotronHConfig": "nemotron-h-two-of-eight-experts", "Qwen3NextConfig": "qwen3-next-two-of-four-experts",
    "ZambaConfig": "zamba-one-head", "Zamba2Config": "zamba2",
    "InklingTextConfig": "inkling-log-scale", "Inkling2TextConfig": "inkling2-three-of-four-experts",
    "Inkling2LoopTextConfig": "inkling2-loop",
    "KimiLinearConfig": "kimi-linear-two-of-eight-experts-in-groups", "Lfm3Config": "lfm3-biases-untied",
    "MiniMaxConfig": "minimax-two-of-four-experts", "MistralConfig": "mistral", "OlmoHybridConfig": "olmo-hybrid-rope",
    "Olmo3Config": "olmo3-biases-tied", "Qwen3_5TextConfig": "qwen3.5-biases",
    "Qwen4ExpTextConfig": "qwen4-exp-two-of-four-experts", "Qwen2Config": "qwen2-windows-tied",
    "RecurrentGemmaConfig": "recurrent-gemma", "BartConfig": "bart",
    "RwkvConfig": "rwkv", "xLSTMConfig": "xlstm-biases", "ZayaConfig": "zaya-biases-windows-untied",
    "DeepseekV2Config": "deepseek-v2-three-of-eight-experts-in-groups",
    "DeepseekV3Config": "deepseek-v3-three-of-eight-experts-in-groups",
    "DeepseekV32Config": "deepseek-v3.2-three-of-eight-experts-in-groups", "GlmMoeDsaConfig": "glm-moe-dsa",
    "Glm5NextConfig": "glm5-next-two-of-eight-experts-in-groups",
}  # fmt: skip
"""Class of a config -> the one here that reads most of its fields."""


def rope(**parameters: Any) -> Changes:
    return {("rope_parameters", name): value for name, value in parameters.items()}


WRONG_ONCE: list[tuple[str, Changes]] = [
    *((subject, rope(partial_rotary_factor=0.5)) for subject in (
        "llama", "mistral", "qwen3", "gemma2", "lfm2", "lfm2-moe", "falcon-h1", "zamba2",
        "granite-moe-hybrid-rope-two-of-four-experts", "bamba", "qwen3-next", "qwen3.5", "recurrent-gemma",
    )),
    ("gemma3", {("rope_parameters", "full_attention", "partial_rotary_factor"): 0.5}),
    ("llama", rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.5)),
    ("bamba", rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.5)),
    ("llama", {("head_dim",): 1}),
    ("qwen3-next-two-of-four-experts", {("head_dim",): 1}),
    ("qwen3.5-biases", {("head_dim",): 1}),
    ("deepseek-v3", {("head_dim",): 1}),
    ("deepseek-v3-three-of-eight-experts-in-groups", {("head_dim",): 2}),
    ("gemma3", {("attn_logit_softcapping",): 0.3}),
    ("gemma3", {("attn_logit_softcapping",): 0.0}),
    ("gemma2", {("attn_logit_softcapping",): 0.0}),
    ("gemma2", {("final_logit_softcapping",): 0.0}),
    ("gemma2", {("query_pre_attn_scalar",): -1}),
    ("mistral", {("sliding_window",): 0}),
    ("granite-moe-hybrid", {("attention_multiplier",): 0.0}),
    ("granite-moe-hybrid", {("num_local_experts",): -1}),
    ("granite-moe-hybrid", {("residual_multiplier",): None}),
    ("falcon-h1-biases", {("embedding_multiplier",): None}),
    ("falcon-h1-biases", {("ssm_multipliers",): [0.9, 0.8, 1.3, 0.7, 1.4, 1.4]}),
    ("jamba", {("num_experts",): 0}),
    ("jamba", {("mamba_d_conv",): 0}),
    ("lfm2", {("block_multiple_of",): -1}),
    ("mamba", {("state_size",): 0}),
    ("mamba2", {("time_step_limit",): [0.0, 0.5, 0.5]}),
    ("mamba2", {("vocab_size",): 0}),
    ("nemotron-h-two-of-eight-experts", {("n_group",): 3}),
    ("nemotron-h-two-of-eight-experts", {("n_routed_experts",): 7}),
    ("nemotron-h-two-of-eight-experts", {("topk_group",): -1}),
    ("nemotron-h-two-of-eight-experts", {("moe_shared_expert_intermediate_size",): 0}),
    ("nemotron-h-that-sees", {("image_token_id",): None}),
    ("recurrent-gemma", {("lru_width",): 25}),
    ("rwkv", {("rescale_every",): 1}),
    ("zamba2", {("layers_block_type",): ["hybrid", "hybrid", "attention"]}),
    ("bart", {("decoder_layers",): 0}),
    ("t5", {("relative_attention_max_distance",): 1}),
    ("t5", {("relative_attention_num_buckets",): 2}),
]  # fmt: skip


def wrong_of(subject: str, mutations: list[Changes]) -> list[str]:
    verdicts = ((changes, judge(subject, changes)) for changes in mutations)
    return [f"{changes}: {verdict.why}" for changes, verdict in verdicts if verdict.kind == "wrong"]


@few_cases
@pytest.mark.parametrize("subject, changes", one_in(4, WRONG_ONCE), ids=str)
def test_what_was_wrong_once_is_right(subject: str, changes: Changes) -> None:
    assert not wrong_of(subject, [changes])


@few_cases
@pytest.mark.parametrize("subject", RICHEST.values() if IS_FULL else one_in(4, RICHEST.values()))
def test_each_field_is_honoured_or_refused(subject: str) -> None:
    changes = list(single_changes(subject))
    drawn = changes + list(foreign_changes(subject)) if IS_FULL else random.Random(subject).sample(changes, N_DRAWN)
    assert not wrong_of(subject, drawn)


@pytest.mark.parametrize("subject", SUBJECTS if IS_FULL else ["jamba"])
def test_several_fields_at_once_are_honoured_or_refused(subject: str) -> None:
    generator = random.Random(subject)
    n_drawn = N_TOGETHER if IS_FULL else N_DRAWN
    assert not wrong_of(subject, [random_changes(subject, generator) for _ in range(n_drawn)])


# The tests below show what these tests can see.


def test_a_field_that_was_ignored_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignoring(peer: PreTrainedModel) -> LanguageModel:
        peer.config.rms_norm_eps = 1e-6
        return from_transformers(peer)

    changes: Changes = {("rms_norm_eps",): 0.1}
    assert judge("llama", changes).kind == "equal"
    monkeypatch.setattr(mutations, "from_transformers", ignoring)
    assert judge("llama", changes).kind == "wrong"


def test_a_refusal_without_a_name_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(peer: PreTrainedModel) -> LanguageModel:
        peer.config.model_type = None
        peer.config.quantization_config = {"quant_method": "fp8"}
        return from_transformers(peer)

    monkeypatch.setattr(mutations, "from_transformers", refusing)
    assert judge("llama", {("rms_norm_eps",): 0.1}).kind == "wrong"


def test_most_mutations_are_of_use() -> None:
    """Transformers can build about half of the mutations that are drawn."""
    kinds = [judge("mistral", changes).kind for changes in random.Random(0).sample(list(single_changes("mistral")), 12)]
    assert kinds.count("equal") > 3
