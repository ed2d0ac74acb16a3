"""Implements BART (Lewis et al. 2020): an encoder of whole inputs, and a decoder that attends to the encoder's output.

The decoder runs on a memory like any other model; `encode` returns what `memory.open(encoder=...)` takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from hybridmem.memory import AttentionSpec, BatchError, CrossAttentionSpec, MemorySpec, Step
from hybridmem.memory.blocks import refuse_attribute, without_gradients
from hybridmem.memory.interface import Encoded
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.attention import Attention, load_projections
from hybridmem.models.layers.decoder import on_step
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import MLP
from hybridmem.models.layers.norms import LayerNorm
from hybridmem.models.layers.vocabulary import HEAD, Embedding, Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import BartConfig

_OFFSET = 2
"""The number of rows of the position embeddings before position 0."""
_EPS = 1e-5
"""The epsilon of every norm, whatever the config says."""


@register("BartForConditionalGeneration")
class Bart:
    """Implements BART: `model.encode(inputs)` runs the encoder, `logits = model(step)` the decoder."""

    def __init__(self, config: BartConfig, checkpoint: Checkpoint) -> None:
        check_numbers(config, "encoder_layers", "decoder_layers", "max_position_embeddings", above=0)
        self.config = config
        head, decoder, encoder = checkpoint.tie(
            "model.shared.weight", HEAD, *(f"model.{side}.embed_tokens.weight" for side in ("decoder", "encoder")),
            is_tied=config.tie_word_embeddings,
        )  # fmt: skip
        scale = config.d_model**0.5 if config.scale_embedding else 1.0
        self._vocabulary = Vocabulary(checkpoint, config, decoder, head, embedding_scale=scale)
        self._encoder_embedding = self._vocabulary.embedding_of(checkpoint, encoder)
        self._logits_bias = checkpoint.take_optional(
            "final_logits_bias" in checkpoint, "final_logits_bias", 1, config.vocab_size
        )
        self._encoder_input, self._decoder_input = (
            _Input(config, checkpoint, f"model.{side}") for side in ("encoder", "decoder")
        )
        self._encoder = [
            _EncoderLayer(config, checkpoint, f"model.encoder.layers.{i}") for i in range(config.encoder_layers)
        ]
        self._decoder = [_DecoderLayer(config, checkpoint, i) for i in range(config.decoder_layers)]
        self.memory_spec = MemorySpec(
            layers=tuple(layer.specs for layer in self._decoder), vocab_size=config.vocab_size, dtype=checkpoint.dtype,
            device=checkpoint.device, model=f"Bart {checkpoint.folder.name}",
        )  # fmt: skip

    if not TYPE_CHECKING:  # Without this condition, a type checker would accept any name.

        def __getattr__(self, name: str) -> object:
            refuse_attribute(self, "Decoder", name)

    def encode(self, inputs: Sequence[Sequence[int]]) -> list[Encoded]:
        """Return the cross-attention keys and values of each input, for `memory.open(encoder=...)`.

        Raises:
            BatchError: an input has no tokens, numbers that are no token ids, or too many tokens for the model's
                positions.
        Cost: one pass of the encoder for each input.
        """
        with without_gradients():
            return [self._encode(token_ids) for token_ids in inputs]

    def _encode(self, token_ids: Sequence[int]) -> Encoded:
        ids_T = read_token_ids(token_ids, self.memory_spec)
        x_TM = self._encoder_input(self._encoder_embedding, ids_T, torch.arange(len(ids_T), device=ids_T.device))
        for layer in self._encoder:
            x_TM = layer(x_TM)
        return [layer.cross.keys_and_values(x_TM) for layer in self._decoder]

    @on_step
    def __call__(self, step: Step) -> Tensor:
        x_TM = self._decoder_input(self._vocabulary.embed, step.token_ids, step.positions)
        for layer in self._decoder:
            x_TM = layer(x_TM, step)
        logits = self._vocabulary.logits(step.select(x_TM))
        return logits if self._logits_bias is None else logits + self._logits_bias


def read_token_ids(token_ids: Sequence[int], spec: MemorySpec) -> Tensor:
    """Return an encoder's input as a tensor, (T,). Raises BatchError unless it is one or more token ids."""
    ids_T = torch.as_tensor(token_ids, device=spec.device)
    is_list = ids_T.dim() == 1 and len(ids_T) > 0 and not ids_T.is_floating_point()
    if not is_list or not 0 <= int(ids_T.min()) <= int(ids_T.max()) < spec.vocab_size:
        raise BatchError(f"{token_ids!r} cannot be encoded; give one or more token ids from 0 to {spec.vocab_size - 1}")
    return ids_T


class _Input:
    """Computes the sum of token and position embeddings, and its norm."""

    def __init__(self, config: BartConfig, checkpoint: Checkpoint, prefix: str) -> None:
        n_positions = config.max_position_embeddings + _OFFSET
        self._positions = checkpoint.take(f"{prefix}.embed_positions.weight", n_positions, config.d_model)
        self._norm = _load_norm(config, checkpoint, f"{prefix}.layernorm_embedding")

    def __call__(self, embed: Embedding, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        n_positions = len(self._positions) - _OFFSET
        if len(positions_T) and int(positions_T.max()) >= n_positions:
            raise BatchError(
                f"a sequence reaches position {int(positions_T.max())}; this model has only {n_positions} positions"
            )
        return self._norm(embed(token_ids_T) + self._positions[positions_T + _OFFSET])


class _EncoderLayer:
    """Computes norm(x + attention(x)), then norm(x + mlp(x)). Every token attends to every other token."""

    def __init__(self, config: BartConfig, checkpoint: Checkpoint, prefix: str) -> None:
        n_heads, n_model = config.encoder_attention_heads, config.d_model
        self._spec = AttentionSpec(n_heads, n_heads, n_model // n_heads)
        self._qkv, self._out = _load_attention(config, checkpoint, f"{prefix}.self_attn", self._spec)
        self._norms = (
            _load_norm(config, checkpoint, f"{prefix}.self_attn_layer_norm"),
            _load_norm(config, checkpoint, f"{prefix}.final_layer_norm"),
        )
        self._mlp = _load_mlp(config, checkpoint, prefix, config.encoder_ffn_dim)

    def __call__(self, x_TM: Tensor) -> Tensor:
        q, k, v = rearrange(self._qkv(x_TM), "t (qkv h d) -> qkv h t d", qkv=3, d=self._spec.head_dim)
        y_HTD = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        x_TM = self._norms[0](x_TM + self._out(rearrange(y_HTD, "h t d -> t (h d)")))
        return self._norms[1](x_TM + self._mlp(x_TM))


@dataclass(frozen=True)
class CrossAttention:
    """Computes cross-attention. Queries come from the decoder, keys and values from the encoder."""

    layer: int
    spec: CrossAttentionSpec
    query: Linear
    key_value: Linear
    out: Linear
    scale: float | None = None

    def keys_and_values(self, x_RM: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, (R, G, D) each, of the encoder's last hidden states."""
        k_RGD, v_RGD = self.key_value(x_RM).view(len(x_RM), 2, self.spec.n_kv_heads, self.spec.head_dim).unbind(1)
        return k_RGD, v_RGD

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        q_THD = self.query(x_TM).view(len(x_TM), self.spec.n_query_heads, self.spec.head_dim)
        return self.out(step.cross_attend(self.layer, q_THD, scale=self.scale).flatten(1))


class _DecoderLayer:
    """Computes norm(x + attention(x)), norm(x + cross_attention(x)), norm(x + mlp(x))."""

    def __init__(self, config: BartConfig, checkpoint: Checkpoint, i: int) -> None:
        prefix, n_heads, n_model = f"model.decoder.layers.{i}", config.decoder_attention_heads, config.d_model
        spec = AttentionSpec(n_heads, n_heads, n_model // n_heads)
        self._attention = Attention(i, spec, *_load_attention(config, checkpoint, f"{prefix}.self_attn", spec))
        self.cross = _load_cross_attention(config, checkpoint, f"{prefix}.encoder_attn", i)
        names = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
        self._norms = [_load_norm(config, checkpoint, f"{prefix}.{name}") for name in names]
        self._mlp = _load_mlp(config, checkpoint, prefix, config.decoder_ffn_dim)
        self.specs: tuple[LayerSpec, ...] = (spec, self.cross.spec)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        x_TM = self._norms[0](x_TM + self._attention(x_TM, step))
        x_TM = self._norms[1](x_TM + self.cross(x_TM, step))
        return self._norms[2](x_TM + self._mlp(x_TM))


def _load_norm(config: BartConfig, checkpoint: Checkpoint, name: str) -> LayerNorm:
    return LayerNorm(
        checkpoint.take(f"{name}.weight", config.d_model), checkpoint.take(f"{name}.bias", config.d_model), _EPS
    )


def _load_mlp(config: BartConfig, checkpoint: Checkpoint, prefix: str, n_inner: int) -> MLP:
    n_model = config.d_model
    return MLP(
        Linear.load(
            checkpoint, f"{prefix}.fc1", n_inner, n_model, has_bias=True, activation=config.activation_function
        ),
        Linear.load(checkpoint, f"{prefix}.fc2", n_model, n_inner, has_bias=True),
    )


def _load_attention(
    config: BartConfig, checkpoint: Checkpoint, prefix: str, spec: AttentionSpec
) -> tuple[Linear, Linear]:
    return load_projections(checkpoint, prefix, config.d_model, spec, has_bias=True, has_out_bias=True, out="out_proj")


def _load_cross_attention(config: BartConfig, checkpoint: Checkpoint, prefix: str, i: int) -> CrossAttention:
    n_model, n_heads = config.d_model, config.decoder_attention_heads

    def take(name: str) -> tuple[Tensor, Tensor]:
        return checkpoint.take(f"{prefix}.{name}.weight", n_model, n_model), checkpoint.take(
            f"{prefix}.{name}.bias", n_model
        )

    (k, k_bias), (v, v_bias) = take("k_proj"), take("v_proj")
    query, out = (
        Linear.load(checkpoint, f"{prefix}.{name}", n_model, n_model, has_bias=True) for name in ("q_proj", "out_proj")
    )
    spec = CrossAttentionSpec(n_heads, n_heads, n_model // n_heads)
    return CrossAttention(i, spec, query, Linear(k, v, bias=joined(k_bias, v_bias)), out)
