"""Lists the targets. Each one draws damaged inputs for one reader of the library, and reads an input as users would."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Protocol


class Target(Protocol):
    """Defines a reader of untrusted bytes. Each process makes it once, with a folder of its own for files."""

    def draw(self, random: Random) -> bytes:
        """Return an input that depends on the random numbers alone."""
        ...

    def read(self, data: bytes) -> None:
        """Read an input as the library does, and use the result. Raises what the library raises."""
        ...


TARGETS: dict[str, tuple[str, str]] = {
    "sequence": ("saved", "SavedSequence"),
    "family": ("saved", "SavedFamily"),
    "prefixes": ("saved", "SavedPrefixes"),
    "chat": ("saved", "SavedChat"),
    "config": ("checkpoints", "ConfigFile"),
    "shards": ("checkpoints", "ShardIndex"),
    "safetensors": ("checkpoints", "SafetensorsFile"),
    "gguf": ("checkpoints", "GgufModel"),
    "tokenizer": ("checkpoints", "TokenizerFile"),
    "template": ("texts", "ChatTemplate"),
    "body": ("requests", "RequestBody"),
    "form": ("requests", "ReplyForm"),
    "head": ("texts", "RequestHead"),
    "holes": ("texts", "HoledText"),
    "database": ("stored", "SessionDatabase"),
    "shared": ("stored", "SharedFiles"),
    "options": ("stored", "OptionFiles"),
    "calls": ("calls", "PublicCalls"),
}
"""Name -> module and class."""


def make_target(name: str, folder: Path) -> Target:
    """Return the target of a name, which keeps its files in `folder`."""
    module, owner = TARGETS[name]
    made: Callable[[Path], Target] = getattr(import_module(f"{__name__}.{module}"), owner)
    return made(folder)
