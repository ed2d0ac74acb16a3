"""Implements Zamba (Glorioso et al. 2024): Mamba layers, and one shared transformer block before some of them.

Unlike Zamba2, it has a single shared block, no adapters and no positions. A mixer has several heads, and each head is a
Mamba-1 recurrence over its own part of the channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, Step
from hybridmem.memory.recurrences import Mamba1
from hybridmem.models.families.zamba2 import Hybrid, is_hybrid
from hybridmem.models.layers.attention import Attention, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Layer
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mamba_mixers import head_spec, load_conv, mamba1_at_once, split_conv
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, require
from hybridmem.models.weights.dry import rates_of

if TYPE_CHECKING:
    from transformers import ZambaConfig


@register("ZambaForCausalLM")
class Zamba(Decoder):
    """Implements Zamba: plain Mamba layers, and layers with the shared transformer block before the mixer."""

    def __init__(self, config: ZambaConfig, checkpoint: Checkpoint) -> None:
        n_model, eps, take = config.hidden_size, config.rms_norm_eps, checkpoint.take
        require(config, attention_hidden_size=2 * n_model)
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        blocks: dict[str, _SharedBlock] = {}
        layers: list[Layer] = []
        for i in range(len(config.layers_block_type)):
            prefix = f"model.layers.{i}"
            if not is_hybrid(config, i):
                layers.append(Block(_load_mamba(config, checkpoint, prefix, i)))
                continue
            owner = _block_prefix(config, checkpoint, i)
            if owner not in blocks:
                blocks[owner] = _load_block(config, checkpoint, owner.removesuffix("."))
            block = blocks[owner]
            spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, config.attention_head_dim)
            # The scale is computed from half the width of a head, as if the input were x without the embeddings beside
            # it.
            attention = Attention(i, spec, block.qkv, block.out, scale=(spec.head_dim / 2) ** -0.5)
            layers.append(
                Hybrid(
                    vocabulary,
                    (block.norm, attention),
                    (block.mlp_norm, block.mlp),
                    Linear(take(f"{prefix}.linear.weight", n_model, n_model)),
                    _load_mamba(config, checkpoint, f"{prefix}.mamba_decoder", i),
                )
            )
        norm = RMSNorm(take("model.final_layernorm.weight", n_model), eps)
        super().__init__(config, checkpoint, vocabulary, layers, norm)


@dataclass(frozen=True)
class _SharedBlock:
    """Holds the parts of the transformer block that all layers with the block share."""

    norm: RMSNorm
    qkv: Linear
    out: Linear
    mlp_norm: RMSNorm
    mlp: GatedMLP


def _block_prefix(config: ZambaConfig, checkpoint: Checkpoint, i: int) -> str:
    """Return the prefix of the tensors of layer i's block. Checkpoints hold the block once, or once for each layer."""
    prefix = "model.layers.{}.shared_transf."
    layers = [j for j, kind in enumerate(config.layers_block_type) if kind == "hybrid"]
    return checkpoint.tie_block(prefix.format(i), *map(prefix.format, layers), is_tied=config.tie_word_embeddings)


def _load_block(config: ZambaConfig, checkpoint: Checkpoint, prefix: str) -> _SharedBlock:
    n_model, eps, take = config.hidden_size, config.rms_norm_eps, checkpoint.take
    spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, config.attention_head_dim)
    qkv, out = load_projections(checkpoint, f"{prefix}.self_attn", n_model, spec, n_in=2 * n_model)
    return _SharedBlock(
        RMSNorm(take(f"{prefix}.input_layernorm.weight", 2 * n_model), eps),
        qkv,
        out,
        RMSNorm(take(f"{prefix}.pre_ff_layernorm.weight", n_model), eps),
        GatedMLP.load(checkpoint, f"{prefix}.feed_forward", n_model, config.intermediate_size, config.hidden_act),
    )


def _load_mamba(config: ZambaConfig, checkpoint: Checkpoint, prefix: str, i: int) -> tuple[RMSNorm, HeadedMixer]:
    norm = RMSNorm(checkpoint.take(f"{prefix}.input_layernorm.weight", config.hidden_size), config.rms_norm_eps)
    return norm, HeadedMixer(config, checkpoint, f"{prefix}.mamba", i)


class HeadedMixer:
    """Computes Mamba-1's mixer in heads. Each head has its own part of the channels, and its own dt, B and C."""

    def __init__(self, config: ZambaConfig, checkpoint: Checkpoint, prefix: str, layer: int) -> None:
        n_model, n_heads, n_states = config.hidden_size, config.n_mamba_heads, config.mamba_d_state
        n_channels, rank, activation = config.mamba_expand * n_model, int(config.mamba_dt_rank), config.hidden_mamba_act
        n_each, has_bias, take = n_channels // n_heads, config.mamba_proj_bias, checkpoint.take
        # Row 2 i is channel i before the convolution, row 2 i + 1 its gate.
        weight = take(f"{prefix}.in_proj.weight", 2 * n_channels, n_model)
        bias = checkpoint.take_optional(has_bias, f"{prefix}.in_proj.bias", 2 * n_channels)
        self._rows, self._gate = (
            Linear(weight[part::2], bias=None if bias is None else bias[part::2], activation=act)
            for part, act in enumerate((None, activation))
        )
        self._out = Linear.load(checkpoint, f"{prefix}.out_proj", n_model, n_channels, has_bias=has_bias)
        conv = load_conv(
            checkpoint, f"{prefix}.conv1d", n_channels, config.mamba_d_conv, has_bias=config.mamba_conv_bias,
            activation=activation,
        )  # fmt: skip
        x_proj = take(f"{prefix}.x_proj_weight", n_heads, rank + 2 * n_states, n_each)
        dt_proj = take(f"{prefix}.dt_proj_weight", n_heads, n_each, rank)
        dt_bias = take(f"{prefix}.dt_proj_bias", n_heads, n_each)
        rates = rates_of(take(f"{prefix}.A_log", n_heads, n_each, n_states, dtype=torch.float32))
        direct = take(f"{prefix}.D", n_heads, n_each, dtype=torch.float32)
        self._heads = []
        for head, conv_of_head in enumerate(split_conv(conv, n_heads)):
            products = Linear(x_proj[head]), Linear(dt_proj[head])
            self._heads.append(
                Mamba1(
                    conv_of_head, *products, dt_bias[head], rates[head].T.contiguous(), direct[head],
                    at_once=mamba1_at_once(*products),
                )
            )  # fmt: skip
        self._layer = layer
        self.specs = tuple(head_spec(i, n_each, n_states, config.mamba_d_conv) for i in range(n_heads))

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        parts = self._rows(x_TM).chunk(len(self._heads), -1)
        y_TE = torch.cat(
            [
                step.recur(self._layer, rows.contiguous(), head, name=spec.name)
                for rows, head, spec in zip(parts, self._heads, self.specs, strict=True)
            ],
            -1,
        )
        return self._out(y_TE * self._gate(x_TM))
