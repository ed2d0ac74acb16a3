"""Makes random heads of DFlash, under the names of transformers and of the authors, and runs transformers' own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hybridmem.models import LanguageModel, load_model
from hybridmem.models.loading.draft_heads import load_draft_head
from tests.models.checkpoints import randomise_
from tests.models.families.llama import CONFIGS
from tests.models.families.qwen3_5 import qwen3_5_config

try:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache
except ImportError:
    pytest.skip("transformers before 5.24 has no DFlashCache to compare heads with", allow_module_level=True)

BLOCK, MASK = 5, 7


def write_target(folder: Path) -> LlamaForCausalLM:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 5
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    randomise_(model)
    model.save_pretrained(folder)
    return model


def write_head(folder: Path, target: Any, **options: Any) -> MuseGlimmerAssistantModel:
    """Write a random head of two layers, the first with a window, as transformers saves it."""
    size = target.config.hidden_size
    chosen: dict[str, Any] = {
        "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [0, 2, 3], "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    } | options  # fmt: skip
    config = MuseGlimmerAssistantConfig(
        hidden_size=size, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, bos_token_id=1, eos_token_id=2, pad_token_id=0, **chosen,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    head = MuseGlimmerAssistantModel(config).eval()
    randomise_(head)
    head.save_pretrained(folder)
    return head


def rename_as_authors(folder: Path, **options: Any) -> None:
    """Give the files of a head the names of the authors, and options that transformers' config does not have."""
    tensors = load_file(folder / "model.safetensors")
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    save_file({names.get(n, n): x for n, x in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    own = {name: config.pop(name) for name in ("block_size", "mask_token_id", "target_layer_ids")}
    changed = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": own, "vocab_size": 40,
        "use_sliding_window": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changed | options))


@torch.no_grad()
def drafted_by_transformers(
    head: MuseGlimmerAssistantModel, target: LlamaForCausalLM, tokens: list[int], ends: Iterable[int]
) -> list[Tensor]:
    """Return the logits (block - 1, vocab) of the drafts after tokens[:n], for each n of `ends`.

    The steps are those of `DFlashTokenCandidateGenerator.get_candidates`: states of the tokens since the last draft are
    given beside a block, which is then cropped from the cache.
    """
    states = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    context = torch.cat([states[i + 1] for i in head.config.target_layer_ids], -1)
    cache, found, size = DFlashCache(config=head.config), [], head.config.block_size
    cache.activate_past_recording()
    first = 0
    for end in ends:
        last = end - 1  # The newest token has no states yet.
        cache.set_previous_accepted_tokens(last - first)
        if first:
            cache.crop(-size)
        block = torch.tensor([[tokens[last], *[head.config.mask_token_id] * (size - 1)]])
        states_BNM = head(
            noise_embeds=target.get_input_embeddings()(block), context_hidden_states=context[:, first:last],
            position_ids=torch.arange(first, last + size)[None], cache=cache,
        ).last_hidden_state  # fmt: skip
        found.append(target.lm_head(states_BNM[0, 1:]))
        first = last
    return found


def load_pair(folder: Path) -> tuple[LanguageModel, Any]:
    """Load a random model with recurrent layers, and a random head for it."""
    torch.manual_seed(3)
    target = AutoModelForCausalLM.from_config(qwen3_5_config()).eval()
    randomise_(target)
    target.save_pretrained(folder / "target")
    write_head(folder / "head", target, target_layer_ids=[0, 2])
    model = load_model(folder / "target")
    return model, load_draft_head(folder / "head", model)
