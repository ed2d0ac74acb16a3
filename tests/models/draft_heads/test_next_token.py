"""Modules of multi-token prediction are compared with transformers' on the same random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, masking_utils

from hybridmem.chat.commands.inspection import inspect_path
from hybridmem.memory import HybridMemory
from hybridmem.models import UnsupportedModelError, load_model
from hybridmem.models.draft_heads import HiddenRows
from tests.extent import few_cases
from tests.models.checkpoints import CONFIGS, draw_tokens, write_checkpoint
from tests.models.draft_heads.mtp_checkpoints import (
    MtpPeer,
    write_inkling_checkpoint,
    write_mtp_checkpoint,
    write_nemotron_checkpoint,
)
from tests.models.families.deepseek import CONFIGS as FAMILIES
from tests.models.families.deepseek_v32 import CONFIGS as INDEXED
from tests.models.families.inkling import CONFIGS as INKLING
from tests.models.families.nemotron_h import CONFIGS as NEMOTRON
from tests.models.families.qwen3_5 import qwen3_5_config, qwen3_5_moe_config
from tests.models.families.qwen3_next import qwen3_next_config
from tests.models.gguf_files import write_gguf
from tests.tolerances import assert_logits_close

TOKENS = draw_tokens(24)
HOLDERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": qwen3_next_config,
    "qwen3.5": qwen3_5_config,
    "qwen3.5-moe": qwen3_5_moe_config,
    "deepseek-v3": FAMILIES["deepseek-v3"],
    "deepseek-v3.2": INDEXED["deepseek-v3.2"],
    "glm-5": INDEXED["glm-moe-dsa"],
    "nemotron-3": NEMOTRON["nemotron-h"],
    "nemotron-3-latent": NEMOTRON["nemotron-h-two-of-eight-experts"],
    "inkling": INKLING["inkling-two-of-four-experts"],
    "inkling-log-scale": lambda: _with(INKLING["inkling-log-scale"](), chain_hidden_post_norm=True),
    "inkling-window": lambda: _with(
        INKLING["inkling-two-of-four-experts"](), mtp_local_layer_ids=[0], mtp_hidden_states_first=False
    ),
}


def _with(config: PreTrainedConfig, **options: object) -> PreTrainedConfig:
    for name, value in options.items():
        setattr(config, name, value)
    return config


def _write(folder: Path, name: str) -> MtpPeer:
    if name.startswith("inkling"):
        return write_inkling_checkpoint(folder, HOLDERS[name](), as_published=name == "inkling")
    if name.startswith("nemotron"):
        return write_nemotron_checkpoint(folder, HOLDERS[name]())
    return write_mtp_checkpoint(folder, HOLDERS[name](), nextn=not name.startswith("qwen"))


@few_cases
@pytest.mark.parametrize("name", HOLDERS)
def test_modules_of_multi_token_prediction_are_those_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module reads all pairs of a text in uneven steps, with another sequence beside it.

    Then comes a token that the head has drafted.
    """
    # Transformers 5.24 masks a module of this kind as one without a window, unlike the model's own layers.
    masks = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["hybrid_sliding"]
    monkeypatch.setitem(masks, "sliding_attention", masking_utils.create_sliding_window_causal_mask)
    peer = _write(tmp_path, name)
    model = load_model(tmp_path, draft_head=True)
    head = model.draft_head
    assert head is not None and head.memory_spec.vocab_size == model.memory_spec.vocab_size
    hidden_rows, memory = HiddenRows(model), HybridMemory(model.memory_spec, "2MiB", page_tokens=4)
    with memory.step({memory.open(): TOKENS}) as step:
        logits_SV, hidden_TM = hidden_rows(step)
    with memory.step({memory.open(): TOKENS}) as step:
        assert torch.equal(model(step), logits_SV)
    expected_TM = peer.hidden(TOKENS)
    assert_logits_close(hidden_TM, expected_TM)

    own = HybridMemory(head.memory_spec, "1MiB", page_tokens=4)
    sequence, beside, logits = own.open(), own.open(), []
    read_TM = head.read(hidden_TM)
    for start, end in ((0, 9), (9, 10), (10, 23)):
        requests = [(beside, [1, 2]), (sequence, TOKENS[start + 1 : end + 1])]
        rows_TM = torch.cat([read_TM[:2], read_TM[start:end]])
        with own.step(requests, outputs="all") as step:
            logits_TV, next_TM = head(step, rows_TM)
        logits.append(logits_TV[2:])
    expected_TV, expected_next_TM = peer.draft(expected_TM[:-1], TOKENS[1:])
    assert_logits_close(torch.cat(logits), expected_TV)

    drafted = int(logits[-1][-1].argmax())
    with own.step({sequence: [drafted]}) as step:
        logits_SV, _ = head(step, next_TM[-1:])
    again_TM = torch.cat([expected_TM[:-1], expected_next_TM[-1:]])
    assert_logits_close(logits_SV[0], peer.draft(again_TM, [*TOKENS[1:], drafted])[0][-1])
    own.check()


def test_a_head_that_is_not_wanted_stays_in_the_files_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    write_mtp_checkpoint(tmp_path, qwen3_5_config())
    recwarn.clear()
    model, other = load_model(tmp_path), load_model(tmp_path, draft_head=True)
    assert model.draft_head is None and not [each for each in recwarn if "not used" in str(each.message)]
    assert model.memory_spec.weights == other.memory_spec.weights, "sequences that were saved fit both"


def test_a_memory_of_a_head_belongs_to_its_weights_and_to_those_of_its_model(tmp_path: Path) -> None:
    """The model's own signature does not depend on its head, so its files fit with any head."""
    write_mtp_checkpoint(tmp_path, qwen3_5_config())
    file, signatures = tmp_path / "model.safetensors", list[tuple[str | None, str | None]]()
    tensors = load_file(file)
    for changed in (None, "mtp.fc.weight", "model.embed_tokens.weight", None):
        factors = {} if changed is None else {changed: 2 * tensors[changed]}
        save_file(tensors | factors, file, {"format": "pt"})
        model = load_model(tmp_path, draft_head=True)
        signatures.append((model.memory_spec.weights, model.draft_head.memory_spec.weights))
    first, other_head, other_model, again = signatures
    assert first == again and None not in first
    assert other_head[0] == first[0] and other_head[1] != first[1]
    assert other_model[0] != first[0] and other_model[1] != first[1]


@few_cases
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5", "qwen3.5-moe", "qwen3-next"])
def test_a_file_of_llama_cpp_holds_the_head_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    """The head has the names `nextn`, in a layer after the last one.

    A file without these has no head.
    """
    config = HOLDERS[name]()
    write_mtp_checkpoint(tmp_path, config, nextn=name == "deepseek-v3")
    logits = []
    for path in (tmp_path, write_gguf(tmp_path, tmp_path / "model.gguf")):
        model = load_model(path, draft_head=True)
        assert model.draft_head is not None, path
        memory, own = HybridMemory(model.memory_spec, "2MiB"), HybridMemory(model.draft_head.memory_spec, "1MiB")
        with memory.step({memory.open(): TOKENS}) as step:
            rows_TM = model.draft_head.read(HiddenRows(model)(step)[1])
        with own.step({own.open(): TOKENS[1:]}, outputs="all") as step:
            logits.append(model.draft_head(step, rows_TM[:-1])[0])
    assert_logits_close(logits[1], logits[0])
    assert load_model(path).draft_head is None


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_a_head_without_an_index_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    """Its attention would read the rows that the model's index has chosen. The model loads without it."""
    write_mtp_checkpoint(tmp_path, config := HOLDERS[name](), nextn=True)
    file, layer = tmp_path / "model.safetensors", f"model.layers.{config.num_hidden_layers}"
    save_file({n: x for n, x in load_file(file).items() if f"{layer}.self_attn.indexer" not in n}, file)
    with pytest.raises(UnsupportedModelError, match=rf"no index of its own \({layer}.self_attn.indexer.wk.weight"):
        load_model(tmp_path, draft_head=True)
    assert "no index of its own" in inspect_path(tmp_path).facts["draft head"]
    load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen4-exp", "mtp.fc.weight"),
        ("glm5-next", "model.language_model.layers.3.eh_proj.weight"),
        ("inkling-log-scale", "model.mtp.layers.0.eh_proj.weight"),
        ("jamba", "mtp.fc.weight"),
    ],
)
def test_heads_that_are_not_implemented_are_refused_by_name(
    name: str, tensor: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    write_checkpoint(tmp_path, CONFIGS[name]())
    file = next(tmp_path.glob("*.safetensors"))
    save_file(load_file(file) | {tensor: torch.zeros(2, 2)}, file, {"format": "pt"})
    recwarn.clear()
    with pytest.raises(UnsupportedModelError, match=f"a draft head with {tensor}"):
        load_model(tmp_path, draft_head=True)
    load_model(tmp_path)
    assert not [each for each in recwarn if "not used" in str(each.message)]
    facts = inspect_path(tmp_path).facts
    assert facts["draft head"].startswith("no: ") and "tensors that nobody asks for" not in facts
