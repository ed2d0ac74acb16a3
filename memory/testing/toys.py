"""Defines a tiny hybrid model on the public API, with every kind of memory that a model may have.

Layer 0 is grouped-query attention. Layer 1 has two recurrences. Layer 2 runs attention (over a window if there is one)
and a recurrence side by side. Layer 3 remembers nothing. There is no matrix product: each output row is computed from
its own input row alone, in the same order whichever rows are in the batch, so that equal histories must give equal
bits.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, ChosenRows, IndexSpec, MemorySpec, RecurrentSpec, StateTensor, Step
from hybridmem.memory.recurrences import CausalConv, Family, Fold, ShortConv, short_conv_spec
from hybridmem.memory.specs import LayerSpec

N_MODEL = 12
VOCAB = 19
HOST = torch.device("cpu")


def moved(x: Any, device: torch.device) -> Any:
    """Return a recurrence with all its weights, wherever they are in it, on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, tuple):
        return tuple(moved(part, device) for part in x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: moved(getattr(x, f.name), device) for f in fields(x) if f.init})
    return x


def project(x_TM: Tensor, weight_OM: Tensor) -> Tensor:
    """Compute x W^T as a sum over each row."""
    return (x_TM[:, None, :] * weight_OM).sum(-1)


def average(state: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Keep two tensors: a decaying mean of the rows, and the largest row so far, whose initial value is not zero."""
    mean, highest = state
    mean = 0.9 * mean + 0.1 * row
    highest = torch.maximum(highest, row)
    return (mean, highest), mean + highest


def delta(state: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Apply a small delta rule (Schlag et al. 2021): S += (v - S k) k^T, y = S k. A row holds k and v."""
    (matrix,) = state
    k, v = row[:, 0], row[:, 1]
    error = v - (matrix * k[:, None, :]).sum(-1)
    matrix = 0.95 * matrix + 0.5 * error[:, :, None] * k[:, None, :]
    return (matrix,), (matrix * k[:, None, :]).sum(-1)


class FamilyToy:
    """Is a model around one recurrence.

    Its rows, between -1 and 1, are computed from the tokens and from a mix of earlier outputs, without convolution.
    """

    def __init__(self, family: Family, device: torch.device = HOST) -> None:
        generator = torch.Generator().manual_seed(11)
        spec, recurrence = family.example(generator)
        self._recurrence = moved(recurrence, device)
        self._row_shape = spec.row_shape
        n_row = math.prod(spec.row_shape)
        self._embedding, self._rows = (torch.randn(n, N_MODEL, generator=generator).to(device) for n in (VOCAB, n_row))
        self._out_seed, self._outs = generator.initial_seed(), dict[int, Tensor]()
        # There are two layers, so that rows of the second depend on the memory of the first.
        self.memory_spec = MemorySpec(((spec,), (spec,)), VOCAB, model=family.name, device=device)

    def __call__(self, step: Step) -> Tensor:
        step.check_model(self.memory_spec)
        x = self._embedding[step.token_ids]
        for layer in range(2):
            rows = torch.tanh(0.5 * project(x, self._rows)).reshape(len(x), *self._row_shape)
            y = step.recur(layer, rows, self._recurrence).flatten(1)
            x = x + torch.tanh(project(y, self._out(y.shape[1])))
        return project(step.select(x), self._embedding)

    def _out(self, n_outputs: int) -> Tensor:
        # The weights are copied to the device only once, so that later steps can be captured.
        if n_outputs not in self._outs:
            generator = torch.Generator().manual_seed(self._out_seed + n_outputs)
            weights = torch.randn(N_MODEL, n_outputs, generator=generator)
            self._outs[n_outputs] = weights.to(self._embedding.device)
        return self._outs[n_outputs]


class Toy:
    """Is a toy model that is called like any model of this library: `logits = model(step)`."""

    def __init__(
        self, *, attention: bool = True, recurrent: bool = True, window: int | None = None,
        n_chosen: int | None = None, span_tokens: int = 1, dtype: torch.dtype = torch.float32,
        device: torch.device = HOST, reproducible: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * (0.9 if shape[0] == VOCAB else 0.6)).to(device, dtype)

        self._embedding, self._head = weights(VOCAB, N_MODEL), weights(VOCAB, N_MODEL)
        self._qkv0, self._out0 = weights(6 * 4 + 2 * 2 * 4, N_MODEL), weights(N_MODEL, 24)
        self._slow, self._fast = weights(5, N_MODEL), weights(5, N_MODEL)
        self._out1 = weights(N_MODEL, 10)
        self._qkv2, self._delta, self._out2 = weights(3 * 4, N_MODEL), weights(8, N_MODEL), weights(N_MODEL, 8)
        self._has_attention, self._has_recurrent, self._has_index = attention, recurrent, n_chosen is not None
        self._index, self._span_tokens = weights(2 * 3 + 3 + 2, N_MODEL), span_tokens
        self._mean = ShortConv(CausalConv(weights(span_tokens, 3).fill_(1 / span_tokens), activation=False))
        means = (StateTensor("mean", (5,)), StateTensor("highest", (5,), initial=-3.0))
        layers = (
            self._indexed(n_chosen) if attention else (),
            tuple(RecurrentSpec("average", (5,), means, name=name) for name in ("slow", "fast")) if recurrent else (),
            ((AttentionSpec(1, 1, 4, window=window),) if attention else ())
            + ((RecurrentSpec("delta", (2, 4), (StateTensor("matrix", (4, 4)),)),) if recurrent else ()),
            (),
        )
        self.memory_spec = MemorySpec(layers, VOCAB, dtype=dtype, model="toy", device=device, reproducible=reproducible)

    def _indexed(self, n_chosen: int | None) -> tuple[LayerSpec, ...]:
        """Return the specs of layer 0: attention, and an index if it chooses rows."""
        if n_chosen is None:
            return (AttentionSpec(6, 2, 4),)
        span = self._span_tokens
        means = () if span == 1 else (short_conv_spec(3, span, "span"),)
        return (
            AttentionSpec(6, 2, 4, n_chosen=n_chosen, span_tokens=span),
            IndexSpec(2, 3, n_chosen, span_tokens=span),
            *means,
        )

    def require_gradients(self) -> None:
        """Make the model's outputs, and the inputs of its first attention, require gradients."""
        for weight in (self._embedding, self._qkv0):
            weight.requires_grad_()

    def __call__(self, step: Step) -> Tensor:
        step.check_model(self.memory_spec)
        x = self._embedding[step.token_ids]
        n_tokens = len(x)
        if self._has_attention:
            q, k, v = torch.split(project(x, self._qkv0), [24, 8, 8], dim=-1)
            chosen = self._choose(x, step) if self._has_index else None
            q, k, v = q.reshape(n_tokens, 6, 4), k.reshape(n_tokens, 2, 4), v.reshape(n_tokens, 2, 4)
            y = step.attend(0, q, k, v, chosen=chosen)
            x = x + torch.tanh(project(y.flatten(1), self._out0))
        if self._has_recurrent:
            slow = step.recur(1, torch.tanh(project(x, self._slow)), Fold(average), name="slow")
            fast = step.recur(1, torch.tanh(project(x, self._fast)), Fold(average), name="fast")
            x = x + torch.tanh(project(torch.cat([slow, fast], -1).to(x.dtype), self._out1))
        parts = [x.new_zeros(n_tokens, 4)] * 2
        if self._has_attention:
            q, k, v = project(x, self._qkv2).reshape(n_tokens, 3, 1, 4).unbind(1)
            parts[0] = step.attend(2, q, k, v).flatten(1)
        if self._has_recurrent:
            parts[1] = step.recur(2, torch.tanh(project(x, self._delta)).reshape(n_tokens, 2, 4), Fold(delta)).to(
                x.dtype
            )
        x = x + torch.tanh(project(torch.cat(parts, -1), self._out2))
        return project(step.select(x), self._head)

    def _choose(self, x: Tensor, step: Step) -> ChosenRows:
        q, k, weights = torch.split(project(x, self._index), [6, 3, 2], dim=-1)
        if self._span_tokens > 1:  # The key of a span is the mean of its tokens' keys.
            k = step.recur(0, k, self._mean, name="span")
        return step.choose(0, q.reshape(len(x), 2, 3), k[:, None], weights.float())
