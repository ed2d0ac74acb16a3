"""Heads of EAGLE-3 are compared with the paper's equations in plain torch. Transformers 5.24 has no class for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.head_drafts import HeadDrafter
from hybridmem.memory import FormatError, HybridMemory
from hybridmem.models import UnsupportedModelError, load_model
from hybridmem.models.draft_heads import HiddenRows
from hybridmem.models.loading.draft_heads import load_draft_head
from tests.models.checkpoints import draw_tokens, randomise_
from tests.models.families.llama import CONFIGS
from tests.tolerances import assert_logits_close

TOKENS, N_DRAFTED = draw_tokens(24), 11


def write_target(folder: Path) -> LlamaForCausalLM:
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 7
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    randomise_(model)
    model.save_pretrained(folder)
    return model


def write_head(folder: Path, target: LlamaConfig, *, drafts_all: bool = False, **options: object) -> dict[str, Tensor]:
    """Write a random head. It drafts every third token, or all of them; then it has an embedding of its own."""
    n, n_inner, width = target.hidden_size, 40, 8
    n_drafted = target.vocab_size if drafts_all else N_DRAFTED
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, spread: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=generator) * (spread or shape[-1] ** -0.5)

    shapes = {
        "self_attn.q_proj": (4 * width, 2 * n), "self_attn.k_proj": (2 * width, 2 * n),
        "self_attn.v_proj": (2 * width, 2 * n), "self_attn.o_proj": (n, 4 * width), "mlp.gate_proj": (n_inner, n),
        "mlp.up_proj": (n_inner, n), "mlp.down_proj": (n, n_inner),
    }  # fmt: skip
    tensors = {f"midlayer.{name}.weight": 2 * draw(*shape) for name, shape in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = 1 + draw(n, spread=0.3)
    tensors |= {
        "fc.weight": draw(n, 3 * n), "norm.weight": 1 + draw(n, spread=0.3), "lm_head.weight": 2 * draw(n_drafted, n),
    }  # fmt: skip
    if drafts_all:
        tensors["embed_tokens.weight"] = draw(n_drafted, n, spread=1.0)
    else:
        tensors["d2t"] = 2 * torch.arange(N_DRAFTED)  # Token i of the head is token 3 i.
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = LlamaConfig(
        hidden_size=n, intermediate_size=n_inner, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=width, vocab_size=target.vocab_size, rms_norm_eps=1e-5, draft_vocab_size=n_drafted, **options,
    ).to_dict()  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}))
    return tensors


class Paper:
    """Computes the equations of EAGLE-3 for a whole text."""

    def __init__(self, folder: Path, target: LlamaForCausalLM) -> None:
        self.config, self.w, self.target = (
            LlamaConfig.from_pretrained(folder),
            load_file(folder / "model.safetensors"),
            target,
        )

    @torch.no_grad()
    def fused(self, tokens: list[int]) -> Tensor:
        states = self.target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
        n_layers = self.target.config.num_hidden_layers
        low_mid_high = torch.cat([states[i][0] for i in (2, n_layers // 2, n_layers - 3)], -1)
        return low_mid_high @ self.w["fc.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.config.rms_norm_eps)

    @torch.no_grad()
    def draft(self, g: Tensor, next_tokens: list[int]) -> tuple[Tensor, Tensor]:
        def product(x: Tensor, name: str) -> Tensor:
            return x @ self.w[f"midlayer.{name}.weight"].T

        table = self.w.get("embed_tokens.weight", self.target.get_input_embeddings().weight)
        n, hidden = len(g), self.norm(g, "midlayer.hidden_norm")
        read = torch.cat([self.norm(table[next_tokens], "midlayer.input_layernorm"), hidden], -1)
        q, k, v = (product(read, f"self_attn.{x}_proj").view(1, n, -1, 8).transpose(1, 2) for x in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(self.config)(read, torch.arange(n)[None]))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = (hidden if getattr(self.config, "norm_before_residual", False) else g) + product(mixed, "self_attn.o_proj")
        y = self.norm(x, "midlayer.post_attention_layernorm")
        x = x + product(F.silu(product(y, "mlp.gate_proj")) * product(y, "mlp.up_proj"), "mlp.down_proj")
        return self.norm(x, "norm") @ self.w["lm_head.weight"].T, x


@pytest.mark.parametrize("options", [{}, {"drafts_all": True, "norm_before_residual": True}], ids=["some", "all"])
def test_a_head_of_eagle_3_computes_the_papers_equations(options: dict[str, bool], tmp_path: Path) -> None:
    """The head reads all pairs of a text in uneven steps.

    Then come two tokens in turn, which continue from what the head itself returned.
    """
    target = write_target(tmp_path / "target")
    write_head(tmp_path / "head", target.config, **options)
    paper, model = Paper(tmp_path / "head", target), load_model(tmp_path / "target")
    head = load_draft_head(tmp_path / "head", model)
    assert head.after == (1, 2, 3)
    memory, own = HybridMemory(model.memory_spec, "2MiB"), HybridMemory(head.memory_spec, "1MiB", page_tokens=4)
    with memory.step({memory.open(): TOKENS}) as step:
        rows_TM = head.read(HiddenRows(model, head.after)(step)[1])
    fused = paper.fused(TOKENS)
    assert_logits_close(rows_TM, fused)
    sequence, logits, drafted = own.open(), [], [3, 6]
    for start, end in ((0, 9), (9, 10), (10, 23)):
        with own.step({sequence: TOKENS[start + 1 : end + 1]}, outputs="all") as step:
            logits_TV, next_TM = head(step, rows_TM[start:end])
        logits.append(logits_TV)
    continued = fused[:-1]
    for i, token in enumerate(drafted):
        with own.step({sequence: [token]}) as step:
            logits_TV, next_TM = head(step, next_TM[-1:])
        logits.append(logits_TV)
        continued = torch.cat([continued, paper.draft(continued, [*TOKENS[1:], *drafted[:i]])[1][-1:]])
    expected, _ = paper.draft(continued, [*TOKENS[1:], *drafted])
    found = torch.cat(logits)
    if not options:
        kept = 3 * torch.arange(N_DRAFTED)
        others = torch.ones(target.config.vocab_size, dtype=torch.bool)
        others[kept] = False
        assert (found[:, others] == -torch.inf).all()
        found = found[:, kept]
    assert expected.std() >= 1
    assert_logits_close(found, expected)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    model = load_model(tmp_path / "target")
    write_head(tmp_path / "layers", target.config, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 9]})
    with pytest.raises(UnsupportedModelError, match=r"\[2, 3, 9\] for a model of 7 layers"):
        load_draft_head(tmp_path / "layers", model)
    narrow = LlamaConfig(hidden_size=16, num_attention_heads=4, vocab_size=target.config.vocab_size)
    write_head(tmp_path / "narrow", narrow)
    with pytest.raises(UnsupportedModelError, match="hidden_size=16; implemented is the model's"):
        load_draft_head(tmp_path / "narrow", model)
    tensors = write_head(tmp_path / "head", target.config)
    for d2t, message in ((None, "no d2t"), (torch.full((N_DRAFTED,), 999), "outside of the model's")):
        changed = {n: x for n, x in tensors.items() if n != "d2t"} | ({} if d2t is None else {"d2t": d2t})
        save_file(changed, tmp_path / "head" / "model.safetensors")
        with pytest.raises(FormatError, match=message):
            load_draft_head(tmp_path / "head", model)


def test_replies_are_the_same_with_drafts_of_such_a_head(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    write_head(tmp_path / "head", target.config)
    model = load_model(tmp_path / "target")
    head, told = load_draft_head(tmp_path / "head", model), []
    for drafts in (False, True):
        drafter = HeadDrafter(model, head, HybridMemory(head.memory_spec, "2MiB")) if drafts else None
        speculation, memory = Speculation(adapts=False, drafter=drafter), HybridMemory(model.memory_spec, "4MiB")
        engine = Engine(model, memory, None, stop_ids=(), speculation=speculation)
        generations = [engine.submit([*TOKENS, i], max_tokens=20) for i in (1, 2)]
        engine.run()
        told.append([generation.token_ids for generation in generations])
        assert (engine.stats.n_drafted > 0) == drafts
    assert told[0] == told[1]
