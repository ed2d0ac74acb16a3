"""Implements the indexer of sparse latent attention: small queries and keys by which each token chooses rows.

DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hybridmem.memory import ChosenRows, IndexSpec, Step
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.attention import Rotary
from hybridmem.models.layers.latent_attention import LatentAttention
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import LayerNorm
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORM_EPS = 1e-6
CHOSEN = "rows that the last index chose"
"""The note of a step that later layers read."""


@dataclass(frozen=True)
class Indexer:
    """Chooses the rows that a layer's attention reads: `chosen = indexer(x, compressed queries, step)`.

    Attributes:
        layer: index in the model's memory spec.
        queries: computes the index's queries, H D elements, from compressed ones.
        keys, norm: compute the key of a token from the layer's input.
        weights: computes the weight of each head, in float32 as close scores are common.
    """

    layer: int
    spec: IndexSpec
    queries: Linear
    keys: Linear
    norm: LayerNorm
    weights: Linear
    rotary: Rotary

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (self.spec,)

    def __call__(self, x_TM: Tensor, q_TC: Tensor, step: Step) -> ChosenRows:
        n_heads, size = self.spec.n_query_heads, self.spec.head_dim
        q_THD, k_T1D = self.queries(q_TC).view(-1, n_heads, size), self.norm(self.keys(x_TM))[:, None]
        rotated = self.rotary(torch.cat([q_THD, k_T1D], 1), step)
        weights_TH = self.weights(x_TM.float()) * n_heads**-0.5
        return step.choose(self.layer, rotated[:, :n_heads], rotated[:, n_heads:], weights_TH)


class Chooses(Protocol):
    """Declares an indexer: it chooses rows by a layer's input and its compressed queries."""

    @property
    def specs(self) -> tuple[LayerSpec, ...]: ...
    def __call__(self, x_TM: Tensor, q_TC: Tensor, step: Step) -> ChosenRows: ...


@dataclass(frozen=True)
class IndexedLatentAttention:
    """Computes latent attention to chosen rows; without an indexer, to those of the last layer that has one."""

    attention: LatentAttention
    indexer: Chooses | None

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (*self.attention.specs, *(() if self.indexer is None else self.indexer.specs))

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        def choose(q_TC: Tensor) -> ChosenRows:
            if self.indexer is not None:
                step.notes[CHOSEN] = self.indexer(x_TM, q_TC, step)
            chosen: ChosenRows = step.notes[CHOSEN]
            return chosen

        return self.attention(x_TM, step, choose)


def load_indexer(
    config: PreTrainedConfig, checkpoint: Checkpoint, prefix: str, i: int, rotary: Rotary, *, is_interleaved: bool
) -> Indexer:
    """Load an indexer from the tensors below `prefix`.

    Args:
        is_interleaved: whether the checkpoint pairs neighbours when it rotates; then rows are reordered for `rotary`.
    """
    n_model, n_heads, size, n_rotary = (
        config.hidden_size, config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim,
    )  # fmt: skip
    if n_rotary > size:
        raise UnsupportedModelError(f"index_head_dim={size} has no room for the qk_rope_head_dim={n_rotary} it rotates")

    def in_order(rows: Tensor) -> Tensor:
        """Return rows (D, ...), the first R of them in half pairing."""
        return joined(rows[:n_rotary:2], rows[1:n_rotary:2], rows[n_rotary:]) if is_interleaved else rows

    heads = checkpoint.take(f"{prefix}.wq_b.weight", n_heads * size, config.q_lora_rank)
    weight, bias = (in_order(checkpoint.take(f"{prefix}.k_norm.{part}", size)) for part in ("weight", "bias"))
    return Indexer(
        i,
        replace(IndexSpec(n_heads, size, config.index_topk), rotation=rotary.rotation),
        Linear(joined(*(in_order(head) for head in heads.reshape(n_heads, size, -1)))),
        Linear(in_order(checkpoint.take(f"{prefix}.wk.weight", size, n_model))),
        LayerNorm(weight, bias, _NORM_EPS),
        Linear(checkpoint.take(f"{prefix}.weights_proj.weight", n_heads, n_model, dtype=torch.float32)),
        rotary,
    )
