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
from hybridmem.models.draft_heads import DFlashHead, HiddenRows, RecordedBlankHead
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
        rows_TM = head.read(HiddenRows(model, head.after)(step)[1])
    alice, bob, found, first = own.open(), own.open(), [], 0
    for i, end in enumerate(ends):
        pairs, blanks, n = TOKENS[first + 1 : end], head.blanks_after(TOKENS[end - 1]), end - 1 - first
        others = [TOKENS[3], *(head.blanks_after(TOKENS[3]) if i % 2 else [])]
        with own.step([(bob, others), (alice, [*pairs, *blanks])] if i else {alice: [*pairs, *blanks]}) as step:
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
def test_drafts_are_those_of_transformers(reads: list[int], tmp_path: Path) -> None:
    """The last layer's states are normed, in transformers as here."""
    target = write_target(tmp_path / "target")
    peer = write_head(tmp_path / "head", target, target_layer_ids=reads)
    model = load_model(tmp_path / "target")
    head = load_draft_head(tmp_path / "head", model)
    expected = drafted_by_transformers(peer, target, TOKENS, ENDS)
    for found, of_peer in zip(draft(model, head, ENDS), expected, strict=True):
        assert of_peer.std() > 0.5
        assert_logits_close(found, of_peer)


@torch.no_grad()
def drafted_by_authors(folder: Path, config: Any, target: LlamaForCausalLM, end: int, *, is_causal: bool) -> Tensor:
    """Compute the authors' equations for the draft after TOKENS[:end]. A layer with a window may be causal."""
    w = load_file(folder / "model.safetensors")
    tokens, n = TOKENS[: end - 1], end - 1
    states = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], config.rms_norm_eps)

    def heads(x: Tensor, name: str) -> Tensor:
        return (
            x.view(len(x), -1, 8) if name == "v" else norm(x.view(len(x), -1, 8), f"layers.{i}.self_attn.{name}_norm")
        )

    fused = norm(torch.cat([states[j + 1][0] for j in config.target_layer_ids], -1) @ w["fc.weight"].T, "hidden_norm")
    x = target.get_input_embeddings().weight[[TOKENS[n], *[MASK] * (BLOCK - 1)]]
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(n + BLOCK)[None])
    q_at, k_at = torch.arange(n, n + BLOCK)[:, None], torch.arange(n + BLOCK)
    for i, kind in enumerate(config.layer_types):
        normed = norm(x, f"layers.{i}.input_layernorm")
        read = {"q": normed, "k": torch.cat([fused, normed]), "v": torch.cat([fused, normed])}
        q, k, v = (
            heads(y @ w[f"layers.{i}.self_attn.{name}_proj.weight"].T, name).transpose(0, 1) for name, y in read.items()
        )
        _, k = apply_rotary_pos_emb(k, k, cos, sin)
        q, _ = apply_rotary_pos_emb(q, q, cos[:, n:], sin[:, n:])
        seen = torch.ones(BLOCK, n + BLOCK, dtype=torch.bool)
        if kind == "sliding_attention":
            seen = (q_at - k_at).abs() < config.sliding_window
            seen &= (k_at <= q_at) | (not is_causal)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = x + mixed @ w[f"layers.{i}.self_attn.o_proj.weight"].T
        y = norm(x, f"layers.{i}.post_attention_layernorm")
        gate, up = (y @ w[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
    return target.lm_head(norm(x, "norm")[1:])


@pytest.mark.parametrize("options", [{}, {"is_causal": False}], ids=["causal", "two-sided"])
def test_heads_of_the_authors_compute_their_equations(options: dict[str, bool], tmp_path: Path) -> None:
    """Where the config does not say it, layers with a window are causal, and the others are not."""
    target = write_target(tmp_path / "target")
    config = write_head(tmp_path / "head", target).config
    rename_as_authors(tmp_path / "head", num_target_layers=5, **options)
    model = load_model(tmp_path / "target")
    head = load_draft_head(tmp_path / "head", model)
    for found, end in zip(draft(model, head, ENDS), ENDS, strict=True):
        expected = drafted_by_authors(tmp_path / "head", config, target, end, is_causal=not options)
        assert_logits_close(found, expected)


def test_replays_have_the_bits_of_the_steps_they_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 17 and 18 tokens are replayed as well: prompts of such lengths would not be."""
    target = write_target(tmp_path / "target")
    write_head(tmp_path / "head", target, block_size=8, sliding_window=8)
    model = load_model(tmp_path / "target")
    head = load_draft_head(tmp_path / "head", model)
    assert isinstance(head, DFlashHead) and head.n_fed == 16
    n_runs, run = 0, DFlashHead.at

    def count(*given: Any) -> Tensor:
        nonlocal n_runs
        n_runs += 1
        return run(*given)

    monkeypatch.setattr(DFlashHead, "at", count)
    recorded, memories = RecordedBlankHead(head), [HybridMemory(head.memory_spec, "1MiB") for _ in range(2)]
    sequences, generator = [memory.open() for memory in memories], torch.Generator().manual_seed(1)
    for i in range(24):
        n = 1 + i % 2
        rows_PM = torch.randn(n, target.config.hidden_size, generator=generator)
        found, tokens = [], torch.randint(0, 40, (n,), generator=generator).tolist()
        for call, memory, own in zip((head, recorded), memories, sequences, strict=True):
            with memory.step({own: [*tokens, *head.blanks_after(tokens[-1])]}) as step:
                found.append(call(step, rows_PM, [n]))
                step.accept({own: n})
        assert torch.equal(*found)
    assert n_runs - 24 <= 16, "of each length, four steps are run, two are recorded, and the others are replayed"


def test_heads_and_steps_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    model = load_model(tmp_path / "target")
    for i, (options, message) in enumerate(
        (
            ({"target_layer_ids": [0, 5]}, r"target_layer_ids=\[0, 5\] for a model of 5 layers"),
            ({"target_layer_ids": [2, 0]}, "ascending"),
            ({"mask_token_id": target.config.vocab_size}, "mask_token_id="),
            ({"block_size": 1}, "block_size=1"),
            ({"sliding_window": 3}, "sliding_window=3 and block_size=5"),
        )
    ):
        write_head(tmp_path / f"head-{i}", target, **options)
        with pytest.raises(UnsupportedModelError, match=message):
            load_draft_head(tmp_path / f"head-{i}", model)
    for i, (options, message) in enumerate(
        (
            ({"num_target_layers": 6}, "a model of 6 layers; this one has 5"),
            ({"final_logit_softcapping": 20.0}, "final_logit_softcapping=20.0"),
            ({"hidden_size": 16}, "hidden_size=16"),
            ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        )
    ):
        write_head(tmp_path / f"of-authors-{i}", target)
        rename_as_authors(tmp_path / f"of-authors-{i}", **options)
        with pytest.raises(UnsupportedModelError, match=message):
            load_draft_head(tmp_path / f"of-authors-{i}", model)
    write_head(tmp_path / "head", target)
    head = load_draft_head(tmp_path / "head", model)
    own = HybridMemory(head.memory_spec, "1MiB")
    with pytest.raises(StepError, match=r"\[2\] pairs in requests of \[3\]"), own.step({own.open(): [1, 2, 3]}) as step:
        head(step, torch.zeros(2, target.config.hidden_size), [2])
