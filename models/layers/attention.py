"""Implements attention layers and rotary position embeddings. Keys and values are stored in the step's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import ROPE_INIT_FUNCTIONS, PreTrainedConfig

from hybridmem.memory import UNROTATED, AttentionSpec, ChosenRows, Rotation, Step
from hybridmem.models.layers.linear import Linear, add_product, add_scaled, normed_products
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.dry import joined

_FIXED_TYPES = ("linear", "yarn", "llama3", "proportional")
"""Types of rotary scaling whose frequencies do not depend on the length of a sequence."""


class Rotary:
    """Rotates the first part of each head by its token's position (rotary position embedding, Su et al. 2021).

    Of R elements that are rotated, element i is paired with element i + R / 2 ("half" pairing). One object serves all
    layers of a model: the angles of a step are computed once, and kept in the step's notes. `rotation` describes the
    same rotation for a memory.

    Args:
        config: its `rope_parameters` name the base, the scaling, and the share of a head that is rotated.
        layer_type: the type of layer whose parameters are used, if each type of layer has its own.
        is_partial: whether `partial_rotary_factor` is the share of a head that is rotated. Architectures that rotate
            whole heads ignore it, as transformers does, except for types of scaling that use it.
    Raises:
        UnsupportedModelError: the type of scaling, or the share of a head, is not implemented.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        head_dim: int,
        device: torch.device,
        *,
        layer_type: str | None = None,
        is_partial: bool = False,
    ) -> None:
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        kind = parameters.get("rope_type", "default")
        self._attention_scale = 1.0
        if kind == "default":
            n_rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) if is_partial else head_dim
            frequencies = 1.0 / parameters["rope_theta"] ** (
                torch.arange(0, n_rotated, 2, dtype=torch.float32) / n_rotated
            )
        elif kind in _FIXED_TYPES:
            frequencies, self._attention_scale = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        else:
            raise UnsupportedModelError(f"rope_type={kind!r}; implemented are default, {', '.join(_FIXED_TYPES)}")
        n_rotated = 2 * len(frequencies)
        if n_rotated > head_dim or (n_rotated < head_dim and not is_partial):
            raise UnsupportedModelError(
                f"rope_type={kind!r}, partial_rotary_factor={parameters.get('partial_rotary_factor', 1.0)} and "
                f"head_dim={head_dim} (or hidden_size / num_attention_heads) would rotate {n_rotated} of {head_dim} "
                "elements; "
                + (f"at most {head_dim} can be" if is_partial else f"{type(config).__name__} rotates whole heads")
            )
        self.rotation = Rotation(tuple(frequencies.float().tolist()))
        self._frequencies = frequencies.to(device, torch.float32)
        sections = parameters.get("mrope_section")
        self._axes = None if sections is None else axes_of(len(frequencies), sections).to(device)

    def __call__(self, x_THD: Tensor, step: Step) -> Tensor:
        """Return x (T, H, D), rotated by the positions of the step's tokens."""
        return turn(x_THD, *self.angles(step, x_THD.dtype))

    def angles(self, step: Step, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for the step's tokens, (T, 1, R / 2) each."""
        angles: tuple[Tensor, Tensor] | None = step.notes.get(self)
        if angles is None:
            angles = step.notes[self] = self.angles_at(step.rotary_positions, dtype)
        return angles

    def angles_at(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for these positions, (T, 1, R / 2) each."""
        if positions_T.dim() == 1:
            angles = torch.outer(positions_T.float(), self._frequencies)[:, None]
        else:  # Pictures have several kinds of positions, each for a share of the frequencies (M-RoPE).
            assert self._axes is not None, "only models with such a rotation see pictures with several axes"
            angles = (positions_T[self._axes].float() * self._frequencies[:, None]).T[:, None]
        return (angles.cos() * self._attention_scale).to(dtype), (angles.sin() * self._attention_scale).to(dtype)


def turn(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (T, H, D) rotated by angles, whose cosines and sines are (T, 1, R / 2) each."""
    half = cos.shape[-1]
    a, b, rest = x_THD.split_with_sizes([half, half, x_THD.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def axes_of(n_frequencies: int, sections: Sequence[int]) -> Tensor:
    """Return (n_frequencies,) by which position each frequency rotates: 0 for time, 1 for height, 2 for width.

    The axes take turns: frequency i is of axis i % 3, as long as i < 3 sections[axis]; all others are of time
    (Qwen Team 2025, "Qwen3-VL").
    """
    axes = torch.zeros(n_frequencies, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : sections[axis] * 3 : 3] = axis
    return axes


@dataclass(frozen=True)
class Attention:
    """Computes grouped-query attention: `y = attention(x, step)`.

    Attributes:
        layer: index in the model's memory spec.
        qkv: a single product for queries, keys and values, in this order.
        norms: the norms of queries and of keys (T, H, D), which run before the rotation.
        gate: a product whose output multiplies the attention's output before `out`: one number for each element, or for
            each head.
        softcap: the cap of the scores; see `Step.attend`.
        sinks: scores without values, (n_query_heads,) in float32; see `Step.attend`.
    """

    layer: int
    spec: AttentionSpec
    qkv: Callable[[Tensor], Tensor]
    out: Linear
    rotary: Rotary | None = None
    scale: float | None = None
    norms: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    gate: Linear | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def specs(self) -> tuple[AttentionSpec]:
        return (replace(self.spec, rotation=UNROTATED if self.rotary is None else self.rotary.rotation),)

    def __call__(self, x_TM: Tensor, step: Step, chosen: ChosenRows | None = None) -> Tensor:
        """Attend, to the rows that an index has chosen if the spec has a number of them."""
        y = self._attend(self.qkv(x_TM), step, chosen)
        return self.out(y if self.gate is None else y * self._spread(self.gate(x_TM)))

    def add_to(self, x_TM: Tensor, norm: Callable[[Tensor], Tensor], step: Step, *, scale: float) -> Tensor:
        """Return x + scale * self(norm(x), step)."""
        if not isinstance(self.qkv, Linear):
            return add_scaled(x_TM, self(norm(x_TM), step), scale)
        linears = (self.qkv,) if self.gate is None else (self.qkv, self.gate)
        qkv, *gates = normed_products(x_TM, norm, *linears)
        gate = self._spread(gates[0]) if gates else None
        return add_product(x_TM, self.out, self._attend(qkv, step), gate, scale=scale)

    def _spread(self, gate: Tensor) -> Tensor:
        """Return gates with one number for each element, given gates for elements or for heads."""
        n_elements = self.spec.n_query_heads * self.spec.head_dim
        return gate if gate.shape[1] == n_elements else gate.repeat_interleave(self.spec.head_dim, -1)

    def _attend(self, qkv: Tensor, step: Step, chosen: ChosenRows | None = None) -> Tensor:
        spec = self.spec
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        qk, v_TGD = torch.split(heads, [spec.n_query_heads + spec.n_kv_heads, spec.n_kv_heads], dim=1)
        if self.norms is not None:
            q_THD, k_TGD = torch.split(qk, [spec.n_query_heads, spec.n_kv_heads], dim=1)
            qk = torch.cat([self.norms[0](q_THD), self.norms[1](k_TGD)], dim=1)
        if self.rotary is not None:
            qk = self.rotary(qk, step)
        q_THD, k_TGD = torch.split(qk, [spec.n_query_heads, spec.n_kv_heads], dim=1)
        y_THD = step.attend(
            self.layer, q_THD, k_TGD, v_TGD, scale=self.scale, softcap=self.softcap, sinks=self.sinks, chosen=chosen
        )  # fmt: skip
        return y_THD.flatten(1)


def head_dim_of(config: PreTrainedConfig) -> int:
    """Return the size of a head. In many configs it must be computed from the model's size."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def load_projections(
    checkpoint: Checkpoint,
    prefix: str,
    n_model: int,
    spec: AttentionSpec,
    *,
    has_bias: bool = False,
    has_out_bias: bool = False,
    out: str = "o_proj",
    n_in: int | None = None,
) -> tuple[Linear, Linear]:
    """Load `qkv` and `out` of an `Attention`, from `q_proj`, `k_proj`, `v_proj` and `out` below `prefix`.

    Args:
        n_in: the number of inputs of queries, keys and values, if it is not n_model.
    """
    n_q, n_kv = spec.n_query_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    sizes = {"q_proj": n_q, "k_proj": n_kv, "v_proj": n_kv}
    weights = [checkpoint.take(f"{prefix}.{name}.weight", size, n_in or n_model) for name, size in sizes.items()]
    bias = (
        joined(*(checkpoint.take(f"{prefix}.{name}.bias", size) for name, size in sizes.items())) if has_bias else None
    )
    out_bias = checkpoint.take_optional(has_out_bias, f"{prefix}.{out}.bias", n_model)
    return Linear(*weights, bias=bias), Linear(checkpoint.take(f"{prefix}.{out}.weight", n_model, n_q), bias=out_bias)
