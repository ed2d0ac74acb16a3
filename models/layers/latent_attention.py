"""Implements multi-head latent attention: all heads read one compressed row for each token.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory import UNROTATED, AttentionSpec, ChosenRows, Step
from hybridmem.memory.kernels import HeadProducts, head_products, multiply_by_row
from hybridmem.models.layers.attention import Rotary
from hybridmem.models.layers.linear import Linear
from hybridmem.models.layers.norms import RMSNorm
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.dry import joined

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NORM_EPS = 1e-6
"""The epsilon of DeepSeek's norms in this attention, whatever the config says, as in transformers and in the training
code."""


@dataclass(frozen=True)
class LatentAttention:
    """Computes `y = attention(x, step)`. A token is stored as a latent of L elements and a rotary key of R elements.

    For a latent c, a head's key is K c with the rotary key appended, and its value is V c. Neither is ever computed: K
    is applied to the query, and V to the weighted sum of latents (the paper's "absorption"), so a step reads L + R
    elements for each token. With many queries at once, this is more work than computing keys and values would be: in
    DeepSeek-V2's sizes, 1,088 multiplications for each head, query and row, instead of 320.

    Attributes:
        layer: index in the model's memory spec.
        inputs: a single product for queries (or their compressed form), latent and rotary key, in this order.
        queries: the norm and the product that compute queries, H (N + R) elements, from their compressed form, or None.
        norm: the norm of latents, which runs before they are stored.
        keys_HNL, values_HVL: K and V of each head.
        scale: the factor on the scores.
        gate: a product with one output for each head, which multiplies the head's output; or None.
        multiply: multiplies rows by a matrix of each head.
    """

    layer: int
    spec: AttentionSpec
    inputs: Linear
    queries: tuple[RMSNorm, Linear] | None
    norm: RMSNorm
    keys_HNL: Tensor
    values_HVL: Tensor
    out: Linear
    rotary: Rotary | None
    scale: float
    gate: Linear | None = None
    multiply: HeadProducts = field(default_factory=head_products)

    @property
    def specs(self) -> tuple[AttentionSpec]:
        if self.rotary is None:
            return (replace(self.spec, rotation=UNROTATED),)
        rotation = replace(self.rotary.rotation, start=self.keys_HNL.shape[2])
        return (replace(self.spec, rotation=rotation),)

    @property
    def _values_HLV(self) -> Tensor:
        return self._turned_HLV if self.multiply is multiply_by_row else self.values_HVL.mT

    @cached_property
    def _turned_HLV(self) -> Tensor:
        return self.values_HVL.mT.contiguous()

    def __call__(self, x_TM: Tensor, step: Step, choose: Callable[[Tensor], ChosenRows] | None = None) -> Tensor:
        """Attend. `choose` returns the rows that an index chooses by compressed queries, before the layer's own."""
        n_heads, n_latent = self.spec.n_query_heads, self.keys_HNL.shape[2]
        n_rotary, n_plain = self.spec.head_dim - n_latent, self.keys_HNL.shape[1]
        q, latents_TL, rotary_TR = self.inputs(x_TM).split_with_sizes(
            [self.inputs.n_out - self.spec.head_dim, n_latent, n_rotary], -1
        )
        chosen = None
        if self.queries is not None:
            norm, product = self.queries
            q = norm(q)
            chosen = None if choose is None else choose(q)
            q = product(q)
        plain_THN, rotary_THR = q.view(len(q), n_heads, -1).split_with_sizes([n_plain, n_rotary], -1)
        rotated = torch.cat([rotary_THR, rotary_TR[:, None]], 1)
        if self.rotary is not None:
            rotated = self.rotary(rotated, step)
        absorbed_THL = self.multiply(plain_THN, self.keys_HNL)
        q_THD = torch.cat([absorbed_THL, rotated[:, :n_heads]], -1)
        k_T1D = torch.cat([self.norm(latents_TL)[:, None], rotated[:, n_heads:]], -1)
        mixed_THL = step.attend(self.layer, q_THD, k_T1D, scale=self.scale, chosen=chosen)
        y_THV = self.multiply(mixed_THL, self._values_HLV)
        if self.gate is not None:
            y_THV = y_THV * self.gate(x_TM)[..., None]
        return self.out(y_THV.flatten(1))


def load_latent_attention(
    config: PreTrainedConfig,
    checkpoint: Checkpoint,
    prefix: str,
    i: int,
    rotary: Rotary | None,
    *,
    is_interleaved: bool,
    out: str = "o_proj",
    has_gate: bool = False,
    norm_eps: float = _NORM_EPS,
) -> LatentAttention:
    """Load a latent attention from the tensors below `prefix`, named as in DeepSeek's checkpoints.

    Args:
        rotary: pairs the first half of the elements that it rotates with the second half ("half" pairing). It is None
            if the "rotary" part of heads is not rotated.
        is_interleaved: whether the checkpoint pairs neighbours. If so, rows are reordered for `rotary`.
        out, has_gate: the name of the last product, and whether each head's output has a gate.
        norm_eps: the epsilon of the norms of queries and latents.
    """
    n_model = config.hidden_size
    n_heads = config.num_attention_heads
    n_latent = config.kv_lora_rank
    n_rotary = config.qk_rope_head_dim
    n_plain, n_value, n_compressed = config.qk_nope_head_dim, config.v_head_dim, getattr(config, "q_lora_rank", None)
    has_bias, take = config.attention_bias, checkpoint.take
    spec = AttentionSpec(n_heads, 1, n_latent + n_rotary, value_dim=n_latent)
    n_q = n_heads * (n_plain + n_rotary)

    def in_order(rows: Tensor, n_before: int) -> Tensor:
        """Return rows (n_before + R, ...), of which the last R are in half pairing."""
        before, rotary_rows = rows.split_with_sizes([n_before, n_rotary])
        return joined(before, rotary_rows[0::2], rotary_rows[1::2]) if is_interleaved else rows

    def take_queries(name: str, n_in: int) -> Tensor:
        heads = take(f"{prefix}.{name}.weight", n_q, n_in).reshape(n_heads, -1, n_in)
        return joined(*(in_order(head, n_plain) for head in heads))

    latent = in_order(take(f"{prefix}.kv_a_proj_with_mqa.weight", n_latent + n_rotary, n_model), n_latent)
    bias = in_order(take(f"{prefix}.kv_a_proj_with_mqa.bias", n_latent + n_rotary), n_latent) if has_bias else None
    if n_compressed is None:
        queries, first = None, take_queries("q_proj", n_model)
        first_bias = torch.zeros(n_q, dtype=latent.dtype, device=latent.device) if has_bias else None
    else:
        norm = RMSNorm(take(f"{prefix}.q_a_layernorm.weight", n_compressed), norm_eps)
        queries = (norm, Linear(take_queries("q_b_proj", n_compressed)))
        first = take(f"{prefix}.q_a_proj.weight", n_compressed, n_model)
        first_bias = checkpoint.take_optional(has_bias, f"{prefix}.q_a_proj.bias", n_compressed)
    keys_values = take(f"{prefix}.kv_b_proj.weight", n_heads * (n_plain + n_value), n_latent)
    per_head = keys_values.reshape(n_heads, -1, n_latent).split_with_sizes([n_plain, n_value], 1)
    keys_HNL, values_HVL = (part.contiguous() for part in per_head)
    return LatentAttention(
        i,
        spec,
        Linear(first, latent, bias=None if bias is None or first_bias is None else joined(first_bias, bias)),
        queries,
        RMSNorm(take(f"{prefix}.kv_a_layernorm.weight", n_latent), norm_eps),
        keys_HNL,
        values_HVL,
        Linear.load(checkpoint, f"{prefix}.{out}", n_model, n_heads * n_value, has_bias=has_bias),
        rotary,
        (n_plain + n_rotary) ** -0.5 if rotary is None else _score_scale(config),
        Linear(take(f"{prefix}.g_proj.weight", n_heads, n_model), activation="sigmoid") if has_gate else None,
    )


def load_latent_rotary(config: PreTrainedConfig, checkpoint: Checkpoint) -> Rotary:
    """Return the rotary embedding of the rotary part of queries and keys, all of which is rotated."""
    if (share := config.rope_parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor={share}; the rotary part of a head is rotated as a whole")
    return Rotary(config, config.qk_rope_head_dim, checkpoint.device)


def _score_scale(config: PreTrainedConfig) -> float:
    """Return the scale of scores: 1 / sqrt(size of a head's queries), times a factor if positions are scaled.

    The factor is the square of YaRN's attention scale, by which DeepSeek-V2 scales whole heads (Peng et al. 2023,
    "YaRN", section 3.4).
    """
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    parameters = config.rope_parameters
    weight = parameters.get("mscale_all_dim", 0) if parameters.get("rope_type", "default") != "default" else 0
    if not weight or parameters["factor"] <= 1:
        return scale
    return scale * float(0.1 * weight * math.log(parameters["factor"]) + 1.0) ** 2
