"""Loads draft heads from folders of their own, for models that are loaded already."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hybridmem.memory import SpecError
from hybridmem.memory.errors import FormatError
from hybridmem.models.draft_heads import BlankHead, DFlashHead, DraftHead, Eagle3Head
from hybridmem.models.layers.decoder import Decoder
from hybridmem.models.loading.dry import DryCheckpoint, find_files
from hybridmem.models.loading.folders import find_folder
from hybridmem.models.products.choice import Kind, compile_ahead, noting_kinds
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError
from hybridmem.models.weights.formats import WeightFormat, weights_in
from hybridmem.models.weights.signature import signature_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AnyHead = DraftHead | BlankHead


def load_draft_head(path_or_hub_id: str | Path, model: Any, *, weights: str = "auto") -> AnyHead:
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
        load = _loader_of(place)
        head = model.load_draft_head(checkpoint) if load is None else load(_config_of(place), checkpoint, model)
    if head is None:
        raise FormatError(f"{place} holds no draft head for {spec.model}; give a folder with one, or leave it out")
    sign(head, model, checkpoint)
    if spec.device.type == "cpu":
        compile_ahead(kinds)  # Compile kernels now, so that no step waits for it.
    return cast(AnyHead, head)


def sign(head: AnyHead, model: Decoder, checkpoint: Checkpoint) -> None:
    """Give the spec of a head's memory the signature of the head's weights and the model's, since it depends on both.

    Args:
        checkpoint: the one from which the head was taken.
    """
    samples = {**checkpoint.samples, "the model": (model.memory_spec.weights or "").encode()}
    head.memory_spec = replace(head.memory_spec, weights=signature_of(model.config, checkpoint.dtype, samples))


def dry_draft_head(model: Any, place: Path, *, weights: str = "auto") -> AnyHead | None:
    """Make the draft head of a folder, a GGUF file or a config.json, whose weights are on "meta", to plan with it.

    Args:
        model: a model from `dry_model`, for which the head is.
        weights: as for `load_model`.
    Returns None if the files hold none, or the config names none.
    Raises:
        SpecError: there is a config alone, which does not say whether there is a head.
        FormatError, UnsupportedModelError: as `load_draft_head` does.
    """
    if not isinstance(model, Decoder):
        raise UnsupportedModelError(f"{type(model).__name__} gives no hidden states for draft heads")
    spec, loads = model.memory_spec, _loader_of(place)
    files = find_files(place, model.config)
    if files is None:
        numbers = [getattr(model.config, name, None) for name in _NUMBERS]
        if all(number is None for number in numbers):
            raise SpecError(
                f"{place} is a config alone, which has none of {', '.join(_NUMBERS)} and so does not say whether there "
                "is a draft head; give the checkpoint's folder"
            )
        if not any(numbers):
            return None
    checkpoint = DryCheckpoint(type(model).__name__, spec.dtype, files)
    with weights_in(cast(WeightFormat, weights), checkpoint.device):
        head = model.load_draft_head(checkpoint) if loads is None else loads(_config_of(place), checkpoint, model)
    return cast("AnyHead | None", head)


def folder_beside(place: Path) -> Path | None:
    """Return the folder `draft_head` in a checkpoint's folder, or None without one.

    A head that was trained for a model that had none can be kept there.
    """
    folder = place / "draft_head"
    return folder if folder.is_dir() else None


_NUMBERS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Names in configs for the number of modules of multi-token prediction."""

_LOADERS: dict[str, Callable[[PreTrainedConfig, Checkpoint, Decoder], AnyHead]] = {
    "LlamaForCausalLMEagle3": Eagle3Head.load,
    "DFlashDraftModel": DFlashHead.load,
    "MuseGlimmerAssistantModel": DFlashHead.load,
}
"""What loads heads that are not named as the model's own, by the architecture in their config."""

_REFUSED = {"DFlash2DraftModel": "DFlash 2 convolves in its layers, and chooses tokens by tables of its own"}
"""Heads that are not implemented, and why, by the architecture in their config."""


def _loader_of(place: Path) -> Callable[[PreTrainedConfig, Checkpoint, Decoder], AnyHead] | None:
    """Return what loads the head of a folder, by the architecture in its config; None if the model itself does."""
    path = place / "config.json"
    raw = json.loads(path.read_text()) if path.is_file() else {}
    architecture = str((raw.get("architectures") or [""])[0])
    if architecture in _REFUSED:
        raise UnsupportedModelError(f"{place} is a {architecture}, which is not implemented: {_REFUSED[architecture]}")
    return _LOADERS.get(architecture)


def _config_of(place: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.from_pretrained(place)
    return config
