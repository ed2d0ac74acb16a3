"""Heads of DFlash are compared with transformers' own, and with the authors' equations in plain torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridmem.memory import HybridMemory, StepError
from hybridmem.models import UnsupportedModelError, load_model
from hybridmem.models.draft_heads import DFlashHead, HiddenRows, RecordedBlockHead
from hybridmem.models.loading.draft_heads import load_draft_head
from tests.models.checkpoints import draw_tokens
from tests.models.draft_heads.dflash_checkpoints import (
    BLOCK,
    MASK,
    drafted_by_transformers,
    rename_as_authors,
    write_head,
    write_target,
)
from tests.tolerances import assert_logits_close

TOKENS, ENDS = draw_tokens(24), (10, 11, 14, 20, 24)
"""A text, and the lengths at which drafts are made."""


def draft(model: Any, head: Any, ends: Iterable[int], call: Any = None) -> list[Tensor]:
    """Return the logits of drafts after these lengths. Beside the text there is another, which drafts now and then."""
    memory, own = HybridMemory(model.memory_spec, "2MiB"), HybridMemory(head.memory_spec, "1MiB", page_tokens=4)
    with memory.step({memory.open(): TOKENS}) as step:
        rows_TM = head.read(HiddenRows(model, head.after)(step))
    alice, bob, found, first = own.open(), own.open(), [], 0
    for i, end in enumerate(ends):
        pairs, block, n = TOKENS[first + 1 : end], head.block_after(TOKENS[end - 1]), end - 1 - first
        others = [TOKENS[3], *(head.block_after(TOKENS[3]) if i % 2 else [])]
        with own.step([(bob, others), (alice, [*pairs, *block])] if i else {alice: [*pairs, *block]}) as step:
            rows_PM, n_pairs = rows_TM[first : first + n], [n]
            if i:
                rows_PM, n_pairs = torch.cat([rows_TM[2:3], rows_PM]), [1, n]
            logits = (call or head)(step, rows_PM, n_pairs)
            step.accept({alice: n} | ({bob: 1} if i else {}))
        found.append(logits[-1])
        first = end - 1
    assert alice.length == first and bob.length == len(found) - 1
    return found


@pytest.mark.parametrize("reads", [[0, 2, 3], [1, 4]])
def test_blocks_are_those_of_transformers(reads: list[int], tmp_path: Path) -> None:
    """The last layer's states are normed, in transformers as here."""
    target = write_target(tmp_path / "target")
    peer = write_head(tmp_path / "head", target, target_layer_ids=reads)
    model = load_model(tmp_path / "target")
    head = load_draft_head(tmp_path / "head", model)
    expected = drafted_by_transformers(peer, target, TOKENS, ENDS)
    for found, of_peer in zip(draft(model, head, ENDS), expected, strict=True):
        assert of_peer.std() > 0.5
        assert_logits_close(found, of_peer)
