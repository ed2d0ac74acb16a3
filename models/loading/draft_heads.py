"""Loads draft heads from folders of their own, for models that are loaded already."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

from hybridmem.memory.errors import FormatError
from hybridmem.models.draft_heads import DraftHead
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.loading.folders import find_folder
from hybridmem.models.products.choice import Kind, compile_ahead, noting_kinds
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.formats import WeightFormat, weights_in


def load_draft_head(path_or_hub_id: str | Path, model: Any, *, weights: str = "auto") -> DraftHead:
    """Load a draft head for a model, in the model's dtype and on its device.

    Args:
        path_or_hub_id: a folder or hub id whose safetensors hold the head, under the names that a checkpoint of the
            model has for a head of its own.
        weights: as for `load_model`.
    Raises:
        FormatError: there is no head, or it does not fit the model.
        UnsupportedModelError: draft heads are not implemented for this model.
    """
    if not isinstance(model, Decoder):
        raise UnsupportedModelError(f"{type(model).__name__} gives no hidden states for draft heads")
    spec, place = model.memory_spec, find_folder(path_or_hub_id)
    checkpoint, kinds = Checkpoint(place, spec.device, spec.dtype), Counter[Kind]()
    with weights_in(cast(WeightFormat, weights), spec.device), noting_kinds(kinds):
        head = model.load_draft_head(checkpoint)
    if head is None:
        raise FormatError(f"{place} holds no draft head for {spec.model}; give a folder with one, or leave it out")
    if spec.device.type == "cpu":
        compile_ahead(kinds)  # Compile kernels now, so that no step waits for it.
    return cast(DraftHead, head)
