"""Implements Inkling (Thinking Machines 2026): attention by content and distance, experts, and many short convolutions.

Keys, values, and the output of each part of a layer are convolved. Positions are nowhere but in a bias of the scores,
which each query computes from its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import UNROTATED, AttentionSpec, Step
from hybridmem.memory.kernels import steady
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.draft_heads import NextTokenHead
from hybridmem.models.layers.decoder import Decoder, Function, Mixer
from hybridmem.models.layers.distance_bias import DistanceBias, LogScale, Scale, unscaled
from hybridmem.models.layers.experts import MixtureOfExperts, Route, load_experts
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.mlp import GatedMLP
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.residual_conv import Convolved, ResidualConv
from hybridmem.models.layers.vocabulary import HEAD, Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, check_numbers

if TYPE_CHECKING:
    from transformers import InklingTextConfig


@register("InklingForCausalLM")
class Inkling(Decoder):
    """Implements Inkling's language model: a layer is attention, to all tokens or a window, and experts or an MLP."""

    def __init__(self, config: InklingTextConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        check_numbers(config, "logits_mup_width_multiplier", "n_shared_experts", above=0)
        if config.unpadded_vocab_size is not None:
            check_numbers(config, "unpadded_vocab_size", above=0)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(f"model.{name}.weight", n_model), config.rms_norm_eps)

        vocabulary = Vocabulary(
            checkpoint, config, "model.embed_tokens.weight", HEAD, embedding_norm=norm("embed_tokens.embed_norm"),
            logits_scale=1 / config.logits_mup_width_multiplier, n_tokens=config.unpadded_vocab_size,
        )  # fmt: skip
        layers = [_Layer.load(config, checkpoint, f"model.layers.{i}", i) for i in range(config.num_hidden_layers)]
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))
        self.draft_prefixes = ("model.mtp.",)

    def load_draft_head(self, checkpoint: Checkpoint) -> NextTokenHead | None:
        """Return the first module of multi-token prediction, a layer with a dense MLP.

        It joins the hidden state first, reads embeddings without the model's norm of them, and mostly has no last norm.
        Its tensors have the names of published files or of transformers.
        """
        root, n_model = "model.mtp.layers.0", self.config.hidden_size
        joined = checkpoint.name_of(f"{root}.input_proj.weight", f"{root}.eh_proj.weight")
        if joined not in checkpoint:
            super().load_draft_head(checkpoint)
            return None
        if not self.config.num_mtp_layers:
            raise UnsupportedModelError(
                f"{checkpoint.folder} has a draft head with {joined}, and num_mtp_layers={self.config.num_mtp_layers} "
                "in its config, which says nothing of its layers; name how many there are, or load the model without it"
            )
        config: InklingTextConfig = self.config.get_mtp_config()

        def norm(*names: str) -> RMSNorm:
            return RMSNorm(checkpoint.take(checkpoint.name_of(*names), n_model), config.rms_norm_eps)

        joined_MN = checkpoint.take(joined, n_model, 2 * n_model)
        if config.mtp_hidden_states_first:
            joined_MN = joined_MN.roll(n_model, 1)
        last = norm("model.mtp.chain_norm.weight") if config.chain_hidden_post_norm else lambda x_TM: x_TM
        block = f"{root}.transformer_block"
        return NextTokenHead(
            self,
            (norm(f"{root}.embed_norm.weight", f"{root}.enorm.weight"),
             norm(f"{root}.hidden_norm.weight", f"{root}.hnorm.weight")),
            Linear(joined_MN), [_Layer.load(config, checkpoint, block, 0, n_ahead=1)], last,
            embed=replace(self.vocabulary.embed, norm=None),
        )  # fmt: skip


@dataclass(frozen=True)
class _Layer:
    """Computes x + part(norm(x)) for each part."""

    parts: tuple[tuple[Function, Mixer], ...]

    @staticmethod
    def load(config: InklingTextConfig, checkpoint: Checkpoint, prefix: str, i: int, *, n_ahead: int = 0) -> _Layer:
        """Load layer i of the config. `n_ahead` is that of `LogScale`."""
        n_model = config.hidden_size
        attention_norm, feed_forward_norm = (
            RMSNorm(checkpoint.take(f"{prefix}.{name}.weight", n_model), config.rms_norm_eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        attention = InklingAttention(config, checkpoint, prefix, i, n_ahead=n_ahead)
        conv = ResidualConv.load(
            checkpoint, {f"{prefix}.mlp_sconv.conv1d": n_model}, i, "feed_forward", config.conv_kernel_size
        )
        feed_forward = Convolved(_load_feed_forward(config, checkpoint, f"{prefix}.mlp", i), conv)
        return _Layer(((attention_norm, attention), (feed_forward_norm, feed_forward)))

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return tuple(spec for _, part in self.parts for spec in part.specs)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        for norm, part in self.parts:
            x_TM = x_TM + part(norm(x_TM), step)
        return x_TM


class InklingAttention:
    """Computes attention whose keys, values and outputs are convolved, with a bias that each query computes."""

    def __init__(
        self, config: InklingTextConfig, checkpoint: Checkpoint, prefix: str, layer: int, *, n_ahead: int = 0
    ) -> None:
        spec, n_distances = attention_spec_of(config, layer)
        self._layer, self._sizes = layer, head_sizes(spec, config.d_rel)
        n_model, n_taps, eps = config.hidden_size, config.conv_kernel_size, config.rms_norm_eps
        own = f"{prefix}.self_attn"
        self._inputs = Linear(
            *(checkpoint.take(f"{own}.{x}_proj.weight", n, n_model) for x, n in zip("qkvr", self._sizes, strict=True))
        )
        self._out = Linear.load(checkpoint, f"{own}.o_proj", n_model, self._sizes[0])
        self._norms = [RMSNorm(checkpoint.take(f"{own}.{x}_norm.weight", spec.head_dim), eps) for x in "qk"]
        self._bias = DistanceBias.load(checkpoint, f"{own}.rel_logits_proj.proj", config.d_rel, n_distances)
        rows = {f"{own}.{x}_sconv.conv1d": self._sizes[1] for x in "kv"}
        self._conv = ResidualConv.load(checkpoint, rows, layer, "keys_values", n_taps)
        self._out_conv = ResidualConv.load(
            checkpoint, {f"{prefix}.attn_sconv.conv1d": n_model}, layer, "attention_output", n_taps
        )
        self._scale: Scale = unscaled
        if spec.window is None and config.log_scaling_n_floor is not None:
            check_numbers(config, "log_scaling_n_floor", above=0)
            self._scale = LogScale(config.log_scaling_n_floor, config.log_scaling_alpha, n_ahead)
        self._head_dim = spec.head_dim
        self.specs: tuple[LayerSpec, ...] = (spec, self._conv.spec, self._out_conv.spec)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        n_q, n_kv, _, n_weights = self._sizes
        q, kv, weights = self._inputs(x_TM).split_with_sizes([n_q, 2 * n_kv, n_weights], -1)
        k, v = self._conv(kv, step).chunk(2, -1)
        q_THD, k_TGD, v_TGD = (x.reshape(len(x), -1, self._head_dim) for x in (q, k, v))
        q_THD, k_TGD = self._scale(self._norms[0](q_THD), step), self._norms[1](k_TGD)
        bias_THL = self._scale(self._bias(weights.reshape(*q_THD.shape[:2], -1)), step)
        # Queries and keys are normed, so scores are divided by the size of a head rather than by its root.
        y_THD = step.attend(self._layer, q_THD, k_TGD, v_TGD, scale=1 / self._head_dim, bias=bias_THL)
        return self._out_conv(self._out(y_THD.flatten(1)), step)


def attention_spec_of(config: InklingTextConfig, layer: int) -> tuple[AttentionSpec, int]:
    """Return the spec of a layer's attention, and up to which distance its scores have a bias."""
    kind = config.layer_types[layer]
    if kind == "hybrid":
        sizes, window = (config.num_attention_heads, config.num_key_value_heads, config.head_dim), None
    elif kind == "hybrid_sliding":
        sizes = config.swa_num_attention_heads, config.swa_num_key_value_heads, config.swa_head_dim
        window = int(config.sliding_window_size)
    else:
        raise UnsupportedModelError(f"layer_types[{layer}]={kind!r}; implemented are hybrid and hybrid_sliding")
    return AttentionSpec(*sizes, window=window, rotation=UNROTATED, has_bias=True), window or config.rel_extent


def head_sizes(spec: AttentionSpec, n_profiles: int) -> Sequence[int]:
    """Return how many outputs the products for queries, keys, values and weights of profiles have."""
    n_q, n_kv = spec.n_query_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    return n_q, n_kv, n_kv, spec.n_query_heads * n_profiles


def _load_feed_forward(config: InklingTextConfig, checkpoint: Checkpoint, prefix: str, i: int) -> Function:
    n_model, kind = config.hidden_size, config.mlp_layer_types[i]
    if kind == "dense":
        factor = checkpoint.take(f"{prefix}.global_scale", 1)
        mlp = GatedMLP.load(checkpoint, prefix, n_model, config.intermediate_size, config.hidden_act)
        return lambda x_TM: mlp(x_TM) * factor
    if kind != "sparse":
        raise UnsupportedModelError(f"mlp_layer_types[{i}]={kind!r}; implemented are dense and sparse")
    n_routed, n_shared, n_inner = config.n_routed_experts, config.n_shared_experts, config.moe_intermediate_size

    def take(name: str, *shape: int) -> Tensor:
        return checkpoint.take(f"{prefix}.gate.{name}", *shape, dtype=torch.float32)

    router = take("weight", n_routed + n_shared, n_model)
    route = partial(
        _choose_beside_shared, n_shared=n_shared, bias_E=take("e_score_correction_bias", n_routed),
        factor=config.route_scale * take("global_scale", 1),
    )  # fmt: skip
    shared = (
        checkpoint.take(f"{prefix}.shared_experts.{x}_proj", n_shared, *shape)
        for x, shape in (("gate", (n_inner, n_model)), ("up", (n_inner, n_model)), ("down", (n_model, n_inner)))
    )
    experts = [
        *load_experts(checkpoint, f"{prefix}.experts", n_routed, n_model, n_inner, config.hidden_act),
        *(GatedMLP(Linear(gate, activation=config.hidden_act), Linear(up), Linear(down))
          for gate, up, down in zip(*shared, strict=True)),
    ]  # fmt: skip
    return MixtureOfExperts(router, experts, config.num_experts_per_tok + n_shared, route)


def _choose_beside_shared(n_chosen: int, *, n_shared: int, bias_E: Tensor, factor: Tensor) -> Route:
    """Return a route that weights experts by their own sigmoids, which sum to `factor` over all that a token takes.

    The last experts are shared: each token takes them all. Others are chosen as in `sigmoid_then_choose`.
    """

    sigmoid = steady(torch.sigmoid)

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        n_routed = logits.shape[1] - n_shared
        ranks = sigmoid(logits[:, :n_routed]) + bias_E
        chosen = ranks.topk(n_chosen - n_shared).indices
        always = torch.arange(n_routed, logits.shape[1], device=logits.device).expand(len(logits), -1)
        experts_TK = torch.cat([chosen, always], 1)
        return F.logsigmoid(logits.gather(1, experts_TK)).softmax(-1) * factor, experts_TK

    return route
