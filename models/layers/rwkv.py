"""Implements what the generations of RWKV share: layers with two parts, both of which also read the previous token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridmem.memory import RecurrentSpec, Step
from hybridmem.memory.recurrences import TokenShift, token_shift_spec
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.decoder import Function, Mixer
from hybridmem.models.layers.linear import Linear
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.dry import joined

_SHIFT = TokenShift()


class TokenMix:
    """Computes weighted means of a token and the previous token, channel by channel: one mixture for each use.

    Args:
        weights: (M,) each, the weights of the previous token.
        name: the name, in its layer, of the memory of the previous token.
    """

    def __init__(self, layer: int, name: str, *weights: Tensor) -> None:
        self._weights_K1M = joined(*(weight[None] for weight in weights))[:, None]
        self._layer = layer
        self.spec: RecurrentSpec = token_shift_spec(len(weights[0]), name)

    def __call__(self, x_TM: Tensor, step: Step) -> tuple[Tensor, ...]:
        """Return the mixtures, (T, M) each."""
        before_TM = step.recur(self._layer, x_TM, _SHIFT, name=self.spec.name)
        return torch.lerp(x_TM, before_TM, self._weights_K1M).unbind()


class ChannelMix:
    """Computes W_value(relu(W_key x)^2) of a mixture of tokens.

    With `receptance`, the result is multiplied by sigmoid(W_receptance x) of a second mixture. See Peng et al. 2023,
    eq. 19-21.

    Args:
        mix: one mixture for `key`, and one for `receptance` if it is given.
    """

    def __init__(self, mix: TokenMix, key: Tensor, value: Tensor, receptance: Tensor | None = None) -> None:
        self._mix = mix
        self._key, self._value = Linear(key, activation="relu"), Linear(value)
        self._receptance = None if receptance is None else Linear(receptance, activation="sigmoid")
        self.specs = (mix.spec,)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        key_TM, *receptance = self._mix(x_TM, step)
        y_TM = self._value(self._key(key_TM).square())
        return y_TM if self._receptance is None else y_TM * self._receptance(*receptance)


@dataclass(frozen=True)
class RWKVLayer:
    """Computes x + time_mix(norm(x)), then x + channel_mix(norm(x)).

    Attributes:
        time_mix, channel_mix: the two parts, each with the norm before it.
        first_norm: the norm of the embeddings, before the first layer.
        scale: the factor on the layer's output.
    """

    time_mix: tuple[Function, Mixer]
    channel_mix: tuple[Function, Mixer]
    first_norm: Function | None = None
    scale: float = 1.0

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (*self.time_mix[1].specs, *self.channel_mix[1].specs)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        if self.first_norm is not None:
            x_TM = self.first_norm(x_TM).to(x_TM.dtype)
        for norm, mixer in (self.time_mix, self.channel_mix):
            x_TM = x_TM + mixer(norm(x_TM), step)
        return x_TM if self.scale == 1.0 else x_TM * self.scale


def take_mixture(checkpoint: Checkpoint, name: str, *shape: int, is_of_token: bool = False) -> Tensor:
    """Load (M,) weights for `TokenMix`. With `is_of_token`, the checkpoint holds the weights of the token itself."""
    weights = checkpoint.take(name, *shape, dtype=torch.float32).flatten()
    return (1 - weights if is_of_token else weights).to(checkpoint.dtype)
