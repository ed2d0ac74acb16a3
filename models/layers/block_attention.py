"""Implements attention over depth: a part of a layer reads what earlier blocks of layers have left of the same token.

Kimi Team 2026, "Attention Residuals". The rows of a token are (B, M): the sums of B - 1 blocks, and the sum of the
block that is not complete yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.kernels import RowProduct
from hybridmem.models.layers.linear import Linear
from hybridmem.models.weights.checkpoint import Checkpoint

_EPS = 1e-6
"""The epsilon of the rows' norm, which no config names."""


@dataclass(frozen=True)
class BlockAttention:
    """Mixes the normed rows of a token by weights that learned queries give them.

    A row's bits do not depend on the other tokens if the model is made to be reproducible.

    Attributes:
        queries: weights (Q, M), float32.
    """

    queries: RowProduct

    @staticmethod
    def load(checkpoint: Checkpoint, name: str, n_model: int, n_queries: int = 1) -> BlockAttention:
        shape = (n_model,) if n_queries == 1 else (n_queries, n_model)
        return BlockAttention(RowProduct(checkpoint.take(name, *shape, dtype=torch.float32).view(-1, n_model)))

    def __call__(self, x_TBM: Tensor) -> Tensor:
        """Return a mixture for each query, (T, Q, M)."""
        n_tokens, n_blocks, n_model = x_TBM.shape
        rows_TBM = F.rms_norm(x_TBM.float(), (n_model,), eps=_EPS)
        scores_TBQ = self.queries(rows_TBM.reshape(-1, n_model)).view(n_tokens, n_blocks, -1) * n_model**-0.5
        weights_TQB = scores_TBQ.transpose(1, 2).softmax(-1)
        mixed_TQM: Tensor = weights_TQB[:, :, :1] * rows_TBM[:, :1]
        for b in range(1, n_blocks):  # A product of matrices may add in another order for another number of tokens.
            mixed_TQM = mixed_TQM + weights_TQB[:, :, b : b + 1] * rows_TBM[:, b : b + 1]
        return mixed_TQM.to(x_TBM.dtype)


@dataclass(frozen=True)
class MessageGate:
    """Computes (1 - forget) * x + gain * message. Both gates are computed from x and the message."""

    down: Linear
    forget: Linear
    gain: Linear
    eps: float

    @staticmethod
    def load(checkpoint: Checkpoint, prefix: str, n_model: int, n_rank: int, eps: float) -> MessageGate:
        def linear(name: str, n_out: int, n_in: int, activation: str | None = None) -> Linear:
            return Linear(checkpoint.take(f"{prefix}.{name}_weight", n_out, n_in), activation=activation)

        forget, gain = (linear(name, n_model, n_rank, "tanh") for name in ("forget", "gain"))
        return MessageGate(linear("down", n_rank, 2 * n_model), forget, gain, eps)

    def __call__(self, x_TM: Tensor, message_TM: Tensor) -> Tensor:
        normed = [F.rms_norm(x, x.shape[-1:], eps=self.eps) for x in (x_TM, message_TM)]
        low_TR = self.down(torch.cat(normed, -1))
        return (1 - self.forget(low_TR)) * x_TM + self.gain(low_TR) * message_TM
