"""Finds a checkpoint's folder, in the file system or on the hub, and reads its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.architectures import ARCHITECTURES, REFUSED, ModelClass
from hybridmem.models.loading.compiler import light_configs
from hybridmem.models.loading.gguf import GgufFile, find_gguf, is_gguf, list_gguf, read_gguf_config
from hybridmem.models.loading.model_list import import_models
from hybridmem.models.weights.checkpoint import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

EMBEDDED = Path(__file__).parent.parent / "embedded"
"""The folder of the small Jamba that ships with the library. `training/train_embedded.py` makes it."""

_DOWNLOAD_ERRORS = (OSError, ValueError)
"""The errors of the hub's library: for a failed request, for a model not in its cache, and for an impossible name."""
_MOST_NAMED = 8
"""An error names at most so many files."""
_WANTED = "give a checkpoint's folder, a GGUF file, 'embedded', or a hub id such as 'owner/name'"


def find_folder(path_or_hub_id: str | Path) -> Path:
    """Return the local folder of a checkpoint, or a model's GGUF file. The model of a hub id is downloaded first."""
    if not isinstance(path_or_hub_id, str | Path) or not str(path_or_hub_id):
        raise FormatError(f"{path_or_hub_id!r} is no path and no hub id; {_WANTED}")
    if str(path_or_hub_id) == "embedded":
        return EMBEDDED
    folder = Path(path_or_hub_id).expanduser()
    if folder.is_dir():
        return find_gguf(folder) or folder
    if folder.exists():
        if is_gguf(folder):
            return folder
        raise FormatError(
            f"{folder} is a file; give the folder that holds config.json and the safetensors files, or a GGUF file"
        )
    if not _is_hub_id(str(path_or_hub_id)):
        raise FormatError(_say_missing(folder))
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=patterns))
    except _DOWNLOAD_ERRORS as error:
        raise FormatError(f"{path_or_hub_id} is no folder here and no model that can be downloaded: {error}") from error


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and name[0] not in "/.~" and not is_gguf(Path(name))


def _say_missing(path: Path) -> str:
    """Return the message for a path at which nothing is. For a GGUF file, it names those that are beside it."""
    if not is_gguf(path):
        return f"there is no folder or file {path}; {_WANTED}"
    if not path.parent.is_dir():
        return f"there is no file {path}, because there is no folder {path.parent}; {_WANTED}"
    beside = ", ".join(other.name for other in list_gguf(path.parent)[:_MOST_NAMED])
    return f"there is no file {path}; {f'{path.parent} holds {beside}' if beside else _WANTED}"


def find_config(path_or_hub_id: str | Path) -> Path:
    """Return the path of a checkpoint's config, given its folder, the config file itself, or a hub id.

    For a hub id, only the config is downloaded.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_file():
        return path
    if path.is_dir() or not _is_hub_id(str(path_or_hub_id)):
        return find_folder(path_or_hub_id)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(path_or_hub_id), "config.json"))
    except _DOWNLOAD_ERRORS as error:
        raise FormatError(
            f"{path_or_hub_id} is no file here and no model whose config can be downloaded: {error}"
        ) from error


def read_config(place: Path) -> tuple[PreTrainedConfig, ModelClass]:
    """Return a config as transformers' object, with all defaults, and the model class that implements it.

    Args:
        place: the folder of a checkpoint; or its config.json, under any name; or a GGUF file.
    """
    if is_gguf(place):
        config = read_gguf_config(GgufFile(place))
        return config, ARCHITECTURES[config.architectures[0]]
    path = place / "config.json" if place.is_dir() else place
    if not path.exists() and (place / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{place} holds an adapter, not a model; merge it into the model it was made for, "
            "peft_model.merge_and_unload(), and save that"
        )
    if not path.exists():
        raise FormatError(
            f"{place} has no config.json; give the folder of a checkpoint in Hugging Face layout, or a GGUF file"
        )
    try:
        raw = json.loads(path.read_text())
        architectures = raw.get("architectures") or [f"unnamed ({raw.get('model_type', 'no model_type')})"]
        if not (isinstance(architectures, list) and isinstance(architectures[0], str)):
            raise ValueError(f"architectures={architectures!r}")
    except (ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path} is no JSON object that names an architecture ({error}); {_WANTED}") from error
    if architectures[0] not in ARCHITECTURES:
        raise unsupported(architectures[0])
    import_models()
    from transformers import AutoConfig

    # This comes first, because the class's module may register a config class.
    model_class = ARCHITECTURES[architectures[0]]
    try:
        with light_configs():
            config = AutoConfig.from_pretrained(place)
    except Exception as error:  # Validators of configs raise errors of several libraries.
        raise FormatError(f"{path} does not describe a {architectures[0]}: {error}") from error
    return config, model_class


def unsupported(architecture: str) -> UnsupportedModelError:
    """Return the error for an architecture that no model class implements."""
    why = f", because {REFUSED[architecture]}" if architecture in REFUSED else ""
    return UnsupportedModelError(f"{architecture} is not supported{why}; these are: {', '.join(sorted(ARCHITECTURES))}")
