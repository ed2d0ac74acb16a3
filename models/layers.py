"""Layers that several models share. Shape legend: `memory.interface`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memory import AttentionSpec, FormatError, RecurrentSpec, Step
from memory.recurrences import CausalConv, Mamba1, mamba1_spec, rms_norm
from models.checkpoint import Checkpoint, UnsupportedModelError
from models.linear import Linear


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight (Zhang & Sennrich 2019)."""

    weight_M: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight_M, self.eps)


class Vocabulary:
    """Token embedding and output head, one matrix if they are tied.

    A packed head cannot be looked up in. Then the embedding stays mapped from the file, where a lookup reads single rows.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, n_tokens: int, n_model: int, head: str | None) -> None:
        weight = checkpoint.take(head or name, n_tokens, n_model)
        self._head = Linear(weight)
        is_shared = head is None and not self._head.is_packed
        self._embedding = weight if is_shared else checkpoint.take_as_stored(name, n_tokens, n_model)
        if not self._head.is_packed:
            self._embedding = self._embedding.to(checkpoint.device, checkpoint.dtype)
        self._dtype = checkpoint.dtype

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """(T, M)."""
        return self._embedding[token_ids_T].to(self._dtype)

    def logits(self, x_TM: Tensor) -> Tensor:
        """(T, vocabulary)."""
        return self._head(x_TM)


class GatedMLP:
    """W_down(act(W_gate x) * W_up x) (Shazeer 2020)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, n_model: int, n_inner: int, activation: str) -> None:
        self._gate = Linear(checkpoint.take(f"{prefix}.gate_proj.weight", n_inner, n_model), activation=activation)
        self._up = Linear(checkpoint.take(f"{prefix}.up_proj.weight", n_inner, n_model))
        self._down = Linear(checkpoint.take(f"{prefix}.down_proj.weight", n_model, n_inner))

    def __call__(self, x_TM: Tensor) -> Tensor:
        return self._down(self._gate(x_TM) * self._up(x_TM))


class MixtureOfExperts:
    """Each token goes through its `n_chosen` best experts, weighted by the softmax over all of them, not renormalised."""

    def __init__(self, router: Tensor, experts: list[GatedMLP], n_chosen: int) -> None:
        if not 1 <= n_chosen <= len(experts):
            raise FormatError(f"num_experts_per_tok is {n_chosen}, but there are {len(experts)} experts")
        self._router = router
        self._experts = experts
        self._n_chosen = n_chosen

    def __call__(self, x_TM: Tensor) -> Tensor:
        weights_TK, experts_TK = F.linear(x_TM, self._router).float().softmax(-1).topk(self._n_chosen)
        # Sorted by expert, the (token, choice) pairs of each expert are one contiguous run.
        order = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=len(self._experts)).tolist()
        y_TM = torch.zeros_like(x_TM)
        for expert, pairs in zip(self._experts, torch.split(order, counts), strict=True):
            if len(pairs):
                tokens = pairs // self._n_chosen
                weights = weights_TK.flatten()[pairs].to(x_TM.dtype)
                y_TM.index_add_(0, tokens, expert(x_TM[tokens]) * weights[:, None])
        return y_TM


class Attention:
    """Grouped-query attention without position encoding; K and V live in the step's memory."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, layer: int, n_model: int, spec: AttentionSpec) -> None:
        n_q, n_kv = spec.n_query_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        sizes = {"q": n_q, "k": n_kv, "v": n_kv}
        self._qkv = Linear(*(checkpoint.take(f"{prefix}.{name}_proj.weight", size, n_model) for name, size in sizes.items()))
        self._o = Linear(checkpoint.take(f"{prefix}.o_proj.weight", n_model, n_q))
        self._layer = layer
        self._spec = spec

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        spec = self._spec
        heads = self._qkv(x_TM).view(len(x_TM), -1, spec.head_dim)
        q_THD, k_TGD, v_TGD = torch.split(heads, [spec.n_query_heads, spec.n_kv_heads, spec.n_kv_heads], dim=1)
        return self._o(step.attend(self._layer, q_THD, k_TGD, v_TGD).flatten(1))


@dataclass(frozen=True)
class MambaShape:
    """Sizes of a Mamba-1 mixer. `norm_eps` is given where dt, B and C are normed, as in Jamba."""

    n_model: int
    n_channels: int
    d_state: int
    d_conv: int
    dt_rank: int
    has_conv_bias: bool
    has_proj_bias: bool
    norm_eps: float | None = None
    activation: str = "silu"

    def __post_init__(self) -> None:
        if self.activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"hidden_act={self.activation!r} in a Mamba mixer; its convolution is implemented with silu only")

    @property
    def spec(self) -> RecurrentSpec:
        return mamba1_spec(self.n_channels, self.d_state, self.d_conv)


class MambaMixer:
    """Mamba-1 (Gu & Dao 2023, Fig. 3): y = W_out(ssm(conv(x)) * silu(z)); convolution and state live in the step's memory."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, layer: int, shape: MambaShape) -> None:
        n_model, n_channels, d_state, take = shape.n_model, shape.n_channels, shape.d_state, checkpoint.take
        in_bias = checkpoint.take_optional(shape.has_proj_bias, f"{prefix}.in_proj.bias", 2 * n_channels)
        # Two products, because the rows and the gate go separate ways: neither has to be copied out of a common result.
        self._rows, self._gate = (
            Linear(weight, bias=bias, activation=activation)
            for weight, bias, activation in zip(
                take(f"{prefix}.in_proj.weight", 2 * n_channels, n_model).chunk(2),
                (None, None) if in_bias is None else in_bias.chunk(2),
                (None, shape.activation),
                strict=True,
            )
        )
        out_bias = checkpoint.take_optional(shape.has_proj_bias, f"{prefix}.out_proj.bias", n_model)
        self._out = Linear(take(f"{prefix}.out_proj.weight", n_model, n_channels), bias=out_bias)
        norms = None
        if shape.norm_eps is not None:
            names = ("dt_layernorm", shape.dt_rank), ("b_layernorm", d_state), ("c_layernorm", d_state)
            dt, b, c = (take(f"{prefix}.{name}.weight", size) for name, size in names)
            norms = (dt, b, c, shape.norm_eps)
        self._recurrence = Mamba1(
            conv=CausalConv(
                take(f"{prefix}.conv1d.weight", n_channels, 1, shape.d_conv)[:, 0].T.contiguous(),
                checkpoint.take_optional(shape.has_conv_bias, f"{prefix}.conv1d.bias", n_channels),
            ),
            x_proj=Linear(take(f"{prefix}.x_proj.weight", shape.dt_rank + 2 * d_state, n_channels)),
            dt_proj=Linear(take(f"{prefix}.dt_proj.weight", n_channels, shape.dt_rank)),
            dt_bias_E=take(f"{prefix}.dt_proj.bias", n_channels),
            a_NE=-take(f"{prefix}.A_log", n_channels, d_state, dtype=torch.float32).exp().T.contiguous(),
            d_E=take(f"{prefix}.D", n_channels, dtype=torch.float32),
            norms=norms,
        )
        self._layer = layer

    def __call__(self, x_TM: Tensor, step: Step) -> Tensor:
        y_TE = step.recur(self._layer, self._rows(x_TM), self._recurrence)
        return self._out(y_TE * self._gate(x_TM))
