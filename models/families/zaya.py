"""Implements Zaya (Zyphra 2025): attention whose queries and keys are convolved, and experts with a router of its own.

Half of each layer's values come from the token before. The router's hidden row is handed on from layer to layer. The
residual stream is in float32, and is scaled and shifted around each part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, Step
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.attention import Rotary
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.layers.experts import Experts, load_experts
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.layers.query_key_conv import QueryKeyConv, around
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError, check_numbers, require

if TYPE_CHECKING:
    from transformers import ZayaConfig

_ROUTER_ROW = "router row of the layer before"
"""Key in a step's notes of what a layer's router hands to the next one, (T, R)."""


@register("ZayaForCausalLM")
class Zaya(Decoder):
    """Implements Zaya: each layer is convolved attention and a mixture of experts, of which a token takes one."""

    def __init__(self, config: ZayaConfig, checkpoint: Checkpoint) -> None:
        n_model = config.hidden_size
        require(config, num_experts_per_tok=1)
        check_numbers(config, "cca_time0", "cca_time1", "num_experts", above=0)
        vocabulary = Vocabulary.load(
            checkpoint, config, "model.embed_tokens.weight", bias="lm_head.bias" if config.lm_head_bias else None
        )
        rotaries = {
            kind: Rotary(config, config.head_dim, checkpoint.device, layer_type=kind, is_partial=True)
            for kind in ("hybrid", "hybrid_sliding")
            if kind in config.layer_types
        }

        def scaling(prefix: str, kind: str) -> _Scaling:
            names = f"model.{prefix}{kind}_bias", f"model.{prefix}{kind}_scale"
            return _Scaling(*(checkpoint.take(name, n_model) for name in names))

        def part(i: int, before: str, behind: str, function: ConvolvedAttention | RoutedExperts) -> _Part:
            prefix = f"layers.{i}.{behind}_residual_scale."
            return _Part(
                RMSNorm(checkpoint.take(f"model.layers.{i}.{before}.weight", n_model), config.rms_norm_eps),
                function, scaling(prefix, "hidden_states"), scaling(prefix, "residual"),
            )  # fmt: skip

        layers = []
        for i in range(config.num_hidden_layers):
            attention = ConvolvedAttention(config, checkpoint, i, rotaries)
            mixture = RoutedExperts(config, checkpoint, f"model.layers.{i}.mlp", is_first=i == 0)
            layers.append(
                _Layer(
                    attention.specs,
                    scaling("", "input_hidden_states") if i == 0 else None,
                    part(i, "input_layernorm", "post_attention", attention),
                    part(i, "post_attention_layernorm", "post_mlp", mixture),
                )
            )
        norm = RMSNorm(checkpoint.take("model.norm.weight", n_model), config.rms_norm_eps)
        super().__init__(config, checkpoint, vocabulary, layers, norm, residual_dtype=torch.float32)


@dataclass(frozen=True)
class _Scaling:
    """Computes (x + bias) * scale."""

    bias_M: Tensor
    scale_M: Tensor

    def __call__(self, x_TM: Tensor) -> Tensor:
        return (x_TM + self.bias_M) * self.scale_M


@dataclass(frozen=True)
class _Part:
    """Computes output_scaling(function(norm(x))) + residual_scaling(x)."""

    norm: RMSNorm
    function: ConvolvedAttention | RoutedExperts
    output_scaling: _Scaling
    residual_scaling: _Scaling

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self.output_scaling(self.function(self.norm(x_TM), step)) + self.residual_scaling(x_TM)


@dataclass(frozen=True)
class _Layer:
    specs: tuple[LayerSpec, ...]
    input_scaling: _Scaling | None
    attention: _Part
    experts: _Part

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        if self.input_scaling is not None:
            x_TM = self.input_scaling(x_TM)
        return self.experts(self.attention(x_TM, step), step)


class ConvolvedAttention:
    """Computes attention after convolutions of queries and keys (Figliolia et al. 2025, "CCA")."""

    def __init__(self, config: ZayaConfig, checkpoint: Checkpoint, layer: int, rotaries: dict[str, Rotary]) -> None:
        kind, prefix, take = config.layer_types[layer], f"model.layers.{layer}.self_attn", checkpoint.take
        if kind not in rotaries:
            raise UnsupportedModelError(f"layer_types[{layer}]={kind!r}; implemented are {' and '.join(_KINDS)}")
        n_model, head_dim, n_q, n_kv = (
            config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads,
        )  # fmt: skip
        n_keys, n_channels, half = n_kv * head_dim, (n_q + n_kv) * head_dim, n_kv * head_dim // 2
        if 2 * half != n_keys:
            raise UnsupportedModelError(
                f"half of each token's values is delayed, and num_key_value_heads={n_kv} times head_dim={head_dim} "
                "cannot be halved"
            )
        has_bias = config.attention_bias
        products = {"q_proj": n_q * head_dim, "k_proj": n_keys, "v_proj_current": half, "v_proj_delayed": half}
        inside = f"{prefix}.qkv_proj"
        weights = [take(f"{inside}.{name}.weight", size, n_model) for name, size in products.items()]
        biases = [checkpoint.take_optional(has_bias, f"{inside}.{name}.bias", size) for name, size in products.items()]
        # The bias of delayed values is added after the delay: before the first token there is a row of zeros.
        self._delayed_bias = biases[3]
        self._inputs = [Linear(weight, bias=bias) for weight, bias in zip(weights, [*biases[:3], None], strict=True)]
        self._out = Linear.load(checkpoint, f"{prefix}.o_proj", n_model, n_q * head_dim, has_bias=has_bias)
        sizes = {"conv_qk_depthwise": (1, config.cca_time0), "conv_qk_grouped": (head_dim, config.cca_time1)}
        by_channel, by_head = (
            (take(f"{inside}.{name}.weight", n_channels, *rest), take(f"{inside}.{name}.bias", n_channels))
            for name, rest in sizes.items()
        )
        self._conv = QueryKeyConv(by_channel, by_head, half)
        self._temperature_G1 = take(f"{prefix}.qk_norm.temp", n_kv)[:, None]
        self._layer, self._rotary, self._n_heads = layer, rotaries[kind], (n_q, n_kv)
        window = int(config.sliding_window) if kind == "hybrid_sliding" else None
        attention = AttentionSpec(n_q, n_kv, head_dim, window=window)
        self.specs = (replace(attention, rotation=self._rotary.rotation), self._conv.spec)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        q, k, v, delayed = (product(x_TM) for product in self._inputs)
        qk_THD, before = self._conv(self._layer, torch.cat([q, k], -1), delayed, step)
        q_THD, k_TGD = (x.view(len(x), n, -1) for x, n in zip((q, k), self._n_heads, strict=True))
        q_THD, k_TGD = (
            a + b for a, b in zip(qk_THD.split_with_sizes(self._n_heads, 1), around(q_THD, k_TGD), strict=True)
        )
        q_THD, k_TGD = _to_length(q_THD), _to_length(k_TGD) * self._temperature_G1
        if self._delayed_bias is not None:
            before = before + self._delayed_bias
        v_TGD = torch.cat([v, before], -1).view_as(k_TGD)
        q_THD, k_TGD = self._rotary(torch.cat([q_THD, k_TGD], 1), step).split_with_sizes(self._n_heads, 1)
        return self._out(step.attend(self._layer, q_THD, k_TGD, v_TGD).flatten(1))


_KINDS = ("hybrid", "hybrid_sliding")


def _to_length(x_THD: Tensor) -> Tensor:
    """Return rows of the length sqrt(D)."""
    length: Tensor = torch.linalg.vector_norm(x_THD, dim=-1, keepdim=True)
    return x_THD / length.clamp_min(torch.finfo(x_THD.dtype).eps) * math.sqrt(x_THD.shape[-1])


class RoutedExperts:
    """Runs each token through one of several experts, or none, which a small network chooses.

    The network is in float32 whatever the model's dtype: its scores decide which expert runs. To its first row it adds
    what that of the layer before had there.
    """

    def __init__(self, config: ZayaConfig, checkpoint: Checkpoint, prefix: str, *, is_first: bool) -> None:
        n_model, n_row, n_experts = config.hidden_size, config.router_hidden_size, config.num_experts
        gate = f"{prefix}.gate"

        def take(name: str, *shape: int) -> Tensor:
            return checkpoint.take(f"{gate}.{name}", *shape, dtype=torch.float32)

        def linear(name: str, n_out: int, n_in: int, activation: str | None = None, *, has_bias: bool = True) -> Linear:
            bias = take(f"{name}.bias", n_out) if has_bias else None
            return Linear(take(f"{name}.weight", n_out, n_in), bias=bias, activation=activation, format="dense")

        self._row = linear("down_proj", n_row, n_model)
        self._before_R = None if is_first else take("router_states_scale", n_row)
        self._norm = RMSNorm(take("router_mlp.norm.weight", n_row), config.rms_norm_eps)
        self._hidden = [linear(f"router_mlp.{name}", n_row, n_row, "gelu") for name in ("fc1", "fc2")]
        self._scores = linear("router_mlp.out_proj", n_experts + 1, n_row, has_bias=False)
        self._balance_E = take("balancing_biases", n_experts + 1)
        experts = load_experts(
            checkpoint, f"{prefix}.experts", n_experts, n_model, config.moe_intermediate_size, config.hidden_act
        )
        self._experts = Experts([*experts, torch.zeros_like], 1)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        row_TR = self._row(x_TM.float())
        if self._before_R is not None:
            row_TR = row_TR + step.notes[_ROUTER_ROW] * self._before_R
        step.notes[_ROUTER_ROW] = row_TR
        y_TR = self._norm(row_TR)
        for product in self._hidden:
            y_TR = product(y_TR)
        weights_TE = self._scores(y_TR).softmax(-1)
        chosen_T1 = (weights_TE + self._balance_E).argmax(-1, keepdim=True)
        return self._experts.run(x_TM, weights_TE.gather(1, chosen_T1), chosen_T1)
