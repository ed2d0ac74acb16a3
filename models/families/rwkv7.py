"""Implements RWKV-7 (Peng et al. 2025): matrix states that each token decays, erases from and writes to.

Checkpoints are those of flash-linear-attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from hybridmem.memory import FormatError, Step
from hybridmem.memory.recurrences import RWKV7, rwkv7_spec
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import LayerNorm
from hybridmem.models.layers.rwkv import ChannelMix, RWKVLayer, TokenMix, take_mixture
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

_LOG_DECAY = -math.exp(-0.5)
"""The logarithm of the fastest decay."""

_MIXTURES = "rwkvag"
"""Names of the mixtures of a token with the token before it, in the order of the single tensor of old checkpoints."""


class RWKV7Config(PreTrainedConfig):  # type: ignore[misc]
    """Reads config.json of flash-linear-attention's checkpoints, for which transformers has no class.

    Attributes:
        attn: a description of attention layers in hybrid models, or None.
        value_dim: the size of the values of all heads, as one number or one for each layer; None for `hidden_size`.
        decay_low_rank_dim, gate_low_rank_dim, a_low_rank_dim, v_low_rank_dim: the sizes of low-rank projections; None
            for flash-linear-attention's choice.
    """

    model_type = "rwkv7"

    def __init__(
        self, hidden_size: int = 2048, num_hidden_layers: int = 24, head_dim: int | None = 64,
        num_heads: int | None = None, hidden_ratio: float | None = 4, intermediate_size: int | None = None,
        hidden_act: str = "sqrelu", vocab_size: int = 32000, decay_low_rank_dim: int | None = None,
        gate_low_rank_dim: int | None = None, a_low_rank_dim: int | None = None, v_low_rank_dim: int | None = None,
        norm_first: bool = True, norm_bias: bool = True, norm_eps: float = 1e-5, fuse_norm: bool = True,
        attn: dict[str, Any] | None = None, value_dim: int | list[int] | None = None,
        tie_word_embeddings: bool = False, **rest: Any,
    ) -> None:  # fmt: skip
        self.hidden_size, self.num_hidden_layers, self.vocab_size = hidden_size, num_hidden_layers, vocab_size
        self.head_dim = head_dim or hidden_size // (num_heads or 1)
        self.num_heads = hidden_size // self.head_dim
        inner = 32 * math.ceil(int(hidden_size * (hidden_ratio or 4)) / 32)
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size or inner
        self.hidden_act = hidden_act
        by_head = self.head_dim / 64
        self.decay_low_rank_dim = decay_low_rank_dim or _low_rank(2.5 * by_head, hidden_size)
        self.gate_low_rank_dim = gate_low_rank_dim or _low_rank(5, hidden_size)
        self.a_low_rank_dim = a_low_rank_dim or _low_rank(2.5 * by_head, hidden_size)
        self.v_low_rank_dim = v_low_rank_dim or _low_rank(1.7 * by_head, hidden_size)
        self.norm_first, self.norm_bias, self.norm_eps, self.fuse_norm = norm_first, norm_bias, norm_eps, fuse_norm
        self.attn, self.value_dim = attn, value_dim
        super().__init__(tie_word_embeddings=tie_word_embeddings, **rest)


def _low_rank(factor: float, n_model: int) -> int:
    return max(32, round(factor * math.sqrt(n_model) / 32) * 32)


AutoConfig.register(RWKV7Config.model_type, RWKV7Config, exist_ok=True)


@register("RWKV7ForCausalLM")
class Rwkv7(Decoder):
    """Implements RWKV-7: each layer is a time mix and a channel mix."""

    def __init__(self, config: RWKV7Config, checkpoint: Checkpoint) -> None:
        _check(config)
        n_model = config.hidden_size
        vocabulary = Vocabulary.load(checkpoint, config, "model.embeddings.weight")

        def norm(name: str) -> LayerNorm:
            bias = checkpoint.take_optional(config.norm_bias, f"model.{name}.bias", n_model)
            return LayerNorm(checkpoint.take(f"model.{name}.weight", n_model), bias, config.norm_eps)

        layers = []
        for i in range(config.num_hidden_layers):
            prefix, ffn = f"layers.{i}", f"model.layers.{i}.ffn"
            channel_mix = ChannelMix(
                TokenMix(i, "feed_forward_shift", take_mixture(checkpoint, f"{ffn}.x_k", n_model)),
                checkpoint.take(f"{ffn}.key.weight", config.intermediate_size, n_model),
                checkpoint.take(f"{ffn}.value.weight", n_model, config.intermediate_size),
            )
            layers.append(
                RWKVLayer(
                    (norm(f"{prefix}.attn_norm"), Rwkv7TimeMix(config, checkpoint, i)),
                    (norm(f"{prefix}.ffn_norm"), channel_mix),
                    norm(f"{prefix}.pre_norm") if i == 0 and config.norm_first else None,
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("norm"))


def _check(config: RWKV7Config) -> None:
    n_model, value_dim = config.hidden_size, config.value_dim
    if config.hidden_act != "sqrelu":
        raise UnsupportedModelError(f"hidden_act={config.hidden_act!r}; RWKV-7 is implemented with 'sqrelu'")
    if config.attn is not None:
        raise UnsupportedModelError(f"attn={config.attn}; RWKV-7 is implemented without attention layers")
    if value_dim is not None and {n_model} != set(value_dim if isinstance(value_dim, list) else [value_dim]):
        raise UnsupportedModelError(
            f"value_dim={value_dim}; RWKV-7 is implemented with values as wide as the model, {n_model}"
        )
    if n_model % config.head_dim:
        raise FormatError(f"head_dim={config.head_dim}, but hidden_size={n_model} is no multiple of it")


_FIRST_VALUES = "values of RWKV-7's first layer"
"""The key in a step's notes of the first layer's values, (T, M). Later layers mix these into their own values."""


class Rwkv7TimeMix:
    """Computes RWKV-7's time mix: token mixtures, projections and low-rank gates around `memory.recurrences.RWKV7`.

    Peng et al. 2025, section 4.1.
    """

    def __init__(self, config: RWKV7Config, checkpoint: Checkpoint, layer: int) -> None:
        prefix, n_model, take = f"model.layers.{layer}.attn", config.hidden_size, checkpoint.take
        self._mix = TokenMix(layer, "attention_shift", *_mixtures(checkpoint, prefix, n_model))
        self._r, self._k, self._v, self._out = (
            Linear(take(f"{prefix}.{x}_proj.weight", n_model, n_model)) for x in "rkvo"
        )

        def low_rank(name: str, rank: int, inner: str | None, outer: str | None) -> LowRank:
            return LowRank(checkpoint, f"{prefix}.{name}_lora.lora", n_model, rank, inner, outer)

        self._decay = low_rank("w", config.decay_low_rank_dim, "tanh", "sigmoid")
        self._rate = low_rank("a", config.a_low_rank_dim, None, "sigmoid")
        self._gate = low_rank("g", config.gate_low_rank_dim, "sigmoid", None)
        self._value_mix = None if layer == 0 else low_rank("v", config.v_low_rank_dim, None, "sigmoid")
        self._k_k_M, self._k_a_M = (take(f"{prefix}.{name}", n_model) for name in ("k_k", "k_a"))
        self._bonus_HN = take(f"{prefix}.r_k", config.num_heads, config.head_dim)
        self._norm_weight_M, self._norm_bias_M = (
            take(f"{prefix}.g_norm.{part}", n_model) for part in ("weight", "bias")
        )
        self._norm_eps = config.head_dim * config.norm_eps
        # This is added below the root: with `fuse_norm` as much as the fused kernel adds, else only enough to avoid 0 /
        # 0.
        self._unit_eps = 1e-6 if config.fuse_norm else 1e-24
        self._n_heads, self._layer = config.num_heads, layer
        self.specs = (self._mix.spec, rwkv7_spec(config.num_heads, config.head_dim, "wkv"))

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        for_r, for_w, for_k, for_v, for_a, for_g = self._mix(x_TM, step)
        r_TM, k_TM, rate_TM = self._r(for_r), self._k(for_k), self._rate(for_a)
        v_TM = self._values(for_v, step)
        kappa_THN = self._unit((k_TM * self._k_k_M).view(len(x_TM), self._n_heads, -1))
        k_TM = torch.addcmul(k_TM, k_TM * (rate_TM - 1), self._k_a_M)
        log_decay_TM = self._decay(for_w) * _LOG_DECAY
        rows_T6HN = torch.stack([r_TM, log_decay_TM, k_TM, v_TM, kappa_THN.flatten(1), rate_TM], 1)
        rows_T6HN = rows_T6HN.view(len(x_TM), 6, self._n_heads, -1)
        y_THN = step.recur(self._layer, rows_T6HN, _FOLD, name="wkv")
        y_TM = F.group_norm(y_THN.flatten(1), self._n_heads, self._norm_weight_M, self._norm_bias_M, self._norm_eps)
        r_THN, _, k_THN, v_THN, _, _ = rows_T6HN.unbind(1)
        bonus_TH1 = (r_THN * k_THN * self._bonus_HN).sum(-1, keepdim=True)
        return self._out((y_TM + (bonus_TH1 * v_THN).flatten(1)) * self._gate(for_g))

    def _values(self, x_TM: Tensor, step: Step) -> Tensor:
        v_TM = self._v(x_TM)
        if self._value_mix is None:
            step.notes[_FIRST_VALUES] = v_TM
            return v_TM
        return torch.lerp(v_TM, step.notes[_FIRST_VALUES], self._value_mix(x_TM))

    def _unit(self, x_THN: Tensor) -> Tensor:
        """Return x / |x| over the last axis, computed in float32."""
        x_THN32 = x_THN.float()
        return (x_THN32 * torch.rsqrt(x_THN32.square().sum(-1, keepdim=True) + self._unit_eps)).to(x_THN.dtype)


_FOLD = RWKV7()


class LowRank:
    """Computes outer(W_2 inner(W_1 x) + b), a low-rank projection. Without `outer` there is no bias."""

    def __init__(
        self, checkpoint: Checkpoint, prefix: str, n_model: int, rank: int, inner: str | None, outer: str | None
    ) -> None:
        bias = checkpoint.take_optional(outer is not None, f"{prefix}.2.bias", n_model)
        self._down = Linear(checkpoint.take(f"{prefix}.0.weight", rank, n_model), activation=inner)
        self._up = Linear(checkpoint.take(f"{prefix}.2.weight", n_model, rank), bias=bias, activation=outer)

    def __call__(self, x_TM: Tensor) -> Tensor:
        return self._up(self._down(x_TM))


def _mixtures(checkpoint: Checkpoint, prefix: str, n_model: int) -> list[Tensor]:
    """Return the weights of the mixtures, (M,) each, in the order of `_MIXTURES`."""
    if f"{prefix}.x_x" in checkpoint:
        return list(take_mixture(checkpoint, f"{prefix}.x_x", len(_MIXTURES), n_model).view(-1, n_model))
    return [take_mixture(checkpoint, f"{prefix}.x_{name}", 1, 1, n_model) for name in _MIXTURES]
