"""Implements the token embedding and the output head."""

from __future__ import annotations

import torch
from torch import Tensor

from models.layers.linear import Linear
from models.loading.checkpoint import Checkpoint


class Vocabulary:
    """Holds the token embedding and the output head, as one matrix if they are tied.

    Single rows cannot be read from a packed head. Then the embedding stays mapped from the file, where a lookup reads
    single rows.

    Args:
        head: name of the head's weights; None if they are the embedding's.
        embedding_scale, logits_scale: factors of embeddings and logits.
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
        """Return the embeddings of tokens, (T, M)."""
        x_TM = self._embedding[token_ids_T].to(self._dtype)
        return x_TM if self._embedding_scale == 1.0 else x_TM * self._embedding_scale

    def logits(self, x_TM: Tensor) -> Tensor:
        """Return logits, (T, vocabulary)."""
        logits = self._head(x_TM)
        if self._logits_scale != 1.0:
            logits = logits * self._logits_scale
        return logits if self._logits_cap is None else torch.tanh(logits / self._logits_cap) * self._logits_cap
