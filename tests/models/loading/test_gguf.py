"""GGUF files are read: the tensors, config and tokenizer of every family, and the number types that people use.

Bad files are refused.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedConfig
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.commands.inspection import inspect_path
from hybridmem.chat.commands.plan import read_model as read_planned
from hybridmem.chat.prompts import find_stop_ids, load_tokenizer
from hybridmem.memory import FormatError, HybridMemory
from hybridmem.models import EMBEDDED, UnsupportedModelError, load_model
from hybridmem.models.loading.dry import find_files
from hybridmem.models.loading.folders import find_folder
from hybridmem.models.loading.gguf import GgufFile, configs, read_gguf_config
from hybridmem.models.loading.gguf.header import Header
from hybridmem.models.loading.load import dry_model, open_model, weight_bytes
from tests.extent import few_cases, one_in, only_in_long, pick
from tests.models import gguf_files
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.families.vocabulary import HEADS, SIZES
from tests.models.gguf_files import write_gguf

FAMILIES = (
    "bailing-hybrid", "bailing-hybrid-two-of-eight-experts-in-groups", "kimi-linear",
    "kimi-linear-two-of-eight-experts-in-groups", "bamba", "deepseek-v2",
    "deepseek-v2-three-of-eight-experts-in-groups", "deepseek-v3",
    "deepseek-v3-three-of-eight-experts-in-groups", "deepseek-v3-no-experts", "deepseek-v3.2",
    "deepseek-v3.2-three-of-eight-experts-in-groups", "glm-moe-dsa", "glm-moe-dsa-no-experts", "glm5-next",
    "glm5-next-two-of-eight-experts-in-groups", "glm5-next-single-rows", "falcon-mamba-wide", "gemma2", "gemma3",
    "gemma3-capped-tied", "granite-moe-hybrid", "granite-moe-hybrid-rope-two-of-four-experts",
    "granite-moe-hybrid-no-experts", "jamba", "jamba-two-of-four-experts", "jamba-no-attention", "lfm2",
    "lfm2-biases-untied", "lfm2-moe-three-of-four-experts", "llama", "llama-biases-tied", "llama-3-rope", "mamba",
    "mamba-bias-untied", "mamba2", "mamba2-tied", "nemotron-h-two-of-eight-experts", "olmo3", "olmo3-biases-tied",
    "qwen2", "qwen3", "qwen3.5", "qwen3.5-moe", "qwen3.5-moe-two-of-three-experts", "qwen3-next", "rwkv7",
)  # fmt: skip


def test_each_class_that_files_hold_is_loaded_from_one() -> None:
    """The column GGUF of docs/results/architectures.md names these classes."""
    known = {kind for _, kind, _ in (*configs._ARCHITECTURES.values(), *configs._VARIANTS)}
    assert ONE_OF_EACH.keys() == known


def test_whether_a_field_is_there_is_known_without_reading_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A field may be a vocabulary of 262,144 tokens, and the tokenizer asks for dozens of fields."""
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["llama"]()), tmp_path / "model.gguf")
    fields = Header(path).fields
    monkeypatch.setattr(Header, "value_at", lambda *_: pytest.fail("it was read"))
    assert "general.architecture" in fields and "general.nothing" not in fields


def logits(model: Any) -> torch.Tensor:
    memory = HybridMemory(model.memory_spec, "16MiB")
    with memory.step({memory.open(): list(range(1, 40))}, outputs="all") as step:
        found: torch.Tensor = model(step)
    return found


def config_of(name: str) -> PreTrainedConfig:
    return CONFIGS[name.removesuffix("-tied") if "gemma" in name else name]()


ONE_OF_EACH = {config_of(name).model_type: name for name in reversed((*FAMILIES, "falcon-h1"))}
"""Type of a model that files hold -> the first of its families above."""


def config_in_a_file(name: str) -> PreTrainedConfig:
    """Return the config of a family, as far as a GGUF file can say it."""
    config = config_of(name)
    if "gemma" in name:  # Files do not say how scores are scaled.
        config.query_pre_attn_scalar, config.tie_word_embeddings = config.head_dim, True
    if "mscale" in (rope := getattr(config, "rope_parameters", None) or {}):
        rope["mscale"] = rope["mscale_all_dim"]  # Files say one of the two.
    if hasattr(config, "time_step_limit"):
        config.time_step_limit = (0.0, float("inf"))  # llama.cpp supports no other limit.
    # llama.cpp supports no other values, and files of Kimi Linear know no groups.
    if config.model_type in ("kimi_linear", "bailing_hybrid"):
        config.attention_bias, config.kda_safe_gate = False, True
        config.linear_num_heads = config.num_attention_heads
        for part in ("mscale", "mscale_all_dim"):
            rope.pop(part, None)
    if config.model_type == "deepseek_v32":
        config.attention_bias = False  # llama.cpp supports no other value.
    if config.model_type == "glm5_next":
        text = config.text_config
        text.attention_bias, text.linear_num_heads = False, text.num_attention_heads  # llama.cpp supports no others.
    if config.model_type == "kimi_linear":
        config.n_group, config.norm_topk_prob = 1, True
    if config.model_type == "olmo3":
        config.hidden_act = "silu"  # llama.cpp supports no other value.
    if config.model_type == "lfm2_moe":
        config.routed_scaling_factor = 1.0  # llama.cpp supports no other value.
    return config


@few_cases
@pytest.mark.parametrize("name", one_in(3, FAMILIES))
def test_a_file_is_the_checkpoint_that_it_was_made_from(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, config_in_a_file(name))
    expected = logits(load_model(folder))
    model = load_model(path := write_gguf(folder, tmp_path / "model.gguf"))
    assert expected.std() > 0.5 and model.memory_spec.dtype == torch.float32
    assert open_model(path).dry_spec() == replace(model.memory_spec, weights=None), "as commands ask before they read"
    assert (logits(model) - expected).abs().max() < 2e-4 * expected.abs().max()


FUSED = ("qwen3.5-moe", "deepseek-v2", "granite-moe-hybrid-rope-two-of-four-experts")


@only_in_long
@pytest.mark.parametrize("name", FUSED[: pick(1, 3)])
def test_experts_whose_first_products_are_one_tensor(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[name]())
    expected = logits(load_model(write_gguf(folder, tmp_path / "apart.gguf")))
    path = write_gguf(folder, tmp_path / "fused.gguf", fuses_experts=True)
    assert any("ffn_gate_up_exps" in tensor for tensor in GgufFile(path))
    assert torch.equal(logits(load_model(path)), expected)


def test_falcon_h1_whose_factors_are_in_its_weights(tmp_path: Path) -> None:
    """llama.cpp supports Falcon-H1's norm only after the gate."""
    config = CONFIGS["falcon-h1"]()
    config.mamba_norm_before_gate, config.key_multiplier, config.lm_head_multiplier = False, 0.7, 1.3
    config.ssm_multipliers, config.mlp_multipliers = [0.8, 1.1, 0.9, 1.2, 1.05], [1.4, 0.6]
    config.attention_in_multiplier, config.attention_out_multiplier = 1.1, 0.9
    config.embedding_multiplier, config.ssm_in_multiplier, config.ssm_out_multiplier = 1.5, 0.95, 1.05
    folder = write_checkpoint(tmp_path, config)
    expected = logits(load_model(folder))
    found = logits(load_model(write_gguf(folder, tmp_path / "model.gguf")))
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


def test_gemma2_bounds_scores_and_logits_where_a_file_does_not_say_so(tmp_path: Path) -> None:
    """The first files lacked these bounds, which are those of all published models, and llama.cpp's defaults."""
    config = config_in_a_file("gemma2")
    config.attn_logit_softcapping, config.final_logit_softcapping = 50.0, 30.0
    folder = write_checkpoint(tmp_path, config)
    without = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    found = read_gguf_config(GgufFile(write_gguf(folder, tmp_path / "model.gguf", **without)))
    assert (found.attn_logit_softcapping, found.final_logit_softcapping) == (50.0, 30.0)


def test_olmo2_is_read_as_olmo3_without_windows(tmp_path: Path) -> None:
    """Files of both name the architecture olmo2, and those of OLMo 2 name no window."""
    folder = write_checkpoint(tmp_path, CONFIGS["olmo3"]())
    without = {"attention.sliding_window": None, "attention.sliding_window_pattern": None, "rope.freq_base_swa": None}
    found = logits(load_model(write_gguf(folder, tmp_path / "model.gguf", **without)))
    own = Olmo2Config(**SIZES, **HEADS, intermediate_size=32, num_hidden_layers=4, rms_norm_eps=1e-5)
    own.rope_parameters = {"rope_type": "default", "rope_theta": 500000.0}
    peer = Olmo2ForCausalLM(own).eval()
    peer.load_state_dict(load_file(folder / "model.safetensors"))
    expected = peer(torch.arange(1, 40)[None]).logits[0].detach()
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


def test_nemotron_h_without_experts(tmp_path: Path) -> None:
    config = CONFIGS["nemotron-h"]()
    config.layers_block_type = ["linear_attention", "mlp", "full_attention", "mlp"]
    folder = write_checkpoint(tmp_path, config)
    expected = logits(load_model(folder))
    found = logits(load_model(write_gguf(folder, tmp_path / "model.gguf")))
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
def test_numbers_in_few_bits_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    """Blocks become the floats that the `gguf` package makes of them; it cannot write K-quants, see below.

    Models hold these floats here, because products in the file's own bits are tested where forms are.
    """
    folder = write_checkpoint(tmp_path, wide("jamba"))
    path = write_gguf(folder, tmp_path / "model.gguf", kind)
    file = GgufFile(path)
    name = "blk.0.ffn_up.weight"
    assert file.stored_dtype(name) == kind
    (stored,) = (tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    expected = torch.from_numpy(dequantize(stored.data, stored.tensor_type))
    assert torch.equal(file.read(name, torch.float32).float(), expected)
    whole, found = logits(load_model(folder)), logits(load_model(path, dtype="float32", weights="dense"))
    assert 0 < (found - whole).std() / whole.std() < {"F16": 0.01, "BF16": 0.05, "Q8_0": 0.05}.get(kind, 0.5)
    assert load_model(path, weights="dense").memory_spec.dtype == {"F16": torch.float16}.get(kind, torch.bfloat16)


def wide(name: str) -> Any:
    """Return a config whose rows are blocks of 32 numbers."""
    config = CONFIGS[name]()
    config.hidden_size, config.intermediate_size = 96, 64
    return config


@pytest.mark.parametrize("kind, block_bytes", [("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)])
def test_k_quants_are_read_in_slices(
    kind: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library turns random blocks into floats, and slices of the tensor give the same floats."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    from hybridmem.models.loading.gguf import file as module

    dtype = GGMLQuantizationType[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (3, 7, 2 * block_bytes)).astype(np.uint8)
    writer = GGUFWriter(tmp_path / "random.gguf", "jamba")
    writer.add_tensor("x", blocks, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "random.gguf")
    expected = torch.from_numpy(dequantize(blocks, dtype))
    monkeypatch.setattr(module, "_AT_ONCE", 5 * 512)
    assert expected.shape == (3, 7, 512) and torch.equal(file.read("x", torch.float32), expected)
    assert torch.equal(file.read("x", torch.bfloat16, 1), expected[1].bfloat16())


@only_in_long
def test_weights_are_rounded_again_while_they_are_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, wide("jamba"))
    path = write_gguf(folder, tmp_path / "model.gguf", "Q8_0")
    exact, rounded = (
        logits(load_model(path, dtype="float32")),
        logits(load_model(path, dtype="float32", weights="int8")),
    )
    assert 0 < (rounded - exact).std() / exact.std() < 0.05


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a", CONFIGS["mamba"]())
    (tmp_path / "b").mkdir()
    path = write_gguf(source, tmp_path / "b" / "one.gguf")
    assert find_folder(tmp_path / "b") == path
    assert torch.equal(logits(load_model(tmp_path / "b")), logits(load_model(path)))
    write_gguf(source, tmp_path / "b" / "two.gguf")
    with pytest.raises(FormatError, match=r"one\.gguf, two\.gguf"):
        load_model(tmp_path / "b")


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"leave_out": "blk.1.ssm_in.weight"}, FormatError, r"no tensor .*in_proj.*blk\.1\.ssm_in\.weight"),
        ({"leave_out": "token_embd.weight"}, FormatError, "no tensor token_embd"),
        ({"ssm.state_size": 7}, FormatError, r"blk\.0\.ssm_.* has shape .* its metadata says"),
        ({"ssm.inner_size": 0}, FormatError, "inner_size|contradict|shape"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    options: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["mamba"]()), tmp_path / "model.gguf", **options)
    with pytest.raises(error, match=match):
        load_model(path)


@only_in_long
@pytest.mark.parametrize("changed", [
    {"expert_gating_func": 1}, {"swiglu_clamp_exp": [0.0, 7.0]}, {"expert_shared_feed_forward_length": 5},
])  # fmt: skip
def test_options_of_ling_that_are_not_implemented_are_named(changed: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["bailing-hybrid"]()), tmp_path / "model.gguf", **changed)
    with pytest.raises(UnsupportedModelError, match=r"sigmoids|swiglu_clamp|expert_shared_feed_forward_length=5"):
        load_model(path)


@only_in_long
@pytest.mark.parametrize("name, changed, match", [
    ("glm5-next", {"expert_gating_func": 1}, "something else than sigmoids"),
    ("glm5-next", {"attention.indexer.kpool_select_tail": False}, "index_kpool_always_select_tail=False"),
    ("glm5-next", {"expert_shared_feed_forward_length": 5}, "expert_shared_feed_forward_length=5"),
    ("glm5-next", {"swiglu_clamp_exp": [0.7, 0.7, 7.0]}, r"by several bounds .*7\.0\]"),
    ("glm5-next", {"attention.layer_norm_epsilon": 1e-5}, "layer_norm_epsilon=.*; implemented is 1e-06"),
    ("deepseek-v3.2", {"expert_gating_func": 1}, "something else than sigmoids"),
    ("glm-moe-dsa", {"rope.dimension_count": 2}, "rope.dimension_count=2 of 4 elements"),
])  # fmt: skip
def test_options_of_models_with_an_index_that_are_not_implemented_are_named(
    name: str, changed: dict[str, Any], match: str, tmp_path: Path
) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS[name]()), tmp_path / "model.gguf", **changed)
    with pytest.raises(UnsupportedModelError, match=match):
        load_model(path)


def test_glm5_next_has_another_name_in_files_from_before_llama_cpp_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, config_in_a_file("glm5-next"))
    expected = logits(load_model(write_gguf(folder, tmp_path / "model.gguf")))
    monkeypatch.setitem(gguf_files._NEWER, "glm5_next", "glm5next")
    assert torch.equal(logits(load_model(write_gguf(folder, tmp_path / "older.gguf"))), expected)


def test_layers_that_share_an_index_are_those_without_its_tensors_where_a_file_does_not_say(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS["glm-moe-dsa"]())
    path = write_gguf(folder, tmp_path / "model.gguf", **{"attention.indexer.types": None})
    assert read_gguf_config(GgufFile(path)).indexer_types == ["full", "shared", "full"]


def test_files_that_are_not_whole_are_named(tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["mamba"]()), tmp_path / "model.gguf")
    content = path.read_bytes()
    for damaged in (b"", b"GGUF", b"no model at all", content[: len(content) // 3], content[:-5000]):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=r"model\.gguf"):
            load_model(path)
    shard = tmp_path / "m-00001-of-00002.gguf"
    shard.write_bytes(content)
    with pytest.raises(FormatError, match=r"00002-of-00002\.gguf is missing"):
        load_model(shard)


def test_what_is_wrong_with_a_file_is_said_in_words_of_its_user(tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["mamba"]()), tmp_path / "model.gguf")
    content = path.read_bytes()
    for damaged, words in (
        (b"", "it is empty"),
        (b"GGUF\3\0\0\0", "16 bytes should follow byte 8, but the file ends at 8"),
        (b"<!doctype html>", "does not begin with GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a pointer of Git LFS.*git lfs pull"),
        (content[:-5000], f"should end at byte .* but the file ends at {len(content) - 5000:,}"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(
            FormatError, match=rf"model\.gguf is no GGUF file, or damaged \(.*{words}.*download it again"
        ):
            load_model(path)


def test_a_missing_file_is_no_folder_and_the_files_beside_it_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FormatError, match=r"there is no file .*model\.gguf; give .*a GGUF file"):
        load_model(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=r"there is no file .*model\.gguf, because there is no folder .*none;"):
        load_model(tmp_path / "none" / "model.gguf")
    for name in ("b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(FormatError, match=r"there is no file .*; .* holds a\.gguf, b-00001-of-00002\.gguf$"):
        load_model(tmp_path / "model.gguf")
    # With one slash it could be a hub id, for which somebody without a network would wait half a minute.
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(FormatError, match="there is no file"):
        load_model(f"{tmp_path.name}/model.gguf")


def test_a_file_is_known_by_its_content_where_its_name_has_no_suffix(tmp_path: Path) -> None:
    path = write_gguf(EMBEDDED, tmp_path / "model.gguf").rename(tmp_path / "sha256-0123")
    assert load_model(path).memory_spec.vocab_size == load_model("embedded").memory_spec.vocab_size
    assert load_tokenizer(path).encode("a") and inspect_path(path).facts["loads"] == "yes"


def test_what_a_file_holds_can_be_seen_without_loading_it(tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, wide("jamba")), tmp_path / "model.gguf", "Q8_0")
    found, config = inspect_path(path), read_gguf_config(GgufFile(path))
    assert (found.facts["architecture"], found.facts["dtype"], found.facts["layers"]) == ("jamba", "bfloat16", 3)
    assert set(found.by_kind) == {"F32", "F16", "Q8_0"} and sum(found.by_kind.values()) > 0.7 * path.stat().st_size
    assert found.facts["bytes of weights when loaded"]["auto"] == weight_bytes(
        dry_model(config, "JambaForCausalLM", files=find_files(path, config))
    )
    told = found.facts["weights that auto holds"]
    assert set(told) == {"Q8_0, as stored", "bfloat16"} and told["Q8_0, as stored"] > told["bfloat16"] > 0
    assert found.facts["loads"] == "yes" and found.facts["chat template"].startswith("no: it continues texts")
    assert found.facts["tokens of context"] == config.max_position_embeddings


def test_a_folder_with_a_file_is_inspected_as_it_is_loaded(tmp_path: Path) -> None:
    path = write_gguf(EMBEDDED, tmp_path / "one.gguf")
    assert inspect_path(tmp_path) == inspect_path(path) and inspect_path(path).facts["chat template"] == "yes"
    shutil.copy(path, tmp_path / "two.gguf")
    for read in (inspect_path, load_model):
        with pytest.raises(FormatError, match=r"several models, one\.gguf, two\.gguf; give the path of one of them"):
            read(tmp_path)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_what_loads_is_inspected_and_planned(name: str, tmp_path: Path) -> None:
    """This is true of every architecture that is read from files."""
    path = write_gguf(write_checkpoint(tmp_path, config_in_a_file(name)), tmp_path / "model.gguf")
    model, facts = load_model(path), inspect_path(path).facts
    assert (facts["loads"], facts["layers"]) == ("yes", len(model.memory_spec.layers))
    planned, architecture = read_planned(str(path), "auto", "auto")
    specs = planned.memory_spec, model.memory_spec
    assert len({(spec.layers, spec.vocab_size, spec.dtype) for spec in specs}) == 1
    assert weight_bytes(planned) == facts["bytes of weights when loaded"]["auto"]
    assert read_gguf_config(GgufFile(path)).architectures == [architecture]


def test_a_file_of_qwen2_is_planned_by_the_command(tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["qwen2"]()), tmp_path / "model.gguf")
    result = CliRunner().invoke(app, ["plan", "--model", str(path), "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["weight_bytes"] == inspect_path(path).facts["bytes of weights when loaded"]["auto"]


def test_what_does_not_load_is_neither_inspected_as_if_it_did_nor_planned(tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["mamba"]()), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"mamba", b"gptxj", 1))
    with pytest.raises(UnsupportedModelError) as error:
        load_model(path)
    assert inspect_path(path).facts["loads"] == f"no: {error.value}"
    result = CliRunner().invoke(app, ["plan", "--model", str(path)])
    assert result.exit_code == 1 and str(error.value) in result.stderr


def test_a_file_without_a_tensor_that_the_model_needs_does_not_load_and_inspect_names_it(tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["mamba"]()), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"output_norm.weight", b"output_mode.weight"))
    loads = inspect_path(path).facts["loads"]
    assert loads.startswith("no: ") and "output_norm.weight" in loads


def test_without_the_package_of_names_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config and the tokenizer are read even without the package."""
    path = write_gguf(EMBEDDED, tmp_path / "embedded.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load_tokenizer(path).encode("a") and read_gguf_config(GgufFile(path))
    with pytest.raises(
        UnsupportedModelError, match=r"needs the gguf package, which is not installed; install hybridmem\[gguf\]"
    ):
        load_model(path)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["mamba"]()), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"mamba", b"gptxj", 1))
    with pytest.raises(UnsupportedModelError, match=r"'gptxj'.*jamba.*qwen3"):
        load_model(path)


def test_a_file_with_several_templates_has_them_by_name(tmp_path: Path) -> None:
    """A prompt with tools is written by the template that is made for tools, as in transformers."""
    folder = tmp_path / "folder"
    shutil.copytree(EMBEDDED, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    tokenizer = load_tokenizer(write_gguf(folder, tmp_path / "model.gguf"))
    message, tool = [{"role": "user", "content": "hi"}], {"type": "function", "function": {"name": "f"}}
    assert tokenizer.apply_chat_template(message, tools=[tool], tokenize=False) == "1 tools"
    plain = tokenizer.apply_chat_template(message, tokenize=False)
    assert plain == load_tokenizer("embedded").apply_chat_template(message, tokenize=False)


def test_a_tokenizer_is_the_folders_with_its_template_and_the_command_line_takes_the_file(tmp_path: Path) -> None:
    path = write_gguf(EMBEDDED, tmp_path / "embedded.gguf")
    ours, theirs = load_tokenizer(path), load_tokenizer("embedded")
    for text in ("My cat is called Milo.", "<|user|>x<|end|>", " two  spaces\n", "\u00e9\U0001f600"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template and find_stop_ids(ours, load_model(path)) == (2,)
    assert ours.end_token_ids == [2]
    prompt = "My cat is called Milo. What is my cat called?"
    replies = [
        CliRunner().invoke(app, ["generate", "--model", model, "--prompt", prompt]) for model in (str(path), "embedded")
    ]
    assert replies[0].exit_code == 0 and "Milo" in replies[0].stdout and replies[0].stdout == replies[1].stdout
    with pytest.raises(FormatError, match="no tokenizer that can be read"):
        load_tokenizer(write_gguf(write_checkpoint(tmp_path, CONFIGS["mamba"]()), tmp_path / "without.gguf"))


def test_the_tokenizer_of_rwkv_takes_the_longest_token_that_fits(tmp_path: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"the", b"then", b"\n\n", "\u00e9".encode(), b"it's", b"  ", b"<s>"]
    path = write_gguf(write_checkpoint(tmp_path, CONFIGS["rwkv7"]()), tmp_path / "model.gguf", world_tokens=tokens)
    tokenizer = load_tokenizer(path)
    ids = {token: i + 1 for i, token in enumerate(tokens)}
    text = "then theo\n\n\n   it's \u00e9\U0001f600"
    expected = [b"then", b" ", b"the", b"o", b"\n\n", b"\n", b"  ", b" ", b"it's", b" ", "\u00e9".encode()]
    expected += [bytes([byte]) for byte in "\U0001f600".encode()]
    found = tokenizer.encode(text)
    assert found == [ids[token] for token in expected] and tokenizer.decode(found) == text
    assert tokenizer.encode("<s>", split_special_tokens=True) == [ids[b"<s>"]] and tokenizer.eos_token_id == 0
    assert tokenizer.chat_template is None and tokenizer.decode([*found, 0], skip_special_tokens=True) == text
    with pytest.raises(FormatError, match="no token for the byte 0xff"):
        load_tokenizer(write_gguf(tmp_path, tmp_path / "other.gguf", world_tokens=tokens[:255]))
