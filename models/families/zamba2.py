"""Implements Zamba2 (Glorioso et al. 2024): Mamba-2 layers; before some of them, a shared transformer block runs.

A few such blocks serve all layers. A block reads x and the tokens' embeddings e. Its output is only added to the
mixer's input, not to the residual stream:

    u = W mlp(norm(attention(norm([x, e]))))     x = x + mamba(norm(x + u))

Layers that share a block differ by low-rank adapters (Hu et al. 2021). The adapters are added at run time, so each
block's weights are held once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, Step
from hybridmem.memory.recurrences import SSDShape
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.attention import Attention, Rotary, load_projections
from hybridmem.models.layers.decoder import Block, Decoder, Function, Layer, Mixer
from hybridmem.models.layers.linear import Linear, activation_by
from hybridmem.models.layers.mamba_mixers import Mamba2Mixer, Mamba2Options
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, require

if TYPE_CHECKING:
    from transformers import Zamba2Config, ZambaConfig

_MIXER_NORM_EPS = 1e-5
"""The epsilon of the gated norms. The config's epsilon is that of all other norms."""


@dataclass(frozen=True)
class Adapted:
    """Computes W x + B A x. Layers share the product W; the low-rank adapter B A belongs to one layer.

    Attributes:
        down: A, for all parts in `ups` at once.
        ups: the parts of B. Each part reads its own part of A x, and the outputs of all parts are concatenated.
    """

    shared: Linear
    down: Linear
    ups: tuple[Linear, ...]

    def __call__(self, x_TM: Tensor) -> Tensor:
        parts = self.down(x_TM).chunk(len(self.ups), -1)
        return self.shared(x_TM) + torch.cat([up(part) for up, part in zip(self.ups, parts, strict=True)], -1)


@dataclass(frozen=True)
class _MLP:
    """Computes W_down(act(gate) * up), where gate and up come from one adapted product."""

    gate_up: Adapted
    down: Linear
    activation: Function

    def __call__(self, x_TM: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TM).chunk(2, -1)
        return self.down(self.activation(gate) * up)


@dataclass(frozen=True)
class Hybrid:
    """Computes a layer with a transformer block. The attributes are in the order in which they run."""

    vocabulary: Vocabulary
    attention: tuple[RMSNorm, Attention]
    mlp: tuple[RMSNorm, Function]
    out: Linear
    mamba: tuple[RMSNorm, Mixer]

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return self.attention[1].specs + self.mamba[1].specs

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        (norm, attention), (mlp_norm, mlp), (mamba_norm, mamba) = self.attention, self.mlp, self.mamba
        # Embeddings are looked up again, which costs a copy of one row for each token, instead of being passed through
        # all layers.
        embeddings_TM = self.vocabulary.embed(step.token_ids)
        y_TM = attention(norm(torch.cat([x_TM, embeddings_TM], -1)), step)
        return x_TM + mamba(mamba_norm(x_TM + self.out(mlp(mlp_norm(y_TM)))), step)


@dataclass(frozen=True)
class _SharedBlock:
    """Holds a transformer block without its adapters, which the checkpoint has next to the block, below `prefix`."""

    prefix: str
    norm: RMSNorm
    qkv: Linear
    out: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


@register("Zamba2ForCausalLM")
class Zamba2(Decoder):
    """Implements Zamba2: plain Mamba-2 layers, and layers with a shared transformer block before the mixer."""

    def __init__(self, config: Zamba2Config, checkpoint: Checkpoint) -> None:
        require(config, use_conv_bias=True, use_long_context=False)
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")
        rotary = Rotary(config, config.attention_head_dim, checkpoint.device) if config.use_mem_rope else None
        blocks: dict[str, _SharedBlock] = {}
        layers: list[Layer] = []
        for i in range(len(config.layers_block_type)):
            prefix = f"model.layers.{i}"
            if not is_hybrid(config, i):
                layers.append(Block(_load_mamba(config, checkpoint, prefix, i)))
                continue
            n_before = config.hybrid_layer_ids.index(i)
            owner = _block_prefix(config, checkpoint, i, n_before)
            if owner not in blocks:
                blocks[owner] = _load_block(config, checkpoint, owner.removesuffix("."))
            block = blocks[owner]
            out = Linear(checkpoint.take(f"{prefix}.linear.weight", n_model, n_model))
            mamba = _load_mamba(config, checkpoint, f"{prefix}.mamba_decoder", i)
            attention = block.norm, _adapt_attention(config, checkpoint, block, i, n_before, rotary)
            mlp = block.mlp_norm, _adapt_mlp(config, checkpoint, block, n_before)
            layers.append(Hybrid(vocabulary, attention, mlp, out, mamba))
        norm = RMSNorm(checkpoint.take("model.final_layernorm.weight", n_model), config.rms_norm_eps)
        super().__init__(config, checkpoint, vocabulary, layers, norm)


def is_hybrid(config: ZambaConfig | Zamba2Config, i: int) -> bool:
    """Return whether a shared block runs before layer i's mixer. Raises UnsupportedModelError for other kinds."""
    kind = config.layers_block_type[i]
    if kind not in ("linear_attention", "hybrid"):
        raise UnsupportedModelError(f"layers_block_type[{i}]={kind!r}; implemented are linear_attention and hybrid")
    return bool(kind == "hybrid")


def _block_prefix(config: Zamba2Config, checkpoint: Checkpoint, i: int, n_before: int) -> str:
    """Return the name under which to take the block of layer i.

    The layers use the blocks in turn. Checkpoints hold each block once, or under the names of all layers that use it.
    """
    prefix, turn = "model.layers.{}.shared_transformer.", n_before % config.num_mem_blocks
    layers = config.hybrid_layer_ids[turn :: config.num_mem_blocks]
    return checkpoint.tie_block(prefix.format(i), *map(prefix.format, layers), is_tied=config.tie_word_embeddings)


def _load_mamba(config: Zamba2Config, checkpoint: Checkpoint, prefix: str, i: int) -> tuple[RMSNorm, Mamba2Mixer]:
    shape = SSDShape(
        config.n_mamba_heads, config.mamba_headdim, config.mamba_ngroups, config.mamba_d_state, config.mamba_d_conv
    )
    options = Mamba2Options(
        n_model=config.hidden_size, shape=shape, has_conv_bias=True, has_in_bias=config.add_bias_linear,
        has_out_bias=config.add_bias_linear, norm_eps=_MIXER_NORM_EPS, n_norm_groups=config.mamba_ngroups,
        dt_limits=(config.time_step_min, math.inf),
    )  # fmt: skip
    norm = RMSNorm(checkpoint.take(f"{prefix}.input_layernorm.weight", config.hidden_size), config.rms_norm_eps)
    return norm, Mamba2Mixer(checkpoint, f"{prefix}.mamba", i, options)


def _load_block(config: Zamba2Config, checkpoint: Checkpoint, prefix: str) -> _SharedBlock:
    n_model = config.hidden_size
    n_inner = config.intermediate_size
    has_bias = config.add_bias_linear
    take = checkpoint.take
    qkv, out = load_projections(checkpoint, f"{prefix}.self_attn", n_model, _spec(config), n_in=2 * n_model)
    return _SharedBlock(
        prefix,
        norm=RMSNorm(take(f"{prefix}.input_layernorm.weight", 2 * n_model), config.rms_norm_eps),
        qkv=qkv,
        out=out,
        mlp_norm=RMSNorm(take(f"{prefix}.pre_ff_layernorm.weight", n_model), config.rms_norm_eps),
        gate_up=Linear.load(checkpoint, f"{prefix}.feed_forward.gate_up_proj", 2 * n_inner, n_model, has_bias=has_bias),
        down=Linear.load(checkpoint, f"{prefix}.feed_forward.down_proj", n_model, n_inner, has_bias=has_bias),
    )


def _spec(config: Zamba2Config) -> AttentionSpec:
    return AttentionSpec(config.num_attention_heads, config.num_key_value_heads, config.attention_head_dim)


def _adapt_attention(
    config: Zamba2Config, checkpoint: Checkpoint, block: _SharedBlock, layer: int, n_before: int, rotary: Rotary | None
) -> Attention:
    spec = _spec(config)
    qkv: Function = block.qkv
    if config.use_shared_attention_adapter:
        n_q, n_kv = spec.n_query_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        adapters = {
            f"self_attn.linear_{name}_adapter_list.{n_before}": size
            for name, size in (("q", n_q), ("k", n_kv), ("v", n_kv))
        }
        qkv = _adapt(config, checkpoint, block, block.qkv, 2 * config.hidden_size, adapters)
    # The scale is that of half a head, as if the input were only x, without the embeddings.
    return Attention(layer, spec, qkv, block.out, rotary=rotary, scale=(spec.head_dim / 2) ** -0.5)


def _adapt_mlp(config: Zamba2Config, checkpoint: Checkpoint, block: _SharedBlock, n_before: int) -> _MLP:
    adapters = {f"feed_forward.gate_up_proj_adapter_list.{n_before}": 2 * config.intermediate_size}
    gate_up = _adapt(config, checkpoint, block, block.gate_up, config.hidden_size, adapters)
    return _MLP(gate_up, block.down, activation_by(config.hidden_act))


def _adapt(
    config: Zamba2Config,
    checkpoint: Checkpoint,
    block: _SharedBlock,
    shared: Linear,
    n_in: int,
    adapters: dict[str, int],
) -> Adapted:
    """Return `shared` with the adapters of these names, which have these numbers of outputs."""
    rank = config.adapter_rank
    downs = [checkpoint.take(f"{block.prefix}.{name}.0.weight", rank, n_in) for name in adapters]
    ups = [Linear(checkpoint.take(f"{block.prefix}.{name}.1.weight", n_out, rank)) for name, n_out in adapters.items()]
    return Adapted(shared, Linear(*downs), tuple(ups))
