"""Loads the part of a checkpoint that sees: the tower and its projector, as transformers implements them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridmem.memory.errors import FormatError
from hybridmem.models.weights.checkpoint import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Tower:
    """Computes the rows of embeddings of a picture.

    transformers' class is made around a language model without layers and with one token, which is then dropped. So the
    names of tensors in published files, and what its `get_image_features` does with the tower's output, are its own.

    Args:
        config: of the whole model; its first architecture names the class.
        tensors: the checkpoint's tensors of tower and projector, by their names in the file.
    """

    def __init__(
        self, config: PreTrainedConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        import transformers

        name = (config.architectures or ["unnamed"])[0]
        made_by = getattr(transformers, name, None)
        if made_by is None:
            raise UnsupportedModelError(
                f"the tower of {name} is computed by transformers, and {transformers.__version__} has no such class; "
                "install a later one"
            )
        with _quiet(), torch.random.fork_rng(devices=[]):
            whole, report = made_by.from_pretrained(
                None, config=_without_text(config), state_dict=dict(tensors), dtype=dtype, output_loading_info=True
            )
        missing = [name for name in report["missing_keys"] if not _is_text(name)]
        if missing:
            raise FormatError(f"{len(missing)} tensors of the tower of {name} are not in its files: {missing[:3]}")
        self._model = getattr(whole, "model", whole).eval().to(device)
        self._model.language_model = None
        self._dtype, self._device = dtype, device

    def tensors(self) -> list[Tensor]:
        """Return its weights."""
        return [*self._model.parameters()]

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return (N, M) rows for the inputs that the image processor made of one picture."""
        on_device = {name: x.to(self._device) for name, x in inputs.items() if isinstance(x, Tensor)}
        for name, x in on_device.items():
            if x.is_floating_point():
                on_device[name] = x.to(self._dtype)
        with torch.no_grad():
            found = self._model.get_image_features(**on_device, return_dict=True).pooler_output
        rows = torch.cat([part.flatten(0, -2) for part in found]) if isinstance(found, list | tuple) else found
        return rows.flatten(0, -2).to(self._dtype)


def _is_text(name: str) -> bool:
    return "language_model." in name or name.startswith("lm_head.")


def _without_text(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a config whose language model has no layers, and one token."""
    config = deepcopy(config)
    for each in (config, config.get_text_config()):
        changes = {"num_hidden_layers": 0, "layer_types": [], "vocab_size": 1, "tie_word_embeddings": False}
        changes |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "quantization_config": None}
        changes |= {"layers_block_type": [], "audio_config": None}
        for name, value in changes.items():
            if hasattr(each, name):
                setattr(each, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting that there is no language model."""
    from transformers.utils import logging

    before, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if has_bars:
            logging.enable_progress_bar()
