"""Implements T5 (Raffel et al. 2020): an encoder and a decoder, whose only positions are a bias of scores by distance.

The decoder runs on a memory like any other model; `encode` returns what `memory.open(encoder=...)` takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from hybridmem.memory import UNROTATED, AttentionSpec, CrossAttentionSpec, MemorySpec, Step
from hybridmem.memory.blocks import refuse_attribute, without_gradients
from hybridmem.memory.interface import Encoded
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.families.bart import CrossAttention, read_token_ids
from hybridmem.models.layers.decoder import Function, on_step
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import MLP, GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import HEAD, Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, check_numbers

if TYPE_CHECKING:
    from transformers import T5Config


@register("T5ForConditionalGeneration")
class T5:
    """Implements T5: `model.encode(inputs)` runs the encoder, `logits = model(step)` the decoder."""

    def __init__(self, config: T5Config, checkpoint: Checkpoint) -> None:
        check_numbers(config, "num_layers", "num_decoder_layers", above=0)
        check_numbers(config, "relative_attention_num_buckets", above=3)
        check_numbers(config, "relative_attention_max_distance", above=config.relative_attention_num_buckets // 2)
        self.config = config
        n_model, n_distances = config.d_model, config.relative_attention_max_distance
        # Checkpoints of the first version tie the head to the embeddings. Later ones have a separate head, which only
        # this option of transformers' config shows.
        encoder, decoder, head = checkpoint.tie(
            "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD,
            own=() if config.scale_decoder_outputs else (HEAD,),
        )  # fmt: skip
        scale = n_model**-0.5 if config.scale_decoder_outputs else 1.0
        self._vocabulary = Vocabulary(checkpoint, config, decoder, head, logits_scale=scale)
        self._encoder_embedding = self._vocabulary.embedding_of(checkpoint, encoder)
        self._encoder = [_EncoderLayer(config, checkpoint, i) for i in range(config.num_layers)]
        self._decoder = [_DecoderLayer(config, checkpoint, i) for i in range(config.num_decoder_layers)]
        self._encoder_norm, self._norm = (
            _load_norm(config, checkpoint, f"{side}.final_layer_norm") for side in ("encoder", "decoder")
        )
        self._encoder_bias, decoder_bias = (
            checkpoint.take(
                f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                config.relative_attention_num_buckets,
                config.num_heads,
                dtype=torch.float32,
            )
            for side in ("encoder", "decoder")
        )
        distances = torch.arange(n_distances + 1, device=checkpoint.device)
        self._bias_HL = decoder_bias[
            _bucket(distances, config.relative_attention_num_buckets, n_distances)
        ].T.contiguous()
        self.memory_spec = MemorySpec(
            layers=tuple(layer.specs for layer in self._decoder), vocab_size=config.vocab_size, dtype=checkpoint.dtype,
            device=checkpoint.device, model=f"T5 {checkpoint.folder.name}",
        )  # fmt: skip

    if not TYPE_CHECKING:  # Without this condition, a type checker would accept any name.

        def __getattr__(self, name: str) -> object:
            refuse_attribute(self, "Decoder", name)

    def encode(self, inputs: Sequence[Sequence[int]]) -> list[Encoded]:
        """Return the cross-attention keys and values of each input, for `memory.open(encoder=...)`.

        Raises:
            BatchError: an input has no tokens, or numbers that are no token ids.
        Cost: one pass of the encoder for each input.
        """
        with without_gradients():
            return [self._encode(token_ids) for token_ids in inputs]

    def _encode(self, token_ids: Sequence[int]) -> Encoded:
        ids_T = read_token_ids(token_ids, self.memory_spec)
        x_TM, positions = self._encoder_embedding(ids_T), torch.arange(len(ids_T), device=ids_T.device)
        ahead_TT = positions - positions[:, None]
        n_buckets = self.config.relative_attention_num_buckets // 2
        buckets_TT = (
            _bucket(ahead_TT.abs(), n_buckets, self.config.relative_attention_max_distance) + (ahead_TT > 0) * n_buckets
        )
        bias_HTT = rearrange(self._encoder_bias[buckets_TT], "queries keys h -> h queries keys")
        for layer in self._encoder:
            x_TM = layer(x_TM, bias_HTT)
        x_TM = self._encoder_norm(x_TM)
        return [layer.cross.keys_and_values(x_TM) for layer in self._decoder]

    @on_step
    def __call__(self, step: Step) -> Tensor:
        x_TM = self._vocabulary.embed(step.token_ids)
        for layer in self._decoder:
            x_TM = layer(x_TM, step, self._bias_HL)
        return self._vocabulary.logits(self._norm(step.select(x_TM)))


def _bucket(distances: Tensor, n_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance.

    Half of the buckets hold one distance each. The others hold ranges that grow up to `max_distance`. The last bucket
    also holds all longer distances.
    """
    n_exact = n_buckets // 2
    far = torch.log(distances.clamp(min=1) / n_exact) / math.log(max_distance / n_exact) * (n_buckets - n_exact)
    return torch.where(distances < n_exact, distances, (n_exact + far.long()).clamp(max=n_buckets - 1))


class _EncoderLayer:
    """Computes x + attention(norm(x)), then x + mlp(norm(x)). Every token attends to every other token."""

    def __init__(self, config: T5Config, checkpoint: Checkpoint, i: int) -> None:
        prefix = f"encoder.block.{i}.layer"
        self._n_heads, self._head_dim = config.num_heads, config.d_kv
        self._qkv, self._out = _load_attention(config, checkpoint, f"{prefix}.0.SelfAttention", "qkv")
        self._attention_norm = _load_norm(config, checkpoint, f"{prefix}.0.layer_norm")
        self._mlp_norm, self._mlp = _load_mlp(config, checkpoint, f"{prefix}.1")

    def __call__(self, x_TM: Tensor, bias_HTT: Tensor) -> Tensor:
        qkv_TX = self._qkv(self._attention_norm(x_TM))
        q, k, v = rearrange(qkv_TX, "t (qkv h d) -> qkv h t d", qkv=3, d=self._head_dim)
        y_HTD = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=bias_HTT[None].to(q.dtype), scale=1.0
        )[0]
        x_TM = x_TM + self._out(rearrange(y_HTD, "h t d -> t (h d)"))
        return x_TM + self._mlp(self._mlp_norm(x_TM))


class _DecoderLayer:
    """Computes x + attention(norm(x)), x + cross_attention(norm(x)), x + mlp(norm(x)). Scores are not scaled."""

    def __init__(self, config: T5Config, checkpoint: Checkpoint, i: int) -> None:
        prefix, n_heads, head_dim = f"decoder.block.{i}.layer", config.num_heads, config.d_kv
        self._layer, self._spec = i, AttentionSpec(n_heads, n_heads, head_dim, rotation=UNROTATED, has_bias=True)
        self._qkv, self._out = _load_attention(config, checkpoint, f"{prefix}.0.SelfAttention", "qkv")
        query, out = _load_attention(config, checkpoint, f"{prefix}.1.EncDecAttention", "q")
        key_value, _ = _load_attention(config, checkpoint, f"{prefix}.1.EncDecAttention", "kv")
        self.cross = CrossAttention(i, CrossAttentionSpec(n_heads, n_heads, head_dim), query, key_value, out, scale=1.0)
        self._norms = [_load_norm(config, checkpoint, f"{prefix}.{part}.layer_norm") for part in (0, 1)]
        self._mlp_norm, self._mlp = _load_mlp(config, checkpoint, f"{prefix}.2")
        self.specs: tuple[LayerSpec, ...] = (self._spec, self.cross.spec)

    def __call__(self, x_TM: Tensor, step: Step, bias_HL: Tensor) -> Tensor:
        q, k, v = (
            self._qkv(self._norms[0](x_TM)).view(len(x_TM), 3, self._spec.n_query_heads, self._spec.head_dim).unbind(1)
        )
        x_TM = x_TM + self._out(step.attend(self._layer, q, k, v, scale=1.0, bias=bias_HL).flatten(1))
        x_TM = x_TM + self.cross(self._norms[1](x_TM), step)
        return x_TM + self._mlp(self._mlp_norm(x_TM))


def _load_norm(config: T5Config, checkpoint: Checkpoint, name: str) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", config.d_model), config.layer_norm_epsilon)


def _load_attention(config: T5Config, checkpoint: Checkpoint, prefix: str, names: str) -> tuple[Linear, Linear]:
    """Load one product for those of q, k and v that are in `names`, and the product of the output."""
    n_inner = config.num_heads * config.d_kv
    weights = [checkpoint.take(f"{prefix}.{name}.weight", n_inner, config.d_model) for name in names]
    return Linear(*weights), Linear.load(checkpoint, f"{prefix}.o", config.d_model, n_inner)


def _load_mlp(config: T5Config, checkpoint: Checkpoint, prefix: str) -> tuple[RMSNorm, Function]:
    norm = _load_norm(config, checkpoint, f"{prefix}.layer_norm")
    n_model = config.d_model
    n_inner = config.d_ff
    act = config.dense_act_fn
    prefix = f"{prefix}.DenseReluDense"
    if config.is_gated_act:
        return norm, GatedMLP.load(checkpoint, prefix, n_model, n_inner, act, names=("wi_0", "wi_1", "wo"))
    up = Linear.load(checkpoint, f"{prefix}.wi", n_inner, n_model, activation=act)
    return norm, MLP(up, Linear.load(checkpoint, f"{prefix}.wo", n_model, n_inner))
