"""Implements Kimi Linear (Kimi Team 2025): delta attention with a decay per key channel, latent attention, experts.

Latent attention here rotates neither queries nor keys: only the layers of delta attention encode positions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.kernels import steady
from hybridmem.memory.recurrences import DeltaRule, DeltaRuleShape
from hybridmem.models.layers.decoder import Block, Decoder, Function, Mixer, in_turn
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

    embedding = "model.embed_tokens.weight"

    def __init__(self, config: KimiLinearConfig, checkpoint: Checkpoint) -> None:
        require(config, tie_word_embeddings=False)  # Transformers never ties them.
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, self.embedding)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            kind, prefix = config.layer_types[i], f"model.layers.{i}"
            if kind == "linear_attention":
                mixer = self._delta_mixer(config, checkpoint, prefix, i)
            elif kind == "full_attention":
                mixer = self._attention(config, checkpoint, prefix, i)
            else:
                raise UnsupportedModelError(
                    f"layer_types[{i}]={kind!r}; implemented are linear_attention and full_attention"
                )
            feed_forward = self._feed_forward(config, checkpoint, prefix, config.mlp_layer_types[i])
            layers.append(
                Block(
                    (norm(f"layers.{i}.input_layernorm"), mixer),
                    (norm(f"layers.{i}.post_attention_layernorm"), feed_forward),
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))

    def _delta_mixer(self, config: Any, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        shape, n_model, prefix = read_delta_shape(config), config.hidden_size, f"{prefix}.self_attn"

        def in_two_steps(name: str, activation: str | None) -> Function:
            down = Linear(checkpoint.take(f"{prefix}.{name}_a_proj.weight", shape.key_dim, n_model))
            up = checkpoint.take(f"{prefix}.{name}_b_proj.weight", shape.n_keys, shape.key_dim)
            return in_turn(down, Linear(up, activation=activation))

        a_log = checkpoint.take(f"{prefix}.A_log", 1, 1, shape.n_heads, 1, dtype=torch.float32)
        decays = checkpoint.take(f"{prefix}.dt_bias", shape.n_keys, dtype=torch.float32), repeat_rates(a_log, shape)
        gate = in_two_steps("g", "sigmoid")
        return KimiDeltaMixer(config, checkpoint, prefix, i, shape, in_two_steps("f", None), gate, decays)

    def _attention(self, config: Any, checkpoint: Checkpoint, prefix: str, i: int) -> Mixer:
        check_heads(config)
        return load_latent_attention(config, checkpoint, f"{prefix}.self_attn", i, None, is_interleaved=False)

    def _feed_forward(self, config: Any, checkpoint: Checkpoint, prefix: str, kind: str) -> Function:
        """Load a gated MLP or a mixture; published files and those of transformers call the MLP differently."""
        mixture = f"{prefix}.block_sparse_moe"
        stored = checkpoint.name_of(*(f"{name}.gate_proj.weight" for name in (f"{prefix}.mlp", mixture)))
        return load_feed_forward(
            config, checkpoint, kind, stored.removesuffix(".gate_proj.weight"), mixture,
            bias="e_score_correction_bias", names=("w1", "w3", "w2"),
        )  # fmt: skip


def check_heads(config: Any) -> None:
    """Raise UnsupportedModelError unless there are as many key heads as query heads."""
    if config.num_key_value_heads != config.num_attention_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads={config.num_key_value_heads}, num_attention_heads={config.num_attention_heads}; "
            "latent attention is implemented with as many of both"
        )


def read_delta_shape(config: Any) -> DeltaRuleShape:
    """Return the sizes of the delta attention layers."""
    n_heads, size = config.linear_num_heads, config.linear_head_dim
    return DeltaRuleShape(n_heads, n_heads, size, size, config.linear_conv_kernel_dim, decays_keys=True)


def repeat_rates(a_log: Tensor, shape: DeltaRuleShape) -> Tensor:
    """Return each head's -exp(A_log), repeated for each key channel of the head, (H N,)."""
    return rates_of(a_log).view(-1, 1).expand(shape.n_heads, shape.key_dim).reshape(-1)


def load_feed_forward(
    config: Any, checkpoint: Checkpoint, kind: str, mlp: str, mixture: str, *, bias: str, names: tuple[str, str, str]
) -> Function:
    """Load a gated MLP, or a mixture of experts and shared experts, which sigmoid scores plus a bias choose by groups.

    Args:
        mlp, mixture: prefixes of the names of tensors, of the MLP and of the mixture.
        bias, names: the name of the bias, and the names of an expert's three products.
    """
    n_model, n_experts, n_inner = config.hidden_size, config.num_local_experts, config.moe_intermediate_size

    def load_mlp(name: str, size: int) -> GatedMLP:
        return GatedMLP.load(checkpoint, name, n_model, size, config.hidden_act)

    if kind == "dense":
        return load_mlp(mlp, config.intermediate_size)
    if kind != "sparse":
        raise UnsupportedModelError(f"mlp_layer_types has {kind!r}; implemented are dense and sparse")
    if config.n_shared_experts < 1:
        raise UnsupportedModelError(f"num_shared_experts={config.n_shared_experts}; implemented is at least one")
    check_groups(config, least=2, experts="num_local_experts")
    # The router is float32 whatever the model's dtype, because scores decide which experts run, and close scores are
    # common.
    router = checkpoint.take(f"{mixture}.gate.weight", n_experts, n_model, dtype=torch.float32)
    route = partial(
        sigmoid_then_choose,
        bias_E=checkpoint.take(f"{mixture}.gate.{bias}", n_experts, dtype=torch.float32),
        n_groups=config.n_group,
        n_chosen_groups=config.topk_group,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )
    experts = load_experts(
        checkpoint, f"{mixture}.experts", n_experts, n_model, n_inner, config.hidden_act, names=names
    )  # fmt: skip
    shared = load_mlp(f"{mixture}.shared_experts", n_inner * config.n_shared_experts)
    return MixtureOfExperts(router, experts, config.num_experts_per_tok, route, shared=shared)


class KimiDeltaMixer:
    """Computes W_out(norm(delta(conv(q, k, v), beta, a)) * g), with a norm over each head (Kimi Team 2025, section 4).

    Args:
        decay, gate: functions that compute a, (T, H N), and g, (T, H V), from the layer's input.
        decays: bias and rate with which the recurrence computes decays; None if `decay` returns logarithms of decays.
        out: the name of the output projection.
    """

    def __init__(
        self, config: Any, checkpoint: Checkpoint, prefix: str, layer: int, shape: DeltaRuleShape, decay: Function,
        gate: Function, decays: tuple[Tensor, Tensor] | None, *, out: str = "o_proj",
    ) -> None:  # fmt: skip
        n_model, n_inner, take = config.hidden_size, shape.n_heads * shape.value_dim, checkpoint.take
        q, k, v = (take(f"{prefix}.{name}_proj.weight", n_inner, n_model) for name in "qkv")
        self._rows = Linear(q, k, v, take(f"{prefix}.b_proj.weight", shape.n_heads, n_model))
        self._decay, self._gate, self._sigmoid = decay, gate, steady(torch.sigmoid)
        self._norm = RMSNorm(take(f"{prefix}.o_norm.weight", shape.value_dim), config.rms_norm_eps)
        self._out = Linear(take(f"{prefix}.{out}.weight", n_model, n_inner))
        conv = load_conv(
            checkpoint, f"{prefix}.conv1d", shape.n_channels, shape.d_conv, has_bias=False,
            activation=config.hidden_act, parts=tuple(f"{prefix}.{name}_conv1d" for name in "qkv"),
        )  # fmt: skip
        self._recurrence = DeltaRule(shape, conv, *(decays or (None, None)))
        self._layer = layer
        self.specs: tuple[RecurrentSpec] = (shape.spec(),)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        shape = self._recurrence.shape
        qkv_TE, beta_TH = self._rows(x_TM).split_with_sizes([shape.n_channels, shape.n_heads], -1)
        rows_TR = torch.cat([qkv_TE, self._sigmoid(beta_TH), self._decay(x_TM)], -1)
        y_TI = step.recur(self._layer, rows_TR, self._recurrence)
        y_THV = self._norm(y_TI.view(len(y_TI), shape.n_heads, shape.value_dim))
        return self._out(y_THV.flatten(1) * self._gate(x_TM))
