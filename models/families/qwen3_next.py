"""Implements Qwen3-Next (Qwen Team 2025): delta mixers, gated attention every few layers, and experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from hybridmem.memory import AttentionSpec
from hybridmem.memory.recurrences import DeltaRuleShape
from hybridmem.models.draft_heads import NextTokenHead
from hybridmem.models.layers.attention import Attention, Rotary, head_dim_of
from hybridmem.models.layers.decoder import Block, Decoder, Mixer
from hybridmem.models.layers.delta_mixer import DeltaInputs, DeltaMixer, delta_shape_of
from hybridmem.models.layers.experts import MixtureOfExperts, SharedExpert, load_experts, softmax_then_choose
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm, load_offset_norm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, Qwen3NextConfig


@register("Qwen3NextForCausalLM")
class Qwen3Next(Decoder):
    """Implements Qwen3-Next. The names of all tensors except the head's begin with `root`."""

    def __init__(self, config: Qwen3NextConfig, checkpoint: Checkpoint, root: str = "model") -> None:
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, f"{root}.embed_tokens.weight")
        rotary = Rotary(config, head_dim_of(config), checkpoint.device, is_partial=True)

        def norm(name: str) -> RMSNorm:
            return load_offset_norm(checkpoint, f"{root}.{name}", n_model, config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            prefix = f"{root}.layers.{i}"
            mixer = self._mixer(config, checkpoint, prefix, i, rotary)
            feed_forward = self._feed_forward(config, checkpoint, f"{prefix}.mlp", i)
            layers.append(
                Block(
                    (norm(f"layers.{i}.input_layernorm"), mixer),
                    (norm(f"layers.{i}.post_attention_layernorm"), feed_forward),
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))
        self._rotary = rotary

    def load_draft_head(self, checkpoint: Checkpoint) -> NextTokenHead | None:
        """Return the module of multi-token prediction below `mtp`: attention, then the feed-forward part of a layer.

        A checkpoint with several modules is read as having the first, which drafts all tokens.
        """
        if "mtp.fc.weight" not in checkpoint:
            super().load_draft_head(checkpoint)
            return None
        config, n_model = self.config, self.config.hidden_size

        def norm(name: str) -> RMSNorm:
            return load_offset_norm(checkpoint, f"mtp.{name}", n_model, config.rms_norm_eps)

        mixer = load_gated_attention(config, checkpoint, "mtp.layers.0.self_attn", 0, self._rotary)
        feed_forward = self._draft_feed_forward(config, checkpoint, "mtp.layers.0.mlp")
        layer = Block(
            (norm("layers.0.input_layernorm"), mixer), (norm("layers.0.post_attention_layernorm"), feed_forward)
        )
        norms = norm("pre_fc_norm_embedding"), norm("pre_fc_norm_hidden")
        joined = Linear.load(checkpoint, "mtp.fc", n_model, 2 * n_model)
        return NextTokenHead(self, norms, joined, [layer], norm("norm"))

    def _draft_feed_forward(
        self, config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str
    ) -> Callable[[Tensor], Tensor]:
        if getattr(config, "num_experts", 0) and f"{prefix}.gate.weight" in checkpoint:
            return load_mixture(config, checkpoint, prefix, renormalise=config.norm_topk_prob)
        return GatedMLP.load(checkpoint, prefix, config.hidden_size, config.intermediate_size, config.hidden_act)

    def _mixer(self, config: Qwen3NextConfig, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary) -> Mixer:
        kind = config.layer_types[i]
        if kind == "full_attention":
            return load_gated_attention(config, checkpoint, f"{prefix}.self_attn", i, rotary)
        if kind != "linear_attention":
            raise UnsupportedModelError(
                f"layer_types[{i}]={kind!r}; implemented are linear_attention and full_attention"
            )
        shape = delta_shape_of(config)
        prefix = f"{prefix}.linear_attn"
        inputs = self._delta_inputs(checkpoint, prefix, config.hidden_size, shape)
        return DeltaMixer(
            checkpoint, prefix, i, shape, inputs, norm_eps=config.rms_norm_eps, activation=config.hidden_act
        )

    def _delta_inputs(self, checkpoint: Checkpoint, prefix: str, n_model: int, shape: DeltaRuleShape) -> DeltaInputs:
        return DeltaInputs.take_by_key_head(checkpoint, prefix, n_model, shape)

    def _feed_forward(
        self, config: Qwen3NextConfig, checkpoint: Checkpoint, prefix: str, i: int
    ) -> Callable[[Tensor], Tensor]:
        has_experts = (
            i not in config.mlp_only_layers and config.num_experts > 0 and (i + 1) % config.decoder_sparse_step == 0
        )
        if has_experts:
            return load_mixture(config, checkpoint, prefix, renormalise=config.norm_topk_prob)
        return GatedMLP.load(checkpoint, prefix, config.hidden_size, config.intermediate_size, config.hidden_act)


def load_gated_attention(
    config: Qwen3NextConfig, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary
) -> Attention:
    """Load attention with an output gate. `q_proj` holds, head by head, the rows of the query and of the gate."""
    spec = AttentionSpec(config.num_attention_heads, config.num_key_value_heads, head_dim_of(config))
    n_model, n_q, n_kv = config.hidden_size, spec.n_query_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim

    def linears(*kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        name = "weight" if kind else "bias"
        q_and_gate = checkpoint.take(f"{prefix}.q_proj.{name}", 2 * n_q, *kind)
        q, gate = (x.flatten(0, 1) for x in q_and_gate.reshape(-1, 2, spec.head_dim, *kind).unbind(1))
        k, v = (checkpoint.take(f"{prefix}.{x}_proj.{name}", n_kv, *kind) for x in "kv")
        return q, k, v, gate

    *qkv, gate = linears(n_model)
    qkv_bias = gate_bias = None
    if config.attention_bias:
        *biases, gate_bias = linears()
        qkv_bias = joined(*biases)
    out_bias = checkpoint.take_optional(config.attention_bias, f"{prefix}.o_proj.bias", n_model)
    q_norm, k_norm = (
        load_offset_norm(checkpoint, f"{prefix}.{x}_norm", spec.head_dim, config.rms_norm_eps) for x in "qk"
    )
    return Attention(
        i,
        spec,
        Linear(*qkv, bias=qkv_bias),
        Linear(checkpoint.take(f"{prefix}.o_proj.weight", n_model, n_q), bias=out_bias),
        rotary=rotary,
        norms=(q_norm, k_norm),
        gate=Linear(gate, bias=gate_bias, activation="sigmoid"),
    )


def load_mixture(config: Qwen3NextConfig, checkpoint: Checkpoint, prefix: str, *, renormalise: bool) -> SharedExpert:
    """Load the experts below `prefix`, and their shared expert."""
    n_model, act = config.hidden_size, config.hidden_act
    experts = load_experts(
        checkpoint, f"{prefix}.experts", config.num_experts, n_model, config.moe_intermediate_size, act
    )
    router = checkpoint.take(f"{prefix}.gate.weight", config.num_experts, n_model)
    route = partial(softmax_then_choose, renormalise=renormalise)
    shared = GatedMLP.load(checkpoint, f"{prefix}.shared_expert", n_model, config.shared_expert_intermediate_size, act)
    gate = Linear(checkpoint.take(f"{prefix}.shared_expert_gate.weight", 1, n_model), activation="sigmoid")
    return SharedExpert(MixtureOfExperts(router, experts, config.num_experts_per_tok, route), shared, gate)
