"""Implements Kimi Linear (Kimi Team 2025): delta attention with decays of key channels, latent attention, experts.

Its latent attention rotates nothing: positions are known from the layers of delta attention alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.recurrences import DeltaRule, DeltaRuleShape
from hybridmem.models.layers.decoder import Block, Decoder, Function, Mixer
from hybridmem.models.layers.experts import MixtureOfExperts, check_groups, load_experts, sigmoid_then_choose
from hybridmem.models.layers.latent_attention import load_latent_attention
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mamba_mixers import load_conv
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, require
from hybridmem.models.weights.dry import rates_of

if TYPE_CHECKING:
    from transformers import KimiLinearConfig


@register("KimiLinearForCausalLM")
class KimiLinear(Decoder):
    """Implements Kimi Linear."""

    def __init__(self, config: KimiLinearConfig, checkpoint: Checkpoint) -> None:
        require(config, tie_word_embeddings=False)  # transformers never ties them
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embed_tokens.weight")

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            mixer = _load_mixer(config, checkpoint, f"model.layers.{i}.self_attn", i)
            feed_forward = _load_feed_forward(config, checkpoint, f"model.layers.{i}", config.mlp_layer_types[i])
            layers.append(
                Block(
                    (norm(f"layers.{i}.input_layernorm"), mixer),
                    (norm(f"layers.{i}.post_attention_layernorm"), feed_forward),
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))


def _load_mixer(config: KimiLinearConfig, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
    kind = config.layer_types[i]
    if kind == "linear_attention":
        return KimiDeltaMixer(config, checkpoint, prefix, i)
    if kind != "full_attention":
        raise UnsupportedModelError(f"layer_types[{i}]={kind!r}; implemented are linear_attention and full_attention")
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads={config.num_key_value_heads}, num_attention_heads={config.num_attention_heads}; "
            "latent attention is implemented with as many of both"
        )
    return load_latent_attention(config, checkpoint, prefix, i, None, is_interleaved=False)


def _load_feed_forward(config: KimiLinearConfig, checkpoint: Checkpoint, prefix: str, kind: str) -> Function:
    """Load a gated MLP or a mixture; published files and those of transformers call the MLP differently."""
    n_model, n_experts, n_inner = config.hidden_size, config.num_local_experts, config.moe_intermediate_size

    def mlp(name: str, size: int) -> GatedMLP:
        return GatedMLP.load(checkpoint, name, n_model, size, config.hidden_act)

    mixture = f"{prefix}.block_sparse_moe"
    if kind == "dense":
        stored = checkpoint.name_of(*(f"{name}.gate_proj.weight" for name in (f"{prefix}.mlp", mixture)))
        return mlp(stored.removesuffix(".gate_proj.weight"), config.intermediate_size)
    if kind != "sparse":
        raise UnsupportedModelError(f"mlp_layer_types has {kind!r}; implemented are dense and sparse")
    if config.n_shared_experts < 1:
        raise UnsupportedModelError(f"num_shared_experts={config.n_shared_experts}; implemented is at least one")
    check_groups(config, least=2, experts="num_local_experts")
    # In float32 whatever the model's dtype: the scores decide which experts run, and close scores are common.
    router = checkpoint.take(f"{mixture}.gate.weight", n_experts, n_model, dtype=torch.float32)
    route = partial(
        sigmoid_then_choose,
        bias_E=checkpoint.take(f"{mixture}.gate.e_score_correction_bias", n_experts, dtype=torch.float32),
        n_groups=config.n_group,
        n_chosen_groups=config.topk_group,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    experts = load_experts(
        checkpoint, f"{mixture}.experts", n_experts, n_model, n_inner, config.hidden_act, names=("w1", "w3", "w2")
    )
    shared = mlp(f"{mixture}.shared_experts", n_inner * config.n_shared_experts)
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, route, shared=shared)


class KimiDeltaMixer:
    """Computes W_out(norm(delta(conv(q, k, v), beta, a)) * sigmoid(g)); g and a are products in two steps.

    Kimi Team 2025, section 4. The norm is over each head.
    """

    def __init__(self, config: KimiLinearConfig, checkpoint: Checkpoint, prefix: str, layer: int) -> None:
        n_model, n_heads, size, take = (
            config.hidden_size,
            config.linear_num_heads,
            config.linear_head_dim,
            checkpoint.take,
        )
        shape = DeltaRuleShape(n_heads, n_heads, size, size, config.linear_conv_kernel_dim, decays_keys=True)
        n_inner = n_heads * size
        q, k, v = (take(f"{prefix}.{name}_proj.weight", n_inner, n_model) for name in "qkv")
        self._rows = Linear(q, k, v, take(f"{prefix}.b_proj.weight", n_heads, n_model))
        self._decay = self._in_two_steps(checkpoint, f"{prefix}.f", n_model, size, n_inner, None)
        self._gate = self._in_two_steps(checkpoint, f"{prefix}.g", n_model, size, n_inner, "sigmoid")
        self._norm = RMSNorm(take(f"{prefix}.o_norm.weight", size), config.rms_norm_eps)
        self._out = Linear(take(f"{prefix}.o_proj.weight", n_model, n_inner))
        rates = rates_of(take(f"{prefix}.A_log", 1, 1, n_heads, 1, dtype=torch.float32))
        self._recurrence = DeltaRule(
            shape,
            load_conv(
                checkpoint, f"{prefix}.conv1d", shape.n_channels, shape.d_conv, has_bias=False,
                activation=config.hidden_act, parts=tuple(f"{prefix}.{name}_conv1d" for name in "qkv"),
            ),
            a_bias_A=take(f"{prefix}.dt_bias", n_inner, dtype=torch.float32),
            rate_A=rates.expand(1, 1, n_heads, size).reshape(-1),
        )  # fmt: skip
        self._layer = layer

    @staticmethod
    def _in_two_steps(
        checkpoint: Checkpoint, prefix: str, n_in: int, n_between: int, n_out: int, activation: str | None
    ) -> tuple[Linear, Linear]:
        return (
            Linear(checkpoint.take(f"{prefix}_a_proj.weight", n_between, n_in)),
            Linear(checkpoint.take(f"{prefix}_b_proj.weight", n_out, n_between), activation=activation),
        )

    @property
    def specs(self) -> tuple[RecurrentSpec]:
        return (self._recurrence.shape.spec(),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        shape = self._recurrence.shape
        (down, up), (gate_down, gate_up) = self._decay, self._gate
        qkv_TE, beta_TH = self._rows(x_TM).split_with_sizes([shape.n_channels, shape.n_heads], -1)
        rows_TR = torch.cat([qkv_TE, beta_TH.sigmoid(), up(down(x_TM))], -1)
        y_TI = step.recur(self._layer, rows_TR, self._recurrence)
        y_THV = self._norm(y_TI.view(len(y_TI), shape.n_heads, shape.value_dim))
        return self._out(y_THV.flatten(1) * gate_up(gate_down(x_TM)))
