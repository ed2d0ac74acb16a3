"""Formulas of other engines agree with figures that these engines, their users or a model's makers publish."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from hybridmem.chat.planning.peers import (
    SGLANG_SLOTS,
    Model,
    llama_cpp,
    llama_cpp_kv_bytes,
    plan_peers,
    sglang,
    sglang_draft_bytes,
    vllm,
    vllm_block_tokens,
    vllm_group_layers,
)
from hybridmem.memory import AttentionSpec, MemorySpec
from hybridmem.memory.recurrences import DeltaRuleShape, SSDShape
from hybridmem.memory.specs import RecurrentSpec
from hybridmem.models.loading.folders import read_config
from hybridmem.models.loading.load import dry_model
from tests.extent import few_cases, only_in_long

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
MIB, GIB = 1 << 20, 1 << 30


def model_of(
    recurrence: RecurrentSpec | None, n_states: int, attention: AttentionSpec, n_attention: int, architecture: str = ""
) -> Model:
    layers = [*([(recurrence,)] * n_states if recurrence else []), *[(attention,)] * n_attention]
    return Model.of(MemorySpec(tuple(layers), 1000, torch.bfloat16), architecture)


def qwen3_5(n_heads: int, n_states: int, n_kv_heads: int, n_attention: int) -> Model:
    """Return the config of Qwen3.5 or 3.6, from 4B on.

    There are 16 key heads. Heads have 128 channels in the delta rule, and 256 in attention.
    """
    delta = DeltaRuleShape(n_heads=n_heads, n_key_heads=16, value_dim=128, key_dim=128, d_conv=4).spec()
    return model_of(delta, n_states, AttentionSpec(4 * n_kv_heads, n_kv_heads, 256), n_attention, "Qwen3_5ForCausalLM")


QWEN_9B, QWEN_27B, QWEN_35B = qwen3_5(32, 24, 4, 8), qwen3_5(48, 48, 4, 16), qwen3_5(32, 30, 2, 10)
GRANITE_350M = model_of(
    SSDShape(n_heads=48, head_dim=32, n_groups=1, d_state=128, d_conv=4).spec(), 28, AttentionSpec(12, 4, 64), 4
)
NEMOTRON_9B = model_of(
    SSDShape(n_heads=128, head_dim=80, n_groups=8, d_state=128, d_conv=4).spec(), 27, AttentionSpec(40, 8, 128), 4
)
NEMOTRON_SUPER = model_of(
    SSDShape(n_heads=128, head_dim=64, n_groups=8, d_state=128, d_conv=4).spec(), 40, AttentionSpec(32, 2, 128), 8
)


@cache
def from_config(name: str) -> Model:
    config, _ = read_config(CONFIGS / f"{name}.json")
    return Model.of(dry_model(config, config.architectures[0]).memory_spec, config.architectures[0])


# The tests below are about llama.cpp.


@pytest.mark.parametrize(
    ("model", "n_sequences", "published_mib"),
    [
        pytest.param(QWEN_9B, 1, 50.25, id="Qwen3.5-9B: log in ggml-org/llama.cpp#22546, 2.25 MiB of R and 48.00 of S"),
        pytest.param(QWEN_27B, 1, 149.6, id="Qwen3.6-27B: size of a checkpoint in ggml-org/llama.cpp threads"),
        pytest.param(QWEN_35B, 1, 63, id="Qwen3.6-35B-A3B: the same"),
        pytest.param(
            QWEN_35B,
            4,
            251,
            id="Qwen3.5-35B-A3B, 4 slots: lilting.ch/en/articles/qwen35-ctx-kv-cache-vulkan-optimization",
        ),
    ],
)
def test_llama_cpp_states(model: Model, n_sequences: int, published_mib: float) -> None:
    assert n_sequences * sum(model.float32_bytes) / MIB == pytest.approx(published_mib, rel=0.02)


def test_llama_cpp_states_of_mamba() -> None:
    """ggml-org/llama.cpp#5328 reports 23.75 MiB for each slot of "Mamba 3B"."""
    assert sum(from_config("mamba-2.8b").float32_bytes) / MIB == 23.75


def test_llama_cpp_keys_and_values() -> None:
    """A log in ggml-org/llama.cpp#22546 says 8192.00 MiB for 262,144 cells of 8 layers of Qwen3.5-9B in F16."""
    assert llama_cpp_kv_bytes(QWEN_9B, 262144) == 8192 * MIB
    assert llama_cpp_kv_bytes(QWEN_9B, 262143) == 8192 * MIB and llama_cpp_kv_bytes(QWEN_9B, 1) == 8 * MIB
    window = model_of(None, 0, AttentionSpec(8, 4, 256, window=1024), 3)
    assert llama_cpp_kv_bytes(window, 100_000) == 3 * 1536 * 2 * 4 * 256 * 2


def test_llama_cpp_takes_back_with_a_state_a_token_where_it_can() -> None:
    """Threads of its users report 149.6 MiB for one state.

    Each token to take back costs as many more.
    """
    plan = llama_cpp(QWEN_27B, 80 * GIB, 32768, 7)
    assert plan.window_bytes is not None
    assert (plan.window_bytes - plan.session_bytes) / MIB == pytest.approx(7 * 149.6, rel=0.02)
    jamba = llama_cpp(from_config("jamba-1.5-mini"), 80 * GIB, 32768, 7)
    assert jamba.window_bytes is None and any("no tokens back" in note for note in jamba.notes)


# The tests below are about vLLM.


@pytest.mark.parametrize(
    ("model", "itemsizes", "published_tokens", "padding_percent"),
    [
        pytest.param(QWEN_9B, (2, 4), 528, 0.76, id="Qwen3.5: log in vllm-project/vllm#37467"),
        pytest.param(QWEN_27B, (2, 4), 784, 0.13, id="Qwen3.6-27B: vllm-project/vllm#51250 and its log"),
        pytest.param(QWEN_35B, (2, 4), 1056, 0.76, id="Qwen3.6-35B-A3B: vllm-project/vllm#51250"),
        pytest.param(QWEN_35B, (1, 4), 2096, 0.0, id="Qwen3.5-35B-A3B with K and V in fp8: log of vLLM 0.17.1"),
        pytest.param(GRANITE_350M, (2, 2), 400, 1.39, id="granite-4.0-h-350m, states in bfloat16: log of vLLM 0.11.1"),
        pytest.param(
            NEMOTRON_9B, (2, 2), 672, None, id="Nemotron-Nano-9B-v2, states in bfloat16: vllm-project/vllm#24280"
        ),
        pytest.param(
            NEMOTRON_SUPER, (1, 4), 8320, None, id="Nemotron-3-Super, K and V in fp8: vllm-project/vllm#48401"
        ),
    ],
)
def test_vllm_blocks(
    model: Model, itemsizes: tuple[int, int], published_tokens: int, padding_percent: float | None
) -> None:
    """The dtypes follow from the models' configs and the date of the reports.

    States are float32 if a config asks for that.
    """
    kv_itemsize, state_itemsize = itemsizes
    (columns, column_bytes), fixed_bytes = model.row_bytes[0], model.fixed_bytes[0]
    token_bytes, state_bytes = (
        model.token_elements[0] * kv_itemsize,
        columns * column_bytes + fixed_bytes * state_itemsize // 4,
    )
    assert vllm_block_tokens(token_bytes, state_bytes) == published_tokens
    if padding_percent is not None:
        assert 100 * (published_tokens * token_bytes / state_bytes - 1) == pytest.approx(padding_percent, abs=0.005)


def test_vllm_groups() -> None:
    """docs/design/hybrid_kv_cache_manager.md says that groups are as large as the smallest kind.

    So 12 and 13 layers are padded to 13.
    """
    assert vllm_group_layers(10, 20) == 10 and vllm_group_layers(13, 12) == 13 and vllm_group_layers(0, 7) == 7
    assert vllm_group_layers(10, 30) == 10  # Qwen3.5-35B has four groups of ten, as vLLM's users count them.


def test_vllm_sessions() -> None:
    """A user's log says that Qwen3.5-35B in fp8 has 304 blocks in 6.08 GiB.

    Here K and V are bfloat16, so a block has the same size.
    """
    plan = vllm(QWEN_35B, 10 * 1056 * 2048 * 304, 2 * 1056, 4)
    block_bytes = 10 * 1056 * 2048
    assert block_bytes / MIB / 10 == pytest.approx(2.05, rel=0.02)
    assert plan.session_bytes == (2 + 3) * block_bytes and plan.n_sessions == 304 // 5
    assert plan.window_bytes == (2 + 3 * 5) * block_bytes and plan.n_window_sessions == 304 // 17


# The tests below are about SGLang.


def test_sglang_slots() -> None:
    """In sgl-project/sglang#19002, 250 slots serve 83 requests.

    In noonghunna/club-3090#1319, 8 requests take 24 slots.
    """
    assert (250 // SGLANG_SLOTS, 8 * SGLANG_SLOTS) == (83, 24)
    slot_bytes = sum(QWEN_35B.state_bytes)
    plan = sglang(QWEN_35B, 250 * slot_bytes * 19 // 9, 1, 0)
    assert plan.n_sessions == 83 and plan.session_bytes == 3 * slot_bytes + QWEN_35B.token_bytes


def test_sglang_drafts() -> None:
    """sgl-project/sglang#23643 says that 64 slots for 5 drafts in 36 layers take about 12 GB.

    The model is not named. Qwen3-Next-80B has 36 such layers, and 12 GB means 1 MiB for each state, half of it on each
    of two GPUs.
    """
    half = DeltaRuleShape(n_heads=16, n_key_heads=8, value_dim=128, key_dim=128, d_conv=4).spec()
    assert 64 * sglang_draft_bytes(model_of(half, 36, AttentionSpec(8, 1, 256), 12), 5) / 1e9 == pytest.approx(
        12, rel=0.02
    )


@only_in_long
def test_sglang_divides_memory_once() -> None:
    model, budget = from_config("qwen3-next-80b-a3b"), 80 * GIB
    plan = sglang(model, budget, 32768, 0)
    for_kv = budget * 10 // 19
    assert plan.n_sessions == min(for_kv // (32768 * 24576), (budget - for_kv) // (3 * sum(model.state_bytes)))
    # Keys and states take one buffer from both ends (sgl-project/sglang#29678). So the number of sessions is the budget
    # divided by what a session takes.
    assert (
        f"--enable-unified-memory both share one buffer, as here: up to {budget // plan.session_bytes:,} sessions"
        in plan.notes[0]
    )
    assert budget // plan.session_bytes > plan.n_sessions
    drafting = sglang(model, budget, 32768, 4)
    assert drafting.n_window_sessions is not None and drafting.n_window_sessions < plan.n_sessions


# The tests below compare the plans of models.


@few_cases
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("jamba-1.5-mini", 52e9), ("jamba-1.5-large", 398e9), ("granite-4.0-h-tiny", 7e9),
        ("granite-4.0-h-small", 32e9),
        ("qwen3-next-80b-a3b", 80e9), ("nemotron-h-8b", 8_100_852_736), ("falcon-h1-7b", 7.6e9), ("mamba-2.8b", 2.8e9),
        ("mamba2-2.7b", 2.7e9),
    ],
)  # fmt: skip
def test_configs_are_those_of_the_models(name: str, published: float) -> None:
    """The shapes that a config asks for have as many parameters as the makers say."""
    from hybridmem.models import weight_bytes

    config, _ = read_config(CONFIGS / f"{name}.json")
    n_parameters = weight_bytes(dry_model(config, config.architectures[0], dtype="bfloat16")) / 2
    assert n_parameters == pytest.approx(published, rel=0.02)


def test_jamba_keeps_4_gb_for_256k_tokens() -> None:
    """arXiv 2403.19887, table 1, says that 256K tokens take 4 GB of keys and values in 16 bits."""
    assert from_config("jamba-1.5-mini").token_bytes * 262144 == 4 * GIB


def test_qwen3_next_keeps_as_much_in_states_as_in_3144_tokens() -> None:
    model = from_config("qwen3-next-80b-a3b")
    assert (model.token_bytes, round(sum(model.state_bytes) / MIB, 1)) == (24 * 1024, 73.7)
    assert sum(model.state_bytes) // model.token_bytes == 3144


def test_layers_that_a_formula_does_not_describe_get_no_figure() -> None:
    windows = model_of(None, 0, AttentionSpec(8, 4, 64, window=100), 3)
    by_name = {plan.name: plan for plan in plan_peers(windows, GIB, 1000, 8)}
    assert by_name["vLLM"].why_not and by_name["SGLang"].why_not and not by_name["llama.cpp"].why_not
    attention = model_of(None, 0, AttentionSpec(8, 4, 64), 3)
    for plan in plan_peers(attention, GIB, 1024, 8):
        assert (plan.session_bytes, plan.window_bytes) == (1024 * 3 * 2 * 4 * 64 * 2,) * 2, (
            "attention takes tokens back for nothing"
        )
        assert plan.n_sessions == plan.n_window_sessions == GIB // plan.session_bytes
