"""Reads generation_config.json, where a checkpoint's authors say how to sample replies and which tokens end them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridmem.memory import FormatError


def read_generation_config(tokenizer: Any) -> dict[str, Any]:
    """Return the options in generation_config.json in a tokenizer's folder, or none if there is no such file.

    Raises FormatError if the file cannot be read, or holds no object.
    """
    path = Path(str(getattr(tokenizer, "name_or_path", ""))) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{path} cannot be read: it holds no object but {found!r:.80}")
    return found
