"""Stands for checkpoints whose numbers are not read. Models made from them have shapes, but take no memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.gguf import GgufCheckpoint, GgufFile, is_gguf
from hybridmem.models.loading.quantised_checkpoints import find_coding
from hybridmem.models.weights.checkpoint import Checkpoint, UnreadCheckpoint, UnsupportedModelError
from hybridmem.models.weights.coded import CodedTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_MOST_NUMBERS = 1 << 60
"""More numbers than any tensor can have, because torch counts a tensor's bytes in 64 bits."""


class DryCheckpoint(Checkpoint):
    """Reads no numbers. Every tensor that is taken exists, has the expected shape, and takes no memory.

    Args:
        files: a checkpoint of the same model, which says what is tied, and what is stored in few bits. Without it, the
            config says what is tied.
    """

    def __init__(self, name: str, dtype: torch.dtype, files: Checkpoint | None = None) -> None:
        self._start(Path(name), torch.device("meta"), dtype)
        self._stored = files

    def __len__(self) -> int:
        return 0

    def __contains__(self, name: str) -> bool:
        return self._stored is None or name in self._stored

    def names_below(self, prefixes: Iterable[str]) -> list[str]:
        return []

    def first_below(self, prefixes: Iterable[str]) -> str | None:
        return None if self._stored is None else self._stored.first_below(prefixes)

    def tie(self, source: str, *names: str, is_tied: bool = True, own: Collection[str] = ()) -> tuple[str, ...]:
        if self._stored is not None and (is_tied or all(name in self._stored for name in names)):
            return self._stored.tie(source, *names, is_tied=is_tied, own=own)
        return tuple(source if is_tied and name not in own else name for name in names)

    def tie_block(self, block: str, *sources: str, is_tied: bool) -> str:
        if self._stored is not None:
            return self._stored.tie_block(block, *sources, is_tied=is_tied)
        return sources[0] if is_tied else block

    def scale(self, name: str, factor: float | Tensor) -> None:
        """Do nothing, because there are no numbers to scale."""

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if math.prod(shape) >= _MOST_NUMBERS:
            raise FormatError(f"{name} of {self.folder} would have the shape {list(shape)}; correct config.json")
        if dtype is None and self.keeps_bits and (coded := self._coded(name, shape)) is not None:
            return coded
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def take_joined(self, names: Sequence[str], *shape: int) -> Tensor:
        return self.take(names[0], *shape)

    def take_as_stored(self, name: str, *shape: int) -> Tensor:
        return self.take(name, *shape)

    def _coded(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a tensor that the files hold in few bits, or None."""
        if self._stored is None or name not in self._stored:
            return None
        try:
            found = self._stored.take_as_stored(name, *shape)
        except FormatError:
            return None
        return found.to(self.dtype) if isinstance(found, CodedTensor) else None


def find_files(place: Path, config: PreTrainedConfig) -> Checkpoint | None:
    """Return the unread checkpoint of a folder or GGUF file, or None if there is none that can be read."""
    try:
        if is_gguf(place):
            return GgufCheckpoint(GgufFile(place), config, torch.device("meta"), torch.float32)
        checkpoint = UnreadCheckpoint(place, torch.float32)
        if (coding := find_coding(config)) is not None:
            checkpoint.decode_with(coding)
    except (FormatError, UnsupportedModelError):
        return None
    return checkpoint
