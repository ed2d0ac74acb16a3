"""Decides which names of a checkpoint stand for one tensor. What the files hold counts, not what the config says."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from hybridmem.memory.errors import FormatError

_AT_ONCE = 1 << 20
"""How many numbers are compared at once. Most tensors that differ do so in the first part."""


class Stored(Protocol):
    """Declares an object that knows which tensors a checkpoint holds, and compares them."""

    folder: Path

    def __contains__(self, name: str) -> bool: ...

    def are_equal(self, name: str, other: str) -> bool: ...


@dataclass
class TiedWeights:
    """Remembers which names stand for one tensor. The rules are those of transformers (`PreTrainedModel.tie_weights`).

    A tensor that is stored is used. A name that is not stored stands for the tensor to which it is tied, in either
    direction.

    Attributes:
        stored_as: name that no file holds -> name of the stored tensor for which it stands.
        equal: names of stored tensors that need not be read, because they hold the numbers of another one.
        differing: name -> name of the tensor to which the config ties it, for pairs that are both stored and differ.
    """

    stored_as: dict[str, str] = field(default_factory=dict)
    equal: set[str] = field(default_factory=set)
    differing: dict[str, str] = field(default_factory=dict)
    _decided: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def decide(
        self, checkpoint: Stored, source: str, names: tuple[str, ...], is_tied: bool, own: Collection[str]
    ) -> tuple[str, ...]:
        """Return what `Checkpoint.tie` returns. A later call does not compare the numbers again."""
        if source not in self._decided:
            root = next((name for name in (source, *names) if name in checkpoint), source) if is_tied else source
            if root != source:
                self.stored_as[source] = root
            self._decided[source] = tuple(self._find(checkpoint, source, name, is_tied, own) for name in names)
        return self._decided[source]

    def decide_block(
        self, checkpoint: Stored, names: Collection[str], block: str, sources: tuple[str, ...], is_tied: bool
    ) -> str:
        """Return what `Checkpoint.tie_block` returns, for a checkpoint that holds tensors of these names."""
        if block not in self._decided:
            held = {prefix: [n for n in names if n.startswith(prefix)] for prefix in (block, *sources)}
            source = next((prefix for prefix in sources if held[prefix]), sources[0])
            pairs = [(source + name.removeprefix(block), name) for name in held[block]]
            if block == source or all(one in names and checkpoint.are_equal(one, other) for one, other in pairs):
                self.equal.update(held[block] if block != source else ())
                self._decided[block] = (source,)
            else:
                self.differing.update({f"{block}*": f"{source}*"} if is_tied else {})
                self._decided[block] = (block,)
        return self._decided[block][0]

    def _find(self, checkpoint: Stored, source: str, name: str, is_tied: bool, own: Collection[str]) -> str:
        root = self.stored_as.get(source, source)
        if name not in checkpoint:
            if not is_tied:
                raise FormatError(
                    f"{checkpoint.folder} has no tensor {name!r}, and its config says tie_word_embeddings=False: "
                    f"{source} does not stand for it; download the checkpoint again, or, if it was trained with one "
                    "matrix for both, correct the config"
                )
            return source
        if name == root or (root in checkpoint and checkpoint.are_equal(root, name)):
            self.equal.add(name)
            return source
        if is_tied and name not in own:
            self.differing[name] = root
        return name


def equal_in(dtype: torch.dtype, one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same numbers once they are cast to `dtype`, in which a model uses them."""
    if one.shape != other.shape:
        return False
    if one.dtype is other.dtype and one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    pairs = zip(*(torch.split(t.flatten(), _AT_ONCE) for t in (one, other)), strict=True)
    return all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs)
