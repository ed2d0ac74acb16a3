"""Implements an indexer that chooses spans of rows: a span's key is made from the keys of its tokens.

The tokens of a span that is not finished are remembered as the window of a recurrence, so a rollback into the span
keeps what its key needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import UNROTATED, ChosenRows, IndexSpec, Step
from hybridmem.memory.recurrences import CausalConv, GatedPool, ShortConv, gated_pool_spec, short_conv_spec
from hybridmem.memory.specs import LayerSpec
from hybridmem.models.layers.attention import Attention, Rotary, turn
from hybridmem.models.layers.decoder import Function
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import LayerNorm, load_offset_norm
from hybridmem.models.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from transformers import Glm5NextTextConfig, Qwen4ExpTextConfig

SPAN, _NORM_EPS = "span", 1e-6


@dataclass(frozen=True)
class MeanSpans:
    """Remembers raw keys of tokens, and chooses spans by the means of their keys.

    A convolution with equal taps computes the means, of which only those at the last tokens of spans are used. The same
    convolution brings the first token's angles to the last one. All heads of an index have the same weight.

    Attributes:
        layer: index in the model's memory spec.
        norm: of means, before they are rotated.
    """

    layer: int
    norm: Function
    recurrence: ShortConv

    @staticmethod
    def of(layer: int, norm: Function, n_span: int, size: int, n_rotated: int, like: Tensor) -> MeanSpans:
        """Make one for keys of `size` elements, of which the first are rotated, with the dtype and device of `like`."""
        weight_WE = like.new_zeros(n_span, size + n_rotated)
        weight_WE[:, :size] = 1 / n_span
        weight_WE[0, size:] = 1
        return MeanSpans(layer, norm, ShortConv(CausalConv(weight_WE, activation=False)))

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        n_span, n_channels = self.recurrence.conv.weight_WE.shape
        return () if n_span == 1 else (short_conv_spec(n_channels, n_span, SPAN),)

    def choose(self, q_THD: Tensor, k_TD: Tensor, angles: tuple[Tensor, Tensor], step: Step) -> ChosenRows:
        """Choose spans for normed queries that are not rotated yet.

        Args:
            k_TD: raw keys of the tokens.
            angles: cosines and sines of their positions, (T, 1, R / 2) each.
        """
        cos, sin = angles
        q_THD = turn(q_THD, cos, sin)
        if self.specs:
            rows = torch.cat([k_TD, cos[:, 0], sin[:, 0]], -1)
            found = step.recur(self.layer, rows, self.recurrence, name=SPAN)
            k_TD, *angles_TR = found.split_with_sizes([k_TD.shape[1], cos.shape[-1], sin.shape[-1]], -1)
            cos, sin = (each[:, None] for each in angles_TR)
        k_T1D = turn(self.norm(k_TD)[:, None], cos, sin)
        weights_TH = torch.ones(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        return step.choose(self.layer, q_THD, k_T1D, weights_TH)


class MeanIndexer:
    """Chooses spans by the means of their tokens' keys: `chosen = indexer(x, step)`.

    The mean is normed, and rotated by the position of the span's first token.
    """

    def __init__(
        self, config: Qwen4ExpTextConfig, checkpoint: Checkpoint, prefix: str, layer: int, rotary: Rotary
    ) -> None:
        n_heads, size, n_span = config.indexer_n_heads, config.indexer_head_dim, config.indexer_compress_ratio
        self._rotary, self._n_heads, self._size = rotary, n_heads, size
        self._inputs = Linear.load(checkpoint, f"{prefix}.index_qk_proj", (n_heads + 1) * size, config.hidden_size)
        self._q_norm, k_norm = (
            load_offset_norm(checkpoint, f"{prefix}.{x}_layernorm", size, config.rms_norm_eps) for x in "qk"
        )
        self.spec = IndexSpec(n_heads, size, config.indexer_budget, rotation=rotary.rotation, span_tokens=n_span)
        n_rotated = 2 * len(rotary.rotation.frequencies)
        like = torch.empty(0, dtype=checkpoint.dtype, device=checkpoint.device)
        self._spans = MeanSpans.of(layer, k_norm, n_span, size, n_rotated, like)
        self.specs: tuple[LayerSpec, ...] = (self.spec, *self._spans.specs)

    def __call__(self, x_TM: Tensor, step: Step) -> ChosenRows:
        heads = self._inputs(x_TM).view(len(x_TM), -1, self._size)
        angles = self._rotary.angles(step, heads.dtype)
        return self._spans.choose(self._q_norm(heads[:, : self._n_heads]), heads[:, -1], angles, step)


class PoolIndexer:
    """Chooses spans by gated averages of their tokens' keys: `chosen = indexer(x, compressed queries, step)`.

    Neither keys nor queries are rotated.
    """

    def __init__(self, config: Glm5NextTextConfig, checkpoint: Checkpoint, prefix: str, layer: int) -> None:
        n_heads, size, n_span, n_model = (
            config.index_n_heads, config.index_head_dim, config.index_kpool, config.hidden_size,
        )  # fmt: skip
        take, self._layer, self._n_heads = checkpoint.take, layer, n_heads
        self._queries = Linear(take(f"{prefix}.wq_b.weight", n_heads * size, config.q_lora_rank))
        self._keys = Linear(take(f"{prefix}.wk.weight", size, n_model))
        self._gates = Linear(take(f"{prefix}.index_kpool_compress_gate", size, n_model))
        weight, bias = (take(f"{prefix}.k_norm.{part}", size) for part in ("weight", "bias"))
        self._norm = LayerNorm(weight, bias, _NORM_EPS)
        self._weights = Linear(take(f"{prefix}.weights_proj.weight", n_heads, n_model, dtype=torch.float32))
        bias_WE = take(f"{prefix}.index_kpool_compress_ape", n_span, size, dtype=torch.float32)
        self._recurrence = GatedPool(bias_WE)
        self.spec = IndexSpec(n_heads, size, config.index_topk, rotation=UNROTATED, span_tokens=n_span)
        spans = () if n_span == 1 else (gated_pool_spec(size, n_span, SPAN),)
        self.specs: tuple[LayerSpec, ...] = (self.spec, *spans)

    def __call__(self, x_TM: Tensor, q_TC: Tensor, step: Step) -> ChosenRows:
        q_THD = self._queries(q_TC).view(len(x_TM), self._n_heads, -1)
        k_TD = self._norm(self._keys(x_TM))
        if self.spec.span_tokens > 1:
            rows = torch.cat([k_TD, self._gates(x_TM)], -1)
            k_TD = step.recur(self._layer, rows, self._recurrence, name=SPAN)
        weights_TH = self._weights(x_TM.float()) * self._n_heads**-0.5
        return step.choose(self._layer, q_THD, k_TD[:, None], weights_TH)


@dataclass(frozen=True)
class IndexedAttention:
    """Computes attention to the rows that an indexer chooses."""

    attention: Attention
    indexer: MeanIndexer

    @staticmethod
    def of(attention: Attention, indexer: MeanIndexer) -> IndexedAttention:
        """Return this attention, reading what the indexer chooses."""
        index = indexer.spec
        spec = replace(attention.spec, n_chosen=index.n_chosen, span_tokens=index.span_tokens)
        return IndexedAttention(replace(attention, spec=spec), indexer)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        return (*self.attention.specs, *self.indexer.specs)

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        return self.attention(x_TM, step, self.indexer(x_TM, step))
