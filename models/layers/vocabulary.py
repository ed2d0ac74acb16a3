"""Implements the token embedding and the output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridmem.models.layers.linear import Linear
from hybridmem.models.products.choice import hold_rows
from hybridmem.models.weights.checkpoint import Checkpoint
from hybridmem.models.weights.coded import CodedTensor
from hybridmem.models.weights.formats import wanted_vocabulary_format

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hybridmem.models.products.quantised import QuantisedWeight

HEAD = "lm_head.weight"
"""The name of the head's weights in the checkpoints of most families."""


@dataclass(frozen=True)
class Embedding:
    """Looks up the embeddings of tokens, in `dtype`, multiplied by `scale`.

    Attributes:
        weight: (vocabulary, M), in any dtype; or an object that holds such a weight for products as well.
        norm: norms embeddings that have been looked up; None for none.
    """

    weight: Tensor | QuantisedWeight
    dtype: torch.dtype
    scale: float = 1.0
    norm: Callable[[Tensor], Tensor] | None = None

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings (T, M) of tokens."""
        rows = self.weight[token_ids_T] if isinstance(self.weight, Tensor) else self.weight.rows(token_ids_T)
        x_TM = rows.to(self.dtype)
        if self.norm is not None:
            x_TM = self.norm(x_TM)
        return x_TM if self.scale == 1.0 else x_TM * self.scale


class Vocabulary:
    """Holds the token embedding and the output head, as a single matrix if they are tied.

    A head of packed floats does not allow reading single rows. In that case the embedding stays mapped from the file,
    where a lookup reads single rows.

    Args:
        name, head: names of the embedding and of the head's weights; the same if they are one matrix.
        bias: name of the head's bias; None for none.
        embedding_scale, logits_scale: factors of embeddings and logits.
        logits_cap: logits become cap * tanh(logits / cap) after that (Gemma Team 2024, "Gemma 2"); None for no cap.
        embedding_norm: norms embeddings; None for none.
        n_tokens: how many rows belong to tokens, if the rows after them only pad the matrices; None for all.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: PreTrainedConfig, name: str, head: str, *, embedding_scale: float = 1.0,
        logits_scale: float = 1.0, logits_cap: float | None = None, bias: str | None = None,
        embedding_norm: Callable[[Tensor], Tensor] | None = None, n_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self._name, self._shape = name, (config.vocab_size, config.hidden_size)
        self._logits_scale, self._logits_cap = logits_scale, logits_cap
        self.n_tokens = min(config.vocab_size, n_tokens or config.vocab_size)
        weight = checkpoint.take(head, *self._shape)
        bias_V = None if bias is None else checkpoint.take(bias, config.vocab_size)
        self._head = Linear(weight, bias=bias_V, format=wanted_vocabulary_format(), keeps_sums=True)
        rows: Tensor | QuantisedWeight | None = self._head.rows if head == name else None
        if rows is None:
            rows = self._take_rows(checkpoint, name)
        self.embed = Embedding(rows, checkpoint.dtype, embedding_scale, embedding_norm)

    @staticmethod
    def load(
        checkpoint: Checkpoint, config: PreTrainedConfig, name: str, *, head: str = HEAD, **options: Any
    ) -> Vocabulary:
        """Load the embedding, and the head that the checkpoint holds or the config ties to it (`Checkpoint.tie`)."""
        (head,) = checkpoint.tie(name, head, is_tied=config.tie_word_embeddings)
        return Vocabulary(checkpoint, config, name, head, **options)

    def embedding_of(self, checkpoint: Checkpoint, name: str) -> Embedding:
        """Return the embedding with this name and the same scale, for example an encoder's."""
        return self.embed if name == self._name else replace(self.embed, weight=self._take_rows(checkpoint, name))

    def _take_rows(self, checkpoint: Checkpoint, name: str) -> Tensor | QuantisedWeight:
        weight = checkpoint.take_as_stored(name, *self._shape)
        if isinstance(weight, CodedTensor):
            return hold_rows(weight.to(checkpoint.dtype), wanted_vocabulary_format())
        return weight if self._head.is_packed else weight.to(checkpoint.device, checkpoint.dtype)

    def logits(self, x_TM: Tensor) -> Tensor:
        """Return logits, (T, n_tokens) in float32 (float64 for such rows), whatever the dtype of weights is."""
        logits = self._head(x_TM)
        if self.n_tokens < self._shape[0]:
            logits = logits[:, : self.n_tokens]
        if self._logits_scale != 1.0:
            logits = logits * self._logits_scale
        return logits if self._logits_cap is None else torch.tanh(logits / self._logits_cap) * self._logits_cap
