"""Reads generation_config.json, in which a checkpoint's authors say how replies are drawn and where they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridmem.memory import FormatError


def read_generation_config(tokenizer: Any) -> dict[str, Any]:
    """Return the options in generation_config.json, from the folder of a tokenizer; none if there is no such file.

    Raises FormatError: the file cannot be read, or holds no object.
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
