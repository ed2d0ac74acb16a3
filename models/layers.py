"""Layers that several models share, but for mixers. Shape legend: `memory.interface`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.kernels import rms_norm
from models.checkpoint import Checkpoint
from models.linear import Linear


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight (Zhang & Sennrich 2019)."""

    weight_M: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(self.weight_M.dtype), self.weight_M, self.eps)


def load_offset_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> RMSNorm:
    """A norm that multiplies by 1 + weight, as in Gemma and its relatives."""
    weight = 1 + checkpoint.take(f"{name}.weight", size, dtype=torch.float32)
    return RMSNorm(weight.to(checkpoint.dtype), eps)


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias (Ba et al. 2016)."""

    weight_M: Tensor
    bias_M: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight_M.shape, self.weight_M, self.bias_M, self.eps)


class Vocabulary:
    """Token embedding and output head, one matrix if they are tied.

    A packed head cannot be looked up in. Then the embedding stays mapped from the file, where a lookup reads single rows.

    Args:
        head: name of the head's weights; None if they are the embedding's.
        embedding_scale, logits_scale: what embeddings and logits are multiplied by.
        logits_cap: logits become cap * tanh(logits / cap) after that (Gemma Team 2024, "Gemma 2"); None for no cap.
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, n_tokens: int, n_model: int, head: str | None, *,
        embedding_scale: float = 1.0, logits_scale: float = 1.0, logits_cap: float | None = None,
    ) -> None:  # fmt: skip
        weight = checkpoint.take(head or name, n_tokens, n_model)
        self._head = Linear(weight)
        is_shared = head is None and not self._head.is_packed
        self._embedding = weight if is_shared else checkpoint.take_as_stored(name, n_tokens, n_model)
        if not self._head.is_packed:
            self._embedding = self._embedding.to(checkpoint.device, checkpoint.dtype)
        self._dtype = checkpoint.dtype
        self._embedding_scale, self._logits_scale, self._logits_cap = embedding_scale, logits_scale, logits_cap

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """(T, M)."""
        x_TM = self._embedding[token_ids_T].to(self._dtype)
        return x_TM if self._embedding_scale == 1.0 else x_TM * self._embedding_scale

    def logits(self, x_TM: Tensor) -> Tensor:
        """(T, vocabulary)."""
        logits = self._head(x_TM)
        if self._logits_scale != 1.0:
            logits = logits * self._logits_scale
        return logits if self._logits_cap is None else torch.tanh(logits / self._logits_cap) * self._logits_cap


@dataclass(frozen=True)
class MLP:
    """W_down act(W_up x)."""

    up: Linear
    down: Linear

    @staticmethod
    def load(checkpoint: Checkpoint, prefix: str, n_model: int, n_inner: int, activation: str, *, has_bias: bool = False) -> MLP:
        """From `up_proj` and `down_proj` below `prefix`."""

        def linear(name: str, n_out: int, n_in: int, activation: str | None = None) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", n_out, n_in, has_bias=has_bias, activation=activation)

        return MLP(linear("up_proj", n_inner, n_model, activation), linear("down_proj", n_model, n_inner))

    def __call__(self, x_TM: Tensor) -> Tensor:
        return self.down(self.up(x_TM))


@dataclass(frozen=True)
class GatedMLP:
    """W_down(act(W_gate x) * W_up x) (Shazeer 2020); the activation is the gate's."""

    gate: Linear
    up: Linear
    down: Linear

    @staticmethod
    def load(
        checkpoint: Checkpoint, prefix: str, n_model: int, n_inner: int, activation: str, *, has_bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> GatedMLP:  # fmt: skip
        """From what `names` calls gate, up and down below `prefix`."""

        def linear(name: str, n_out: int, n_in: int, activation: str | None = None) -> Linear:
            return Linear.load(checkpoint, f"{prefix}.{name}", n_out, n_in, has_bias=has_bias, activation=activation)

        gate, up, down = names
        return GatedMLP(linear(gate, n_inner, n_model, activation), linear(up, n_inner, n_model), linear(down, n_model, n_inner))

    @staticmethod
    def of(gate_up: Tensor, down: Tensor, activation: str) -> GatedMLP:
        """From weights (2 n_inner, n_model), the gate's first, and (n_model, n_inner)."""
        gate, up = gate_up.chunk(2)
        return GatedMLP(Linear(gate, activation=activation), Linear(up), Linear(down))

    def __call__(self, x_TM: Tensor) -> Tensor:
        return self.down(self.gate(x_TM) * self.up(x_TM))
