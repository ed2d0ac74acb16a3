"""Implements RWKV-4 (Peng et al. 2023): averages of values that decay with age, without attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.recurrences import RWKV4, rwkv4_spec
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import LayerNorm
from hybridmem.models.layers.rwkv import ChannelMix, RWKVLayer, TokenMix, take_mixture
from hybridmem.models.layers.vocabulary import Vocabulary
from hybridmem.models.loading.architectures import register
from hybridmem.models.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import RwkvConfig

_LAST_NORM_EPS = 1e-5
"""The epsilon of the norm before the head. The config's epsilon is that of all other norms."""


@register("RwkvForCausalLM")
class Rwkv(Decoder):
    """Implements RWKV-4: each layer is a time mix and a channel mix.

    Every `rescale_every` layers the residual stream is halved, and so is everything that later layers add to it. So the
    stream stays in the range of float16.
    """

    def __init__(self, config: RwkvConfig, checkpoint: Checkpoint) -> None:
        n_model, every = config.hidden_size, config.rescale_every
        vocabulary = Vocabulary.load(checkpoint, config, "rwkv.embeddings.weight", head="head.weight")

        def norm(name: str, eps: float = config.layer_norm_epsilon) -> LayerNorm:
            weight, bias = (checkpoint.take(f"rwkv.{name}.{part}", n_model) for part in ("weight", "bias"))
            return LayerNorm(weight, bias, eps)

        layers = []
        for i in range(config.num_hidden_layers):
            prefix, scale = f"blocks.{i}", 0.5 ** (i // every) if every > 0 else 1.0
            layers.append(
                RWKVLayer(
                    (norm(f"{prefix}.ln1"), TimeMix(config, checkpoint, i, scale)),
                    (norm(f"{prefix}.ln2"), _channel_mix(config, checkpoint, i, scale)),
                    norm(f"{prefix}.pre_ln") if i == 0 else None,
                    0.5 if every > 0 and (i + 1) % every == 0 else 1.0,
                )
            )
        super().__init__(config, checkpoint, vocabulary, layers, norm("ln_out", _LAST_NORM_EPS))


def _channel_mix(config: RwkvConfig, checkpoint: Checkpoint, i: int, scale: float) -> ChannelMix:
    prefix, n_model, n_inner = f"rwkv.blocks.{i}.feed_forward", config.hidden_size, config.intermediate_size
    mixtures = (
        take_mixture(checkpoint, f"{prefix}.time_mix_{x}", 1, 1, n_model, is_of_token=True)
        for x in ("key", "receptance")
    )
    return ChannelMix(
        TokenMix(i, "feed_forward_shift", *mixtures),
        checkpoint.take(f"{prefix}.key.weight", n_inner, n_model),
        checkpoint.take(f"{prefix}.value.weight", n_model, n_inner) * scale,
        checkpoint.take(f"{prefix}.receptance.weight", n_model, n_model),
    )


class TimeMix:
    """Computes y = W_out(sigmoid(r) wkv(k, v)) (Peng et al. 2023, eq. 11-18).

    Args:
        scale: the factor on the output.
    """

    def __init__(self, config: RwkvConfig, checkpoint: Checkpoint, layer: int, scale: float) -> None:
        prefix, n_model, n_channels = f"rwkv.blocks.{layer}.attention", config.hidden_size, config.attention_hidden_size
        names, take = ("key", "value", "receptance"), checkpoint.take
        mixtures = (
            take_mixture(checkpoint, f"{prefix}.time_mix_{name}", 1, 1, n_model, is_of_token=True) for name in names
        )
        self._mix = TokenMix(layer, "attention_shift", *mixtures)
        self._key, self._value, self._receptance = (
            Linear(
                take(f"{prefix}.{name}.weight", n_channels, n_model),
                activation="sigmoid" if name == "receptance" else None,
            )
            for name in names
        )
        self._out = Linear(take(f"{prefix}.output.weight", n_model, n_channels) * scale)
        decay_E, first_E = (
            take(f"{prefix}.time_{name}", n_channels, dtype=torch.float32) for name in ("decay", "first")
        )
        self._recurrence = RWKV4(-decay_E.exp(), first_E)
        self._layer = layer
        self.specs = (self._mix.spec, rwkv4_spec(n_channels, "wkv"))

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        key_TM, value_TM, receptance_TM = self._mix(x_TM, step)
        rows_T2E = torch.stack([self._key(key_TM), self._value(value_TM)], 1)
        return self._out(
            step.recur(self._layer, rows_T2E, self._recurrence, name="wkv") * self._receptance(receptance_TM)
        )
