"""Implements multi-token prediction as DeepSeek-V3 does it (DeepSeek-AI 2024), and Qwen3-Next and Qwen3.5 after it.

A module joins the embedding of the next token with the hidden state, each normed, by one matrix, and runs a layer of
the model's own kind: `x = layer(W [norm(e); norm(h)])`. Its hidden state is `norm(x)`, from which the model's output
matrix makes logits. The hidden state is also what the next draft continues from, in place of the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridmem.memory import MemorySpec, Step
from hybridmem.memory.blocks import without_gradients
from hybridmem.models.layers.decoder import Decoder, Function, Layer
from hybridmem.models.layers.linear import Linear


class NextTokenHead:
    """Drafts with one module of multi-token prediction. For each further token of a draft, the module runs once more.

    Args:
        model: the model whose embedding and output matrix it shares.
        norms: norms the embedding and the hidden state.
        joined: the product with [embedding; hidden state], (M, 2 M).
        layers: the module's layers, whose indices in a memory begin at 0.
        norm: norms what the layers return.
        embed: looks up embeddings of tokens. None: as the model does.
    Attributes:
        is_recordable: True if `in_step_order` depends on tensors alone; see `Decoder.is_recordable`.
    """

    after: tuple[int, ...] = ()

    def __init__(
        self, model: Decoder, norms: tuple[Function, Function], joined: Linear, layers: Sequence[Layer], norm: Function,
        *, embed: Function | None = None,
    ) -> None:  # fmt: skip
        self._vocabulary = model.vocabulary
        self._embed = self._vocabulary.embed if embed is None else embed
        self._norms, self._joined, self._layers, self._norm = norms, joined, layers, norm
        self.is_recordable = model.is_recordable
        spec = model.memory_spec
        self.memory_spec = MemorySpec(
            layers=tuple(layer.specs for layer in layers), vocab_size=spec.vocab_size, dtype=spec.dtype,
            device=spec.device, model=f"the draft head of {spec.model}",
        )  # fmt: skip

    def read(self, rows_TR: Tensor) -> Tensor:
        """Return the rows as they are: they are the model's hidden states after its last norm."""
        return rows_TR

    def __call__(self, step: Step, rows_TM: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        return self.in_step_order(step, in_order_of(step, rows_TM))

    def in_step_order(self, step: Step, rows_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Feed pairs whose rows are in the step's own order. Returns what `__call__` returns."""
        step.check_model(self.memory_spec)
        with without_gradients():
            return self._run(step, rows_TM)

    def _run(self, step: Step, rows_TM: Tensor) -> tuple[Tensor, Tensor]:
        embed_norm, hidden_norm = self._norms
        embedded_TM = embed_norm(step.embed(self._embed))
        x_TM = self._joined(torch.cat([embedded_TM, hidden_norm(rows_TM)], -1))
        for layer in self._layers:
            x_TM = layer(x_TM, step)
        rows_SM = self._norm(step.select(x_TM))
        return self._vocabulary.logits(rows_SM), rows_SM


def in_order_of(step: Step, rows_TM: Tensor) -> Tensor:
    """Return rows that are in the caller's order in the step's own order."""
    own = step.select(torch.arange(len(rows_TM), device=rows_TM.device), "all")
    placed = torch.empty_like(rows_TM)
    placed[own] = rows_TM
    return placed
