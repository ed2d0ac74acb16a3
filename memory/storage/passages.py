"""Puts the rows of pictures into saved files, and takes them out, so that they can be fed again in any process.

A sequence goes on without them. They are needed when a rollback or an edit reaches back before a picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from hybridmem.memory.blocks.arguments import read_dtype
from hybridmem.memory.sequences.soft_tokens import Passage, SoftTokens
from hybridmem.memory.storage.checksums import bytes_of

PASSAGES = "passages"


@dataclass(frozen=True)
class SavedPassage:
    """Holds what a file says of one picture.

    Attributes:
        digest: hexadecimal.
        rows: (N, bytes of a row) uint8.
        dtype: the dtype of the rows, by its name.
        offsets, back, about: see `Passage` and `SoftTokens.restore`.
    """

    digest: str
    rows: Tensor
    dtype: str
    offsets: list[list[int]] | None
    back: int
    about: Any

    @staticmethod
    def of(passage: Passage) -> SavedPassage:
        rows = passage.rows.cpu().contiguous()
        offsets = None if passage.offsets is None else passage.offsets.tolist()
        dtype = str(rows.dtype).removeprefix("torch.")
        return SavedPassage(
            passage.digest.hex(), rows.view(torch.uint8), dtype, offsets, passage.back, passage.about
        )  # fmt: skip

    def restore(self, soft: SoftTokens, device: torch.device) -> Passage:
        """Add it to a table. Raises ValueError, TypeError or SpecError."""
        rows = self.rows.view(read_dtype("dtype", self.dtype)).to(device)
        offsets = None if self.offsets is None else np.array(self.offsets, np.int64)
        return soft.restore(bytes.fromhex(self.digest), rows, offsets, self.back, self.about)


def as_tensors(passages: Iterable[SavedPassage]) -> tuple[dict[str, list[Tensor]], dict[str, str]]:
    """Return tensors and metadata for a file; nothing if there are no passages."""
    tensors, entries = dict[str, list[Tensor]](), list[dict[str, Any]]()
    for i, each in enumerate(passages):
        tensors[f"{PASSAGES}/{i}"] = [each.rows]
        about = {"digest": each.digest, "dtype": each.dtype, "offsets": each.offsets, "back": each.back}
        entries.append(about | {"about": each.about, "checksum": _checksum(each.rows)})
    return tensors, {PASSAGES: json.dumps(entries, sort_keys=True)} if entries else {}


def passages_in(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[list[SavedPassage], tuple[str, ...]]:
    """Return the passages of a file, and which are damaged. Raises what reading JSON and mappings raises."""
    whole, damaged = list[SavedPassage](), list[str]()
    for i, entry in enumerate(json.loads(metadata.get(PASSAGES, "[]"))):
        rows = tensors[f"{PASSAGES}/{i}"]
        if rows.dtype != torch.uint8 or rows.dim() != 2:
            raise ValueError(f"rows of the picture {i}")
        if _checksum(rows) != entry["checksum"]:
            damaged.append(f"the picture {entry['digest']:.12}")
            continue
        fields = str(entry["digest"]), rows, str(entry["dtype"]), entry["offsets"], int(entry["back"])
        whole.append(SavedPassage(*fields, entry["about"]))
    return whole, tuple(damaged)


def _checksum(rows: Tensor) -> str:
    return xxh3_128(bytes_of(rows)).hexdigest()
