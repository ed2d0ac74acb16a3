"""Implements hyper-connections: several residual streams, mixed into one for each part of a layer.

Zhu et al. 2024, "Hyper-Connections". The streams of a token lie in one row (T, S M), one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory import Step
from hybridmem.memory.kernels import RowProduct, Weights, steady
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.decoder import Function, Mixer
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import GatedNorm
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.dry import with_one_more


def load_stream_norm(checkpoint: Checkpoint, name: str, n_streams: int, n_model: int, eps: float) -> Function:
    """Load a norm of each stream, which multiplies by 1 + weight."""
    weight = with_one_more(checkpoint.take(f"{name}.weight", n_streams * n_model, dtype=torch.float32))
    norm = GatedNorm(Weights(weight.to(checkpoint.dtype)), eps, n_streams)
    return lambda x_TE: norm(x_TE, None)


@dataclass(frozen=True)
class GatedStreams:
    """Mixes streams by gates of low rank, and says how much of a part's output each stream gets.

    Attributes:
        norm: norms each stream.
        down, up: compute the gates of all streams, (T, S M).
        shares: computes half of each stream's share, (T, S); None where nothing is added to the streams.
    """

    n_streams: int
    norm: Function
    down: Linear
    up: Linear
    shares: Linear | None

    @staticmethod
    def load(
        checkpoint: Checkpoint, prefix: str, n_streams: int, n_model: int, n_rank: int, eps: float, *, adds: bool = True
    ) -> GatedStreams:
        n_all = n_streams * n_model

        def linear(name: str, n_out: int, n_in: int, activation: str, factor: float = 1.0) -> Linear:
            checkpoint.scale(f"{prefix}.{name}.weight", factor)
            return Linear.load(checkpoint, f"{prefix}.{name}", n_out, n_in, activation=activation)

        return GatedStreams(
            n_streams,
            load_stream_norm(checkpoint, f"{prefix}.hc_norm", n_streams, n_model, eps),
            linear("input_mix_weight_down", n_rank, n_all, "silu", 1 / n_streams),
            linear("input_mix_weight_up", n_all, n_rank, "sigmoid"),
            linear("block_inject_weight", n_streams, n_all, "sigmoid", 1 / n_streams) if adds else None,
        )

    def mix(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the streams' mean after the gates, (T, M), and the normed streams, (T, S M)."""
        normed_TE = self.norm(x_TE)
        gated_TE = self.up(self.down(normed_TE)) * normed_TE
        return gated_TE.view(len(x_TE), self.n_streams, -1).mean(1), normed_TE

    def add(self, x_TE: Tensor, part: Callable[..., Tensor], *arguments: Step) -> Tensor:
        """Return the streams with the output of a part for their mixture."""
        mixed_TM, normed_TE = self.mix(x_TE)
        assert self.shares is not None
        shares_TS1 = self.shares(normed_TE)[..., None]
        y_T1M = part(mixed_TM, *arguments)[:, None]
        return torch.addcmul(x_TE.view(len(x_TE), self.n_streams, -1), shares_TS1, y_T1M, value=2).flatten(1)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self.mix(x_TE)[0]


@dataclass(frozen=True)
class RoutedStreams:
    """Mixes streams by numbers that they compute themselves, and routes streams among each other.

    Xie et al. 2026, "mHC: Manifold-Constrained Hyper-Connections". The matrix by which the streams are routed has rows
    and columns that sum to one, so that streams keep their size (Sinkhorn & Knopp 1967).

    Attributes:
        weights: a product, (S + S + S S, S M) in float32, that computes shares of the mixture, shares of a part's
            output, and routes.
        biases, scales: (S + S + S S,) and (3,) float32, of these three.
        eps, n_rounds: a number that is added to sums, and how often rows and columns are normed.
        norm_eps: the epsilon of the norm of all streams together, which has no weight.
        norm: the norm of the mixture.
    """

    n_streams: int
    weights: RowProduct
    biases: Tensor
    scales: Tensor
    eps: float
    n_rounds: int
    norm_eps: float
    norm: Function
    sigmoid: Function = field(default_factory=lambda: steady(torch.sigmoid))

    def add(self, x_TE: Tensor, part: Callable[..., Tensor], *arguments: Step) -> Tensor:
        """Return the routed streams with the output of a part for their mixture."""
        n, x_TSM = self.n_streams, x_TE.view(len(x_TE), self.n_streams, -1)
        normed_TE = F.rms_norm(x_TE.float(), x_TE.shape[1:], eps=self.norm_eps)
        computed = self.weights(normed_TE).split_with_sizes([n, n, n * n], -1)
        mixture, shares, routes = (
            x * scale + bias
            for x, scale, bias in zip(computed, self.scales, self.biases.split_with_sizes([n, n, n * n]), strict=True)
        )
        mixed_TM = ((self.sigmoid(mixture) + self.eps)[..., None] * x_TSM).sum(1).to(x_TE.dtype)
        y_T1M = part(self.norm(mixed_TM), *arguments)[:, None]
        shares_TS1 = (2 * self.sigmoid(shares))[..., None].to(x_TE.dtype)
        routed_TSM = self._doubly_stochastic(routes).to(x_TE.dtype).mT @ x_TSM
        return torch.addcmul(routed_TSM, shares_TS1, y_T1M).flatten(1)

    def _doubly_stochastic(self, routes: Tensor) -> Tensor:
        """Return (T, S, S) whose rows and columns sum to about one."""
        x_TSS: Tensor = routes.view(-1, self.n_streams, self.n_streams).softmax(-1) + self.eps
        x_TSS = x_TSS / (x_TSS.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.n_rounds - 1):
            x_TSS = x_TSS / (x_TSS.sum(-1, keepdim=True) + self.eps)
            x_TSS = x_TSS / (x_TSS.sum(-2, keepdim=True) + self.eps)
        return x_TSS


class Streams(Protocol):
    """Declares how a part of a layer reads from residual streams, and is added to them."""

    def add(self, x_TE: Tensor, part: Callable[..., Tensor], *arguments: Step) -> Tensor:
        """Return the streams with the output of a part for their mixture."""
        ...


@dataclass(frozen=True)
class StreamBlock:
    """Computes a layer on residual streams.

    Attributes:
        before: a mixer of streams whose output is added first, or None.
        mixer, feed_forward: the two parts, each with its mixture of streams.
        n_copies: how many streams the input is repeated into: 1 in all layers but the first.
    """

    before: Mixer | None
    mixer: tuple[Streams, Mixer]
    feed_forward: tuple[Streams, Function]
    n_copies: int = 1

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (*self.mixer[1].specs, *(() if self.before is None else self.before.specs))

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        x_TE = x_TM if self.n_copies == 1 else x_TM.repeat(1, self.n_copies)
        if self.before is not None:
            x_TE = x_TE + self.before(x_TE, step)
        x_TE = self.mixer[0].add(x_TE, self.mixer[1], step)
        return self.feed_forward[0].add(x_TE, self.feed_forward[1])
