"""Says how rotary keys carry positions, and rotates keys whose tokens have moved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridmem.memory.errors import SpecError

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, (R, 1, pairs) float32 each, of the angles by which a row's pairs of elements are rotated."""


@dataclass(frozen=True)
class Rotation:
    """Says how rotary keys carry positions (Su et al. 2021, "RoFormer").

    At position p, each pair of elements is rotated by p times the frequency of the pair.

    Attributes:
        frequencies: the radians per token of each pair of elements.
        layout: "half" pairs element i with element i + len(frequencies), as in Llama; "interleaved" pairs element 2i
            with element 2i + 1, as in GPT-J.
        start: the index in a head of the first of the 2 * len(frequencies) rotated elements. i above counts from
            `start`.
    """

    frequencies: tuple[float, ...]
    layout: Literal["half", "interleaved"] = "half"
    start: int = 0

    def __post_init__(self) -> None:
        if self.layout not in ("half", "interleaved"):
            raise SpecError(f"Rotation.layout is {self.layout!r}; choose 'half' or 'interleaved'")
        if not isinstance(self.frequencies, tuple) or not all(
            isinstance(f, float) and math.isfinite(f) for f in self.frequencies
        ):
            raise SpecError(
                f"Rotation.frequencies are {self.frequencies!r}; give a tuple of finite floats, one for each pair of "
                "elements"
            )
        if type(self.start) is not int or self.start < 0:
            raise SpecError(f"Rotation.start is {self.start!r}; it must be an integer of at least 0 elements")

    @property
    def end(self) -> int:
        """Return the index after the last element of a head that is rotated."""
        return self.start + 2 * len(self.frequencies)

    def __repr__(self) -> str:
        return f"<Rotation of {len(self.frequencies)} pairs, {self.layout}>"

    def angles_between(self, old_R: NDArray[np.int64], new_R: NDArray[np.int64]) -> Angles:
        """Compute the angles that rotate keys from positions old_R to new_R.

        A model rounds position times frequency to float32, which at position 10,000 is off by up to 5e-4. The
        difference of two such rounded angles gives the very key that the model would have computed at the new position.
        """
        frequencies = np.array(self.frequencies, np.float32)
        old, new = (
            np.outer(positions.astype(np.float32), frequencies).astype(np.float64) for positions in (old_R, new_R)
        )
        cos, sin = (torch.from_numpy(f(new - old).astype(np.float32))[:, None] for f in (np.cos, np.sin))
        return cos, sin

    def rotated(self, keys_RGD: Tensor, angles: Angles) -> Tensor:
        """Rotate keys (R, G, D) to their new positions, and return them in float32.

        The given keys may be overwritten.
        """
        start, end, middle = self.start, self.end, self.start + len(self.frequencies)
        out = keys_RGD.float()
        first, second = (
            (slice(start, middle), slice(middle, end))
            if self.layout == "half"
            else (slice(start, end, 2), slice(start + 1, end, 2))
        )
        cos, sin = (t.to(keys_RGD.device) for t in angles)
        a, b = out[..., first], out[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out


UNROTATED = Rotation(())
"""The rotation of keys that carry no position, as in Jamba.

T5's do not either: T5 adds a bias by distance to the scores.
"""
