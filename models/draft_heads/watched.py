"""Runs a model so that its hidden states can be read beside its logits."""

from __future__ import annotations

from torch import Tensor

from hybridmem.memory import SpecError, Step
from hybridmem.models.layers.decoder import Decoder, on_step


class HiddenRows:
    """Computes `logits, rows_TR = hidden_rows(step)`: what the model returns, and the rows that a draft head reads.

    The rows are those of all tokens, in the step's own order. It can be recorded and replayed as the model can.

    Args:
        after: see `DraftHead.after`.
    Raises:
        SpecError: the model has no hidden states to be read, or fewer layers.
    """

    def __init__(self, model: object, after: tuple[int, ...] = ()) -> None:
        if not isinstance(model, Decoder):
            raise SpecError(f"{type(model).__name__} gives no hidden states for draft heads; use a decoder of a family")
        n_layers = len(model.memory_spec.layers)
        if not all(0 <= i < n_layers for i in after):
            raise SpecError(f"after={after} are no layers of {model.memory_spec.model}, which has 0 ... {n_layers - 1}")
        self.model, self.after, self.memory_spec = model, after, model.memory_spec
        self.is_recordable = model.is_recordable

    @on_step
    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        rows_TR = self.model.hidden_rows(step, self.after)
        n_model = rows_TR.shape[1] // (len(self.after) + 1)
        return self.model.vocabulary.logits(step.select(rows_TR[:, -n_model:])), rows_TR
